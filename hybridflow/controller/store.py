"""Rows in Ray's object store, and values on their way between processes.

Where it stands: :func:`packed` is what the driver does to arguments and a device process to results. Rows of this
process's memory go to the store of its node, one object a column, or along with the message where they are small; rows
that are in a store already stay there. Invariant: an object lives as long as a batch, in any process, has rows of it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from hybridflow.errors import DataError
from hybridflow.protocol.data import DataProto
from hybridflow.protocol.parcel import INLINE_BYTES, Parcel, inline_or
from hybridflow.protocol.remote import Handle, Part
from hybridflow.protocol.serialize import PackedTensor, cells_of, pack


class Stored(Handle):
    """A part of a column in the object store; read in place on its own node, copied once to any other.

    Args:
        ref: the object; it goes when the last copy of this handle goes, or the process that made it.
        column: name of the column when it was made.
        origin: who made it, such as ``rollout.generate on rank 3``.
        node: Ray's id of the node it is on.
    """

    __slots__ = ("column", "node", "origin", "ref", "together")

    def __init__(self, ref: Any, column: str, origin: str, node: str) -> None:
        super().__init__()
        self.ref, self.column, self.origin, self.node = ref, column, origin, node
        self.together: Together | None = None

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
        stored = [handle for handle in handles if isinstance(handle, Stored)]
        for together in {handle.together for handle in stored if handle.together is not None}:
            stored += together.others()
        wanted = {id(handle): handle for handle in stored if not handle.fetched}
        if len(wanted) > 1:
            try:
                parts = ray.get([handle.ref for handle in wanted.values()])
            except RayError:
                return  # one by one it shows which
            for handle, part in zip(wanted.values(), parts, strict=True):
                handle.keep(part)

    def __reduce__(self) -> tuple[Any, ...]:
        return Stored, (self.ref, self.column, self.origin, self.node)


class Together:
    """Tensors of this node's store that came with one call. They are read in place, so to get one costs a request and
    no bytes: who reads a second column of a batch gets the others with it, in the same request, while the call lasts.
    """

    def __init__(self, batches: Iterable[DataProto]) -> None:
        here = this_node()
        self._handles = [handle for batch in batches for handle in batch.tensor_handles if isinstance(handle, Stored)]
        self._handles = [handle for handle in self._handles if handle.node == here]
        self._asked = 0

    def __enter__(self) -> None:
        for handle in self._handles:
            handle.together = self

    def __exit__(self, *_: object) -> None:
        # Handles that knew one another would keep their objects alive until a garbage collection.
        for handle in self._handles:
            handle.together = None

    def others(self) -> list[Stored]:
        """What to get beside the parts that are asked for."""
        self._asked += 1
        return self._handles if self._asked == 2 else []


@functools.cache
def this_node() -> str:
    """Ray's id of the node that this process runs on."""
    return ray.get_runtime_context().get_node_id()


def packed(value: Any, origin: str) -> Any:
    """A value to be sent: its batches become references, below containers too.

    Raises:
        DataError: a column of a batch came from another process and has been written to in place.
    """

    def put(column: str, part: Part) -> Handle:
        return inline_or(lambda ready: Stored(ray.put(ready), column, origin, this_node()), part)

    return pack(value, lambda part: part.parcel(put, origin) if isinstance(part, DataProto) else part)


def shared(values: Sequence[Any]) -> list[Any]:
    """Packed values by rank, each one that several ranks get, and is large, put in the store once for all of them."""
    ready: dict[int, Any] = {}
    for value in values:
        if id(value) not in ready:
            alone = sum(other is value for other in values) == 1
            ready[id(value)] = value if alone or size_of(value) <= INLINE_BYTES else ray.put(value)
    return [ready[id(value)] for value in values]


def unshared(share: Any) -> Any:
    """A packed value as a rank got it; see :func:`shared`."""
    return ray.get(share) if isinstance(share, ray.ObjectRef) else share


def size_of(value: Any) -> int:
    """About as many bytes as a packed value has to send: tensors, arrays, strings and bytes, below containers."""
    if isinstance(value, (PackedTensor, Parcel, np.ndarray)):
        return value.nbytes
    if isinstance(value, (str, bytes)):
        return len(value)
    return sum(size_of(part) for part in cells_of(value) or ())


def batches_in(value: Any) -> Iterator[DataProto]:
    """The batches in a value, below containers too."""
    if isinstance(value, DataProto):
        yield value
    else:
        for part in cells_of(value) or ():
            yield from batches_in(part)
