"""Jagged columns: rows of different lengths kept as one tensor of values and one of offsets, without padding.

A jagged column is ``torch.nested`` with ``layout=torch.jagged``: logical shape [B, j, *trailing], values
[total, *trailing], offsets int64 [B + 1]. torch itself cannot take rows of such a tensor; the functions here can, and
``columns.py`` calls them wherever a column is jagged.

Invariant: what these functions build is packed: offsets are int64 and start at 0, values hold nothing outside of the
rows. Row operations work on values and offsets at once, never row by row, and keep dtype and device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nested._internal.nested_tensor import NestedTensor

from hybridflow.errors import DataError


def is_jagged(column: object) -> bool:
    """Whether a column is a nested tensor with ``layout=torch.jagged``."""
    # By class: reading `layout` of a nested tensor goes through torch's dispatch, and every row operation asks this.
    return isinstance(column, NestedTensor)


def make_jagged(values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The jagged tensor [B, j, *trailing] of values [total, *trailing] and offsets int64 [B + 1]; no copy."""
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def offsets_of(lengths: torch.Tensor) -> torch.Tensor:
    """Offsets int64 [B + 1] of rows with lengths int64 [B]."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def jagged_parts(column: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values [total, *trailing] and offsets int64 [B + 1] of a jagged column, packed.

    A view where the column is packed or a window of packed values; a copy where it has holes (explicit lengths).
    """
    assert isinstance(column, NestedTensor)
    # The attributes behind values(), offsets() and lengths(), which are the same but for 0.1 ms of dispatch each.
    values, offsets, lengths = column._values, column._offsets.long(), column._lengths
    if lengths is not None:
        return gather(values, offsets[:-1], lengths.long())
    start, stop = int(offsets[0]), int(offsets[-1])
    if start or stop != values.shape[0]:
        values, offsets = values[start:stop], offsets - start
    return values, offsets


