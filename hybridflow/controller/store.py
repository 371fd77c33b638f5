"""Rows in Ray's object store: how a process holds them, and how it reads them.

Where it stands: the handles of columns that are neither small nor in this process's memory. A message between processes
(``message.py``) says where an object is and has no Ray reference to it, which costs Ray some ten microseconds each time
it is sent and received, whether or not the rows are read. So the invariant that keeps objects alive is our own: the
process that made an object keeps it for as long as the driver has a :class:`Lease` of it. The driver has one of every
object of its batches, and of those of a call's arguments until the call has ended. A device process borrows them for
that time (:class:`Borrowed`), and what a worker keeps beyond it is fetched before.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import ray
from ray._private.worker import global_worker
from ray.exceptions import RayError

from hybridflow.errors import DataError
from hybridflow.protocol.data import DataProto
from hybridflow.protocol.remote import Column, Handle, Part

Address = tuple[bytes, bytes, bytes]
"""Where an object is: its id, the process that owns it, and what that process said of it."""

_ray: Any = global_worker
"""Ray's own state of this process. A few of its internal calls are used, here and nowhere else."""


def address_of(ref: Any) -> Address:
    """What :func:`reference` needs in any process. This is what Ray's own pickle of a reference holds."""
    _, owner, status = _ray.core_worker.serialize_object_ref(ref)
    return ref.binary(), owner, status


def reference(address: Address) -> Any:
    """A Ray reference of which the object's owner is not told: another one has to keep the object alive."""
    name, owner, status = address
    ref = ray.ObjectRef(name, owner)  # type: ignore[arg-type]
    _ray.core_worker.deserialize_and_register_object_ref(name, ray.ObjectRef.nil(), owner, status)
    return ref


def values_at(addresses: Iterable[Address]) -> list[Any]:
    """The objects; raises RayError where one is lost. This is ``ray.get`` without what it spends on its own profile."""
    values, _ = _ray.get_objects([reference(address) for address in addresses])
    return values


_leases: weakref.WeakValueDictionary[bytes, Lease] = weakref.WeakValueDictionary()
"""By name of the object, those of this process."""


class Lease:
    """The driver's claim to an object: it may go once the lease has.

    Args:
        name: of the object.
        ref: Ray's reference, of one that this process has made.
        release: tells the process that has made it.
    """

    def __init__(self, name: bytes, ref: Any = None, release: Callable[[bytes], None] | None = None) -> None:
        self._ref = ref
        _leases[name] = self
        if release is not None:
            weakref.finalize(self, release, name).atexit = False  # the processes end with the driver


def lease(name: bytes) -> Lease | None:
    """This process's lease of an object; None where another one has to keep it."""
    return _leases.get(name)


class Stored(Handle):
    """A part of a column in the object store; read in place on its own node, copied once to any other.

    Args:
        address: the object; it goes when its maker dies, or the driver lets go of the last handle.
        column: name of the column when it was made.
        origin: who made it, such as ``rollout.generate on rank 3``.
        node: Ray's id of the node it is on.
        kept_by: keeps the object alive; without it somebody else has to.
    """

    asked = False
    borrowed: Borrowed | None = None

    def __init__(self, address: Address, column: str, origin: str, node: str, kept_by: Lease | None = None) -> None:
        self.address, self.column, self.origin, self.node, self.kept_by = address, column, origin, node, kept_by
        self.name = address[0]

    @property
    def key(self) -> Any:
        return self.address[0]

    def hold(self) -> None:
        if self.kept_by is None:
            self.kept_by = lease(self.address[0])

    def fetch(self) -> Part:
        self.asked = True
        return super().fetch()

    def load(self) -> Part:
        try:
            return values_at([self.address])[0]
        except RayError as error:
            raise DataError(
                f"column {self.column!r} of {self.origin} cannot be read any more: the process that made it is gone, "
                f"or its node, and the rows with it ({type(error).__name__}). Make the batch again, or run again from "
                f"the last checkpoint."
            ) from error

    @classmethod
    def prefetch(cls, handles: Sequence[Handle]) -> None:
        stored = [handle for handle in handles if isinstance(handle, Stored)]
        for borrowed in {handle.borrowed for handle in stored}:
            stored += borrowed.others() if borrowed is not None else []
        wanted = {id(handle): handle for handle in stored if not handle.fetched}
        if len(wanted) > 1:
            try:
                parts = values_at(handle.address for handle in wanted.values())
            except RayError:
                return  # one by one it shows which
            for handle, part in zip(wanted.values(), parts, strict=True):
                handle.keep(part)

    def __reduce__(self) -> tuple[Any, ...]:
        return Stored, (self.address, self.column, self.origin, self.node)


class Borrowed:
    """Objects that came with one call, which the driver keeps in the store until the call has ended.

    Tensors of this node's store are read in place, so that to get one costs a request and no bytes. The first read of a
    method gets, in one request, the columns that the method read the last time it ran here; where it reads others, it
    gets all of them.

    Args:
        batches: the arguments.
        expected: the columns that the method is likely to read, by name; None for all.
    """

    def __init__(self, batches: Iterable[DataProto], expected: set[str] | None = None) -> None:
        self._named = [item for batch in batches for item in batch.columns.items()]
        self._columns = [weakref.ref(column) for _, column in self._named]
        self._handles: list[weakref.ref[Stored]] = []
        self._expected = expected
        self._parts: list[Part | None] = []
        borrow = self._borrow
        for _, column in self._named:
            if column.entries is None:
                borrow(column.handles)
            else:
                column.on_touch = borrow

    def _borrow(self, handles: Iterable[Handle]) -> None:
        for handle in handles:
            if isinstance(handle, Stored):
                handle.borrowed = self
                self._handles.append(weakref.ref(handle))

    def others(self) -> list[Stored]:
        """What to get beside the parts that are asked for."""
        expected, self._expected = self._expected, None
        columns = [column for key, column in self._named if expected is None or key in expected]
        here = this_node()
        return [
            handle for column in columns if not column.is_object for handle in stored_of(column) if handle.node == here
        ]

    def read(self) -> set[str]:
        """The tensor columns of which rows have been fetched so far. Ends getting others with them."""
        named, self._named = self._named, []
        touched = [(key, column) for key, column in named if column.entries is None and not column.is_object]
        self._parts = [handle._part for _, column in touched for handle in column.handles]
        return {key for key, column in touched if any(handle.asked for handle in stored_of(column))}

    def give_back(self) -> None:
        """The call has ended: what the worker has kept is fetched, since its objects may go at any time now.

        Such rows stay in this node's shared memory for as long as they are kept. They are this process's own: where
        they are sent, they are put in the store again. Nothing kept leads back here, where all that was read still is.
        """
        self._named = []
        for column in (column() for column in self._columns):
            if column is not None:
                stored_of(column)  # touched, so that its handles are among those that follow
                column.on_touch = None
        for handle in (handle() for handle in self._handles):
            if handle is not None:
                if not handle.fetched:
                    with contextlib.suppress(DataError):  # told when it is read
                        handle.keep(handle.load())
                handle.portable, handle.borrowed = False, None


def stored_of(column: Column) -> list[Stored]:
    """The parts of a column that are in the store."""
    return [handle for handle in column.handles if isinstance(handle, Stored)]


def this_node() -> str:
    """Ray's id of the node that this process runs on."""
    return _ray.current_node_id.hex()
