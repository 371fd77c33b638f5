"""Transfer protocols: how the arguments of one call reach the ranks of a role, and how their answers become one value.

A protocol is a pair of pure functions over a layout. The driver's WorkerGroup runs ``distribute`` before it submits a
call and ``collect`` on the answers; nothing here knows Ray. The invariant: for a method that gives its batch back,
distribute then collect is the identity, in order, for every layout and every number of rows (HybridFlow, arXiv
2409.19256, table 3).

| protocol | distribute | collect |
|---|---|---|
| ONE_TO_ALL | the same arguments to every rank | list over ranks |
| ALL_TO_ALL | of each ``PerRank([...])`` one value to each rank, all else to every rank | list over ranks |
| DP | one chunk to each rank | concatenated over ranks |
| THREE_D | chunk D to every rank of data-parallel replica D | concatenated over D from the replica's collector rank |
| THREE_D_ALL_MICRO_DP | chunk (D, gD) to every rank of that generation replica | likewise, over all (D, gD) |
| THREE_D_PP_ONLY | the same arguments to every rank | list over stages, from T=0, C=0, D=0 |

THREE_D and THREE_D_PP_ONLY read the training layout of a role, THREE_D_ALL_MICRO_DP its generation layout; a role that
has only one of them uses it for both.

A chunk is a run of neighbouring rows, or what the call's ``spread`` chooses; collect puts rows back in order. Where
chunks differ in size, ``pad`` makes them equal, ``balance`` leaves them and ``refuse`` raises. Padding repeats rows
from the front of the batch at the end of a chunk, says so in ``meta_info["padded_rows"]``, and is cut off at collect.
Only new chunks are written to: the caller's batch never changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from numbers import Real
from typing import Any, Generic, TypeVar

from hybridflow.errors import ConfigError, DataError, nearest
from hybridflow.protocol.columns import short
from hybridflow.protocol.data import DataProto
from hybridflow.protocol.meta import join_metric
from hybridflow.protocol.rows import chunk_rows, row_numbers
from hybridflow.resharding.layout import Layout, generation_of, training_of

PADDED_ROWS = "padded_rows"
UNEVEN = ("pad", "balance", "refuse")

Payload = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of one rank."""

Spread = Callable[[DataProto, int], Sequence[Sequence[int]]]
"""``(batch, number of chunks) -> row numbers of each chunk``, every row once."""

_Value = TypeVar("_Value")


class Protocol(Enum):
    """The built-in transfer protocols."""

    ONE_TO_ALL = "one_to_all"
    ALL_TO_ALL = "all_to_all"
    DP = "dp"
    THREE_D = "three_d"
    THREE_D_ALL_MICRO_DP = "three_d_all_micro_dp"
    THREE_D_PP_ONLY = "three_d_pp_only"


@dataclass(frozen=True)
class PerRank(Generic[_Value]):
    """An argument of an ALL_TO_ALL method with one value for each rank, in the order of ranks.

    It is explicit because a list that happens to have as many elements as there are ranks is an ordinary argument.
    """

    values: Sequence[_Value]

    def __post_init__(self) -> None:
        no_list = isinstance(self.values, (str, bytes, Mapping)) or not hasattr(self.values, "__getitem__")
        if no_list or getattr(self.values, "ndim", 1) == 0:  # a number in an array or tensor has no length
            raise DataError(f"PerRank of a {type(self.values).__name__}: give a list with one value for each rank.")


