"""DataProto: the table of rows that the driver and the roles hand to each other.

A driver's step builds one, every method of a role takes and returns one, and ``transfer.py`` cuts it among ranks. It
has tensor columns in ``batch`` (dense [B, ...] or jagged [B, j, ...]), object columns in ``non_tensor_batch`` (arrays
of Python objects [B]) and ``meta_info`` (a dict about the batch as a whole). The names are those users know from verl.

A column's rows may be here or in another process (``remote.py``). Operations on rows move row numbers; the rows
themselves are taken, and fetched where they are elsewhere, when a column is read: ``data["rewards"]``.

Invariants:

- All columns have the same number of rows, and no name is used twice.
- Nothing changes the caller: every operation returns a new DataProto, with a ``meta_info`` of its own (a deep copy).
  The exceptions are :meth:`DataProto.pop` and assignments to ``batch`` and ``non_tensor_batch``.
- No padding, truncation or dropped key happens in silence; errors name the key, both sizes and the fix.

New objects may share memory with old ones: slices of tensors are views, selected columns are the same columns, cells of
object columns are the same objects. Treat columns as read-only and ``clone()`` before writing in place. Jagged columns
of equal lengths need not share offsets, which torch wants for arithmetic: compute on :meth:`DataProto.flat`.

What depends on the kind of a column is in ``columns.py``, on where its rows are in ``remote.py``; bytes and files are
in ``serialize.py``.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hybridflow.errors import DataError, nearest
from hybridflow.protocol import columns as col
from hybridflow.protocol import jagged as jag
from hybridflow.protocol import meta, serialize
from hybridflow.protocol.columns import Block, Signature
from hybridflow.protocol.item import DataProtoItem
from hybridflow.protocol.parcel import Parcel, Put, Shard
from hybridflow.protocol.remote import Column, concat_columns, refuse_difference
from hybridflow.protocol.rows import (
    Index,
    Rows,
    chunk_rows,
    mini_batches,
    permutation,
    positive,
    row_number,
    row_numbers,
    sliced,
)
from hybridflow.protocol.view import ColumnView, TensorView, built, known_names, refuse_written


class DataProto:
    """Rows of named columns.

    Args:
        batch: tensor columns [B, ...] by name: a TensorDict or another mapping; the tensors are kept, not copied.
        non_tensor_batch: lists or arrays of B cells; each becomes an object array [B].
        meta_info: deep copied.

    Raises:
        DataError: where columns differ in their number of rows, a name is used twice or is no string, a tensor is
            neither dense nor jagged or has no rows. Names the column and the fix.
    """

    _known: dict[str, Column]
    _shards: Sequence[Shard] = ()
    meta_info: dict[str, Any]

    def __init__(
        self,
        batch: Mapping[str, torch.Tensor] | None = None,
        non_tensor_batch: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> None:
        tensors = {} if batch is None else dict(batch.items())  # a TensorDict has no truth value
        objects = non_tensor_batch or {}
        self._known = built(tensors, objects)
        self.meta_info = meta.copied({} if meta_info is None else meta_info)

    # ------------------------------------------------------------------------------------------ building

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> DataProto:
        """The same as ``DataProto(tensors, non_tensors, meta_info)``."""
        return cls(tensors, non_tensors, meta_info)

    @classmethod
    def from_single_dict(cls, data: Mapping[str, Any], meta_info: Mapping[str, Any] | None = None) -> DataProto:
        """Build from one dict: tensors become tensor columns, lists and arrays become object columns."""
        tensors = {key: value for key, value in data.items() if isinstance(value, torch.Tensor)}
        objects = {key: value for key, value in data.items() if key not in tensors}
        return cls(tensors, objects, meta_info)

    @classmethod
    def _of(cls, columns: Mapping[str, Column], meta_info: dict[str, Any]) -> DataProto:
        """The columns as a new object, tensors first; ``meta_info`` is kept, not copied."""
        new = object.__new__(cls)
        new._known = dict(sorted(columns.items(), key=lambda item: item[1].is_object))
        new.meta_info = meta_info
        return new

    @classmethod
    def _of_shards(cls, shards: Sequence[Shard], meta_info: dict[str, Any]) -> DataProto:
        """Rows that came from other processes, whose columns nobody has asked for yet."""
        new = object.__new__(cls)
        new._shards, new.meta_info = shards, meta_info
        return new

    @property
    def _columns(self) -> dict[str, Column]:
        if shards := self._shards:  # another thread may open them at the same time
            self._known, self._shards = concat_columns([shard.columns for shard in shards]), ()
        return self._known

    def _map(self, operation: Callable[[Column], Column]) -> DataProto:
        columns = {key: operation(column) for key, column in self._columns.items()}
        return self._of(columns, meta.copied(self.meta_info))

    def _take(self, wanted: Index) -> DataProto:
        """The rows of these numbers; what is worked out for one column serves all that share its row numbers."""
        self.refuse_written("rows of a batch")
        if shards := Shard.within(self._shards, wanted):
            return self._of_shards(shards, meta.copied(self.meta_info))
        taken: dict[int, tuple[Rows, Sequence[int]]] = {}

        def at(column: Column) -> Column:
            shared = id(column.rows)
            if shared not in taken:
                taken[shared] = column.rows.take(wanted)
            return column.at(*taken[shared])

        return self._map(at)

    # ------------------------------------------------------------------------------------------ reading

    @property
    def batch(self) -> TensorView:
        """The tensor columns as a mapping. Reading one fetches it; assigning one checks its rows."""
        return TensorView(self._columns)

    @property
    def non_tensor_batch(self) -> ColumnView:
        """The object columns as a mapping. Reading one fetches it; assigning one checks its rows."""
        return ColumnView(self._columns, objects=True)

    def __len__(self) -> int:
        """Number of rows; 0 without columns."""
        return sum([s.size for s in self._shards]) or next((len(column) for column in self._columns.values()), 0)

    def keys(self) -> list[str]:
        """Names of all columns."""
        return list(self._columns)

    def __contains__(self, key: object) -> bool:
        return key in self._columns

    def signature(self, key: str) -> Signature:
        """Kind, dtype, shape of a row and device of a column, without reading it."""
        return self._column(key).signature

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
            return self._column(index).value()
        size = len(self)
        if isinstance(index, slice):
            return self._take(sliced(index, size))
        scalar = isinstance(index, (torch.Tensor, np.ndarray)) and index.ndim == 0
        if scalar or isinstance(index, (int, np.integer)):
            row = row_number(index, size)
            parts = {key: col.get_row(column.block(), row) for key, column in self._columns.items()}
            objects = {key: parts.pop(key) for key in self.non_tensor_batch}
            return DataProtoItem(parts, objects, meta.copied(self.meta_info))
        return self.select_idxs(index)

    def _column(self, key: str) -> Column:
        if key not in self._columns:
            raise DataError(f"no column {key!r}.{nearest(key, self._columns)}")
        return self._columns[key]

    def _jagged(self, key: str, method: str) -> Column:
        column = self._column(key)
        if column.signature.kind != "jagged":
            raise DataError(
                f"{method}: column {key!r} is {column.signature}, not jagged. Read it as data[{key!r}], or build "
                f"it with DataProto.from_padded(tensor, mask)."
            )
        return column

    def flat(self, key: str) -> torch.Tensor:
        """Values [total, ...] of a jagged column, row after row, contiguous; dtype kept."""
        return self._jagged(key, "flat").jagged().values.contiguous()

    def lengths(self, key: str) -> torch.Tensor:
        """Lengths int64 [B] of the rows of a jagged column; of a remote one they are fetched without the rows."""
        return self._jagged(key, "lengths").lengths()

    def to_padded(self, key: str, value: float = 0, side: str = "right") -> torch.Tensor:
        """A jagged column as a dense tensor [B, T, ...], T its longest row, filled up with ``value`` on ``side``."""
        return jag.pad_jagged(self._jagged(key, "to_padded").jagged(), value, side)

    @staticmethod
    def jagged(rows: Sequence[torch.Tensor | Sequence], dtype: torch.dtype | None = None) -> torch.Tensor:
        """A jagged column from one tensor or list of numbers a row; see :func:`jagged.jagged_from_rows`."""
        return jag.jagged_from_rows(rows, dtype).nested()

    @staticmethod
    def from_padded(padded: torch.Tensor, mask_or_lengths: torch.Tensor) -> torch.Tensor:
        """A jagged column from a dense one [B, T, ...] and a mask [B, T] or lengths [B].

        A mask keeps the places where it is true, wherever they are; see :func:`jagged.jagged_from_padded`.
        """
        return jag.jagged_from_padded(padded, mask_or_lengths).nested()

    # ------------------------------------------------------------------------------------------ columns

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
        tensors = known_names("select", "batch", batch_keys, self.batch, self)
        objects = known_names("select", "non_tensor_batch", non_tensor_batch_keys, self.non_tensor_batch, self)
        meta_keys = known_names("select", "meta_info", meta_info_keys, self.meta_info, self)
        columns = {key: self._columns[key] for key in (*tensors, *objects)}
        chosen = self._of(columns, meta.copied({key: self.meta_info[key] for key in meta_keys}))
        return copy.deepcopy(chosen) if deepcopy else chosen

    def pop(
        self,
        batch_keys: str | Iterable[str] | None = None,
        non_tensor_batch_keys: str | Iterable[str] | None = None,
        meta_info_keys: str | Iterable[str] | None = None,
    ) -> DataProto:
        """Take columns and meta data out of THIS object and return them. None takes none of a kind.

        The only method that changes its object. Nothing is taken where it raises.

        Raises:
            DataError: names an unknown key and the nearest one.
        """
        empty: list[str] = []
        popped = self.select(
            empty if batch_keys is None else batch_keys,
            empty if non_tensor_batch_keys is None else non_tensor_batch_keys,
            empty if meta_info_keys is None else meta_info_keys,
        )
        for key in popped._columns:
            del self._columns[key]
        self.meta_info = {key: value for key, value in self.meta_info.items() if key not in popped.meta_info}
        return popped

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> DataProto:
        """The same columns, ``old_keys[i]`` now under the name ``new_keys[i]``; order is kept.

        Raises:
            DataError: where an old name is unknown, a new one is taken, or the lists differ in length.
        """
        old = known_names("rename", "the columns", old_keys, self._columns, self)
        new = [new_keys] if isinstance(new_keys, str) else list(new_keys)
        if len(old) != len(new) or len(set(old)) != len(old):
            raise DataError(f"rename: {len(set(old))} old names {old} but {len(new)} new names {new}; one for each.")
        names = dict(zip(old, new, strict=True))
        renamed: dict[str, Column] = {}
        for key, column in self._columns.items():
            name = names.get(key, key)
            if name in renamed:
                raise DataError(f"rename: two columns would be called {name!r}. Drop one with select or pop first.")
            if not isinstance(name, str):
                raise DataError(f"rename: column names are strings, not {name!r} ({type(name).__name__}).")
            renamed[name] = column
        return self._of(renamed, meta.copied(self.meta_info))

    def union(self, other: DataProto) -> DataProto:
        """Columns and meta data of both. A name both have must mean the same in both; NaN equals NaN.

        ``meta_info["metrics"]`` becomes one dict with the names of both, joined over workers where it was a list.

        Raises:
            DataError: where the numbers of rows differ; names the column and the first row that differ, or the
                ``meta_info`` key and both values.
        """
        if not isinstance(other, DataProto):
            raise DataError(f"union: a {type(other).__name__} is no DataProto; of a call that runs, give .result().")
        mine, theirs = self._columns, other._columns
        if mine and theirs and len(self) != len(other):
            raise DataError(
                f"union: {len(self)} rows with columns {list(mine)}, but {len(other)} rows with columns "
                f"{list(theirs)}. Both sides describe the same rows; use concat to add rows."
            )
        for key in (key for key in mine if key in theirs):
            refuse_difference(key, mine[key], theirs[key])
        return self._of({**mine, **theirs, **mine}, meta.merge("union", [self.meta_info, other.meta_info]))

    # ------------------------------------------------------------------------------------------ rows

    def select_idxs(self, idxs: Any) -> DataProto:
        """Rows by number (a list, range, array or tensor of ints, repeats allowed), or a bool mask [B]."""
        return self._take(row_numbers(idxs, len(self)))

    def reorder(self, indices: Any) -> DataProto:
        """The rows in another order: row i of the result is row ``indices[i]``. Unlike verl's, returns a new object.

        Raises:
            DataError: where ``indices`` is not a permutation of all rows.
        """
        return self._take(permutation(indices, len(self)))

    def repeat(self, times: int, interleave: bool = True) -> DataProto:
        """B * times rows: copies of a row side by side (0 0 1 1), or with ``interleave=False`` apart (0 1 0 1)."""
        positive("repeat", "times", times)
        rows = np.arange(len(self))
        return self._take(np.repeat(rows, times) if interleave else np.tile(rows, times))

    def chunk(self, chunks: int) -> list[DataProto]:
        """Exactly ``chunks`` parts in order, whose sizes differ by at most one row, the longer ones first.

        7 rows in 3 chunks are 3, 2, 2. With fewer rows than chunks the last ones have no rows.
        """
        positive("chunk", "chunks", chunks)
        return [self._take(rows) for rows in chunk_rows(len(self), chunks)]

    def split(self, split_size: int) -> list[DataProto]:
        """Parts of ``split_size`` rows in order, the last one maybe shorter. No rows give one part without rows."""
        positive("split", "split_size", split_size)
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
        for index, part in enumerate(data):
            if not isinstance(part, DataProto):
                raise DataError(f"concat: part {index} is a {type(part).__name__}; give a list of DataProtos.")
            part.refuse_written("concat")
        shards = Shard.concat([part._shards for part in data])
        new = cls._of_shards(shards, {}) if shards else cls._of(concat_columns([part._columns for part in data]), {})
        new.meta_info = meta.merge("concat", [part.meta_info for part in data], collect_metrics=True)
        return new

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
        batches = mini_batches(len(self), mini_batch_size, epochs, seed, shuffle)
        return (self._take(rows) for rows in batches)

    def pad_to_divisor(self, size: int) -> tuple[DataProto, int]:
        """The smallest multiple of ``size`` rows: rows from the front are repeated at the end, as often as needed.

        Returns:
            The padded rows, and how many of them are padding, for :meth:`unpad`. No rows stay no rows.
        """
        positive("pad_to_divisor", "size", size)
        rows = len(self)
        pad_size = -rows % size
        return self._take(np.arange(rows + pad_size) % max(rows, 1)), pad_size

    def unpad(self, pad_size: int) -> DataProto:
        """All rows but the last ``pad_size``, 0 <= pad_size <= B."""
        if isinstance(pad_size, bool) or not isinstance(pad_size, (int, np.integer)) or not 0 <= pad_size <= len(self):
            raise DataError(f"unpad: pad_size={pad_size!r} is outside of 0..{len(self)}, the number of rows.")
        return self[: len(self) - pad_size]

    # ------------------------------------------------------------------------------------------ bytes

    def to(self, device: torch.device | str) -> DataProto:
        """The rows with their tensors on a device. Unlike verl's, returns a new object."""
        return self._map(lambda column: Column.of(col.move_block(column.block(), device)))

    @property
    def nbytes(self) -> int:
        """Bytes of all columns; views count their rows only, cells are counted without the objects they hold."""
        return sum(column.nbytes() for column in self._columns.values())

    def print_size(self, prefix: str = "") -> None:
        """Print one line a column: name, kind, rows and MiB."""
        for key, column in self._columns.items():
            print(f"{prefix}{key}: {column.signature}, {len(column)} rows, {column.nbytes() / 2**20:.3f} MiB")

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
        blocks = {key: column.block() for key, column in self._columns.items()}
        return _of_blocks, (serialize.pack(blocks), serialize.pack(self.meta_info))

    def parcel(self, put: Put, where: str) -> Parcel:
        """This batch on its way to another process: see :class:`Parcel`.

        Args:
            put: stores rows that are in this process's memory.
            where: who sends it, for error messages.

        Raises:
            DataError: names a column that came from another process and has been written to in place.
        """
        self.refuse_written(where)
        return Parcel(self._shards or [Shard.of(self._columns, put)], serialize.pack(self.meta_info))

    def hold(self, kept_by: Callable[[bytes], Any]) -> None:
        """Keep the objects of a batch that has just arrived; ``kept_by`` gives what keeps the one of a name."""
        for shard in self._shards:
            shard.kept = [kept_by(name) for name in shard.names]

    @property
    def columns(self) -> Mapping[str, Column]:
        """All columns by name: what rows they have and where these are."""
        return self._columns

    def refuse_written(self, where: str) -> None:
        """Raises DataError for a column that came from another process and has been written to in place."""
        for columns in [s.columns for s in self._shards if s.is_open] if self._shards else [self._known]:
            refuse_written(where, columns)

    def __copy__(self) -> DataProto:
        return self._map(lambda column: column)

    def __deepcopy__(self, memo: dict[int, Any]) -> DataProto:
        def clone(column: Column) -> Column:
            block = column.block()
            return Column.of(copy.deepcopy(block, memo) if isinstance(block, np.ndarray) else col.clone_block(block))

        return self._map(clone)

    def __repr__(self) -> str:
        columns = ", ".join(f"{key}: {column.signature}" for key, column in self._columns.items())
        return f"DataProto({len(self)} rows; {columns or 'no columns'}; meta_info: {list(self.meta_info)})"


def _of_blocks(blocks: dict[str, Block], meta_info: dict[str, Any]) -> DataProto:
    rows = Rows.all_of(len(next(iter(blocks.values()), ())))
    return DataProto._of({key: Column.of(block, rows) for key, block in blocks.items()}, meta_info)
