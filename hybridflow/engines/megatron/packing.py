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
from dataclasses import dataclass, fields, replace
from typing import Any

import torch


@dataclass(frozen=True)
class Group:
    """Sequences whose lengths differ by less than a factor of two, as one padded attention call.

    Attributes:
        size: sequences b.
        query_length, key_length: sides q and k of the padded rectangles.
        queries: [n] int64 numbers of local tokens; ``query_cells`` [n]: their places in the rectangle [b * q].
        keys: [m] int64 numbers of tokens of all context-parallel ranks, rank after rank; ``key_cells`` [m]: their
            places in [b * k].
        mask: [b, 1, q, k] bool, True where a query sees a key; None where plain causal order says the same.
    """

    size: int
    query_length: int
    key_length: int
    queries: torch.Tensor
    query_cells: torch.Tensor
    keys: torch.Tensor
    key_cells: torch.Tensor
    mask: torch.Tensor | None

    def to(self, device: torch.device) -> Group:
        tensors = {f.name: value for f in fields(self) if isinstance(value := getattr(self, f.name), torch.Tensor)}
        return replace(self, **{name: tensor.to(device) for name, tensor in tensors.items()})


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
    tokens, gathered = parts[cp_rank], torch.cat(parts)
    places = torch.empty_like(gathered)
    places[gathered] = torch.arange(total)

    starts = sizes.cumsum(0) - sizes
    sequence_of = torch.repeat_interleave(torch.arange(len(sizes)), sizes)[tokens]
    positions = tokens - starts[sequence_of]
    counts = torch.bincount(sequence_of, minlength=len(sizes))
    # Number of each token among the local ones of its sequence, and how far back its last query looks.
    slots = torch.arange(len(tokens)) - (counts.cumsum(0) - counts)[sequence_of]
    reach = torch.zeros_like(sizes).scatter_reduce(0, sequence_of, positions + 1, "amax")

    groups = []
    for members in _similar(reach.tolist()):
        row_of = torch.full_like(sizes, -1)
        row_of[members] = torch.arange(len(members))
        q, k = int(counts[members].max()), int(reach[members].max())
        queries = (row_of[sequence_of] >= 0).nonzero()[:, 0]
        query_cells = row_of[sequence_of[queries]] * q + slots[queries]
        rows = torch.repeat_interleave(torch.arange(len(members)), reach[members])
        columns = torch.arange(len(rows)) - (reach[members].cumsum(0) - reach[members])[rows]
        keys = places[starts[members][rows] + columns]
        mask = None
        if cp_size > 1:
            # A padded query looks at the first key, so that its softmax is a number.
            at = torch.zeros(len(members) * q, dtype=torch.int64).index_copy(0, query_cells, positions[queries])
            mask = at.view(-1, 1, q, 1) >= torch.arange(k)
        group = Group(len(members), q, k, queries, query_cells, keys, rows * k + columns, mask)
        groups.append(group.to(device))
    return Packing(tokens.to(device), tuple(groups))


def rearrange(x: torch.Tensor, source: torch.Tensor, target: torch.Tensor, size: int) -> torch.Tensor:
    """``out[target] = x[source]`` in a tensor of ``size`` rows of zeros; neither index repeats a row."""
    return _Rearrange.apply(x, source, target, size)  # type: ignore[return-value]


class _Rearrange(torch.autograd.Function):
    """Its own backward with source and target exchanged: cheaper than what autograd derives for repeated rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, source: torch.Tensor, target: torch.Tensor, size: int) -> torch.Tensor:
        ctx.save_for_backward(source, target)
        ctx.rows = len(x)
        return _moved(x, source, target, size)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        source, target = ctx.saved_tensors
        return _moved(grads[0], target, source, ctx.rows), None, None, None


def _moved(x: torch.Tensor, source: torch.Tensor, target: torch.Tensor, size: int) -> torch.Tensor:
    out = x.new_zeros(size, *x.shape[1:])
    out[target] = x[source]
    return out


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
