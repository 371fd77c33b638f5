"""Lines: how the driver talks to a device process, once Ray has started it.

Where it stands: ``group.py`` queues calls on the lines of a pool, ``future.py`` waits for their answers, and
``process.py`` is the other end. Ray starts the process, watches over it and keeps its objects; a call does not go
through Ray, which takes 2 ms of two cores to tell four processes something and to hear from them.

Invariants: calls of a line run one at a time, in the order in which they were queued. Each end has a thread that always
reads, so that neither ever waits for the other to make room; and who queues a call never waits, also where the process
has been stopped. An object that a process has made for an answer stays in its store until the driver's last
:class:`Lease` of it is gone.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import pickle
import secrets
import signal
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from ray.exceptions import ActorUnavailableError

from hybridflow.controller.message import Message
from hybridflow.controller.store import Lease

_RAYS_WORD = 5.0
"""Seconds to wait for Ray to say what became of a process whose line is cut. It never does while a child lives that the
process has forked, which has Ray's sockets too."""

_READ_AT_ONCE = 64 * 1024
"""Bytes: most calls and answers are smaller."""

_GATHER = 0.005
"""Seconds that an object which has been let go waits for others: a batch has many on each process."""

_HANDSHAKE = 30
"""Seconds that a process has to let the driver in."""


class Address(NamedTuple):
    """Where a process listens, and the key that it lets its driver in by.

    Attributes:
        at: host and port, or the name of a Unix socket.
    """

    at: tuple[str, int] | bytes
    key: bytes

    def __str__(self) -> str:
        return self.at.decode().strip("\0") if isinstance(self.at, bytes) else f"{self.at[0]}:{self.at[1]}"


class Asked:
    """What a rank was asked, and its answer once that is there.

    Args:
        rank: of the process.
        arrived: gets this object when it is answered.

    Attributes:
        message: of an :class:`~hybridflow.controller.call.Answer`; None until it is there.
        leases: of the objects that were made for it.
        error: Ray's word on the end of the process, instead of an answer.
    """

    __slots__ = ("arrived", "error", "followers", "leases", "message", "rank")

    def __init__(self, rank: int, arrived: SimpleQueue[Asked]) -> None:
        self.rank, self.arrived = rank, arrived
        self.message: Message | None = None
        self.leases: list[Lease] = []
        self.error: BaseException | None = None
        self.followers: list[Line] = []

    @property
    def done(self) -> bool:
        return self.message is not None or self.error is not None

    def settle(self) -> None:
        """Tell who waits for it."""
        arrived = self.arrived
        del self.arrived  # which has this object from now on: its leases are not to wait for Python to find a cycle
        arrived.put(self)
        for line in self.followers:
            line.flush()


class _Queued(NamedTuple):
    asked: Asked
    method: str
    arguments: tuple[Any, ...]
    needs: Sequence[Asked]


