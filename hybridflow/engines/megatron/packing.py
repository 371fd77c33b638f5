"""Packed sequences: which tokens of a stream a context-parallel rank holds, and how attention sees them.

A micro-batch is one stream of tokens, sequence after sequence, without padding between them. With c context-parallel
ranks the stream is cut in 2c equal chunks and rank r holds chunks r and 2c - 1 - r: causal attention then costs every
rank about the same. Attention alone needs to know where sequences begin; it works on rectangles, so sequences of
similar length form a :class:`Group`, which is padded for that one operation.

Invariants: every token of the stream is held by exactly one rank; every local query is in exactly one group, with all
keys of its sequence up to its own position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Cells:
    """Where tokens stand in a rectangle of padded sequences.

    Attributes:
        shape: sequences b and padded length w.
        tokens: [n] int64 numbers of the tokens, ascending; ``cells`` [n]: their places among the b * w.
        sources: [b * w] int64: the token in each cell. Behind its last token a sequence repeats that one.
    """

    shape: tuple[int, int]
    tokens: torch.Tensor
    cells: torch.Tensor
    sources: torch.Tensor

    def to(self, device: torch.device) -> Cells:
        return Cells(self.shape, *(x.to(device) for x in (self.tokens, self.cells, self.sources)))

    def fill(self, x: torch.Tensor) -> torch.Tensor:
        """[t, ...] -> [b, w, ...]. Gradients of repeated tokens are dropped: nobody may use what they lead to."""
        return _Fill.apply(x, self).unflatten(0, self.shape)  # type: ignore[union-attr]

    def take(self, x: torch.Tensor, count: int) -> torch.Tensor:
        """[b, w, ...] -> [count, ...], zeros where this rectangle has no token."""
        return _Take.apply(x.flatten(0, 1), self, count)  # type: ignore[return-value]

    def _take(self, x: torch.Tensor, count: int) -> torch.Tensor:
        found = x.contiguous().index_select(0, self.cells)
        if len(self.tokens) == count:
            return found
        return x.new_zeros(count, *x.shape[1:]).index_copy_(0, self.tokens, found)


class _Fill(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cells: Cells) -> torch.Tensor:
        ctx.cells, ctx.count = cells, len(x)
        # Many times faster than any other way of indexing, but on contiguous rows only.
        return x.contiguous().index_select(0, cells.sources)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.cells._take(grads[0], ctx.count), None


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cells: Cells, count: int) -> torch.Tensor:
        ctx.cells, ctx.size = cells, len(x)
        return cells._take(x, count)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        grad, cells = grads[0].contiguous(), ctx.cells
        found = grad if len(cells.tokens) == len(grad) else grad.index_select(0, cells.tokens)
        return grad.new_zeros(ctx.size, *grad.shape[1:]).index_copy_(0, cells.cells, found), None, None


@dataclass(frozen=True)
class Group:
    """Sequences whose lengths differ by less than a factor of two, as one padded attention call.

    Attributes:
        queries: local tokens, in a rectangle [b, q].
        keys: tokens of all context-parallel ranks, rank after rank, in a rectangle [b, k].
        mask: [b, 1, q, k] bool, True where a query sees a key; None where plain causal order says the same.
    """

    queries: Cells
    keys: Cells
    mask: torch.Tensor | None

    def to(self, device: torch.device) -> Group:
        mask = None if self.mask is None else self.mask.to(device)
        return Group(self.queries.to(device), self.keys.to(device), mask)


@dataclass(frozen=True)
class Packing:
    """One rank's part of a stream. Travels through megatron-core's layers as ``packed_seq_params``.

    Attributes:
        tokens: [t / c] int64 positions in the stream of the tokens held here, ascending.
        groups: what attention computes.
        qkv_format: what megatron-core reads; "thd" would make it cut positions by its own rules.
    """

    tokens: torch.Tensor
    groups: tuple[Group, ...]
    qkv_format: str = "sbhd"


def pack(lengths: Sequence[int], cp_size: int, cp_rank: int, device: torch.device) -> Packing:
    """The part of one context-parallel rank.

    Args:
        lengths: tokens of each sequence of the stream, padding at its end counted as a sequence of its own; their sum
            is a multiple of ``2 * cp_size`` where ``cp_size`` is above 1.
    """
    sizes = torch.tensor(lengths)
    total = int(sizes.sum())
    parts = [_tokens_of(rank, cp_size, total) for rank in range(cp_size)]
    held, gathered = parts[cp_rank], torch.cat(parts)
    places = torch.empty_like(gathered)
    places[gathered] = torch.arange(total)

    starts = sizes.cumsum(0) - sizes
    sequence_of = torch.repeat_interleave(torch.arange(len(sizes)), sizes)[held]
    positions = held - starts[sequence_of]
    counts = torch.bincount(sequence_of, minlength=len(sizes))
    # Number of each token among the local ones of its sequence, and how far back its last query looks.
    slots = torch.arange(len(held)) - (counts.cumsum(0) - counts)[sequence_of]
    reach = torch.zeros_like(sizes).scatter_reduce(0, sequence_of, positions + 1, "amax")

    groups = []
    for members in _similar(reach.tolist()):
        row_of = torch.full_like(sizes, -1)
        row_of[members] = torch.arange(len(members))
        mine = (row_of[sequence_of] >= 0).nonzero()[:, 0]
        queries = _cells(row_of[sequence_of[mine]], slots[mine], mine, len(members))
        rows = torch.repeat_interleave(torch.arange(len(members)), reach[members])
        columns = torch.arange(len(rows)) - (reach[members].cumsum(0) - reach[members])[rows]
        tokens, order = places[starts[members][rows] + columns].sort()
        keys = _cells(rows[order], columns[order], tokens, len(members))
        mask = None
        if cp_size > 1:
            at = positions[queries.sources].view(*queries.shape)
            mask = at[:, None, :, None] >= torch.arange(keys.shape[1])
        groups.append(Group(queries, keys, mask).to(device))
    return Packing(held.to(device), tuple(groups))


def _cells(rows: torch.Tensor, columns: torch.Tensor, tokens: torch.Tensor, size: int) -> Cells:
    """Tokens [n], ascending, at the given places of ``size`` sequences; each sequence has one or more, without gaps."""
    width = int(columns.max()) + 1
    cells, lengths = rows * width + columns, torch.bincount(rows, minlength=size)
    token_at = torch.empty(size * width, dtype=torch.int64).index_copy(0, cells, tokens)
    filled = torch.minimum(torch.arange(width), lengths[:, None] - 1) + torch.arange(size)[:, None] * width
    return Cells((size, width), tokens, cells, token_at[filled.flatten()])


def _tokens_of(rank: int, cp_size: int, total: int) -> torch.Tensor:
    if cp_size == 1:
        return torch.arange(total)
    chunk = total // (2 * cp_size)
    first, second = rank * chunk, (2 * cp_size - 1 - rank) * chunk
    return torch.cat([torch.arange(first, first + chunk), torch.arange(second, second + chunk)])


def _similar(sizes: list[int]) -> list[list[int]]:
    """Numbers of the sizes above 0, longest first, in groups whose smallest is more than half of the largest."""
    groups: list[list[int]] = []
    for number in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        if sizes[number] == 0:
            break
        if not groups or 2 * sizes[number] <= sizes[groups[-1][0]]:
            groups.append([])
        groups[-1].append(number)
    return groups
