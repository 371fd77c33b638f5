"""Transfer protocols: how the arguments of one call reach the ranks of a role, and how their answers become one value.

A protocol is a pair of pure functions over the coordinates of a layout. The driver's WorkerGroup runs ``distribute``
before it submits a call and ``collect`` on the answers; nothing here knows Ray. The invariant: for a method that gives
its batch back, distribute then collect is the identity, in order, for every layout and every number of rows
(HybridFlow, arXiv 2409.19256, table 3).

| protocol | distribute | collect |
|---|---|---|
| ONE_TO_ALL | the same arguments to every rank | list over ranks |
| DP | one chunk to each rank | concatenated over ranks |
| THREE_D | chunk D to every rank of data-parallel replica D | concatenated over D from the replica's collector rank |

Rows that do not divide are shared out so that chunks differ by at most one row; the shorter chunks then repeat rows
from the front of the batch, say so in ``meta_info["padded_rows"]``, and lose the repeated rows again at collect. Only
new chunks are written to: the caller's batch never changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from numbers import Number
from typing import Any

from hybridflow.errors import ConfigError, DataError, nearest
from hybridflow.protocol.data import DataProto
from hybridflow.resharding.layout import ParallelLayout

PADDED_ROWS = "padded_rows"
UNEVEN = ("pad", "refuse")

Payload = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of one rank."""


class Protocol(Enum):
    """The built-in transfer protocols."""

    ONE_TO_ALL = "one_to_all"
    DP = "dp"
    THREE_D = "three_d"


