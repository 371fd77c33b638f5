"""Row numbers: which rows of which pieces a column has. Integers only; no byte of a row is touched here.

A column (``remote.py``) is a sequence of pieces, each some rows made by one process. Its rows are numbers into the
pieces laid one after another: with pieces of 4 and 3 rows, row 5 is the second row of the second piece. Taking,
cutting, repeating and concatenating rows is arithmetic on these numbers.

Invariant: a :class:`Rows` never changes, so the columns of a batch share one wherever they agree.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch

from hybridflow.errors import DataError

Index = range | np.ndarray
"""Row numbers: a range of step 1, or int64 [N]."""


class Rows:
    """Rows of several pieces, in order.

    Attributes:
        sizes: rows of each piece, all above 0.
        index: the chosen rows, numbered through all pieces; each piece is named by at least one.
    """

    __slots__ = ("index", "sizes")

    def __init__(self, sizes: tuple[int, ...], index: Index) -> None:
        self.sizes, self.index = sizes, index

    @staticmethod
    def all_of(size: int) -> Rows:
        """Every row of one piece."""
        return Rows((size,) if size else (), range(size))

    def __len__(self) -> int:
        return len(self.index)

    def is_whole(self) -> bool:
        """Whether these are all rows of all pieces in order."""
        return isinstance(self.index, range) and len(self.index) == sum(self.sizes)

    def same(self, other: Rows) -> bool:
        """Whether both name the same rows of pieces of the same sizes."""
        return self is other or (self.sizes == other.sizes and np.array_equal(self.index, other.index))

    def take(self, wanted: Index) -> tuple[Rows, Sequence[int]]:
        """The rows numbered ``wanted`` of these, 0 <= n < len(self), and the pieces that still have one of them."""
        if isinstance(wanted, range):
            index = self.index[wanted.start : wanted.stop]
        elif isinstance(self.index, range):
            index = wanted + self.index.start if self.index.start else wanted
        else:
            index = self.index[wanted]
        return _pruned(self.sizes, contiguous(index))

    @staticmethod
    def concat(parts: Sequence[Rows], places: Sequence[Sequence[int]], sizes: tuple[int, ...]) -> Rows:
        """The rows of all parts in order, where piece j of part i is piece ``places[i][j]`` of the result.

        Pieces are numbered as they come.
        """
        if sum(map(len, places)) == len(sizes) and all([part.is_whole() for part in parts]):
            return Rows(sizes, range(sum(sizes)))
        starts = _bounds(sizes)
        moved = []
        for part, place in zip(parts, places, strict=True):
            if not len(part):
                continue
            first, *_ = place
            if list(place) == list(range(first, first + len(place))):
                shift: int | np.ndarray = starts[first]
            else:
                old = _bounds(part.sizes)
                by_piece = [starts[new] - begin for new, begin in zip(place, old, strict=False)]
                shift = np.repeat(by_piece, part.sizes)[_as_array(part.index)]
            index = part.index
            if isinstance(index, range) and isinstance(shift, int):
                moved.append(range(index.start + shift, index.stop + shift))
            else:
                moved.append(_as_array(index) + shift)
        return Rows(sizes, _joined(moved))

    def compact(self, pieces: Sequence[int]) -> tuple[Rows, list[Index]]:
        """The same rows where the given pieces have no others; and for each of these which of its rows are left."""
        if self.is_whole():
            return self, [range(self.sizes[piece]) for piece in pieces]
        bounds = _bounds(self.sizes)
        index = _as_array(self.index)
        left = np.ones(bounds[-1], dtype=bool)
        for piece in pieces:
            left[bounds[piece] : bounds[piece + 1]] = False
        left[index] = True
        kept = [contiguous(np.flatnonzero(left[bounds[piece] : bounds[piece + 1]])) for piece in pieces]
        sizes = np.add.reduceat(left, bounds[:-1], dtype=np.int64).tolist()
        return Rows(tuple(sizes), contiguous((np.cumsum(left) - 1)[index])), kept

    def runs(self) -> Iterator[tuple[int, Index]]:
        """Stretches of rows of one piece: the piece's number, and the rows' numbers inside of it."""
        bounds = _bounds(self.sizes)
        if isinstance(self.index, range):
            start, stop = self.index.start, self.index.stop
            for piece in range(bisect_right(bounds, start) - 1, bisect_left(bounds, stop)):
                begin = bounds[piece]
                yield piece, range(max(start, begin) - begin, min(stop, bounds[piece + 1]) - begin)
            return
        pieces = np.searchsorted(bounds, self.index, side="right") - 1
        cuts = [0, *(np.flatnonzero(np.diff(pieces)) + 1).tolist(), len(self.index)]
        for begin, end in pairwise(cuts):
            piece = int(pieces[begin])
            yield piece, contiguous(self.index[begin:end] - bounds[piece])

    def num_runs(self) -> int:
        """How many stretches :meth:`runs` gives."""
        if isinstance(self.index, range):
            return len(self.sizes)
        pieces = np.searchsorted(_bounds(self.sizes), self.index, side="right")
        return 1 + int(np.count_nonzero(np.diff(pieces)))


def contiguous(index: Index) -> Index:
    """The same row numbers, as a range where they are consecutive."""
    if isinstance(index, range):
        return index
    size = len(index)
    if not size:
        return range(0)
    first = int(index[0])
    if int(index[-1]) - first == size - 1 and bool((index[1:] - index[:-1] == 1).all()):
        return range(first, first + size)
    return index


def row_numbers(index: Any, size: int) -> np.ndarray:
    """Row numbers int64 [N] within 0..size-1 that an index means.

    Args:
        index: a list, range, array or tensor of integers (negative ones count from the end), or a bool mask [size].

    Raises:
        DataError: where the index is of another type or dimension, out of range, or a mask of another length.
    """
    if isinstance(index, (str, bytes, Mapping)) or not isinstance(index, (Sequence, np.ndarray, torch.Tensor)):
        raise DataError(
            f"cannot index rows with a {type(index).__name__}: use an int, a slice, integers or a bool mask."
        )
    try:
        rows = np.array(index.detach().cpu().numpy() if isinstance(index, torch.Tensor) else index)
    except (TypeError, ValueError) as error:
        raise DataError(f"cannot index rows with {index!r}: use integers or a bool mask ({error}).") from error
    if rows.ndim != 1:
        raise DataError(f"the index of rows has shape {list(rows.shape)}; it must have one dimension.")
    if rows.dtype == bool:
        if len(rows) != size:
            raise DataError(f"a mask of {len(rows)} does not fit {size} rows: give one bool a row.")
        return rows.nonzero()[0]
    # An empty list has no dtype of its own and reads as float.
    if len(rows) and rows.dtype.kind not in "iu":
        raise DataError(f"cannot index rows with dtype {rows.dtype}; use integers or a bool mask.")
    outside = (rows < -size) | (rows >= size)
    if outside.any():
        raise DataError(f"row {rows[outside.argmax()]} is out of range: there are {size} rows, 0 to {size - 1}.")
    rows = rows.astype(np.int64, copy=False)
    return np.where(rows < 0, rows + size, rows)


def row_number(index: Any, size: int) -> int:
    """The number, within 0..size-1, of the one row that an index means: an int, or an array or tensor of one."""
    value = index.item() if isinstance(index, (torch.Tensor, np.ndarray)) else index
    if isinstance(value, (bool, float)):
        raise DataError(f"cannot index one row with {value!r}: use an int, or a bool mask with one bool a row.")
    return int(row_numbers([int(value)], size)[0])


def sliced(index: slice, size: int) -> Index:
    """The rows of a slice; raises DataError where its bounds are no integers or its step is 0."""
    try:
        start, stop, step = index.indices(size)
    except (TypeError, ValueError) as error:
        raise DataError(f"cannot take the rows {index}: {error}.") from error
    return range(start, max(start, stop)) if step == 1 else np.arange(start, stop, step)


def permutation(index: Any, size: int) -> np.ndarray:
    """Row numbers int64 [size] in which each row occurs once; raises DataError where one does not."""
    rows = row_numbers(index, size)
    occurs = np.zeros(size, dtype=bool)
    occurs[rows] = True
    if len(rows) != size or not occurs.all():
        raise DataError(
            f"reorder: {len(rows)} indices with {occurs.sum()} different values for {size} rows; each row must occur "
            f"once. Use select_idxs to drop or repeat rows."
        )
    return rows


def chunk_rows(num_rows: int, num_chunks: int) -> list[range]:
    """Runs of neighbouring rows whose lengths differ by at most one, the longer ones first."""
    base, extra = divmod(num_rows, num_chunks)
    bounds = [chunk * base + min(chunk, extra) for chunk in range(num_chunks + 1)]
    return [range(bounds[chunk], bounds[chunk + 1]) for chunk in range(num_chunks)]


def mini_batches(
    size: int, mini_batch_size: int, epochs: int, seed: int | None, shuffle: bool | None
) -> Iterator[np.ndarray]:
    """Row numbers int64 [mini_batch_size] of each mini-batch; see :meth:`DataProto.make_iterator`."""
    positive("make_iterator", "mini_batch_size", mini_batch_size)
    positive("make_iterator", "epochs", epochs)
    if size % mini_batch_size:
        raise DataError(
            f"make_iterator: {size} rows do not divide into mini-batches of {mini_batch_size}: {size} = "
            f"{size // mini_batch_size} * {mini_batch_size} + {size % mini_batch_size}. Change mini_batch_size, or "
            f"use pad_to_divisor first."
        )
    if seed is not None and shuffle is False:
        raise DataError(f"make_iterator: seed={seed} has no effect with shuffle=False; drop one of them.")
    generator = None
    if seed is not None:
        whole = isinstance(seed, (int, np.integer)) and not isinstance(seed, bool)
        if not whole or not -(2**63) <= seed < 2**64:
            raise DataError(f"make_iterator: seed={seed!r}; give an integer of 64 bits.")
        generator = torch.Generator().manual_seed(int(seed))
    shuffled = shuffle or seed is not None

    def batches() -> Iterator[np.ndarray]:
        for _ in range(epochs):
            order = torch.randperm(size, generator=generator) if shuffled else torch.arange(size)
            for rows in order.split(mini_batch_size) if size else ():
                yield rows.numpy()

    return batches()


def positive(method: str, name: str, value: int) -> None:
    """Raises DataError where an argument is no integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise DataError(f"{method}: {name}={value!r}; give an integer of at least 1.")


