"""How a batch travels between processes: columns as handles that both sides can use, in a table of plain tuples.

Where it stands: ``controller/message.py`` makes a :class:`Parcel` of each batch among the arguments or results of a
call. It unpickles as the batch, which stays pickled until it is touched: a driver passes on whole what one process has
sent (a :class:`Shard`), and a call reads few of the columns that it is given. Invariant: rows that are in an object
store stay there, and rows of this process are sent once, however often the batch repeats them.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from hybridflow.protocol import columns as col
from hybridflow.protocol.columns import Block, Signature
from hybridflow.protocol.jagged import Jagged
from hybridflow.protocol.remote import ONE_AT_A_TIME, Column, Handle, Inline, Part, Piece
from hybridflow.protocol.rows import Index, Rows
from hybridflow.protocol.serialize import PackedBytes, pack, raw_bytes

INLINE_BYTES = 64 * 1024
"""Up to this size a part of a column travels in the message: cheaper than an entry in an object store."""

Put = Callable[[str, Part], Handle]
"""A handle that any process can use, for a part of the column of a name."""


def portable(key: str, column: Column, put: Put, shared: dict[int, Rows]) -> Column:
    """The column with handles that any process can use: what is in this process's memory is given to ``put``.

    Only rows that the column has are sent, each once, so a repeated prompt is sent once. Tensors are detached and moved
    to the CPU.

    Args:
        shared: by the identity of row numbers, those of the columns made so far; added to, so that columns that share
            row numbers still do where they arrive, and moving rows there is worked out once.
    """
    local = [number for number, piece in enumerate(column.pieces) if not piece.is_portable]
    if not local:
        return column
    kind = column.signature
    if kind.device != "cpu":
        kind = Signature(kind.kind, kind.dtype, kind.shape)
    if len(column.pieces) == 1 and column.rows.is_whole():
        return Column(kind, (_portable(key, column.block(), put),), column.rows)
    rows, kept = column.rows.compact(local)
    blocks = [col.take_rows(column.pieces[n].block(), index) for n, index in zip(local, kept, strict=True)]
    pieces = list(column.pieces)
    if len(local) == len(pieces):
        pieces = [_portable(key, col.concat_blocks(blocks), put)]
        rows = shared.setdefault(id(column.rows), Rows((sum(rows.sizes),), rows.index))
    else:
        for number, block in zip(local, blocks, strict=True):
            pieces[number] = _portable(key, block, put)
    return Column(kind, tuple(pieces), rows)


def _portable(key: str, block: Block, put: Put) -> Piece:
    if isinstance(block, np.ndarray):
        return Piece(put(key, block), None, len(block))
    if isinstance(block, Jagged):
        return Piece(put(key, block.values), put(key, block.lengths), len(block))
    return Piece(put(key, block), None, len(block))


def inline_or(store: Callable[[Any], Handle], part: Part, dumps: Callable[..., bytes] = pickle.dumps) -> Handle:
    """A small part as :class:`Inline`; another in ``store``, which gets an object that unpickles as the part.

    Args:
        dumps: pickles cells.
    """
    if isinstance(part, torch.Tensor):
        if part.nbytes > INLINE_BYTES:
            return store(pack(part))
        raw, dtype, shape = raw_bytes(part)
        return Inline(raw.tobytes(), dtype, shape)
    data = dumps(pack(part), protocol=5)
    return Inline(data) if len(data) <= INLINE_BYTES else store(PackedBytes(data))


class Shard:
    """Rows that came from another process, as they came: what they are is not unpickled before somebody asks.

    Args:
        size: number of rows.
        schema: pickle of the columns' names and signatures, equal for shards that can be concatenated.
        table: pickle of the columns' row numbers and pieces.
        names: of the objects in the store that the rows are in.

    Attributes:
        kept: what keeps these objects in the store.
    """

    def __init__(self, size: int, schema: bytes, table: bytes, names: tuple[bytes, ...]) -> None:
        self.size, self.schema, self.table, self.names = size, schema, table, names
        self.kept: list[Any] = []
        self._columns: dict[str, Column] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Shard, (self.size, self.schema, self.table, self.names)

    @staticmethod
    def of(columns: Mapping[str, Column], put: Put) -> Shard:
        """Rows as they are sent; what is in this process's memory is given to ``put``."""
        moved: dict[int, Rows] = {}
        columns = {key: portable(key, column, put, moved) for key, column in columns.items()}
        places: dict[int, int] = {}  # of row numbers, by identity: most columns share theirs
        rows, entries = [], []
        for column in columns.values():
            place = places.setdefault(id(column.rows), len(rows))
            if place == len(rows):
                index = column.rows.index
                rows.append((column.rows.sizes, (index.start, index.stop) if isinstance(index, range) else index))
            entries.append((place, tuple([piece.as_entry() for piece in column.pieces])))
        names = [handle.name for column in columns.values() for handle in column.handles if handle.name is not None]
        size = len(next(iter(columns.values()), ()))
        schema = _schema(tuple([(key, column.signature) for key, column in columns.items()]))
        return Shard(size, schema, pickle.dumps((rows, entries), 5), tuple(names))

    @property
    def is_open(self) -> bool:
        """Whether somebody in this process has asked for the columns."""
        return self._columns is not None

    @property
    def columns(self) -> dict[str, Column]:
        """The columns, whose pieces stay as they came until they are touched."""
        with ONE_AT_A_TIME:
            if self._columns is None:
                self._columns = self._opened()
            return self._columns

    def _opened(self) -> dict[str, Column]:
        rows, entries = pickle.loads(self.table)
        numbers = [Rows(sizes, range(*index) if isinstance(index, tuple) else index) for sizes, index in rows]
        columns = {
            key: Column.untouched(signature, pieces, numbers[number])
            for (key, signature), (number, pieces) in zip(_signatures(self.schema), entries, strict=True)
        }
        if self.kept:
            for column in columns.values():
                for handle in column.handles:
                    handle.hold()  # a batch may go on with some columns only, and the shard be forgotten
        return columns

    @staticmethod
    def concat(parts: Sequence[Sequence[Shard]]) -> list[Shard]:
        """The shards of all parts; empty where a part has none, or they differ in their columns."""
        shards = [shard for part in parts for shard in part]
        return shards if all(parts) and len({shard.schema for shard in shards}) == 1 else []

    @staticmethod
    def within(shards: Sequence[Shard], wanted: Index) -> list[Shard]:
        """The shards that are just the wanted rows; empty where rows and shards do not coincide."""
        if not isinstance(wanted, range):
            return []
        start, rows, found = 0, 0, []
        for shard in shards:
            if wanted.start <= start and start + shard.size <= wanted.stop:
                rows += shard.size
                found.append(shard)
            start += shard.size
        return found if rows == len(wanted) else []


