"""Columns whose rows may be anywhere: what a DataProto is a table of.

A column is a sequence of pieces and the numbers of its rows in them (``rows.py``). A piece is some rows that one
process made, behind a handle: in this process's memory (:class:`Local`), as bytes that travel along (:class:`Inline`,
for small ones), or in an object store (``controller/store.py``). Moving rows moves numbers. Rows are fetched when a
column is read, once, and only the pieces it has rows of.

Invariants: number of rows, kind, dtype and shape of a row are known without a fetch. What is behind a handle never
changes, so fetched rows are read-only: :meth:`Column.was_written` tells who wrote to them nevertheless. Rows of this
process may be written to until they are sent, as long as nobody else derived a column from them.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from hybridflow.errors import DataError
from hybridflow.protocol import columns as col
from hybridflow.protocol.columns import Block, Signature
from hybridflow.protocol.jagged import Jagged, is_jagged
from hybridflow.protocol.rows import Rows
from hybridflow.protocol.serialize import restore_tensor

ONE_AT_A_TIME = threading.RLock()
"""Threads of a driver may read one batch: what has come is opened once, so that all have the same handles."""

Part = torch.Tensor | np.ndarray
"""What one handle stands for: dense rows, the values or the lengths of jagged rows, or cells."""


class Handle:
    """Where a part is. Fetched at most once, and kept for as long as the handle lives."""

    portable = True
    """Whether another process can use it."""

    name: bytes | None = None
    """Of the object in the store that it stands for, which somebody has to keep there; None for other parts."""

    _part: Part | None = None
    _version = 0

    def hold(self) -> None:
        """Keep the object alive for as long as this handle."""

    @property
    def key(self) -> Any:
        """Equal for handles of the same part."""
        return id(self)

    def load(self) -> Part:
        """The part, from where it is. Called once."""
        raise NotImplementedError

    @classmethod
    def prefetch(cls, handles: Sequence[Handle]) -> None:
        """Fetch many at once, where that is quicker than one by one."""

    @property
    def fetched(self) -> bool:
        return self._part is not None

    def keep(self, part: Part) -> None:
        """Take note of the part, read-only from now on."""
        self._part, self._version = part, version_of(part)

    def fetch(self) -> Part:
        """The part, shared with everybody who asks: not to be written to."""
        if self._part is None:
            self.keep(self.load())
        assert self._part is not None
        return self._part

    @property
    def was_written(self) -> bool:
        return self._part is not None and version_of(self._part) != self._version


class Local(Handle):
    """A part in this process's memory."""

    portable = False

    def __init__(self, part: Part) -> None:
        self._part = part

    @property
    def key(self) -> Any:
        return id(self._part)

    @property
    def was_written(self) -> bool:
        return False

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a part in this process's memory is sent by parcel.portable(), which copies it")


class Inline(Handle):
    """A part as bytes, which travel with the handle and are not read before somebody wants the rows.

    Args:
        data: a tensor's elements, or a pickle of cells.
        dtype, shape: of the tensor; of cells the name is empty.
    """

    def __init__(self, data: bytes, dtype: str = "", shape: tuple[int, ...] = ()) -> None:
        self.data, self.dtype, self.shape = data, dtype, shape

    @property
    def content(self) -> tuple[bytes, str, tuple[int, ...]]:
        """What it is made of."""
        return self.data, self.dtype, self.shape

    def load(self) -> Part:
        return restore_tensor(self.data, self.dtype, self.shape) if self.dtype else pickle.loads(self.data)

    @staticmethod
    def joined(parts: Sequence[Inline]) -> torch.Tensor:
        """The rows of several tensors of one dtype and shape of a row, one after another."""
        first = parts[0]
        shape = (sum([part.shape[0] for part in parts]), *first.shape[1:])
        return restore_tensor(b"".join([part.data for part in parts]), first.dtype, shape)

    def __reduce__(self) -> tuple[Any, ...]:
        return Inline, self.content


def _ordinary() -> AbstractContextManager[Any]:
    """Tensors made inside can be used for training afterwards, also where the caller is in inference mode or no_grad.

    A column is read once and kept: who reads it first does not decide whether it has its autograd history.
    """
    ordinary = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    return nullcontext() if ordinary else torch.inference_mode(False)


def version_of(part: Part | Jagged) -> int:
    """Torch's count of writes to a tensor or to anything it is a view of."""
    tensor = part.values if isinstance(part, Jagged) else part
    return tensor._version if isinstance(tensor, torch.Tensor) and not tensor.is_inference() else 0


