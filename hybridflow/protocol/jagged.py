"""Jagged columns: rows of different lengths kept as one tensor of values and one of lengths, without padding.

Outside, a jagged column is a ``torch.nested`` tensor with ``layout=torch.jagged`` and logical shape [B, j, *trailing].
Inside it is a :class:`Jagged`: torch cannot take rows of such a tensor, and building one costs 0.1 ms, so the rows are
moved here and a nested tensor is only built for who reads one.

Invariant: a Jagged is packed: values hold nothing outside of the rows. Row operations work on values and lengths at
once, never row by row, and keep dtype and device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nested._internal.nested_tensor import NestedTensor

from hybridflow.errors import DataError

_INDEXED_AS = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Dtypes that torch cannot write to by index, and those of the same size whose bits are written instead."""


def is_jagged(value: object) -> bool:
    """Whether a value is a nested tensor with ``layout=torch.jagged``."""
    # By class: reading `layout` of a nested tensor goes through torch's dispatch.
    return isinstance(value, NestedTensor)


class Jagged:
    """Rows one after another.

    Attributes:
        values: [total, *trailing].
        lengths: int64 [B], whose sum is ``total``.
    """

    __slots__ = ("_offsets", "lengths", "values")

    def __init__(self, values: torch.Tensor, lengths: torch.Tensor, offsets: torch.Tensor | None = None) -> None:
        self.values, self.lengths, self._offsets = values, lengths, offsets

    @property
    def offsets(self) -> torch.Tensor:
        """Row i is ``values[offsets[i] : offsets[i + 1]]``; int64 [B + 1], from 0."""
        if self._offsets is None:
            self._offsets = offsets_of(self.lengths)
        return self._offsets

    def __len__(self) -> int:
        return len(self.lengths)

    @staticmethod
    def of(nested: torch.Tensor) -> Jagged:
        """The rows of a nested tensor.

        Views where it is packed or a window of packed values; a copy where it has holes (explicit lengths).
        """
        assert isinstance(nested, NestedTensor)
        # The attributes behind values(), offsets() and lengths(), which are the same but for 0.1 ms of dispatch each.
        values, offsets, lengths = nested._values, nested._offsets.long(), nested._lengths
        if lengths is not None:
            return Jagged(gather(values, offsets[:-1], lengths.long()), lengths.long())
        start, stop = int(offsets[0]), int(offsets[-1])
        if start or stop != values.shape[0]:
            values, offsets = values[start:stop], offsets - start
        return Jagged(values, offsets.diff(), offsets)

    def nested(self) -> torch.Tensor:
        """The same rows as a nested tensor [B, j, *trailing]; no copy."""
        return torch.nested.nested_tensor_from_jagged(self.values, self.offsets)

    def take(self, rows: torch.Tensor) -> Jagged:
        """Copies of rows by number, int64 [N], in the order given, repeats allowed."""
        lengths = self.lengths[rows]
        return Jagged(gather(self.values, self.offsets[:-1][rows], lengths), lengths)

    def slice(self, start: int, stop: int) -> Jagged:
        """Rows ``start:stop`` as a view; 0 <= start <= stop <= B."""
        offsets = self.offsets
        return Jagged(self.values[int(offsets[start]) : int(offsets[stop])], self.lengths[start:stop])

    def row(self, row: int) -> torch.Tensor:
        """One row, [length, *trailing], a view."""
        offsets = self.offsets
        return self.values[int(offsets[row]) : int(offsets[row + 1])]

    def to(self, device: torch.device | str) -> Jagged:
        return Jagged(self.values.to(device), self.lengths.to(device))

    def clone(self) -> Jagged:
        return Jagged(self.values.clone(), self.lengths.clone())


