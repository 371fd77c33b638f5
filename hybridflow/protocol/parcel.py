"""How a batch travels between processes: columns as handles that both sides can use, in a table of plain tuples.

Where it stands: ``controller/store.py`` makes a :class:`Parcel` of each batch among the arguments or results of a call.
It unpickles as the batch, whose columns stay pickled until they are touched: a call reads few of those it is given.
Invariant: rows that are in an object store stay there, and rows of this process are sent once, however often the batch
repeats them.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hybridflow.protocol import columns as col
from hybridflow.protocol.columns import Block, Signature
from hybridflow.protocol.jagged import Jagged
from hybridflow.protocol.remote import Column, Handle, Inline, Part, Piece
from hybridflow.protocol.rows import Rows
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
    rows, kept = column.rows.compact(local)
    blocks = [col.take_rows(column.pieces[n].block(), index) for n, index in zip(local, kept, strict=True)]
    pieces = list(column.pieces)
    if len(local) == len(pieces):
        pieces = [_portable(key, col.concat_blocks(blocks), put)]
        rows = shared.setdefault(id(column.rows), Rows((sum(rows.sizes),), rows.index))
    else:
        for number, block in zip(local, blocks, strict=True):
            pieces[number] = _portable(key, block, put)
    kind = column.signature
    if kind.device != "cpu":
        kind = Signature(kind.kind, kind.dtype, kind.shape)
    return Column(kind, tuple(pieces), rows)


def _portable(key: str, block: Block, put: Put) -> Piece:
    if isinstance(block, np.ndarray):
        return Piece(put(key, block), None, len(block))
    if isinstance(block, Jagged):
        return Piece(put(key, block.values.detach().cpu()), put(key, block.lengths.cpu()), len(block))
    return Piece(put(key, block.detach().cpu()), None, len(block))


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


class Parcel:
    """A DataProto on its way: unpickles as the DataProto, whose rows stay where they are.

    Pickling a DataProto itself reads all of its columns, so that the pickle can be read anywhere and at any time.

    Args:
        columns: portable ones.
        meta_info: packed.
    """

    def __init__(self, columns: dict[str, Column], meta_info: dict[str, Any]) -> None:
        self._columns, self._meta_info = columns, meta_info

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickle of its own: the sender's pickler may look more closely at each class than these need.
        return open_parcel, (pickle.dumps(_table(self._columns), protocol=5), self._meta_info)


def _table(columns: dict[str, Column]) -> tuple[Any, ...]:
    """Columns as tuples, whose pickle is a fraction of the objects': row numbers, signatures, and what has which."""
    places: dict[int, int] = {}  # of row numbers and of signatures, by identity: most columns share theirs
    kinds: dict[Signature, int] = {}
    rows, entries = [], []
    for key, column in columns.items():
        if id(column.rows) not in places:
            places[id(column.rows)] = len(rows)
            index = column.rows.index
            rows.append((column.rows.sizes, (index.start, index.stop) if isinstance(index, range) else index))
        if id(column.signature) not in places:
            places[id(column.signature)] = kinds.setdefault(column.signature, len(kinds))
        pieces = tuple([piece.entry or _entry(piece) for piece in column.pieces])
        entries.append((key, places[id(column.signature)], places[id(column.rows)], pieces))
    return rows, [(kind.kind, kind.dtype, kind.shape, kind.device) for kind in kinds], entries


def _entry(piece: Piece) -> bytes:
    return pickle.dumps((piece.size, *(handle.__reduce__() for handle in piece.handles)), protocol=5)


def open_parcel(table: bytes, meta_info: dict[str, Any]) -> Any:
    """The DataProto of a parcel."""
    from hybridflow.protocol.data import DataProto

    rows, kinds, entries = pickle.loads(table)
    numbers = [Rows(sizes, range(*index) if isinstance(index, tuple) else index) for sizes, index in rows]
    signatures = [Signature(*kind) for kind in kinds]
    columns = {
        key: Column.untouched(signatures[kind], pieces, numbers[number]) for key, kind, number, pieces in entries
    }
    return DataProto._of(columns, meta_info)