def fetch_all(handles: Iterable[Handle]) -> list[Part]:
    """The parts of all handles, those of one kind fetched together."""
    handles = list(handles)
    waiting: dict[type[Handle], list[Handle]] = {}
    for handle in handles:
        if not handle.fetched:
            waiting.setdefault(type(handle), []).append(handle)
    for kind, group in waiting.items():
        kind.prefetch(group)
    return [handle.fetch() for handle in handles]


Entry = bytes | tuple[Any, ...]
"""A piece as it is sent: its size and its handles, pickled so that one which nobody reads costs nothing; of pieces that
are small a plain tuple of the size and what makes each handle."""


class Piece:
    """Rows that one process made.

    Attributes:
        data: dense rows, the values of jagged rows, or cells.
        lengths: int64 lengths of jagged rows: read alone by who only counts tokens. None for the other kinds.
        size: number of rows, above 0.
        entry: the piece as it is sent, where that is known.
    """

    __slots__ = ("data", "entry", "lengths", "size")

    def __init__(self, data: Handle, lengths: Handle | None, size: int, entry: Entry | None = None) -> None:
        self.data, self.lengths, self.size, self.entry = data, lengths, size, entry

    @staticmethod
    def of_entry(entry: Entry) -> Piece:
        size, *parts = pickle.loads(entry) if isinstance(entry, bytes) else entry
        handles = [part if isinstance(part, Handle) else Inline(*part) for part in parts]
        return Piece(handles[0], handles[1] if len(handles) > 1 else None, size, entry)

    def as_entry(self) -> Entry:
        """The piece as it is sent; its handles are portable."""
        if self.entry is None:
            small = [handle.content for handle in self.handles if type(handle) is Inline]
            if len(small) == len(self.handles):
                self.entry = self.size, *small
            else:
                self.entry = pickle.dumps((self.size, *self.handles), protocol=5)
        return self.entry

    @staticmethod
    def local(block: Block) -> Piece:
        if isinstance(block, Jagged):
            return Piece(Local(block.values), Local(block.lengths), len(block))
        return Piece(Local(block), None, len(block))

    @property
    def handles(self) -> tuple[Handle, ...]:
        return (self.data,) if self.lengths is None else (self.data, self.lengths)

    @property
    def key(self) -> Any:
        """Equal for pieces of the same rows."""
        return self.data.key if self.lengths is None else (self.data.key, self.lengths.key)

    @property
    def is_local(self) -> bool:
        return isinstance(self.data, Local)

    @property
    def is_portable(self) -> bool:
        return self.data.portable and (self.lengths is None or self.lengths.portable)

    @property
    def fetched(self) -> bool:
        return self.data.fetched and (self.lengths is None or self.lengths.fetched)

    def block(self) -> Block:
        """All rows of the piece, fetched."""
        data: Any = self.data.fetch()
        return data if self.lengths is None else Jagged(data, self.lengths.fetch())  # type: ignore[arg-type]


