"""DataProto: the table of rows that the driver and the roles hand to each other.

A driver's step builds one, every method of a role takes and returns one, and ``transfer.py`` cuts it among ranks. It
has tensor columns in ``batch`` (dense [B, ...] or jagged [B, j, ...]), object columns in ``non_tensor_batch`` (arrays
of Python objects [B]) and ``meta_info`` (a dict about the batch as a whole). The names are those users know from verl.

Invariants:

- All columns have the same number of rows, and no name is used twice.
- Nothing changes the caller: every operation returns a new DataProto, with a ``meta_info`` of its own (a deep copy).
  The one exception is :meth:`DataProto.pop`, which takes columns out on purpose.
- No padding, truncation or dropped key happens in silence; errors name the key, both sizes and the fix.

New objects may share memory with old ones: slices of tensors are views, selected columns are the same columns, cells of
object columns are the same objects. Treat columns as read-only and ``clone()`` before writing in place. Jagged columns
of equal lengths need not share offsets, which torch wants for arithmetic: compute on :meth:`DataProto.flat`.

What depends on the kind of a column is in ``columns.py``, bytes and files are in ``serialize.py``.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from hybridflow.errors import DataError, nearest
from hybridflow.protocol import columns as col
from hybridflow.protocol import jagged as jag
from hybridflow.protocol import meta, serialize
from hybridflow.protocol.columns import Column
from hybridflow.protocol.item import DataProtoItem


class DataProto:
    """Rows of named columns.

    Args:
        batch: tensor columns with ``batch_size=[B]``, or None; kept, not copied.
        non_tensor_batch: lists or arrays of B cells; each becomes an object array [B].
        meta_info: deep copied.

    Raises:
        DataError: see :meth:`check_consistency`.
    """

    def __init__(
        self,
        batch: TensorDict | None = None,
        non_tensor_batch: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> None:
        self.batch = batch
        self.non_tensor_batch = {key: col.as_objects(key, cells) for key, cells in (non_tensor_batch or {}).items()}
        self.meta_info: dict[str, Any] = copy.deepcopy(dict(meta_info or {}))
        self.check_consistency()

    # ------------------------------------------------------------------------------------------ building

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> DataProto:
        """Build from tensors [B, ...] (dense or jagged), lists or arrays of B cells, and meta data.

        Raises:
            DataError: see :meth:`check_consistency`.
        """
        objects = {key: col.as_objects(key, cells) for key, cells in (non_tensors or {}).items()}
        for key, tensor in (tensors or {}).items():
            if not isinstance(tensor, torch.Tensor):
                raise DataError(
                    f"column {key!r} in tensors is a {type(tensor).__name__}: give a torch.Tensor [B, ...]."
                )
        twice = sorted(objects.keys() & (tensors or {}).keys())
        if twice:
            raise DataError(f"column {twice[0]!r} is in tensors and in non_tensors: rename one.")
        return cls._of({**(tensors or {}), **objects}, meta_info)

    @classmethod
    def from_single_dict(cls, data: Mapping[str, Any], meta_info: Mapping[str, Any] | None = None) -> DataProto:
        """Build from one dict: tensors become tensor columns, lists and arrays become object columns."""
        tensors = {key: value for key, value in data.items() if isinstance(value, torch.Tensor)}
        objects = {key: value for key, value in data.items() if key not in tensors}
        return cls.from_dict(tensors, objects, meta_info)

    @classmethod
    def _of(cls, columns: Mapping[str, Column], meta_info: Mapping[str, Any] | None) -> DataProto:
        """The one place that sorts columns by kind into a new object."""
        col.check_columns(columns)
        tensors = {key: column for key, column in columns.items() if isinstance(column, torch.Tensor)}
        objects = {key: column for key, column in columns.items() if not isinstance(column, torch.Tensor)}
        batch = None
        if tensors:
            batch = TensorDict(dict(tensors), batch_size=[col.num_rows(next(iter(tensors.values())))])
        return cls(batch, objects, meta_info)

    def _columns(self) -> dict[str, Column]:
        """All columns by name, tensors first."""
        tensors: dict[str, Any] = {} if self.batch is None else dict(self.batch.items())
        return {**tensors, **self.non_tensor_batch}

    def _map(self, operation: Callable[[Column], Column]) -> DataProto:
        return self._of({key: operation(column) for key, column in self._columns().items()}, self.meta_info)

    def check_consistency(self) -> None:
        """Check the invariants of this object; operations call it on what they return.

        Raises:
            DataError: where columns differ in their number of rows, a name is used twice or is no string, a tensor is
                neither dense nor jagged or has no rows, or an array is not an object array of one dimension.
        """
        if self.batch is not None and self.batch.batch_dims != 1:
            raise DataError(f"batch has batch_size {list(self.batch.batch_size)}: it must be [B], one dim of rows.")
        twice = [] if self.batch is None else sorted(self.non_tensor_batch.keys() & set(self.batch.keys()))
        if twice:
            raise DataError(f"column {twice[0]!r} is in batch and in non_tensor_batch: rename one.")
        col.check_columns(self._columns())

    # ------------------------------------------------------------------------------------------ reading

    def __len__(self) -> int:
        """Number of rows; 0 without columns."""
        return next((col.num_rows(column) for column in self._columns().values()), 0)

    def keys(self) -> list[str]:
        """Names of all columns, tensors first."""
        return list(self._columns())

    def __contains__(self, key: object) -> bool:
        return key in self._columns()

    def __iter__(self) -> Iterator[DataProtoItem]:
        """Rows in order, as :class:`DataProtoItem`."""
        return (self[row] for row in range(len(self)))

    def __getitem__(self, index: Any) -> Any:
        """A column, a row, or rows.

        Args:
            index: a name gives the column: a tensor [B, ...], jagged or dense, or an object array [B]. An int gives one
                row, a :class:`DataProtoItem`. A slice, a list, array or tensor of ints, or a bool mask [B] gives a
                DataProto; slices of step 1 are views.

        Raises:
            DataError: where a name is unknown, a row is out of range, or a mask has another length than B.
        """
        if isinstance(index, str):
            return self._column(index)
        size = len(self)
        if isinstance(index, slice):
            start, stop, step = index.indices(size)
            if step == 1:
                return self._map(lambda column: col.slice_rows(column, start, max(start, stop)))
            return self.select_idxs(range(start, stop, step))
        scalar = isinstance(index, (torch.Tensor, np.ndarray)) and index.ndim == 0
        if scalar or isinstance(index, (int, np.integer)):
            row = int(col.row_numbers([self._row_number(index)], size))
            parts = {key: col.get_row(column, row) for key, column in self._columns().items()}
            objects = {key: parts.pop(key) for key in self.non_tensor_batch}
            return DataProtoItem(parts, objects, copy.deepcopy(self.meta_info))
        return self.select_idxs(index)

    @staticmethod
    def _row_number(index: Any) -> int:
        value = index.item() if isinstance(index, (torch.Tensor, np.ndarray)) else index
        if isinstance(value, (bool, float)):
            raise DataError(f"cannot index one row with {value!r}: use an int, or a bool mask with one bool a row.")
        return int(value)

    def _column(self, key: str) -> Column:
        columns = self._columns()
        if key not in columns:
            raise DataError(f"no column {key!r}.{nearest(key, columns)}")
        return columns[key]

    def _jagged(self, key: str, method: str) -> torch.Tensor:
        column = self._column(key)
        if not (isinstance(column, torch.Tensor) and jag.is_jagged(column)):
            raise DataError(
                f"{method}: column {key!r} is {col.signature(column)}, not jagged. Read it as data[{key!r}], or build "
                f"it with DataProto.from_padded(tensor, mask)."
            )
        return column

    def flat(self, key: str) -> torch.Tensor:
        """Values [total, ...] of a jagged column, row after row, contiguous; dtype kept."""
        return jag.jagged_parts(self._jagged(key, "flat"))[0].contiguous()

    def lengths(self, key: str) -> torch.Tensor:
        """Lengths int64 [B] of the rows of a jagged column."""
        return jag.jagged_parts(self._jagged(key, "lengths"))[1].diff()

    def padded(self, key: str, value: float = 0, side: str = "right") -> torch.Tensor:
        """A jagged column as a dense tensor [B, T, ...], T its longest row, filled up with ``value`` on ``side``."""
        return jag.pad_jagged(self._jagged(key, "padded"), value, side)

    @staticmethod
    def jagged(rows: Sequence[torch.Tensor | Sequence], dtype: torch.dtype | None = None) -> torch.Tensor:
        """A jagged column from one tensor or list of numbers a row; see :func:`jagged.jagged_from_rows`."""
        return jag.jagged_from_rows(rows, dtype)

    @staticmethod
    def from_padded(padded: torch.Tensor, mask_or_lengths: torch.Tensor) -> torch.Tensor:
        """A jagged column from a dense one [B, T, ...] and a mask [B, T] or lengths [B].

        A mask keeps the places where it is true, wherever they are; see :func:`jagged.jagged_from_padded`.
        """
        return jag.jagged_from_padded(padded, mask_or_lengths)

    # ------------------------------------------------------------------------------------------ columns

    def _names(self, method: str, kind: str, wanted: str | Iterable[str] | None, known: Iterable[str]) -> list[str]:
        """The wanted names as a list, each of them known."""
        known = list(known)
        names = known if wanted is None else [wanted] if isinstance(wanted, str) else list(wanted)
        for name in names:
            if name not in known:
                # Most often the name is right and the kind is wrong.
                place = "" if name not in self else " It is a column of the other kind."
                raise DataError(f"{method}: no {name!r} in {kind}.{place}{nearest(str(name), known)}")
        return names

    def select(
        self,
        batch_keys: str | Iterable[str] | None = None,
        non_tensor_batch_keys: str | Iterable[str] | None = None,
        meta_info_keys: str | Iterable[str] | None = None,
        deepcopy: bool = False,
    ) -> DataProto:
        """Only some columns and meta data. None keeps all of a kind, an empty list none.

        Args:
            deepcopy: give the columns memory of their own, cells included; otherwise they are shared.

        Raises:
            DataError: names an unknown key and the nearest one.
        """
        known: dict[str, Any] = {} if self.batch is None else dict(self.batch.items())
        tensors = self._names("select", "batch", batch_keys, known)
        objects = self._names("select", "non_tensor_batch", non_tensor_batch_keys, self.non_tensor_batch)
        meta_keys = self._names("select", "meta_info", meta_info_keys, self.meta_info)
        columns = self._columns()
        chosen = self._of({k: columns[k] for k in (*tensors, *objects)}, {k: self.meta_info[k] for k in meta_keys})
        return copy.deepcopy(chosen) if deepcopy else chosen

    def pop(
        self,
        batch_keys: str | Iterable[str] | None = None,
        non_tensor_batch_keys: str | Iterable[str] | None = None,
        meta_info_keys: str | Iterable[str] | None = None,
    ) -> DataProto:
        """Take columns and meta data out of THIS object and return them. None takes none of a kind.

        The only method that changes its object. Nothing is taken where it raises, and a TensorDict or dict that others
        hold is not touched.

        Raises:
            DataError: names an unknown key and the nearest one.
        """
        empty: list[str] = []
        popped = self.select(
            empty if batch_keys is None else batch_keys,
            empty if non_tensor_batch_keys is None else non_tensor_batch_keys,
            empty if meta_info_keys is None else meta_info_keys,
        )
        rest = self._of({k: c for k, c in self._columns().items() if k not in popped}, None)
        self.batch, self.non_tensor_batch = rest.batch, rest.non_tensor_batch
        self.meta_info = {key: value for key, value in self.meta_info.items() if key not in popped.meta_info}
        return popped

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> DataProto:
        """The same columns, ``old_keys[i]`` now under the name ``new_keys[i]``; order is kept.

        Raises:
            DataError: where an old name is unknown, a new one is taken, or the lists differ in length.
        """
        old = self._names("rename", "the columns", old_keys, self._columns())
        new = [new_keys] if isinstance(new_keys, str) else list(new_keys)
        if len(old) != len(new):
            raise DataError(f"rename: {len(old)} old names {old} but {len(new)} new names {new}; give one for each.")
        names = dict(zip(old, new, strict=True))
        renamed: dict[str, Column] = {}
        for key, column in self._columns().items():
            name = names.get(key, key)
            if name in renamed:
                raise DataError(f"rename: two columns would be called {name!r}. Drop one with select or pop first.")
            renamed[name] = column
        return self._of(renamed, self.meta_info)

    def union(self, other: DataProto) -> DataProto:
        """Columns and meta data of both. A name both have must mean the same in both; NaN equals NaN.

        ``meta_info["metrics"]`` becomes one dict with the names of both, averaged over workers where it was a list.

        Raises:
            DataError: where the numbers of rows differ; names the column and the first row that differ, or the
                ``meta_info`` key and both values.
        """
        mine, theirs = self._columns(), other._columns()
        if mine and theirs and len(self) != len(other):
            raise DataError(
                f"union: {len(self)} rows with columns {list(mine)}, but {len(other)} rows with columns "
                f"{list(theirs)}. Both sides describe the same rows; use concat to add rows."
            )
        for key in (key for key in mine if key in theirs):
            row = col.first_difference(key, mine[key], theirs[key])
            if row is not None:
                a, b = (meta.short(col.get_row(columns[key], row)) for columns in (mine, theirs))
                raise DataError(
                    f"union: column {key!r} differs, first in row {row} of {len(self)}: {a} on the left, {b} on the "
                    f"right. Rename one, or select only one of them."
                )
        return self._of({**mine, **theirs, **mine}, meta.merge("union", [self.meta_info, other.meta_info]))

    # ------------------------------------------------------------------------------------------ rows

    def select_idxs(self, idxs: Any) -> DataProto:
        """Rows by number (a list, range, array or tensor of ints, repeats allowed), or a bool mask [B]."""
        rows = col.row_numbers(idxs, len(self))
        return self._map(lambda column: col.take_rows(column, rows))

    def reorder(self, indices: Any) -> DataProto:
        """The rows in another order: row i of the result is row ``indices[i]``. Unlike verl's, returns a new object.

        Raises:
            DataError: where ``indices`` is not a permutation of all rows.
        """
        rows, size = col.row_numbers(indices, len(self)), len(self)
        if not torch.equal(rows.sort().values, torch.arange(size)):
            raise DataError(
                f"reorder: {len(rows)} indices with {len(rows.unique())} different values for {size} rows; each row "
                f"must occur once. Use select_idxs to drop or repeat rows."
            )
        return self._map(lambda column: col.take_rows(column, rows))

    def repeat(self, times: int, interleave: bool = True) -> DataProto:
        """B * times rows: copies of a row side by side (0 0 1 1), or with ``interleave=False`` apart (0 1 0 1)."""
        _positive("repeat", "times", times)
        return self._map(lambda column: col.repeat_rows(column, times, interleave))

    def chunk(self, chunks: int) -> list[DataProto]:
        """Exactly ``chunks`` parts in order, whose sizes differ by at most one row, the longer ones first.

        7 rows in 3 chunks are 3, 2, 2. With fewer rows than chunks the last ones have no rows.
        """
        _positive("chunk", "chunks", chunks)
        base, extra = divmod(len(self), chunks)
        bounds = [part * base + min(part, extra) for part in range(chunks + 1)]
        return [self[start:stop] for start, stop in pairwise(bounds)]

    def split(self, split_size: int) -> list[DataProto]:
        """Parts of ``split_size`` rows in order, the last one maybe shorter. No rows give one part without rows."""
        _positive("split", "split_size", split_size)
        return [self[start : start + split_size] for start in range(0, max(len(self), 1), split_size)]

    @classmethod
    def concat(cls, data: Sequence[DataProto]) -> DataProto:
        """Rows of all parts in order.

        ``meta_info["metrics"]`` (a dict or a list of dicts) is collected as one list with every part's dicts in order;
        all its dicts have all names, and NaN stands where a part did not report a metric, so that a mean over parts
        shows the gap instead of hiding it. Any other key has equal values in all parts that have it.

        Raises:
            DataError: for an empty list (its columns and dtypes would be unknown); where columns are missing in a part
                or differ in kind, dtype or trailing shape; where ``meta_info`` differs. Names the key and the part.
        """
        data = list(data)
        if not data:
            raise DataError("concat([]): there is no part that tells the columns. Concat at least one DataProto.")
        parts = [part._columns() for part in data]
        names = col.common_names(parts)
        joined = {key: col.concat_rows(key, [part[key] for part in parts]) for key in names}
        return cls._of(joined, meta.merge("concat", [part.meta_info for part in data], collect_metrics=True))

    def make_iterator(
        self, mini_batch_size: int, epochs: int, seed: int | None = None, shuffle: bool | None = None
    ) -> Iterator[DataProto]:
        """Mini-batches of ``mini_batch_size`` rows; each epoch covers every row once.

        Args:
            seed: of the order; the same seed gives the same order on every machine, each epoch has another one.
            shuffle: None shuffles if a seed is given. True without a seed draws from torch's global generator.

        Raises:
            DataError: at the call, where rows do not divide into mini-batches, or ``shuffle=False`` has a seed.
        """
        _positive("make_iterator", "mini_batch_size", mini_batch_size)
        _positive("make_iterator", "epochs", epochs)
        size = len(self)
        if size % mini_batch_size:
            raise DataError(
                f"make_iterator: {size} rows do not divide into mini-batches of {mini_batch_size}: {size} = "
                f"{size // mini_batch_size} * {mini_batch_size} + {size % mini_batch_size}. Change mini_batch_size, or "
                f"use pad_to_divisor first."
            )
        if seed is not None and shuffle is False:
            raise DataError(f"make_iterator: seed={seed} has no effect with shuffle=False; drop one of them.")
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        shuffled = shuffle or seed is not None

        def batches() -> Iterator[DataProto]:
            for _ in range(epochs):
                order = torch.randperm(size, generator=generator) if shuffled else torch.arange(size)
                for rows in order.split(mini_batch_size) if size else ():
                    yield self.select_idxs(rows)

        return batches()

    def pad_to_divisor(self, size: int) -> tuple[DataProto, int]:
        """The smallest multiple of ``size`` rows: rows from the front are repeated at the end, as often as needed.

        Returns:
            The padded rows, and how many of them are padding, for :meth:`unpad`. No rows stay no rows.
        """
        _positive("pad_to_divisor", "size", size)
        rows = len(self)
        pad_size = -rows % size
        return self.select_idxs(torch.arange(rows + pad_size) % max(rows, 1)), pad_size

    def unpad(self, pad_size: int) -> DataProto:
        """All rows but the last ``pad_size``, 0 <= pad_size <= B."""
        if not 0 <= pad_size <= len(self):
            raise DataError(f"unpad: pad_size={pad_size} is outside of 0..{len(self)}, the number of rows.")
        return self[: len(self) - pad_size]

    # ------------------------------------------------------------------------------------------ bytes

    def to(self, device: torch.device | str) -> DataProto:
        """The rows with their tensors on a device. Unlike verl's, returns a new object."""
        return self._map(lambda column: col.move_column(column, device))

    @property
    def nbytes(self) -> int:
        """Bytes of all columns; views count their rows only, cells are counted without the objects they hold."""
        return sum(col.column_bytes(column) for column in self._columns().values())

    def print_size(self, prefix: str = "") -> None:
        """Print one line a column: name, kind, rows and MiB."""
        for key, column in self._columns().items():
            size = f"{col.num_rows(column)} rows, {col.column_bytes(column) / 2**20:.3f} MiB"
            print(f"{prefix}{key}: {col.signature(column)}, {size}")

    def save_to_disk(self, path: str | os.PathLike[str]) -> None:
        """Write to one file; it appears under its name only when it is complete. Tensors come back on the CPU."""
        serialize.write_file(path, self)

    @staticmethod
    def load_from_disk(path: str | os.PathLike[str]) -> DataProto:
        """Read what :meth:`save_to_disk` wrote. It is a pickle: read only files you trust.

        Raises:
            DataError: names the file where it is damaged or holds something else.
        """
        data = serialize.read_file(path)
        if not isinstance(data, DataProto):
            raise DataError(f"{path} holds a {type(data).__name__}, not a DataProto.")
        return data

    save, load = save_to_disk, load_from_disk

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _restore, serialize.pack((self._columns(), self.meta_info))

    def __copy__(self) -> DataProto:
        return self._of(self._columns(), self.meta_info)

    def __deepcopy__(self, memo: dict[int, Any]) -> DataProto:
        def clone(column: Column) -> Column:
            return copy.deepcopy(column, memo) if isinstance(column, np.ndarray) else col.clone_column(column)

        return self._map(clone)

    def __repr__(self) -> str:
        columns = ", ".join(f"{key}: {col.signature(column)}" for key, column in self._columns().items())
        return f"DataProto({len(self)} rows; {columns or 'no columns'}; meta_info: {list(self.meta_info)})"


def _restore(columns: dict[str, Column], meta_info: dict[str, Any]) -> DataProto:
    return DataProto._of(columns, meta_info)


def _positive(method: str, name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise DataError(f"{method}: {name}={value!r}; give an integer of at least 1.")