class Line:
    """The driver's end.

    Args:
        address: of the process.
        serving: Ray's reference to what the process does with its end: it is there, or an error, once that has ended.
    """

    def __init__(self, address: Address, serving: Any) -> None:
        self._socket = _let_in(address)
        self._queue: deque[_Queued] = deque()
        self._asked: dict[int, Asked] = {}
        self._numbers = itertools.count()
        self._released: deque[bytes] = deque()
        self._sending = threading.Lock()
        self._cut: BaseException | None = None
        self._driver = os.getpid()
        _start_flushing(self._driver)
        self._served: Future[Any] = serving.future()
        # A node that has fallen silent leaves the line open, also under a message that waits for room.
        self._served.add_done_callback(lambda _: self._shut(socket.SHUT_RDWR))
        threading.Thread(target=self._listen, name="line", daemon=True).start()

    def call(self, asked: Asked, method: str, *arguments: Any, needs: Sequence[Asked] = ()) -> None:
        """Queue a call of the process. To be called with Ctrl-C put off (:func:`uninterrupted`).

        Args:
            asked: what the call is known by.
            method: ``call`` or ``create`` of DeviceProcess.
            arguments: as bytes and other plain values.
            needs: answers of other lines, whose messages are further arguments: the call is sent once they are there.
        """
        self._queue.append(_Queued(asked, method, arguments, needs))
        for need in needs:
            need.followers.append(self)
        self._flush()

    def release(self, name: bytes) -> None:
        """The driver has no use any more for an object that the process has made. May be called at any time."""
        if self._cut is None and os.getpid() == self._driver:  # a child that the driver has forked has a copy of it all
            self._released.append(name)
            _to_flush.put(self)

    def close(self) -> None:
        """The process ends its service once it has done what is queued."""
        self._shut(socket.SHUT_WR)

    def _shut(self, how: int) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(how)

    def _ready(self) -> bool:
        if self._released:
            return True
        try:
            return bool(self._queue) and all([need.done for need in self._queue[0].needs])
        except IndexError:  # another caller has sent it
            return False

    def flush(self) -> None:
        """Send what is ready, unless another caller does so at this moment, who then looks again."""
        with uninterrupted():
            self._flush()

    def _flush(self) -> None:
        # Nobody waits for the lock: a lease may end inside of this very code, wherever Python collects garbage.
        while self._sending.acquire(blocking=False):
            whole = True
            try:
                while whole and self._ready():
                    whole = self._send_next()
            finally:
                if whole:
                    self._sending.release()
            if not whole or not self._ready():
                return

    def _send_next(self) -> bool:
        """Send what comes next; see :meth:`_send`."""
        if self._released:
            return self._send([self._released.popleft() for _ in range(len(self._released))])
        asked, method, arguments, needs = self._queue.popleft()
        asked.error = self._cut or next((need.error for need in needs if need.error is not None), None)
        if asked.error is not None:
            asked.settle()
            return True
        number = next(self._numbers)
        self._asked[number] = asked
        return self._send((number, method, *arguments, *(need.message for need in needs)))

    def _send(self, value: Any) -> bool:
        """Send a value with the lock held.

        Returns:
            Whether it has gone as a whole. A process that does not read just now keeps no caller waiting: a thread
            sends the rest, and gives the lock back.
        """
        try:
            data, sent = memoryview(pickle.dumps(value, protocol=5)), 0
            with contextlib.suppress(BlockingIOError):
                sent = self._socket.send(data, socket.MSG_DONTWAIT)
            if sent < len(data):
                threading.Thread(target=self._send_rest, args=(data[sent:],), name="line", daemon=True).start()
            return sent == len(data)
        except OSError:
            return True  # the line is cut, which the listener tells
        except BaseException:
            self._shut(socket.SHUT_RDWR)  # what comes next would be taken for the rest of this
            raise

    def _send_rest(self, data: memoryview) -> None:
        try:
            with contextlib.suppress(OSError):  # the line is cut
                self._socket.sendall(data)
        finally:
            self._sending.release()
        self._flush()

    def _listen(self) -> None:
        for number, message, names in _received(self._socket):
            asked = self._asked.pop(number)
            asked.leases = [Lease(name, release=self.release) for name in names]
            asked.message = message
            asked.settle()
            del asked
        try:
            error = self._served.exception(_RAYS_WORD)
        except TimeoutError:
            error = None
        with self._sending:
            self._cut = error or ActorUnavailableError("its line is cut", None)
        while self._asked:
            _, asked = self._asked.popitem()
            asked.error = self._cut
            asked.settle()
        self.flush()
        self._socket.close()


_to_flush: SimpleQueue[Line] = SimpleQueue()
"""Lines with objects that have been let go."""


@functools.cache
def _start_flushing(driver: int) -> None:
    """Start the one thread of a driver that tells processes what has been let go."""

    def flush() -> None:
        while True:
            lines = {_to_flush.get()}
            time.sleep(_GATHER)
            with contextlib.suppress(Empty):
                while True:
                    lines.add(_to_flush.get_nowait())
            while lines:
                with contextlib.suppress(Exception):  # that line is cut now, which its listener tells
                    lines.pop().flush()

    threading.Thread(target=flush, name="lines", daemon=True).start()