def _pruned(sizes: tuple[int, ...], index: Index) -> tuple[Rows, Sequence[int]]:
    """The rows without the pieces that none of them is in."""
    if not len(index):
        return Rows((), range(0)), ()
    if len(sizes) == 1:
        return Rows(sizes, index), (0,)
    bounds = _bounds(sizes)
    if isinstance(index, range):
        kept: Sequence[int] = range(bisect_right(bounds, index.start) - 1, bisect_left(bounds, index.stop))
        dropped = bounds[kept[0]]
        return Rows(sizes[kept[0] : kept[-1] + 1], range(index.start - dropped, index.stop - dropped)), kept
    named = np.zeros(bounds[-1], dtype=bool)
    named[index] = True
    in_use = np.logical_or.reduceat(named, bounds[:-1])
    if in_use.all():
        return Rows(sizes, index), range(len(sizes))
    dropped_before = np.cumsum(np.where(in_use, 0, sizes))
    index = index - np.repeat(dropped_before, sizes)[index]
    kept = np.flatnonzero(in_use).tolist()
    return Rows(tuple(sizes[piece] for piece in kept), contiguous(index)), kept


def _bounds(sizes: Sequence[int]) -> list[int]:
    """Where each piece starts, and where the last one ends."""
    return [0, *accumulate(sizes)]


def _as_array(index: Index) -> np.ndarray:
    return np.arange(index.start, index.stop) if isinstance(index, range) else index


def _joined(parts: Sequence[Index]) -> Index:
    """All row numbers in order; a range where the parts are ranges that continue one another."""
    if not parts:
        return range(0)
    ranges = [part for part in parts if isinstance(part, range)]
    if len(ranges) == len(parts) and all(a.stop == b.start for a, b in pairwise(ranges)):
        return range(ranges[0].start, ranges[-1].stop)
    return contiguous(np.concatenate([_as_array(part) for part in parts]))
