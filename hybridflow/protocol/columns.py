"""Row operations on one column: the only place where a DataProto's kinds of column differ.

DataProto (``data.py``) keeps names and rows in agreement and calls these functions for every column. A column is

- dense: a tensor [B, *trailing];
- jagged: a nested tensor [B, j, *trailing] with ``layout=torch.jagged`` (``jagged.py``);
- object: an array of Python objects [B], always of one dimension, also where its cells are lists of equal length.

A further kind of column needs a branch here and nothing in DataProto. Invariant: no function writes to a column it was
given; dtype and device of a tensor never change except in ``move_column``. Cells of object columns are shared.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hybridflow.errors import DataError
from hybridflow.protocol import jagged
from hybridflow.protocol.jagged import is_jagged

Column = torch.Tensor | np.ndarray


def check_column(key: str, column: Any) -> None:
    """Refuse what no row operation could treat right: raises DataError that names the key and the fix."""
    if isinstance(column, np.ndarray):
        if column.dtype != object or column.ndim != 1:
            raise DataError(
                f"column {key!r} is an array of dtype {column.dtype} and shape {list(column.shape)}; arrays of a "
                f"DataProto have dtype object and one dimension. Build it with DataProto.from_dict(non_tensors=...)."
            )
    elif not isinstance(column, torch.Tensor):
        raise DataError(
            f"column {key!r} is a {type(column).__name__}; tensors go in `tensors`, lists and arrays in `non_tensors`."
        )
    elif is_jagged(column):
        if isinstance(column.shape[1], int):
            raise DataError(f"column {key!r} is jagged in a dim other than 1: transpose it to [B, j, ...].")
    elif column.layout != torch.strided or column.is_nested:
        raise DataError(
            f"column {key!r} has layout {column.layout} (nested: {column.is_nested}); use a dense tensor, or "
            f"DataProto.jagged(rows) for rows of different lengths."
        )
    elif column.dim() == 0:
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


def check_columns(columns: Mapping[str, Any]) -> None:
    """Check each column, that names are strings, and that all columns have the same number of rows.

    Raises:
        DataError: names the column, both numbers of rows and the fix.
    """
    first: str | None = None
    for key, column in columns.items():
        if not isinstance(key, str):
            raise DataError(f"column names are strings, not {key!r} ({type(key).__name__}).")
        check_column(key, column)
        first = key if first is None else first
        rows, expected = num_rows(column), num_rows(columns[first])
        if rows != expected:
            raise DataError(
                f"column {key!r} has {rows} rows, column {first!r} has {expected}: all columns of a DataProto have the "
                f"same number of rows. Repeat or drop rows before you combine them."
            )


def num_rows(column: Column) -> int:
    return int(column.shape[0])


def signature(column: Column) -> str:
    """Kind, dtype, trailing shape and device: columns with one signature can be concatenated and compared."""
    if isinstance(column, np.ndarray):
        return "object [rows]"
    tail = "".join(f", {size}" for size in column.shape[2 if is_jagged(column) else 1 :])
    kind = f"jagged [rows, j{tail}]" if is_jagged(column) else f"dense [rows{tail}]"
    return f"{kind} {str(column.dtype).removeprefix('torch.')} on {column.device}"


def take_rows(column: Column, rows: torch.Tensor) -> Column:
    """Copies of rows by number, int64 [N] within 0..B-1, in the order given, repeats allowed."""
    if isinstance(column, np.ndarray):
        return column[rows.numpy()]
    return jagged.take_jagged(column, rows) if is_jagged(column) else column[rows.to(column.device)]


def slice_rows(column: Column, start: int, stop: int) -> Column:
    """Rows ``start:stop``, 0 <= start <= stop <= B: a view of a tensor, a new array of the same cells."""
    if isinstance(column, np.ndarray):
        return column[start:stop].copy()
    return jagged.slice_jagged(column, start, stop) if is_jagged(column) else column[start:stop]


def get_row(column: Column, row: int) -> Any:
    """One row without its row dim: a tensor [*trailing] or [length, *trailing] (a view), or a cell."""
    if is_jagged(column):
        values, offsets = jagged.jagged_parts(column)  # type: ignore[arg-type]
        return values[int(offsets[row]) : int(offsets[row + 1])]
    return column[row]


def repeat_rows(column: Column, times: int, interleave: bool) -> Column:
    """``times`` copies of each row: side by side if ``interleave`` (0 0 1 1), else block after block (0 1 0 1)."""
    rows = torch.arange(num_rows(column))
    return take_rows(column, rows.repeat_interleave(times) if interleave else rows.repeat(times))


def common_names(parts: Sequence[Mapping[str, Column]]) -> list[str]:
    """Names of the columns of parts to concatenate. Raises DataError that names what a part lacks."""
    names = list(dict.fromkeys(key for part in parts for key in part))
    for index, part in enumerate(parts):
        missing = [key for key in names if key not in part]
        if missing:
            raise DataError(
                f"concat: part {index} of {len(parts)} lacks the columns {missing}; it has {list(part)}. Give all "
                f"parts the same columns, or select the common ones first."
            )
    return names


def concat_rows(key: str, columns: Sequence[Column]) -> Column:
    """Rows of all columns in order. Raises DataError that names the key where signatures differ."""
    first = signature(columns[0])
    for index, column in enumerate(columns):
        if signature(column) != first:
            raise DataError(
                f"concat: column {key!r} is {first} in part 0 but {signature(column)} in part {index}. Give all parts "
                f"one dtype, device and trailing shape; rows of different lengths go in DataProto.jagged(rows)."
            )
    if isinstance(columns[0], np.ndarray):
        return np.concatenate(columns)  # type: ignore[arg-type]
    return jagged.concat_jagged(columns) if is_jagged(columns[0]) else torch.cat(columns)  # type: ignore[arg-type]


def first_difference(key: str, left: Column, right: Column) -> int | None:
    """Number of the first row that differs, or None; NaN equals NaN, also inside of cells.

    Raises:
        DataError: names the key where signatures differ. Both columns have the same number of rows.
    """
    if left is right:
        return None
    if signature(left) != signature(right):
        raise DataError(
            f"union: column {key!r} is {signature(left)} on the left but {signature(right)} on the right. Convert one, "
            f"rename one, or select only one of them."
        )
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        unequal = (row for row, (a, b) in enumerate(zip(left, right, strict=True)) if not same_value(a, b))
        return next(unequal, None)
    return jagged.jagged_difference(left, right) if is_jagged(left) else jagged.tensor_difference(left, right)


def same_value(a: Any, b: Any) -> bool:
    """Deep equality of two Python values in which NaN equals NaN; arrays and tensors also compare dtype and shape."""
    if a is b:
        return True
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
            return False
        if signature_of_cell(a) != signature_of_cell(b):
            return False
        if is_jagged(a):
            return jagged.jagged_difference(a, b) is None
        return jagged.tensor_difference(a.reshape(-1), b.reshape(-1)) is None
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        if not (isinstance(a, np.ndarray) and isinstance(b, np.ndarray)) or (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        if a.dtype == object:
            return all(same_value(x, y) for x, y in zip(a.flat, b.flat, strict=True))
        return np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")
    if type(a) is type(b) and isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same_value(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same_value(a[key], b[key]) for key in a)
    if isinstance(a, (float, np.floating)) and isinstance(b, (float, np.floating)) and a != a and b != b:
        return True
    return bool(a == b)


def signature_of_cell(cell: torch.Tensor) -> tuple[Any, ...]:
    """What two tensors inside of cells must share to be compared value by value."""
    if is_jagged(cell):
        return ("jagged", num_rows(cell), cell.dtype, tuple(cell.shape[2:]), cell.device)
    return ("dense", tuple(cell.shape), cell.dtype, cell.device)


def move_column(column: Column, device: torch.device | str) -> Column:
    """The column on a device; arrays stay where they are. The column itself where it is there already."""
    return column if isinstance(column, np.ndarray) else column.to(device)


def clone_column(column: Column) -> Column:
    """A column of its own memory; cells of an object column are still shared."""
    if is_jagged(column):
        values, offsets = jagged.jagged_parts(column)  # type: ignore[arg-type]
        return jagged.make_jagged(values.clone(), offsets.clone())
    return column.copy() if isinstance(column, np.ndarray) else column.clone()


def column_bytes(column: Column) -> int:
    """Bytes of a tensor's rows (and offsets); of objects, references and cells without what they hold."""
    if isinstance(column, np.ndarray):
        cells = (c.nbytes if isinstance(c, (np.ndarray, torch.Tensor)) else sys.getsizeof(c) for c in column)
        return column.nbytes + sum(cells)
    if is_jagged(column):
        return sum(part.nbytes for part in jagged.jagged_parts(column))
    return column.nbytes


def row_numbers(index: Any, size: int) -> torch.Tensor:
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
    rows = index.detach().cpu() if isinstance(index, torch.Tensor) else _as_index(index)
    if rows.dim() != 1:
        raise DataError(f"the index of rows has shape {list(rows.shape)}; it must have one dimension.")
    if rows.dtype == torch.bool:
        if len(rows) != size:
            raise DataError(f"a mask of {len(rows)} does not fit {size} rows: give one bool a row.")
        return rows.nonzero().squeeze(1)
    # An empty list has no dtype of its own and reads as float.
    if len(rows) and (rows.is_floating_point() or rows.is_complex()):
        raise DataError(f"the index of rows has dtype {rows.dtype}; use integers or a bool mask.")
    rows = rows.long()
    outside = ((rows < -size) | (rows >= size)).nonzero()
    if len(outside):
        raise DataError(f"row {int(rows[outside[0]])} is out of range: there are {size} rows, 0 to {size - 1}.")
    return torch.where(rows < 0, rows + size, rows)


def _as_index(index: Any) -> torch.Tensor:
    try:
        return torch.as_tensor(np.array(index))
    except (TypeError, ValueError) as error:
        raise DataError(f"cannot index rows with {index!r}: use integers or a bool mask ({error}).") from error
