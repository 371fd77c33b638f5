"""What processes send one another: a value as bytes, with its large buffers beside them.

Where it stands: the driver packs the arguments of a call and a device process its answer (:func:`packed`), and both
hand Ray one :data:`Message`. Rows of this process's memory go to the store of its node, one object a column, or along
with the message where they are small; rows that are in a store already stay there. The invariant: Ray sees bytes and
not what they mean, because its own way with a value or a reference takes longer than a short call itself.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from typing import Any

import ray
from ray import cloudpickle

from hybridflow.controller.store import Address, Stored, address_of, reference, stored_of, this_node
from hybridflow.errors import DataError
from hybridflow.protocol.data import DataProto
from hybridflow.protocol.parcel import INLINE_BYTES, inline_or
from hybridflow.protocol.remote import Handle, Part
from hybridflow.protocol.serialize import cells_of, pack

Message = bytes | list[Any]
"""A pickle; or a pickle, its large buffers, and references that Ray has to count."""


def packed(value: Any, origin: str, made: list[Any] | None = None) -> Any:
    """A value to be sent: its batches become addresses of rows, below containers too.

    What is put in the store for it stays there for as long as the packed value lives.

    Args:
        origin: who sends it.
        made: references to what is put in the store are added to it.

    Raises:
        DataError: a column of a batch came from another process and has been written to in place, or has a cell that
            cannot be pickled.
    """

    def put(column: str, part: Part) -> Handle:
        def store(ready: Any) -> Handle:
            ref = ray.put(ready)
            if made is not None:
                made.append(ref)
            return Stored(address_of(ref), column, origin, this_node(), ref)

        try:
            return inline_or(store, part, cloudpickle.dumps)  # classes and functions of a script travel by value
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise DataError(
                f"column {column!r} of {origin} has a cell that cannot be sent to another process "
                f"({type(error).__name__}: {error}). Keep what can be pickled, or leave the column out with select."
            ) from error

    return pack(value, lambda part: part.parcel(put, origin) if isinstance(part, DataProto) else part)


def message(value: Any, references: Sequence[Any] = ()) -> Message:
    """A packed value as Ray gets it; ``references`` are counted by Ray for as long as the message exists."""
    buffers: list[pickle.PickleBuffer] = []

    def stays_inside(buffer: pickle.PickleBuffer) -> bool:
        small = buffer.raw().nbytes <= INLINE_BYTES
        if not small:
            buffers.append(buffer)
        return small

    data = cloudpickle.dumps(value, protocol=5, buffer_callback=stays_inside)
    return [data, buffers, list(references)] if buffers or references else data


def opened(message: Message) -> Any:
    """The value of a message. Its rows in the store are there for as long as the sender keeps them."""
    if isinstance(message, bytes):
        return pickle.loads(message)
    data, buffers, _ = message
    return pickle.loads(data, buffers=buffers)


def held(value: Any) -> Any:
    """The value, whose rows in the store stay there from now on for as long as its batches live."""
    for batch in batches_in(value):
        for column in batch.columns.values():
            for handle in stored_of(column):
                handle.hold()
    return value


def shared(messages: Sequence[Message]) -> tuple[list[Message | Address], list[Any]]:
    """Messages by rank, each one that several ranks get, and is large, put in the store once for all of them.

    Returns:
        By rank the message or its address, and the references to what was put there.
    """
    ready: dict[int, Message | Address] = {}
    made: list[Any] = []
    for message in messages:
        if id(message) not in ready:
            alone = sum(other is message for other in messages) == 1
            if alone or size_of(message) <= INLINE_BYTES:
                ready[id(message)] = message
            else:
                made.append(ray.put(message))
                ready[id(message)] = address_of(made[-1])
    return [ready[id(message)] for message in messages], made


def unshared(share: Message | Address) -> Any:
    """The value of a message as a rank got it; see :func:`shared`."""
    return opened(ray.get(reference(share)) if isinstance(share, tuple) else share)


def size_of(message: Message) -> int:
    if isinstance(message, bytes):
        return len(message)
    data, buffers, _ = message
    return len(data) + sum(memoryview(buffer).nbytes for buffer in buffers)


def batches_in(value: Any) -> Iterator[DataProto]:
    """The batches in a value, below containers too."""
    if isinstance(value, DataProto):
        yield value
    else:
        for part in cells_of(value) or ():
            yield from batches_in(part)