def offsets_of(lengths: torch.Tensor) -> torch.Tensor:
    """Offsets int64 [B + 1] of rows with lengths int64 [B]."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def gather(values: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The rows ``values[starts[i] : starts[i] + lengths[i]]`` one after another; starts, lengths int64 [B]."""
    offsets = offsets_of(lengths)
    total = int(offsets[-1])
    shift = torch.repeat_interleave(starts - offsets[:-1], lengths, output_size=total)
    return values[torch.arange(total, device=values.device) + shift]


def concat_jagged(parts: Sequence[Jagged]) -> Jagged:
    """Rows of all parts in order; one dtype, one device, one trailing shape."""
    return Jagged(torch.cat([part.values for part in parts]), torch.cat([part.lengths for part in parts]))


def jagged_difference(left: Jagged, right: Jagged) -> int | None:
    """Number of the first row that differs, in length or in a value, or None; both have the same number of rows."""
    unequal = (left.lengths != right.lengths).nonzero()
    same_lengths = int(unequal[0]) if len(unequal) else len(left)
    stop = int(left.offsets[same_lengths])
    position = tensor_difference(left.values[:stop], right.values[:stop])
    if position is not None:
        offsets = left.offsets
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


def jagged_from_rows(rows: Sequence[torch.Tensor | Sequence], dtype: torch.dtype | None = None) -> Jagged:
    """Rows given as one tensor (or list of numbers) each, [length, *trailing].

    Args:
        rows: rows of one dtype and one trailing shape; lengths may be 0. An empty list takes those of the other rows.
        dtype: convert every row to it. Needed where every row is an empty list, or there are no rows.

    Raises:
        DataError: where rows differ in dtype or trailing shape, or nothing says which dtype to use.
    """
    tensors = {i: _as_row(i, row, dtype) for i, row in enumerate(rows) if not (isinstance(row, Sequence) and not row)}
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
    return Jagged(values, torch.tensor(lengths, dtype=torch.int64, device=first.device))


def _as_row(i: int, row: torch.Tensor | Sequence, dtype: torch.dtype | None) -> torch.Tensor:
    try:
        tensor = torch.as_tensor(row, dtype=dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"jagged: row {i} cannot be made a tensor: {error}. Give numbers, or a tensor.") from error
    if tensor.is_nested:
        raise DataError(f"jagged: row {i} is jagged itself; rows are dense tensors [length, ...], one level deep.")
    return tensor


def jagged_from_padded(padded: torch.Tensor, mask_or_lengths: torch.Tensor) -> Jagged:
    """The rows of a dense column.

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
    return Jagged(padded[mask], mask.sum(dim=1))


def pad_jagged(column: Jagged, value: float = 0, side: str = "right") -> torch.Tensor:
    """The rows as a dense tensor [B, T, *trailing], T the longest row, filled with ``value`` on ``side``."""
    if side not in ("left", "right"):
        raise DataError(f"to_padded: side={side!r}; choose 'right' or 'left'.")
    values, lengths, offsets = column.values, column.lengths, column.offsets
    longest = int(lengths.max()) if len(lengths) else 0
    dense = values.new_full((len(lengths), longest, *values.shape[1:]), _element(value, values.dtype))
    row = torch.repeat_interleave(lengths, output_size=len(values))
    place = torch.arange(len(values), device=values.device) - offsets[:-1][row]
    if side == "left":
        place = place + longest - lengths[row]
    bits = _INDEXED_AS.get(values.dtype)
    if bits is None:
        dense[row, place] = values
    else:
        dense.view(bits)[row, place] = values.view(bits)
    return dense


def _element(value: Any, dtype: torch.dtype) -> Any:
    """The value, which a tensor of the dtype can hold; raises DataError where it cannot: torch would change it."""
    try:
        element = torch.tensor(value, dtype=dtype).item()
        fits = dtype.is_floating_point and (not math.isfinite(value) or abs(value) <= torch.finfo(dtype).max)
        if fits or element == value:
            return element
    except (TypeError, ValueError, RuntimeError):
        pass
    raise DataError(f"to_padded: the column is {dtype}, which has no value {value!r}. Give a value of that dtype.")