def gather(values: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed values and offsets of rows ``values[starts[i] : starts[i] + lengths[i]]``; starts, lengths int64 [B]."""
    offsets = offsets_of(lengths)
    total = int(offsets[-1])
    shift = torch.repeat_interleave(starts - offsets[:-1], lengths, output_size=total)
    return values[torch.arange(total, device=values.device) + shift], offsets


def take_jagged(column: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rows by number, int64 [N], in the order given, repeats allowed."""
    values, offsets = jagged_parts(column)
    rows = rows.to(offsets.device)
    return make_jagged(*gather(values, offsets[:-1][rows], offsets.diff()[rows]))


def slice_jagged(column: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Rows ``start:stop`` as a view of the column's values; 0 <= start <= stop <= B."""
    values, offsets = jagged_parts(column)
    part = offsets[start : stop + 1]
    return make_jagged(values[int(part[0]) : int(part[-1])], part - part[0])


def concat_jagged(columns: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows of all columns in order; one dtype, one device, one trailing shape."""
    parts = [jagged_parts(column) for column in columns]
    lengths = torch.cat([offsets.diff() for _, offsets in parts])
    return make_jagged(torch.cat([values for values, _ in parts]), offsets_of(lengths))


def jagged_difference(left: torch.Tensor, right: torch.Tensor) -> int | None:
    """Number of the first row that differs, in length or in a value, or None; both have the same number of rows."""
    (a, offsets), (b, other) = jagged_parts(left), jagged_parts(right)
    unequal = (offsets.diff() != other.diff()).nonzero()
    same_lengths = int(unequal[0]) if len(unequal) else len(offsets) - 1
    stop = int(offsets[same_lengths])
    position = tensor_difference(a[:stop], b[:stop])
    if position is not None:
        return int(torch.searchsorted(offsets, torch.tensor(position, device=offsets.device), right=True)) - 1
    return same_lengths if len(unequal) else None


def tensor_difference(left: torch.Tensor, right: torch.Tensor) -> int | None:
    """First index of dim 0 at which two tensors of one shape differ, or None; NaN equals NaN."""
    unequal = left != right
    if left.is_floating_point() or left.is_complex():
        unequal &= ~(left.isnan() & right.isnan())
    # any() over no elements is False: rows of no columns are equal.
    rows = unequal.reshape(len(left), -1).any(dim=1) if left.numel() else unequal.new_zeros(0)
    found = rows.nonzero()
    return int(found[0]) if len(found) else None


def jagged_from_rows(rows: Sequence[torch.Tensor | Sequence], dtype: torch.dtype | None = None) -> torch.Tensor:
    """A jagged column from one tensor (or list of numbers) per row, each [length, *trailing].

    Args:
        rows: rows of one dtype and one trailing shape; lengths may be 0. An empty list takes those of the other rows.
        dtype: convert every row to it. Needed where every row is an empty list, or there are no rows.

    Raises:
        DataError: where rows differ in dtype or trailing shape, or nothing says which dtype to use.
    """
    empty = [isinstance(row, Sequence) and not row for row in rows]
    tensors = {i: torch.as_tensor(row, dtype=dtype) for i, row in enumerate(rows) if not empty[i]}
    index, first = next(iter(tensors.items()), (0, torch.zeros(0, dtype=dtype)))
    if not tensors and dtype is None:
        raise DataError("jagged: no row tells its dtype (all are empty lists): pass dtype=, such as dtype=torch.int64.")
    for i, row in tensors.items():
        if row.dim() == 0:
            raise DataError(f"jagged: row {i} is a single number; give each row as a tensor of at least one dim.")
        if row.dtype != first.dtype or row.shape[1:] != first.shape[1:]:
            raise DataError(
                f"jagged: row {i} is {row.dtype} {list(row.shape)} but row {index} is {first.dtype} "
                f"{list(first.shape)}: rows share one dtype and all dims but the first. torch.tensor([]) is float32; "
                f"pass dtype= to convert."
            )
    lengths = [len(tensors[i]) if i in tensors else 0 for i in range(len(rows))]
    values = torch.cat([first[:0], *tensors.values()])
    return make_jagged(values, offsets_of(torch.tensor(lengths, dtype=torch.int64, device=first.device)))


def jagged_from_padded(padded: torch.Tensor, mask_or_lengths: torch.Tensor) -> torch.Tensor:
    """A jagged column from a dense one.

    Args:
        padded: [B, T, *trailing].
        mask_or_lengths: mask [B, T] (bool, or 0 and 1): each row keeps the places where it is true, in order, wherever
            they are; or lengths [B], integers from 0 to T: row i keeps its first ``lengths[i]`` places.

    Raises:
        DataError: where shapes do not fit, a length is outside of 0..T, or a mask holds anything but 0 and 1.
    """
    given = torch.as_tensor(mask_or_lengths).to(padded.device)
    if padded.dim() < 2 or given.shape not in (padded.shape[:1], padded.shape[:2]):
        raise DataError(
            f"from_padded: a tensor {list(padded.shape)} does not fit a mask or lengths {list(given.shape)}: give a "
            f"tensor [B, T] or more, with a mask [B, T] or lengths [B]."
        )
    num_places = padded.shape[1]
    if given.dim() == 1:
        if given.is_floating_point() or given.dtype == torch.bool:
            raise DataError(f"from_padded: lengths are {given.dtype}; give integers [B], or a mask [B, T].")
        if len(given) and (int(given.min()) < 0 or int(given.max()) > num_places):
            row = int(((given < 0) | (given > num_places)).nonzero()[0])
            raise DataError(
                f"from_padded: row {row} has length {int(given[row])}, outside of 0..T with T={num_places}."
            )
        mask = torch.arange(num_places, device=padded.device) < given[:, None]
    else:
        mask = given.bool()
        if given.dtype != torch.bool and not bool((mask == given).all()):
            raise DataError("from_padded: the mask holds values other than 0 and 1; lengths have shape [B].")
    return make_jagged(padded[mask], offsets_of(mask.sum(dim=1)))


def pad_jagged(column: torch.Tensor, value: float = 0, side: str = "right") -> torch.Tensor:
    """The dense tensor [B, T, *trailing] of a jagged column, T its longest row, filled with ``value`` on ``side``."""
    if side not in ("left", "right"):
        raise DataError(f"padded: side={side!r}; choose 'right' or 'left'.")
    values, offsets = jagged_parts(column)
    lengths = offsets.diff()
    longest = int(lengths.max()) if len(lengths) else 0
    dense = values.new_full((len(lengths), longest, *values.shape[1:]), value)
    row = torch.repeat_interleave(lengths, output_size=len(values))
    place = torch.arange(len(values), device=values.device) - offsets[:-1][row]
    if side == "left":
        place = place + longest - lengths[row]
    dense[row, place] = values
    return dense
