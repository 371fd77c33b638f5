"""Rows in Ray's object store, and values on their way between processes.

Where it stands: :func:`packed` is what the driver does to arguments and a device process to results. Rows of this
process's memory go to the store of its node, one object a column, or along with the message where they are small; rows
that are in a store already stay there. Invariant: an object lives as long as a batch, in any process, has rows of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from hybridflow.controller.call import Invocation
from hybridflow.errors import DataError
from hybridflow.protocol.data import DataProto
from hybridflow.protocol.parcel import INLINE_BYTES, Parcel, inline_or
from hybridflow.protocol.remote import Handle, Part
from hybridflow.protocol.serialize import PackedTensor, pack


class Stored(Handle):
    """A part of a column in the object store; read in place on its own node, copied once to any other.

    Args:
        ref: the object; it goes when the last copy of this handle goes, or the process that made it.
        column: name of the column when it was made.
        origin: who made it, such as ``rollout.generate on rank 3``.
    """

    __slots__ = ("column", "origin", "ref")

    def __init__(self, ref: Any, column: str, origin: str) -> None:
        super().__init__()
        self.ref, self.column, self.origin = ref, column, origin

    @property
    def key(self) -> Any:
        return self.ref.binary()

    def load(self) -> Part:
        try:
            return ray.get(self.ref)
        except RayError as error:
            raise DataError(
                f"column {self.column!r} of {self.origin} cannot be read any more: the process that made it is gone, "
                f"or its node, and the rows with it ({type(error).__name__}). Make the batch again, or run again from "
                f"the last checkpoint."
            ) from error

    @classmethod
    def prefetch(cls, handles: Sequence[Handle]) -> None:
        if len(handles) == 1:
            return
        stored = [handle for handle in handles if isinstance(handle, Stored)]
        try:
            parts = ray.get([handle.ref for handle in stored])
        except RayError:
            return  # one by one it shows which
        for handle, part in zip(stored, parts, strict=True):
            handle.keep(part)

    def __reduce__(self) -> tuple[Any, ...]:
        return Stored, (self.ref, self.column, self.origin)


def packed(value: Any, origin: str) -> Any:
    """A value to be sent: its batches become references, below lists, tuples and dicts too.

    Raises:
        DataError: a column of a batch came from another process and has been written to in place.
    """

    def put(column: str, part: Part) -> Handle:
        return inline_or(lambda ready: Stored(ray.put(ready), column, origin), part)

    return pack(value, lambda part: part.parcel(put, origin) if isinstance(part, DataProto) else part)


def shared(values: Sequence[Any]) -> list[Any]:
    """Packed values by rank, each one that several ranks get, and is large, put in the store once for all of them."""
    ready: dict[int, Any] = {}
    for value in values:
        if id(value) not in ready:
            alone = sum(other is value for other in values) == 1
            ready[id(value)] = value if alone or size_of(value) <= INLINE_BYTES else ray.put(value)
    return [ready[id(value)] for value in values]


def size_of(value: Any) -> int:
    """About as many bytes as a packed value has to send: tensors, arrays, strings and bytes, below containers."""
    if isinstance(value, (PackedTensor, Parcel, np.ndarray)):
        return value.nbytes
    if isinstance(value, (str, bytes)):
        return len(value)
    if type(value) in (list, tuple, dict):
        return sum(size_of(part) for part in (value.values() if type(value) is dict else value))
    return size_of((value.call.args, value.call.kwargs)) if isinstance(value, Invocation) else 0


def batches_in(value: Any) -> Iterator[DataProto]:
    """The batches in a value, below lists, tuples and dicts."""
    if isinstance(value, DataProto):
        yield value
    elif type(value) in (list, tuple, dict):
        for part in value.values() if type(value) is dict else value:
            yield from batches_in(part)