class Served:
    """The process's end.

    Args:
        host: address of its node; empty where the driver is on that node too: a Unix socket takes a third of the time.
    """

    def __init__(self, host: str) -> None:
        if host:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, 0), family=family)
            at = host, self._listener.getsockname()[1]
        else:
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind("")  # Linux chooses a name outside of the file system
            self._listener.listen()
            at = self._listener.getsockname()
        self.address = Address(at, secrets.token_bytes(32))
        self._made: dict[bytes, Any] = {}

    def calls(self) -> Iterator[tuple[Any, ...]]:
        """Number, method and arguments of each call, until the driver is gone or has closed the line."""
        self._socket = self._accepted()
        os.register_at_fork(after_in_child=self._socket.close)  # the line ends with this process
        queue: SimpleQueue[tuple[Any, ...] | None] = SimpleQueue()
        threading.Thread(target=self._receive, args=(queue,), name="line", daemon=True).start()
        while (call := queue.get()) is not None:
            yield call
        self._socket.close()

    def _accepted(self) -> socket.socket:
        """The driver's connection: who else knocks is not let in, and keeps nobody waiting."""
        let_in: SimpleQueue[Connection] = SimpleQueue()

        def try_key(connection: Connection) -> None:
            with contextlib.suppress(AuthenticationError, EOFError, OSError):
                deliver_challenge(connection, self.address.key)
                answer_challenge(connection, self.address.key)
                let_in.put(connection)

        def listen() -> None:
            with contextlib.suppress(OSError):  # it is shut
                while True:
                    knocking, _ = self._listener.accept()
                    threading.Thread(target=try_key, args=(Connection(knocking.detach()),), daemon=True).start()

        threading.Thread(target=listen, daemon=True).start()
        with self._listener:
            found = let_in.get()
            self._listener.shutdown(socket.SHUT_RDWR)  # to close it would not wake the thread
        return _prompt(found)

    def answer(self, number: int, message: Message, made: Sequence[Any]) -> None:
        """Answer a call.

        Args:
            made: references to the objects that were put in the store for it.
        """
        names = [ref.binary() for ref in made]
        self._made.update(zip(names, made, strict=True))
        with contextlib.suppress(OSError):  # the driver is gone
            self._socket.sendall(pickle.dumps((number, message, names), protocol=5))

    def _receive(self, queue: SimpleQueue[tuple[Any, ...] | None]) -> None:
        for value in _received(self._socket):
            if isinstance(value, tuple):
                queue.put(value)
            else:
                for name in value:
                    self._made.pop(name, None)
        queue.put(None)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C is heeded at the end: a call is queued on all ranks or on none. A second one is heeded at once."""
    own = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(own):
        yield  # Python runs its handlers in the main thread
        return
    came: list[Any] = []

    def put_off(*given: Any) -> None:
        came.append(given)
        if len(came) > 1:
            own(*given)

    signal.signal(signal.SIGINT, put_off)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, own)
        if len(came) == 1:
            own(*came[0])


def _let_in(address: Address) -> socket.socket:
    """The driver's socket to a process, once each has shown the other that it has the key."""
    if isinstance(address.at, bytes):
        found = socket.socket(socket.AF_UNIX)
        _limit(found, _HANDSHAKE)  # to connect waits where many others have knocked
        found.connect(address.at)
    else:
        found = socket.create_connection(address.at, _HANDSHAKE)
        found.settimeout(None)
        _limit(found, _HANDSHAKE)
    connection = Connection(found.detach())
    answer_challenge(connection, address.key)
    deliver_challenge(connection, address.key)
    return _prompt(connection)


def _limit(end: socket.socket, seconds: int) -> None:
    """How long to wait for the other end, to say something or to make room; 0 is without end."""
    for direction in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        end.setsockopt(socket.SOL_SOCKET, direction, struct.pack("ll", seconds, 0))


def _received(end: socket.socket) -> Iterator[Any]:
    """The values that come over a line, until it ends."""
    with open(end.fileno(), "rb", _READ_AT_ONCE, closefd=False) as stream:
        with contextlib.suppress(EOFError, OSError, pickle.UnpicklingError):  # the last one may have come in part
            while True:
                yield pickle.load(stream)


def _prompt(connection: Connection) -> socket.socket:
    """The socket of a connection, which sends small messages at once, and notices where the other node is gone."""
    with connection:
        found = socket.socket(fileno=os.dup(connection.fileno()))
    _limit(found, 0)  # that of the handshake is over
    if found.family != socket.AF_UNIX:
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return found
