"""Rows of one column in the memory of this process: the only place where the kinds of column differ.

A :class:`hybridflow.protocol.remote.Column` says which rows it has and where they are; what is done with rows that are
here is done by these functions, on a block, which is

- dense: a tensor [B, *trailing];
- jagged: a :class:`hybridflow.protocol.jagged.Jagged` (for users a nested tensor [B, j, *trailing]);
- object: an array of Python objects [B], always of one dimension, also where its cells are lists of equal length.

Invariant: no function writes to a block it was given; dtype and device of a tensor never change except in
``move_block``. Cells of object columns are shared.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from numbers import Number
from typing import Any

import numpy as np
import torch

from hybridflow.errors import DataError
from hybridflow.protocol import jagged
from hybridflow.protocol.jagged import Jagged, is_jagged
from hybridflow.protocol.rows import Index

Block = torch.Tensor | Jagged | np.ndarray


@dataclass(frozen=True)
class Signature:
    """What columns share that can be concatenated and compared.

    Attributes:
        kind: ``dense``, ``jagged`` or ``object``.
        dtype: of a tensor's elements.
        shape: of one row, without the jagged dim.
        device: where a tensor's elements are.
    """

    kind: str
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    device: str = "cpu"

    def __str__(self) -> str:
        if self.kind == "object":
            return "object [rows]"
        dims = ", ".join(["rows", *(["j"] if self.kind == "jagged" else []), *map(str, self.shape)])
        return f"{self.kind} [{dims}] {str(self.dtype).removeprefix('torch.')} on {self.device}"


def signature(block: Block) -> Signature:
    """Kind, dtype, shape of a row and device."""
    if isinstance(block, np.ndarray):
        return Signature("object")
    kind, values = ("jagged", block.values) if isinstance(block, Jagged) else ("dense", block)
    return _signature(kind, values.dtype, values.shape[1:], values.device)


@lru_cache(1024)
def _signature(kind: str, dtype: torch.dtype, shape: torch.Size, device: torch.device) -> Signature:
    """One object for columns that are alike, so that most are told to be so by their identity."""
    return Signature(kind, dtype, tuple(shape), str(device))


def check_value(key: str, value: Any) -> None:
    """Refuse what no row operation could treat right: raises DataError that names the key and the fix."""
    if not isinstance(key, str):
        raise DataError(f"column names are strings, not {key!r} ({type(key).__name__}).")
    if isinstance(value, np.ndarray):
        if value.dtype != object or value.ndim != 1:
            raise DataError(
                f"column {key!r} is an array of dtype {value.dtype} and shape {list(value.shape)}; arrays of a "
                f"DataProto have dtype object and one dimension. Build it with DataProto.from_dict(non_tensors=...)."
            )
    elif not isinstance(value, torch.Tensor):
        raise DataError(f"column {key!r} is a {type(value).__name__}: give a torch.Tensor [B, ...].")
    elif is_jagged(value):
        if isinstance(value.shape[1], int):
            raise DataError(f"column {key!r} is jagged in a dim other than 1: transpose it to [B, j, ...].")
    elif value.layout != torch.strided or value.is_nested:
        raise DataError(
            f"column {key!r} has layout {value.layout} (nested: {value.is_nested}); use a dense tensor, or "
            f"DataProto.jagged(rows) for rows of different lengths."
        )
    elif value.dim() == 0:
        raise DataError(f"column {key!r} is a single number without rows; put it in meta_info, or expand it to [B].")


def as_objects(key: str, values: Any) -> np.ndarray:
    """An object column [B] from a sequence of B cells.

    Lists of equal length stay cells; an array of more than one dimension becomes its rows. An object array of one
    dimension is taken as it is.
    """
    if isinstance(values, np.ndarray):
        if values.dtype == object and values.ndim == 1:
            return values
        if values.ndim == 0:
            raise DataError(f"column {key!r} is a single number without rows; put it in meta_info.")
    elif isinstance(values, (str, bytes, Mapping, torch.Tensor)) or not isinstance(values, Sequence):
        raise DataError(f"column {key!r} is a {type(values).__name__}; give a list or an array with one cell a row.")
    cells = np.empty(len(values), dtype=object)
    # Assigning the whole list at once would let numpy look inside of the cells and build a second dimension.
    for row, cell in enumerate(values):
        cells[row] = cell
    return cells


def empty_block(kind: Signature) -> Block:
    """A block without rows."""
    if kind.kind == "object":
        return np.empty(0, dtype=object)
    values = torch.empty((0, *kind.shape), dtype=kind.dtype, device=kind.device)
    return Jagged(values, torch.empty(0, dtype=torch.int64, device=kind.device)) if kind.kind == "jagged" else values


def take_rows(block: Block, rows: Index) -> Block:
    """Rows by number: all of them give the block itself, a range a view of a tensor, an array copies.

    A range of an object column is a new array of the same cells.
    """
    if isinstance(rows, range):
        if len(rows) == len(block):
            return block
        if isinstance(block, Jagged):
            return block.slice(rows.start, rows.stop)
        part = block[rows.start : rows.stop]
        return part.copy() if isinstance(part, np.ndarray) else part
    if isinstance(block, np.ndarray):
        return block[rows]
    index = torch.from_dlpack(rows)  # row numbers that another process sent are read-only, and from_numpy warns of it
    if isinstance(block, Jagged):
        return block.take(index.to(block.lengths.device))
    index = index.to(block.device)
    # index_select is the quicker one, but on single numbers it does not know all dtypes (uint16 and wider, float8).
    return block[index] if block.dim() == 1 else block.index_select(0, index)


def concat_blocks(blocks: Sequence[Block]) -> Block:
    """Rows of all blocks in order; they have one signature."""
    first = blocks[0]
    if len(blocks) == 1:
        return first
    if isinstance(first, np.ndarray):
        return np.concatenate(blocks)  # type: ignore[arg-type]
    return jagged.concat_jagged(blocks) if isinstance(first, Jagged) else torch.cat(blocks)  # type: ignore[arg-type]


def get_row(block: Block, row: int) -> Any:
    """One row without its row dim: a tensor [*trailing] or [length, *trailing] (a view), or a cell."""
    return block.row(row) if isinstance(block, Jagged) else block[row]


def first_difference(left: Block, right: Block) -> int | None:
    """Number of the first row that differs, or None; NaN equals NaN, also inside of cells. Signatures are equal."""
    if left is right:
        return None
    if isinstance(left, np.ndarray):
        unequal = (row for row, (a, b) in enumerate(zip(left, right, strict=True)) if not same_value(a, b))  # type: ignore[arg-type]
        return next(unequal, None)
    if isinstance(left, Jagged):
        return jagged.jagged_difference(left, right)  # type: ignore[arg-type]
    return jagged.tensor_difference(left, right)  # type: ignore[arg-type]


def same_value(a: Any, b: Any) -> bool:
    """Deep equality of two Python values in which NaN equals NaN; arrays and tensors also compare dtype and shape."""
    if a is b:
        return True
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)) or is_jagged(a) != is_jagged(b):
            return False
        if is_jagged(a):
            x, y = Jagged.of(a), Jagged.of(b)
            return len(x) == len(y) and signature(x) == signature(y) and jagged.jagged_difference(x, y) is None
        if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
            return False
        return jagged.tensor_difference(a.reshape(-1), b.reshape(-1)) is None
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        if not (isinstance(a, np.ndarray) and isinstance(b, np.ndarray)) or (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        if a.dtype == object:
            return all(same_value(x, y) for x, y in zip(a.flat, b.flat, strict=True))
        return np.array_equal(a, b, equal_nan=a.dtype.kind in "fcmM")
    if type(a) is type(b) and isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same_value(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same_value(a[key], b[key]) for key in a)
    if is_dataclass(type(a)) and type(a) is type(b):
        return all(same_value(getattr(a, f.name, None), getattr(b, f.name, None)) for f in fields(a))  # type: ignore[arg-type]
    if isinstance(a, Number) and isinstance(b, Number) and a != a and b != b:
        return True
    try:
        return bool(a == b)
    except Exception:  # of values that cannot be compared nobody can say that they are the same
        return False


def move_block(block: Block, device: torch.device | str) -> Block:
    """The block on a device; arrays stay where they are. The block itself where it is there already."""
    return block if isinstance(block, np.ndarray) else block.to(device)


def clone_block(block: Block) -> Block:
    """A block of its own memory; cells of an object column are still shared."""
    return block.copy() if isinstance(block, np.ndarray) else block.clone()


def object_bytes(cells: np.ndarray) -> int:
    """Bytes of references and cells, without what cells hold."""
    sizes = (c.nbytes if isinstance(c, (np.ndarray, torch.Tensor)) else sys.getsizeof(c) for c in cells)
    return cells.nbytes + sum(sizes)


def short(value: Any, limit: int = 200) -> str:
    """The value's repr for an error message, cut at ``limit`` characters."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}..."