@dataclass(frozen=True)
class Call:
    """What the driver asked for.

    Attributes:
        args, kwargs: the arguments without ``self``; those that are a DataProto are split by DP, THREE_D and
            THREE_D_ALL_MICRO_DP.
        where: name of the method in error messages, such as ``actor.update``.
        uneven: what to do where chunks differ in size: ``pad`` them to the longest; ``balance``: leave them, so that
            nothing is computed twice (a chunk without rows still gets one as padding); ``refuse``.
        spread: chooses the rows of each chunk from the call's first batch; None takes runs of neighbouring rows whose
            lengths differ by at most one.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    where: str = "method"
    uneven: str = "pad"
    spread: Spread | None = None

    @property
    def batches(self) -> list[DataProto]:
        return [value for value in (*self.args, *self.kwargs.values()) if isinstance(value, DataProto)]

    @property
    def per_rank(self) -> list[PerRank[Any]]:
        return [value for value in (*self.args, *self.kwargs.values()) if isinstance(value, PerRank)]

    def payload(self, of: Callable[[Any], Any]) -> Payload:
        """The arguments, each replaced by ``of(argument)``."""
        return tuple([of(arg) for arg in self.args]), {key: of(value) for key, value in self.kwargs.items()}


@dataclass(frozen=True)
class Dispatch:
    """A call that has been distributed.

    Attributes:
        payloads: arguments by rank; ranks that take the same chunk share one object.
        rows: by rank, the rows of the batch in its chunk, padding last; empty where no batch was split.
        padded: how many of those rows are padding.
    """

    payloads: list[Payload]
    rows: tuple[Sequence[int], ...] = ()
    padded: tuple[int, ...] = ()

    def real_rows(self, rank: int) -> Sequence[int]:
        """The rows of a rank's chunk without padding."""
        return self.rows[rank][: len(self.rows[rank]) - self.padded[rank]]


Distribute = Callable[[Layout, Call], Dispatch]
Collect = Callable[[Layout, Call, Dispatch, Sequence[Any]], Any]
Answers = Callable[[Layout, int], bool]


def every_rank(layout: Layout, rank: int) -> bool:
    """The answer of each rank is collected."""
    return True


def collectors(layout: Layout, rank: int) -> bool:
    """One rank of each data-parallel replica answers."""
    return training_of(layout).is_collector(rank)


def generation_collectors(layout: Layout, rank: int) -> bool:
    """One rank of each generation replica answers."""
    return generation_of(layout).is_collector(rank)


def stages(layout: Layout, rank: int) -> bool:
    """One rank of each pipeline stage answers: T=0, C=0, D=0."""
    at = training_of(layout).coordinates(rank)
    return at.tp == at.cp == at.dp == 0


@dataclass(frozen=True)
class TransferProtocol:
    """A named pair of pure functions.

    Attributes:
        distribute: ``(layout, call) -> Dispatch``.
        collect: ``(layout, call, dispatch, outputs by rank) -> value``; the output of a rank that does not answer is
            None.
        answers: ``(layout, rank) -> bool``: whether the output of this rank leaves its process at all.
    """

    name: str
    distribute: Distribute
    collect: Collect
    answers: Answers = every_rank


# ------------------------------------------------------------------------- ONE_TO_ALL, ALL_TO_ALL, THREE_D_PP_ONLY


def distribute_to_all(layout: Layout, call: Call) -> Dispatch:
    """The same arguments, whole batches included, to every rank."""
    _refuse_per_rank(call)
    return Dispatch([(call.args, dict(call.kwargs))] * layout.world_size)


def distribute_per_rank(layout: Layout, call: Call) -> Dispatch:
    """To rank r the r-th value of each PerRank; every other argument, lists and batches included, as it is."""
    size = layout.world_size
    for argument in call.per_rank:
        if len(argument.values) != size:
            raise DataError(
                f"{call.where}: PerRank has {len(argument.values)} values, but the role has {size} ranks ({layout}). "
                f"Give one value for each rank."
            )

    def of_rank(rank: int) -> Payload:
        return call.payload(lambda argument: argument.values[rank] if isinstance(argument, PerRank) else argument)

    return Dispatch([of_rank(rank) for rank in range(size)])


def collect_list(layout: Layout, call: Call, dispatch: Dispatch, outputs: Sequence[Any]) -> list[Any]:
    """The outputs in the order of ranks."""
    return list(outputs)