class Column:
    """Some rows of some pieces.

    Attributes:
        signature: kind, dtype, shape of a row, device.
        pieces, rows: which rows these are.
        entries: of a column that has come from another process and was not touched yet, its pieces as they came.
        on_touch: called with the handles once they are made.
    """

    entries: tuple[Entry, ...] | None = None
    on_touch: Callable[[list[Handle]], None] | None = None
    _block: Block | None = None
    _version = 0
    _value: Part | None = None
    _lengths: torch.Tensor | None = None
    pieces: tuple[Piece, ...]

    def __init__(self, signature: Signature, pieces: tuple[Piece, ...], rows: Rows) -> None:
        self.signature, self.pieces, self.rows = signature, pieces, rows

    @staticmethod
    def untouched(signature: Signature, entries: tuple[Entry, ...], rows: Rows) -> Column:
        """A column as it came from another process."""
        column = object.__new__(Column)
        column.signature, column.entries, column.rows = signature, entries, rows
        return column

    def __getattr__(self, name: str) -> Any:
        if name != "pieces":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        with ONE_AT_A_TIME:
            if self.entries is not None:
                self.pieces, self.entries = tuple([Piece.of_entry(entry) for entry in self.entries]), None
                if self.on_touch is not None:
                    self.on_touch(self.handles)
        return self.__dict__["pieces"]

    @staticmethod
    def of(block: Block, rows: Rows | None = None) -> Column:
        """All rows of a block; ``rows`` may be given to share them with other columns of the size."""
        size = len(block)
        pieces = (Piece.local(block),) if size else ()
        column = Column(col.signature(block), pieces, Rows.all_of(size) if rows is None else rows)
        column._block = block
        return column

    @staticmethod
    def checked(key: str, value: Any, rows: Rows | None = None) -> Column:
        """A column from what a user gave: a tensor [B, ...] (dense or nested), or an object array [B].

        Raises:
            DataError: names the key and the fix where no row operation could treat it right.
        """
        col.check_value(key, value)
        block = Jagged.of(value) if is_jagged(value) else value
        column = Column.of(block, rows if rows is not None and len(rows) == len(block) else None)
        column._value = value
        return column

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def is_object(self) -> bool:
        return self.signature.kind == "object"

    @property
    def is_local(self) -> bool:
        """Whether every row is in this process's memory and its own."""
        return all(piece.is_local for piece in self.pieces)

    @property
    def handles(self) -> list[Handle]:
        return [handle for piece in self.pieces for handle in piece.handles]

    # ------------------------------------------------------------------------------------------ reading

    def block(self) -> Block:
        """The rows, fetched once: a view where they are consecutive rows of one piece, else a copy."""
        if self._block is None:
            block = self._block = self._assembled()
            if self.is_local:
                # What the rows were taken from may be freed now.
                self.pieces = (Piece.local(block),) if len(block) else ()
                self.rows = Rows.all_of(len(block))
            elif isinstance(block, np.ndarray):
                block.flags.writeable = False
            else:
                self._version = version_of(block)
        return self._block

    def jagged(self) -> Jagged:
        """The rows of a jagged column."""
        block = self.block()
        assert isinstance(block, Jagged)
        return block

    def _assembled(self) -> Block:
        pieces, whole = self.pieces, self.rows.is_whole()
        if len(pieces) == 1 and pieces[0].fetched and whole:
            return pieces[0].block()
        with _ordinary():
            if whole and (joined := self._joined()) is not None:
                return joined
            parts: Any = iter(fetch_all(self.handles))
            blocks = [next(parts) if p.lengths is None else Jagged(next(parts), next(parts)) for p in pieces]
            return assemble(self.signature, blocks, self.rows)

    def _joined(self) -> Block | None:
        """All rows of pieces that have come as bytes, which are one tensor's bytes in a row; None of any others."""
        parts: Any = self.handles
        if self.is_object or len(self.pieces) < 2 or not all([type(part) is Inline for part in parts]):
            return None
        if self.signature.kind == "dense":
            return Inline.joined(parts)
        return Jagged(Inline.joined(parts[::2]), Inline.joined(parts[1::2]))

    def value(self) -> Part:
        """The rows as users know them: a tensor [B, ...], nested where jagged, or an object array [B]."""
        if self._value is None:
            value = self.block()
            if isinstance(value, Jagged):
                with _ordinary():  # torch cannot nest ordinary tensors in inference mode
                    value = value.nested()
            self._value = value
        return self._value

    def lengths(self) -> torch.Tensor:
        """Lengths int64 [B] of jagged rows, without their values."""
        if self._block is not None:
            return self._block.lengths  # type: ignore[union-attr]
        if self._lengths is None:
            with _ordinary():
                blocks = fetch_all(piece.lengths for piece in self.pieces if piece.lengths is not None)
            kind = Signature("dense", torch.int64, (), self.signature.device)
            self._lengths = assemble(kind, blocks, self.rows)  # type: ignore[assignment]
        return self._lengths  # type: ignore[return-value]

    def nbytes(self) -> int:
        """Bytes of the rows (and offsets); of objects, references and cells without what they hold, which are read."""
        kind = self.signature
        if kind.dtype is None:
            return col.object_bytes(self.block())  # type: ignore[arg-type]
        item = int(np.prod(kind.shape)) * kind.dtype.itemsize
        if kind.kind == "jagged":
            return int(self.lengths().sum()) * item + (len(self) + 1) * 8
        return len(self) * item

    @property
    def was_written(self) -> bool:
        """Whether rows that another process made have been written to in place in this one."""
        if self.entries is not None:
            return False
        if self._block is not None and not self.is_local and version_of(self._block) != self._version:
            return True
        for piece in self.pieces:  # asked often, and most often nothing has been fetched
            data, lengths = piece.data, piece.lengths
            if (data._part is not None and data.was_written) or (lengths is not None and lengths.was_written):
                return True
        return False

    # ------------------------------------------------------------------------------------------ rows

    def at(self, rows: Rows, kept: Sequence[int]) -> Column:
        """Other rows of the same pieces; ``kept`` are the pieces that are left."""
        pieces = self.pieces
        if len(kept) != len(pieces):
            pieces = pieces[kept[0] : kept[-1] + 1] if isinstance(kept, range) else tuple([pieces[n] for n in kept])
        return Column(self.signature, pieces, rows)

    def same(self, other: Column) -> bool:
        """Whether both are the same rows of the same pieces, as far as that can be told without a fetch."""
        if len(self.pieces) != len(other.pieces) or not self.rows.same(other.rows):
            return False
        return all(a.key == b.key for a, b in zip(self.pieces, other.pieces, strict=True))

    @staticmethod
    def concat(key: str, columns: Sequence[Column], shared: dict[Any, Rows]) -> Column:
        """Rows of all columns in order.

        Args:
            shared: row numbers worked out for other columns of the same parts; added to.

        Raises:
            DataError: names the key where signatures differ.
        """
        first = columns[0].signature
        for index, column in enumerate(columns):
            if column.signature is not first and column.signature != first:
                raise DataError(
                    f"concat: column {key!r} is {first} in part 0 but {column.signature} in part {index}. Give all "
                    f"parts one dtype, device and trailing shape; rows of different lengths go in "
                    f"DataProto.jagged(rows)."
                )
        pieces: dict[Any, tuple[int, Piece]] = {}
        places = tuple(
            [
                tuple([pieces.setdefault(piece.key, (len(pieces), piece))[0] for piece in column.pieces])
                for column in columns
            ]
        )
        known = (tuple([id(column.rows) for column in columns]), places)
        if known not in shared:
            sizes = tuple([piece.size for _, piece in pieces.values()])
            shared[known] = Rows.concat([column.rows for column in columns], places, sizes)
        return Column(first, tuple([piece for _, piece in pieces.values()]), shared[known])


