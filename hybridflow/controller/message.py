"""What processes send one another: a value as bytes, with its large buffers beside them.

Where it stands: the driver packs the arguments of a call and a device process its answer (:func:`packed`), and both
send one :data:`Message` over their line (``line.py``). Rows of this process's memory go to the store of its node, one
object a column, or along with the message where they are small; rows that are in a store already stay there. The
invariant: what is sent is bytes, however large the value; what is large is in the store.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import RayError

from hybridflow.controller.store import Address, Lease, Stored, address_of, lease, this_node, values_at
from hybridflow.errors import DataError
from hybridflow.protocol.data import DataProto
from hybridflow.protocol.parcel import INLINE_BYTES, Parcel, inline_or
from hybridflow.protocol.remote import Handle, Part
from hybridflow.protocol.serialize import CONSTANTS, PackedTensor, cells_of, pack

Ready = bytes | list[Any]
"""A pickle; or a pickle and its large buffers."""

Message = bytes | Address
"""A pickle, or where in the store a large one is with its buffers."""

_SENT_BYTES = 4 * INLINE_BYTES
"""Up to this size a message is sent itself: cheaper than an entry in an object store, also to some ranks."""


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
            return Stored(address_of(ref), column, origin, this_node(), Lease(ref.binary(), ref))

        try:
            return inline_or(store, part, cloudpickle.dumps)  # classes and functions of a script travel by value
        except RayError:
            raise  # the store is full, or gone
        except Exception as error:  # a cell may raise anything when it is pickled
            raise DataError(
                f"column {column!r} of {origin} has a cell that cannot be sent to another process "
                f"({type(error).__name__}: {error}). Keep what can be pickled, or leave the column out with select."
            ) from error

    if isinstance(value, DataProto):
        return value.parcel(put, origin)
    return pack(value, lambda part: part.parcel(put, origin) if isinstance(part, DataProto) else part)


def message(value: Any) -> Ready:
    """A packed value as bytes."""
    buffers: list[pickle.PickleBuffer] = []

    def stays_inside(buffer: pickle.PickleBuffer) -> bool:
        small = buffer.raw().nbytes <= INLINE_BYTES
        if not small:
            buffers.append(buffer)
        return small

    dumps = pickle.dumps if _is_plain(value) else cloudpickle.dumps
    data = dumps(value, protocol=5, buffer_callback=stays_inside)
    return [data, buffers] if buffers else data


def _is_plain(value: Any) -> bool:
    """Whether a packed value holds nothing that a script's own module may define: Python's pickler is quicker."""
    kind = type(value)
    if kind is tuple or kind is list:
        return all(map(_is_plain, value))
    if kind is dict:
        return all(map(_is_plain, value.values())) and all(map(_is_plain, value))
    if kind is Parcel:
        return _is_plain(value.meta_info)
    return kind in CONSTANTS or kind is PackedTensor


def opened(message: Message | Ready) -> Any:
    """The value of a message. Its rows in the store are there for as long as the sender keeps them."""
    ready: Ready = values_at([message])[0] if isinstance(message, tuple) else message
    if isinstance(ready, bytes):
        return pickle.loads(ready)
    data, buffers = ready
    return pickle.loads(data, buffers=buffers)


def held(value: Any) -> Any:
    """The value, just opened, whose rows in the store stay there from now on for as long as its batches live."""
    for batch in batches_in(value):
        batch.hold(lease)
    return value


def sendable(messages: Sequence[Ready]) -> tuple[list[Message], list[Any]]:
    """Messages as they are sent: each large one is put in the store, once for all who get it.

    Returns:
        By receiver the message, and the references to what was put there.
    """
    ready: dict[int, Message] = {}
    made: list[Any] = []
    for message in messages:
        if id(message) not in ready:
            if isinstance(message, bytes) and len(message) <= _SENT_BYTES:
                ready[id(message)] = message
            else:
                made.append(ray.put(message))
                ready[id(message)] = address_of(made[-1])
    return [ready[id(message)] for message in messages], made


def batches_in(value: Any) -> Iterator[DataProto]:
    """The batches in a value, below containers too."""
    if isinstance(value, DataProto):
        yield value
    else:
        for part in cells_of(value) or ():
            yield from batches_in(part)