def collect_stages(layout: Layout, call: Call, dispatch: Dispatch, outputs: Sequence[Any]) -> list[Any]:
    """One output for each pipeline stage, first stage first."""
    return [output for rank, output in enumerate(outputs) if stages(layout, rank)]


def _refuse_per_rank(call: Call) -> None:
    if call.per_rank:
        raise DataError(
            f"{call.where}: PerRank is for methods registered with ALL_TO_ALL, which give each rank its own value. "
            f"Pass a plain argument, or register the method with Protocol.ALL_TO_ALL."
        )


# ------------------------------------------------------------------------------------- DP, THREE_D, ALL_MICRO_DP


def distribute_to_ranks(layout: Layout, call: Call) -> Dispatch:
    """One chunk to each rank."""
    return _split(layout, call, list(range(layout.world_size)))


def distribute_to_replicas(layout: Layout, call: Call) -> Dispatch:
    """Chunk D to every rank of data-parallel replica D."""
    training = training_of(layout)
    return _split(training, call, [training.coordinates(rank).dp for rank in range(training.world_size)])


def distribute_to_generation(layout: Layout, call: Call) -> Dispatch:
    """Chunk (D, gD) to every rank of that generation replica: d * d_g chunks."""
    generation = generation_of(layout)
    return _split(generation, call, [generation.coordinates(rank).dp for rank in range(generation.world_size)])


def collect_rows(layout: Layout, call: Call, dispatch: Dispatch, outputs: Sequence[Any]) -> Any:
    """Outputs of all ranks as one value, in order; see :func:`join`."""
    return join(call, dispatch, outputs, list(range(layout.world_size)))


def collect_replicas(layout: Layout, call: Call, dispatch: Dispatch, outputs: Sequence[Any]) -> Any:
    """Outputs of the collector ranks as one value, in the order of replicas; see :func:`join`."""
    return join(call, dispatch, outputs, _collector_ranks(training_of(layout)))


def collect_generation(layout: Layout, call: Call, dispatch: Dispatch, outputs: Sequence[Any]) -> Any:
    """Outputs of one rank of each generation replica as one value, in the order of replicas; see :func:`join`."""
    return join(call, dispatch, outputs, _collector_ranks(generation_of(layout)))


def _collector_ranks(layout: Layout) -> list[int]:
    ranks = [rank for rank in range(layout.world_size) if layout.is_collector(rank)]
    return sorted(ranks, key=lambda rank: layout.coordinates(rank).dp)


def _split(layout: Layout, call: Call, chunk_of: list[int]) -> Dispatch:
    """Split every batch of the call; rank r takes chunk ``chunk_of[r]``."""
    batches = call.batches
    if not batches:
        return distribute_to_all(layout, call)
    _refuse_per_rank(call)
    chunks = _choose_rows(layout, call, batches, max(chunk_of) + 1)
    size = max([len(chunk) for chunk in chunks]) if call.uneven == "pad" else 1
    num_rows = len(batches[0])
    padding = [max(0, size - len(chunk)) for chunk in chunks]
    rows = [
        [*chunk, *(row % num_rows for row in range(missing))] if missing else chunk
        for chunk, missing in zip(chunks, padding, strict=True)
    ]

    def take(value: Any, chunk: int) -> Any:
        if not isinstance(value, DataProto):
            return value
        wanted = rows[chunk]
        part = value[wanted.start : wanted.stop] if isinstance(wanted, range) else value[wanted]
        part.meta_info[PADDED_ROWS] = padding[chunk]
        return part

    payloads = [call.payload(lambda value, c=c: take(value, c)) for c in range(len(chunks))]
    return Dispatch(
        payloads=[payloads[c] for c in chunk_of],
        rows=tuple(rows[c] for c in chunk_of),
        padded=tuple(padding[c] for c in chunk_of),
    )


