"""A store of columns without Ray: what is put there comes back as bytes another process would read, and is counted."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from hybridflow.protocol.data import DataProto
from hybridflow.protocol.parcel import inline_or
from hybridflow.protocol.remote import Handle, Part
from hybridflow.protocol.serialize import pack

OBJECTS: list[tuple[bytes, list[bytes]]] = []
"""Pickles with their buffers, as read-only memory: what a process on the same node maps."""

LOADED: list[int] = []
"""Numbers of the objects that have been fetched, in order."""


class OnShelf(Handle):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    @property
    def key(self) -> Any:
        return ("shelf", self.number)

    def load(self) -> Part:
        LOADED.append(self.number)
        head, buffers = OBJECTS[self.number]
        return pickle.loads(head, buffers=buffers)

    def __reduce__(self) -> tuple[Any, ...]:
        return OnShelf, (self.number,)


def put_away(value: Any) -> Handle:
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    OBJECTS.append((head, [bytes(buffer.raw()) for buffer in buffers]))
    return OnShelf(len(OBJECTS) - 1)


def always_away(column: str, part: Part) -> Handle:
    return put_away(pack(part))


def away_if_large(column: str, part: Part) -> Handle:
    return inline_or(put_away, part)


def sent(data: DataProto, put=always_away) -> DataProto:
    """The batch as another process receives it."""
    return pickle.loads(pickle.dumps(data.parcel(put, "test"), protocol=5))


def in_pieces(data: DataProto, cuts: Sequence[int], put=always_away) -> DataProto:
    """The batch with rows 0..cuts[0], cuts[0]..cuts[1] and so on made by different processes."""
    bounds = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    parts = [data[start:stop] for start, stop in pairwise(bounds)]
    return DataProto.concat([sent(part, put) for part in parts])


def same(a: Any, b: Any) -> bool:
    """Two columns with the same rows, dtype and all."""
    if isinstance(a, np.ndarray):
        return a.tolist() == b.tolist()
    if a.is_nested:
        return a.dtype == b.dtype and all(torch.equal(x, y) for x, y in zip(a.unbind(), b.unbind(), strict=True))
    return a.dtype == b.dtype and torch.equal(a, b)