@lru_cache(64)
def _schema(signatures: tuple[tuple[str, Signature], ...]) -> bytes:
    """Pickle of the columns' names and signatures, of which most columns share theirs."""
    kinds: dict[Signature, int] = {}
    heads = [(key, kinds.setdefault(signature, len(kinds))) for key, signature in signatures]
    return pickle.dumps(([(kind.kind, kind.dtype, kind.shape, kind.device) for kind in kinds], heads), protocol=5)


@lru_cache(64)
def _signatures(schema: bytes) -> list[tuple[str, Signature]]:
    """The columns' names and signatures: step after step they are the same."""
    kinds, heads = pickle.loads(schema)
    signatures = [Signature(*kind) for kind in kinds]
    return [(key, signatures[kind]) for key, kind in heads]


class Parcel:
    """A DataProto on its way: unpickles as the DataProto, whose rows stay where they are.

    Pickling a DataProto itself reads all of its columns, so that the pickle can be read anywhere and at any time.

    Args:
        shards: its rows.
        meta_info: packed.
    """

    def __init__(self, shards: Sequence[Shard], meta_info: dict[str, Any]) -> None:
        self.shards, self.meta_info = shards, meta_info

    def __reduce__(self) -> tuple[Any, ...]:
        return open_parcel, (list(self.shards), self.meta_info)


def open_parcel(shards: list[Shard], meta_info: dict[str, Any]) -> Any:
    """The DataProto of a parcel."""
    from hybridflow.protocol.data import DataProto

    return DataProto._of_shards(shards, meta_info)