def concat_columns(parts: Sequence[Mapping[str, Column]]) -> dict[str, Column]:
    """Rows of all parts in order, column by column.

    Raises:
        DataError: names the column and the part where a part lacks one, or signatures differ.
    """
    if len(parts) == 1:
        return dict(parts[0])
    shared: dict[Any, Rows] = {}
    return {key: Column.concat(key, [part[key] for part in parts], shared) for key in _common_names(parts)}


def _common_names(parts: Sequence[Mapping[str, Column]]) -> list[str]:
    """Names of the columns of parts to concatenate. Raises DataError that names what a part lacks."""
    if all([part.keys() == parts[0].keys() for part in parts]):
        return list(parts[0])
    names = list(dict.fromkeys(key for part in parts for key in part))
    for index, part in enumerate(parts):
        missing = [key for key in names if key not in part]
        if missing:
            raise DataError(
                f"concat: part {index} of {len(parts)} lacks the columns {missing}; it has {list(part)}. Give all "
                f"parts the same columns, or select the common ones first."
            )
    return names


def refuse_difference(key: str, left: Column, right: Column) -> None:
    """Columns of one name in a union mean the same; they are read only where it cannot be told without.

    Raises:
        DataError: names the key and both signatures, or the first row that differs and both values.
    """
    if left.signature != right.signature:
        raise DataError(
            f"union: column {key!r} is {left.signature} on the left but {right.signature} on the right. Convert one, "
            f"rename one, or select only one of them."
        )
    row = None if left.same(right) else col.first_difference(left.block(), right.block())
    if row is not None:
        a, b = (col.short(col.get_row(column.block(), row)) for column in (left, right))
        raise DataError(
            f"union: column {key!r} differs, first in row {row} of {len(left)}: {a} on the left, {b} on the right. "
            f"Rename one, or select only one of them."
        )


def assemble(kind: Signature, blocks: Sequence[Block], rows: Rows) -> Block:
    """The named rows of blocks laid one after another."""
    if not blocks:
        return col.empty_block(kind)
    if rows.is_whole():
        return col.concat_blocks(blocks)
    if len(blocks) == 1:
        return col.take_rows(blocks[0], rows.index)
    # Rows that jump between blocks are taken from all blocks joined; a few long stretches from each block by itself.
    if rows.num_runs() > 4 * len(blocks):
        return col.take_rows(col.concat_blocks(blocks), rows.index)
    return col.concat_blocks([col.take_rows(blocks[piece], index) for piece, index in rows.runs()])
