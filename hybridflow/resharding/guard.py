"""Whether a rollout holds its trainer's weights: checksums of slices of Hugging Face tensors, compared after a sync.

Each side sums what it holds by its own table, wherever the plan of the sync may have put it. A checksum is

    sum over elements of bits(element) * sum over dims d of (index_d + 1) * K_d      (modulo 2**64)

with the indices of the element in the Hugging Face tensor, so the sums of ranks that hold parts of a slice add up to
that of the whole slice, and an element at another place counts differently.

Invariant: a check reads weights and writes none, and every rank of the group computes the same list of slices.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hybridflow.errors import ModelError
from hybridflow.resharding.boxes import Box, Ranges, extents, find, intersect, slices, translate
from hybridflow.resharding.plan import Table, boxes_by_tensor, describe

MODES = ("off", "sample", "full")
"""``sample`` takes one row of every box of every target matrix, another one at each version, and all vectors; ``full``
takes everything."""

_K = (-0x61C8864680B583EB, 0x27D4EB2F165667C5, 0x165667B19E3779F9)  # odd, without a pattern: one for each dimension
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_ELEMENTS_AT_ONCE = 2**22  # each takes 8 bytes while it is summed

Tensors = Mapping[str, torch.Tensor]
Slice = tuple[str, Ranges]
"""A Hugging Face tensor's name and ranges in it."""


@dataclass(frozen=True)
class Held:
    """A part of the k-th slice that lies in a local parameter: there (``local``) and in the Hugging Face tensor."""

    k: int
    parameter: str
    local: Ranges
    ranges: Ranges


class Guard:
    """The checks of one rank.

    Args:
        rank: of this process.
        sources, targets: the table of each rank of the group that has one, as the sync was planned with.
        mode: one of :data:`MODES`.
        receiver: the role with the targets, for messages.
    """

    def __init__(
        self,
        rank: int,
        sources: Mapping[int, Table],
        targets: Mapping[int, Table],
        mode: str,
        receiver: str = "rollout",
    ) -> None:
        self.rank, self.sources, self.targets, self.mode, self.receiver = rank, sources, targets, mode, receiver
        self._holders: dict[str, list[tuple[tuple[int, str], Box]]] = {}
        for owner, table in sorted(sources.items()):
            for tensor, boxes in boxes_by_tensor(table).items():
                self._holders.setdefault(tensor, []).extend(((owner, name), box) for name, box in boxes)

    def check(
        self, version: int, sources: Tensors, targets: Tensors, dtype: torch.dtype, group: dist.ProcessGroup | None
    ) -> int:
        """Compare both sides. Collective over the group.

        Args:
            version: of the weights; chooses the rows of a sample.
            sources, targets: this rank's parameters by name.
            dtype: of all targets, to which sources are cast.
            group: the ranks of all tables; None where this rank is the only one.

        Returns:
            Slices of this rank's targets that were compared.

        Raises:
            ModelError: on a rank whose targets differ; names the first parameter and the slice.
        """
        if self.mode == "off":
            return 0
        chosen = self.choose(version)
        mine = self.held_by_targets(chosen)
        expected = self.sums(self.held_by_sources(chosen), len(chosen), sources, dtype)
        if group is not None:
            dist.all_reduce(expected, group=group)
        differs = (self.sums(mine, len(chosen), targets, dtype) != expected).tolist()
        wrong = [held for held in mine if differs[held.k]]
        if wrong:
            first = wrong[0]
            raise ModelError(
                f"weights of version {version}: the {self.receiver}'s {first.parameter} does not hold the trainer's "
                f"{describe(*chosen[first.k])} after the sync ({len(wrong)} of {len(mine)} slices differ on rank "
                f"{self.rank}). Nothing may write weights during a sync; otherwise the reshard plan is wrong for this "
                f"pair of layouts: report it with both. rollout.check_sync=off skips this check."
            )
        return len(mine)

    def choose(self, version: int) -> list[Slice]:
        """The slices to compare, the same list on every rank of the group."""
        chosen: dict[Slice, None] = {}
        for table in {id(table): table for table in self.targets.values()}.values():
            for parameter in table.values():
                for box in parameter.boxes:
                    chosen[box.tensor, self._part_of(box, parameter.name, version)] = None
        return list(chosen)

    def _part_of(self, box: Box, name: str, version: int) -> Ranges:
        if self.mode == "full" or len(box.source) == 1:
            return box.source
        (start, stop), *rest = box.source
        row = start + zlib.crc32(f"{version}/{name}/{box.tensor}".encode()) % (stop - start)
        return ((row, row + 1), *rest)

    def held_by_targets(self, chosen: list[Slice]) -> list[Held]:
        """Those that lie inside of one box of this rank's targets, each once."""
        boxes = boxes_by_tensor(self.targets.get(self.rank, {}))
        found: dict[int, Held] = {}
        for k, (tensor, ranges) in enumerate(chosen):
            for name, box in boxes.get(tensor, ()):
                if intersect(ranges, box.source) == ranges:
                    found.setdefault(k, Held(k, name, translate(ranges, box.source, box.target), ranges))
        return [*found.values()]

    def held_by_sources(self, chosen: list[Slice]) -> list[Held]:
        """The parts for which this rank answers: of several ranks that hold an element, the first."""
        found = []
        for k, (tensor, ranges) in enumerate(chosen):
            pieces, _ = find(Box(tensor, ranges, ranges), self._holders.get(tensor, ()))
            for piece in pieces:
                owner, name = piece.key  # type: ignore[misc]
                if owner == self.rank:
                    found.append(Held(k, name, piece.source, piece.target))
        return found

    @torch.no_grad()
    def sums(self, held: list[Held], num_slices: int, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
        """[num_slices] int64: checksums of what is held, 0 where nothing is."""
        device = next(iter(tensors.values())).device if tensors else torch.device("cpu")
        total = torch.zeros(num_slices, dtype=torch.int64, device=device)
        for part in held:
            values = tensors[part.parameter][slices(part.local)].to(dtype).reshape(extents(part.ranges))
            total[part.k] += checksum(values, part.ranges)
        return total


def checksum(values: torch.Tensor, at: Ranges) -> torch.Tensor:
    """Checksum of a rectangle that lies at ``at`` in its Hugging Face tensor; int64, wraps around."""
    (first, last), *rest = at
    rows = max(1, _ELEMENTS_AT_ONCE * (last - first) // values.numel())
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for start in range(first, last, rows):
        stop = min(start + rows, last)
        bits = values[start - first : stop - first].view(_BITS[values.element_size()]).long()
        for dim, (low, high) in enumerate(((start, stop), *rest)):
            others = [d for d in range(bits.dim()) if d != dim]
            along = bits.sum(others) if others else bits
            total += (along * torch.arange(low + 1, high + 1, device=values.device)).sum() * _K[dim]
    return total