def _choose_rows(layout: Layout, call: Call, batches: Sequence[DataProto], num_chunks: int) -> Sequence[Sequence[int]]:
    """The rows of each chunk, without padding."""
    lengths = {len(batch) for batch in batches}
    if len(lengths) > 1:
        raise DataError(f"{call.where}: its batches have {sorted(lengths)} rows; batches of one call have equal rows.")
    num_rows = lengths.pop()
    if num_rows == 0:
        raise DataError(f"{call.where}: the batch has no rows.")
    if call.spread is None:
        chunks: Sequence[Sequence[int]] = chunk_rows(num_rows, num_chunks)
    else:
        chunks = _spread_rows(call, call.spread(batches[0], num_chunks), num_rows)
        if len(chunks) != num_chunks or sorted(row for chunk in chunks for row in chunk) != list(range(num_rows)):
            raise DataError(
                f"{call.where}: its spread gave {len(chunks)} chunks with {sum(map(len, chunks))} rows for "
                f"{num_chunks} replicas and {num_rows} rows. Return a list of rows for each replica, with every row in "
                f"one of them."
            )
    sizes = [len(chunk) for chunk in chunks]
    if call.uneven == "refuse" and len(set(sizes)) > 1:
        raise DataError(
            f"{call.where}: {num_rows} rows do not divide among {num_chunks} replicas ({layout}): chunks of "
            f"{max(sizes)} and {min(sizes)} rows, and padding would change the result. Give it a multiple of "
            f"{num_chunks} rows (data.prompts_per_step * rollout.n), or change the role's layout."
        )
    return chunks


def _spread_rows(call: Call, chosen: Any, num_rows: int) -> list[list[int]]:
    """What a spread returned, as plain integers: ranges of any step, arrays and tensors are row numbers too."""
    try:
        return [row_numbers(chunk, num_rows).tolist() for chunk in chosen]
    except (DataError, TypeError) as error:
        raise DataError(
            f"{call.where}: its spread gave {short(chosen)}, which are no rows ({error}). Return a list of row "
            f"numbers for each replica."
        ) from error


def join(call: Call, dispatch: Dispatch, outputs: Sequence[Any], ranks: Sequence[int]) -> Any:
    """One value from the outputs of ``ranks``: what DP, THREE_D and THREE_D_ALL_MICRO_DP return.

    A DataProto of each rank loses its padded rows, and all are concatenated in the order of the caller's rows; dicts of
    numbers are joined (``meta.join_metric``; a mean is weighted by the real rows behind it; a method that reduces over
    its replicas itself returns equal dicts, and they stay as they are); all None is None; anything else is a list in
    the order of ``ranks``.

    Raises:
        DataError: where ranks return different kinds of value, or rows cannot be told from padding or put in order.
    """
    parts = [outputs[rank] for rank in ranks]
    if all(part is None for part in parts):
        return None
    if any(isinstance(part, DataProto) for part in parts):
        for rank, part in zip(ranks, parts, strict=True):
            if not isinstance(part, DataProto):
                kind = type(part).__name__
                raise DataError(f"{call.where}: rank {rank} returned {kind} where others returned a DataProto.")
        kept = {rank: _unpad(call, dispatch, rank, part) for rank, part in zip(ranks, parts, strict=True)}
        return _in_order(call, dispatch, {rank: part for rank, part in kept.items() if part is not None})
    if all(isinstance(part, dict) and all(isinstance(v, Real) for v in part.values()) for part in parts):
        return _average(call, dispatch, ranks, parts)
    return parts


def _unpad(call: Call, dispatch: Dispatch, rank: int, output: DataProto) -> DataProto | None:
    """The output without padded rows and without the mark; None where every row was padding."""
    rows, padded = (len(dispatch.rows[rank]), dispatch.padded[rank]) if dispatch.rows else (1, 0)
    if padded == rows:
        return None
    if not padded and PADDED_ROWS not in output.meta_info:
        return output
    keep = len(output)
    if padded:
        # A method may return several rows for each row it got (samples of one prompt), next to one another.
        if len(output) % rows:
            raise DataError(
                f"{call.where}: rank {rank} returned {len(output)} rows for a chunk of {rows} of which the last "
                f"{padded} are padding, so the padding cannot be told apart. Return the same number of rows for each "
                f'row, or register the method with uneven="balance" or "refuse".'
            )
        keep = len(output) // rows * (rows - padded)
    kept = output[:keep]
    kept.meta_info.pop(PADDED_ROWS, None)
    return kept


