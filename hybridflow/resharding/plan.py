"""The plan of a resharding: which slice of which source parameter becomes which slice of which target parameter.

Both sides are tables (``models/tables``), one a rank, in the coordinates of the Hugging Face tensors; the plan is the
intersection of their boxes. Every rank makes it alone and finds the same one, so nobody has to be asked who sends what.
Pure: importable without torch, ray, vllm or megatron. ``resharding/transport`` carries plans out.

Ranks of one world are source and target at once. Two worlds (a trainer's pool, a rollout's pool) are planned by the
same functions with ranks that do not meet: the sources first, then the targets.

Invariants: each element of a target box is written exactly once; what a rank holds itself it never receives; a plan
that cannot fill a target does not exist.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from hybridflow.errors import ConfigError, ModelError
from hybridflow.resharding.boxes import Box, ParameterBoxes, Piece, Ranges, find, merge, num_elements, slices, uncovered
from hybridflow.resharding.layout import Groups

Table = Mapping[str, ParameterBoxes]


@dataclass(frozen=True)
class Copy:
    """``target[target_name][target_slices] = source[source_name][source_slices]``; extents agree as in a box."""

    source_name: str
    source_slices: tuple[slice, ...]
    target_name: str
    target_slices: tuple[slice, ...]

    @property
    def num_elements(self) -> int:
        return prod(s.stop - s.start for s in self.source_slices)


@dataclass(frozen=True)
class Transfer:
    """A copy between two ranks; ``sender == receiver`` stays inside one."""

    sender: int
    receiver: int
    copy: Copy


@dataclass(frozen=True)
class Round:
    """What one rank sends and receives at once: (peer, copies) by ascending peer, as the peer has it too."""

    sends: tuple[tuple[int, tuple[Copy, ...]], ...]
    receives: tuple[tuple[int, tuple[Copy, ...]], ...]


@dataclass(frozen=True)
class RankPlan:
    """One rank's part in a resharding.

    Attributes:
        rank: this rank.
        group: ranks that take part in the exchange, ascending: the order of their process group.
        copies: inside the rank.
        coinciding: target parameter -> source parameter that is the same, element for element; such targets may use
            the source's memory instead of their ``copies``.
        rounds: exchanges with the rest of the group, as many on each rank of it.
    """

    rank: int
    group: tuple[int, ...]
    copies: tuple[Copy, ...]
    coinciding: Mapping[str, str]
    rounds: tuple[Round, ...]

    @property
    def num_received(self) -> int:
        """Elements that arrive from other ranks."""
        return sum(copy.num_elements for step in self.rounds for _, copies in step.receives for copy in copies)


def plan_rank(
    rank: int,
    sources: Mapping[int, Table],
    targets: Mapping[int, Table],
    bucket_elements: int,
    nodes: Mapping[int, int] | None = None,
) -> RankPlan:
    """What one rank of a group does; every rank of the group passes the same arguments but its own ``rank``.

    Args:
        sources, targets: the table of each rank that has one; their keys together are the group.
        bucket_elements: most elements that a rank may stage for sending and receiving at once.
        nodes: node of each rank; a sender on the receiver's node is preferred. None: all on one.

    Raises:
        ModelError: nobody holds a part of a target parameter.
        ConfigError: the bucket is smaller than one element for each peer.
    """
    transfers = plan_transfers(sources, targets, nodes)
    local = tuple(t.copy for t in transfers if t.sender == t.receiver == rank)
    return RankPlan(
        rank=rank,
        group=tuple(sorted({*sources, *targets})),
        copies=local,
        coinciding=coinciding(sources.get(rank, {}), targets.get(rank, {})),
        rounds=plan_rounds(rank, transfers, bucket_elements),
    )


def plan_transfers(
    sources: Mapping[int, Table], targets: Mapping[int, Table], nodes: Mapping[int, int] | None = None
) -> list[Transfer]:
    """Fill every box of every target from the sources, local copies included.

    An element comes from the receiver itself where it holds it. Otherwise, of those who hold the same slice, from one
    on the receiver's node, and of these from the one that has least to send so far. Padding (what no target box covers)
    is left alone. Where two parameters of one rank hold an element (a tied embedding's copy), the first provides it.

    Raises:
        ModelError: no source holds a part of a target parameter; names the parameter, the tensor and the slice.
    """
    holders, to_send = _holders(sources), Counter[int]()

    def cost(rank: int, receiver: int) -> tuple[bool, bool, int, int]:
        elsewhere = nodes is not None and nodes[rank] != nodes[receiver]
        return rank != receiver, elsewhere, to_send[rank], rank

    plan: list[Transfer] = []
    for receiver, table in sorted(targets.items()):
        for parameter in table.values():
            pieces: list[Piece] = []
            for box in parameter.boxes:
                slices_held = holders.get(box.tensor, {}).values()
                chosen = [min(holds, key=lambda held: cost(held[0][0], receiver)) for holds in slices_held]
                chosen.sort(key=lambda held: held[0][0] != receiver)
                found, missing = find(box, chosen)
                if missing:
                    raise ModelError(
                        f"{parameter.name}{f' of rank {receiver}' if len(targets) > 1 else ''}: "
                        f"no source parameter holds {describe(box.tensor, missing[0])}"
                        f"{f' and {len(missing) - 1} other parts' if len(missing) > 1 else ''}. "
                        "The source layout has to hold the whole of what the target layout needs."
                    )
                pieces.extend(found)
                for piece in found:
                    to_send[_owner(piece)[0]] += num_elements(piece.source) * (_owner(piece)[0] != receiver)
            for piece in merge(sorted(pieces, key=_owner)):
                sender, name = _owner(piece)
                copy = Copy(name, slices(piece.source), parameter.name, slices(piece.target))
                plan.append(Transfer(sender, receiver, copy))
    return plan


def coinciding(source: Table, target: Table) -> dict[str, str]:
    """Target parameter -> source parameter of the same shape that holds the same elements in the same places."""
    known: dict[object, str] = {}
    for parameter in source.values():
        known.setdefault((parameter.shape, parameter.boxes), parameter.name)
    found = {p.name: known.get((p.shape, p.boxes)) for p in target.values()}
    return {name: same for name, same in found.items() if same is not None}


def plan_rounds(rank: int, transfers: Sequence[Transfer], bucket_elements: int) -> tuple[Round, ...]:
    """Cut what travels into rounds in which no rank stages more than ``bucket_elements``, sent and received together.

    Every pair of ranks is a stream of elements in the plan's order, and round k carries the k-th equal part of each
    stream. A part is as large as the rank with the most peers allows, so both ends cut alike without asking.

    Args:
        transfers: of the whole group.

    Raises:
        ConfigError: the bucket holds less than one element for each peer.
    """
    streams: dict[tuple[int, int], list[Copy]] = {}
    for transfer in transfers:
        if transfer.sender != transfer.receiver:
            streams.setdefault((transfer.sender, transfer.receiver), []).append(transfer.copy)
    if not streams:
        return ()
    peers = max(Counter(end for pair in streams for end in pair).values())
    part = bucket_elements // peers
    if part < 1:
        raise ConfigError(
            f"a bucket of {bucket_elements} elements is too small: a rank has {peers} streams of slices at once, with "
            f"at least one element of each in the bucket. Raise the bucket's size."
        )
    totals = {pair: sum(copy.num_elements for copy in copies) for pair, copies in streams.items()}
    sends: dict[int, list[tuple[Copy, ...]]] = {}
    receives: dict[int, list[tuple[Copy, ...]]] = {}
    for (sender, receiver), copies in sorted(streams.items()):
        if sender == rank:
            sends[receiver] = cut(copies, part)
        if receiver == rank:
            receives[sender] = cut(copies, part)

    def at(parts: dict[int, list[tuple[Copy, ...]]], k: int) -> tuple[tuple[int, tuple[Copy, ...]], ...]:
        return tuple((peer, cuts[k]) for peer, cuts in parts.items() if k < len(cuts))

    return tuple(Round(at(sends, k), at(receives, k)) for k in range(-(-max(totals.values()) // part)))


def cut(copies: Iterable[Copy], size: int) -> list[tuple[Copy, ...]]:
    """Cut a stream of copies into parts of ``size`` elements each (the last one of what is left), in order."""
    parts: list[tuple[Copy, ...]] = []
    part: list[Copy] = []
    room = size
    waiting = list(copies)[::-1]
    while waiting:
        head, rest = split(waiting.pop(), room)
        waiting.extend(rest[::-1])
        part.append(head)
        room -= head.num_elements
        if not room or not waiting:
            parts.append(tuple(part))
            part, room = [], size
    return parts


def split(copy: Copy, room: int) -> tuple[Copy, list[Copy]]:
    """A copy's first elements, at most ``room`` >= 1, as one rectangle, and the rest as rectangles in order."""
    if copy.num_elements <= room:
        return copy, []
    extents = [s.stop - s.start for s in copy.source_slices]
    dim = next(d for d, extent in enumerate(extents) if extent > 1)
    rows = max(1, room // prod(extents[dim + 1 :]))
    # Counted from the right, where both sides agree: one of them may have leading dimensions of extent 1.
    sources, targets = (_halves(part, len(extents) - dim, rows) for part in (copy.source_slices, copy.target_slices))
    first, second = (
        Copy(copy.source_name, source, copy.target_name, target)
        for source, target in zip(sources, targets, strict=True)
    )
    head, rest = split(first, room)
    return head, [*rest, second]


def _halves(part: tuple[slice, ...], from_right: int, rows: int) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    dim = len(part) - from_right
    start, stop = part[dim].start, part[dim].stop
    before, after = part[:dim], part[dim + 1 :]
    return (*before, slice(start, start + rows), *after), (*before, slice(start + rows, stop), *after)


def smallest_groups(partitions: Iterable[Groups], sources: Mapping[int, Table], targets: Mapping[int, Table]) -> Groups:
    """The first partition of the ranks in which every group holds all that its members need, else the last one.

    What both sides cut evenly is always inside the micro-DP groups of a nested layout. Vocabularies that the sides pad
    differently, or experts that are spread over more ranks than the rest, may not be.
    """
    known: dict[object, bool] = {}
    groups: Groups = []
    for groups in partitions:
        for group in groups:
            # Replicas share their tables, so most groups are copies of one that was looked at.
            held = {id(sources[rank]): sources[rank] for rank in group if rank in sources}
            wanted = {id(targets[rank]): targets[rank] for rank in group if rank in targets}
            key = (frozenset(held), frozenset(wanted))
            if key not in known:
                known[key] = _fills(held.values(), wanted.values())
            if not known[key]:
                break
        else:
            return groups
    return groups


def _fills(sources: Iterable[Table], targets: Iterable[Table]) -> bool:
    held: dict[str, set[Ranges]] = {}
    for table in sources:
        for tensor, boxes in boxes_by_tensor(table).items():
            held.setdefault(tensor, set()).update(box.source for _, box in boxes)
    return not any(
        uncovered(box.source, held.get(box.tensor, ()))
        for table in targets
        for parameter in table.values()
        for box in parameter.boxes
    )


# Who holds a slice: ((rank, parameter), box), the key and the box that `find` takes.
_Held = tuple[tuple[int, str], Box]


def _holders(sources: Mapping[int, Table]) -> dict[str, dict[Ranges, list[_Held]]]:
    """Everyone who holds a part of a tensor, by the tensor's name and the part."""
    holders: dict[str, dict[Ranges, list[_Held]]] = {}
    for rank, table in sorted(sources.items()):
        for tensor, boxes in boxes_by_tensor(table).items():
            parts = holders.setdefault(tensor, {})
            for name, box in boxes:
                parts.setdefault(box.source, []).append(((rank, name), box))
    return holders


def _owner(piece: Piece) -> tuple[int, str]:
    assert isinstance(piece.key, tuple)
    return piece.key


def boxes_by_tensor(table: Table) -> dict[str, list[tuple[str, Box]]]:
    """(parameter name, box) of everyone who holds a part of a tensor, by the tensor's name."""
    holders: dict[str, list[tuple[str, Box]]] = {}
    for name, parameter in table.items():
        for box in parameter.boxes:
            holders.setdefault(box.tensor, []).append((name, box))
    return holders


def describe(tensor: str, part: Ranges) -> str:
    """A slice as people write it: ``model.norm.weight[0:8]``."""
    return f"{tensor}[{', '.join(f'{start}:{stop}' for start, stop in part)}]"