@dataclass(frozen=True)
class Call:
    """What the driver asked for.

    Attributes:
        args, kwargs: the arguments without ``self``; those that are a DataProto are split by DP and THREE_D.
        where: name of the method in error messages, such as ``actor.update``.
        uneven: ``pad`` or ``refuse`` rows that do not divide among the replicas.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    where: str = "method"
    uneven: str = "pad"

    @property
    def batches(self) -> list[DataProto]:
        return [value for value in (*self.args, *self.kwargs.values()) if isinstance(value, DataProto)]


@dataclass(frozen=True)
class Dispatch:
    """A call that has been distributed.

    Attributes:
        payloads: arguments by rank; ranks that take the same chunk share one object.
        rows: rows of the chunk of each rank, padding included; empty where no batch was split.
        padded: how many of those rows are padding.
    """

    payloads: list[Payload]
    rows: tuple[int, ...] = ()
    padded: tuple[int, ...] = ()


Distribute = Callable[[ParallelLayout, Call], Dispatch]
Collect = Callable[[ParallelLayout, Call, Dispatch, Sequence[Any]], Any]
Answers = Callable[[ParallelLayout, int], bool]


def every_rank(layout: ParallelLayout, rank: int) -> bool:
    """The answer of each rank is collected."""
    return True


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


# ---------------------------------------------------------------------------------------------- ONE_TO_ALL


def distribute_to_all(layout: ParallelLayout, call: Call) -> Dispatch:
    """The same arguments, whole batches included, to every rank."""
    payload = (call.args, dict(call.kwargs))
    return Dispatch([payload] * layout.world_size)


def collect_list(layout: ParallelLayout, call: Call, dispatch: Dispatch, outputs: Sequence[Any]) -> list[Any]:
    """The outputs in the order of ranks."""
    return list(outputs)


# ------------------------------------------------------------------------------------------ DP and THREE_D


def distribute_to_ranks(layout: ParallelLayout, call: Call) -> Dispatch:
    """One chunk to each rank."""
    return _split(layout, call, layout.world_size, list(range(layout.world_size)))


def distribute_to_replicas(layout: ParallelLayout, call: Call) -> Dispatch:
    """Chunk D to every rank of data-parallel replica D."""
    return _split(layout, call, layout.dp, [layout.coordinates(rank).dp for rank in range(layout.world_size)])


def collect_rows(layout: ParallelLayout, call: Call, dispatch: Dispatch, outputs: Sequence[Any]) -> Any:
    """Outputs of all ranks as one value, in order; see :func:`join`."""
    return join(call, dispatch, outputs, list(range(layout.world_size)))


def collect_replicas(layout: ParallelLayout, call: Call, dispatch: Dispatch, outputs: Sequence[Any]) -> Any:
    """Outputs of the collector ranks as one value, in the order of replicas; see :func:`join`."""
    ranks = [rank for rank in range(layout.world_size) if layout.is_collector(rank)]
    return join(call, dispatch, outputs, ranks)


def chunk_rows(num_rows: int, num_chunks: int) -> tuple[list[list[int]], list[int]]:
    """Row numbers of each chunk, padding last, and how many of them are padding.

    All chunks get ``ceil(num_rows / num_chunks)`` rows. Real rows are shared out evenly, so that no chunk is pure
    padding unless there are fewer rows than chunks: 5 rows over 4 chunks are ``[0, 1] [2, 0] [3, 0] [4, 0]`` with
    padding ``[0, 1, 1, 1]``.
    """
    base, extra = divmod(num_rows, num_chunks)
    size = base + (extra > 0)
    chunks, padding, start = [], [], 0
    for chunk in range(num_chunks):
        stop = start + base + (chunk < extra)
        missing = size - (stop - start)
        chunks.append([*range(start, stop), *(row % num_rows for row in range(missing))])
        padding.append(missing)
        start = stop
    return chunks, padding


def _split(layout: ParallelLayout, call: Call, num_chunks: int, chunk_of: list[int]) -> Dispatch:
    """Split every batch of the call in ``num_chunks``; rank r takes chunk ``chunk_of[r]``."""
    lengths = {len(batch) for batch in call.batches}
    if not lengths:
        return distribute_to_all(layout, call)
    if len(lengths) > 1:
        raise DataError(f"{call.where}: its batches have {sorted(lengths)} rows; batches of one call have equal rows.")
    num_rows = lengths.pop()
    if num_rows == 0:
        raise DataError(f"{call.where}: the batch has no rows.")
    if num_rows % num_chunks and call.uneven == "refuse":
        raise DataError(
            f"{call.where}: {num_rows} rows do not divide among {num_chunks} replicas ({layout}), and padding would "
            f"change the result: {num_rows} = {num_rows // num_chunks} * {num_chunks} + {num_rows % num_chunks}. Give "
            f"it a multiple of {num_chunks} rows (data.prompts_per_step * rollout.n), or change the role's layout."
        )
    chunks, padding = chunk_rows(num_rows, num_chunks)

    def take(value: Any, chunk: int) -> Any:
        if not isinstance(value, DataProto):
            return value
        rows = chunks[chunk]
        # A slice stays a view of the caller's columns; only a padded chunk has to copy rows.
        part = value[rows] if padding[chunk] else value[rows[0] : rows[-1] + 1]
        part.meta_info[PADDED_ROWS] = padding[chunk]
        return part

    payloads = [
        (tuple(take(arg, c) for arg in call.args), {key: take(value, c) for key, value in call.kwargs.items()})
        for c in range(num_chunks)
    ]
    return Dispatch(
        payloads=[payloads[c] for c in chunk_of],
        rows=tuple(len(chunks[c]) for c in chunk_of),
        padded=tuple(padding[c] for c in chunk_of),
    )


def join(call: Call, dispatch: Dispatch, outputs: Sequence[Any], ranks: Sequence[int]) -> Any:
    """One value from the outputs of ``ranks``: what DP and THREE_D return.

    A DataProto of each rank loses its padded rows and is concatenated; dicts of numbers are averaged, weighted by the
    real rows behind them (a method that reduces over its replicas itself returns equal dicts, and they stay as they
    are); all None is None; anything else is a list in the order of ``ranks``.

    Raises:
        DataError: where ranks return different kinds of value, or padded rows cannot be told from real ones.
    """
    parts = [outputs[rank] for rank in ranks]
    if all(part is None for part in parts):
        return None
    if any(isinstance(part, DataProto) for part in parts):
        for rank, part in zip(ranks, parts, strict=True):
            if not isinstance(part, DataProto):
                kind = type(part).__name__
                raise DataError(f"{call.where}: rank {rank} returned {kind} where others returned a DataProto.")
        kept = [_unpad(call, dispatch, rank, part) for rank, part in zip(ranks, parts, strict=True)]
        return DataProto.concat([part for part in kept if part is not None])
    if all(isinstance(part, dict) and all(isinstance(v, Number) for v in part.values()) for part in parts):
        return _average(call, dispatch, ranks, parts)
    return parts


def _unpad(call: Call, dispatch: Dispatch, rank: int, output: DataProto) -> DataProto | None:
    """The output without padded rows and without the mark; None where every row was padding."""
    rows, padded = (dispatch.rows[rank], dispatch.padded[rank]) if dispatch.rows else (1, 0)
    if padded == rows:
        return None
    keep = len(output)
    if padded:
        # A method may return several rows for each row it got (samples of one prompt), next to one another.
        if len(output) % rows:
            raise DataError(
                f"{call.where}: rank {rank} returned {len(output)} rows for a chunk of {rows} of which the last "
                f"{padded} are padding, so the padding cannot be told apart. Return the same number of rows for each "
                f'row, or register the method with uneven="refuse".'
            )
        keep = len(output) // rows * (rows - padded)
    kept = output[:keep]
    kept.meta_info.pop(PADDED_ROWS, None)
    return kept


def _average(call: Call, dispatch: Dispatch, ranks: Sequence[int], parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Metrics of several ranks as one dict: the mean weighted by real rows. All ranks name the same metrics."""
    names = list(parts[0])
    for rank, part in zip(ranks, parts, strict=True):
        if set(part) != set(names):
            raise DataError(
                f"{call.where}: rank {ranks[0]} returned the metrics {sorted(names)}, rank {rank} {sorted(part)}. "
                f"Return the same names on every rank."
            )
    weights = [dispatch.rows[rank] - dispatch.padded[rank] if dispatch.rows else 1 for rank in ranks]

    def mean(name: str) -> Any:
        values = [part[name] for part in parts]
        if all(value == values[0] for value in values):
            return values[0]
        return sum(w * v for w, v in zip(weights, values, strict=True) if w) / sum(weights)

    return {name: mean(name) for name in names}


# ------------------------------------------------------------------------------------------------ registry

PROTOCOLS: dict[Protocol | str, TransferProtocol] = {
    Protocol.ONE_TO_ALL: TransferProtocol("ONE_TO_ALL", distribute_to_all, collect_list),
    Protocol.DP: TransferProtocol("DP", distribute_to_ranks, collect_rows),
    Protocol.THREE_D: TransferProtocol(
        "THREE_D", distribute_to_replicas, collect_replicas, answers=ParallelLayout.is_collector
    ),
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