def _in_order(call: Call, dispatch: Dispatch, parts: Mapping[int, DataProto]) -> DataProto:
    """Outputs by rank as one, in the order of the caller's rows."""
    joined = DataProto.concat(list(parts.values()))
    if call.spread is None or not dispatch.rows:
        return joined
    order = [row for rank in parts for row in dispatch.real_rows(rank)]
    if order == sorted(order):
        return joined
    times = len(joined) // len(order)
    for rank, part in parts.items():
        rows = len(dispatch.real_rows(rank))
        if len(part) != times * rows:
            raise DataError(
                f"{call.where}: rank {rank} returned {len(part)} rows for {rows}, so the rows, which were spread out "
                f"of order, cannot be put back. Return the same number of rows for each row, or register the method "
                f"without spread."
            )
    place = {row: at * times for at, row in enumerate(order)}
    return joined[[place[row] + k for row in range(len(order)) for k in range(times)]]


def _average(call: Call, dispatch: Dispatch, ranks: Sequence[int], parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Metrics of several ranks as one dict: means are weighted by real rows. All ranks name the same metrics."""
    names = list(parts[0])
    for rank, part in zip(ranks, parts, strict=True):
        if set(part) != set(names):
            raise DataError(
                f"{call.where}: rank {ranks[0]} returned the metrics {sorted(names)}, rank {rank} {sorted(part)}. "
                f"Return the same names on every rank."
            )
    weights = [len(dispatch.real_rows(rank)) if dispatch.rows else 1 for rank in ranks]
    return {name: join_metric(name, [part[name] for part in parts], weights) for name in names}


# ------------------------------------------------------------------------------------------------ registry

PROTOCOLS: dict[Protocol | str, TransferProtocol] = {
    Protocol.ONE_TO_ALL: TransferProtocol("ONE_TO_ALL", distribute_to_all, collect_list),
    Protocol.ALL_TO_ALL: TransferProtocol("ALL_TO_ALL", distribute_per_rank, collect_list),
    Protocol.DP: TransferProtocol("DP", distribute_to_ranks, collect_rows),
    Protocol.THREE_D: TransferProtocol("THREE_D", distribute_to_replicas, collect_replicas, collectors),
    Protocol.THREE_D_ALL_MICRO_DP: TransferProtocol(
        "THREE_D_ALL_MICRO_DP", distribute_to_generation, collect_generation, generation_collectors
    ),
    Protocol.THREE_D_PP_ONLY: TransferProtocol("THREE_D_PP_ONLY", distribute_to_all, collect_stages, stages),
}


def register_protocol(
    name: str, distribute: Distribute, collect: Collect, answers: Answers = every_rank
) -> TransferProtocol:
    """Add a protocol of one's own, to be used as ``@register("name")``.

    The driver and every device process look the name up, so register it in a module that both import (the worker's).

    Raises:
        ConfigError: where the name is taken by another pair of functions.
    """
    protocol = TransferProtocol(name, distribute, collect, answers)
    taken = {known.name.upper(): known for known in PROTOCOLS.values()}
    if taken.get(name.upper(), protocol) != protocol:
        raise ConfigError(f"transfer protocol {name!r} exists already; choose another name. Taken: {sorted(taken)}.")
    PROTOCOLS[name] = protocol
    return protocol


def transfer_protocol(key: Protocol | str) -> TransferProtocol:
    """The protocol behind an enum member or a registered name; raises ConfigError that lists the names."""
    if key not in PROTOCOLS:
        names = (known.name for known in PROTOCOLS.values())
        raise ConfigError(f"unknown transfer protocol {key!r}.{nearest(str(key), names)}")
    return PROTOCOLS[key]
