"""DataFuture: a call that runs. What the driver reads of it, and how a failure ends it on all its ranks.

Where it stands: ``group.py`` submits calls and hands these out. The invariants: the first rank that fails ends the call
for the driver and for all its peers, also for those that hang in a collective; a call whose argument has failed runs on
no rank, and is told the argument's own error.
"""

from __future__ import annotations

import copy
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from ray.exceptions import OutOfMemoryError, RayActorError, RayError

from hybridflow.controller import outside
from hybridflow.controller.call import Answer, Invocation, Later
from hybridflow.controller.line import Asked
from hybridflow.controller.message import held, opened, packed
from hybridflow.controller.pool import Failure
from hybridflow.errors import DataError, WorkerDiedError, WorkerError
from hybridflow.protocol.transfer import Call, Dispatch
from hybridflow.trace import Span

if TYPE_CHECKING:
    from hybridflow.controller.group import WorkerGroup

_LOST_PEER = ("Connection closed by peer", "Connection reset", "Broken pipe", "DistNetworkError", "DistBackendError")
"""What a rank raises when its peer in a collective dies: a consequence, so we look for the cause a little longer."""

_LOST_PEER_WAIT = 5.0
"""Seconds to wait for Ray's word on a dead process after a rank has lost its peer."""

_TOGETHER = 0.1
"""Seconds to wait for one of several calls before the others are looked at."""

_ALIKE_WAIT = 1.0
"""Seconds for the other ranks of a failed call to fail alike before they are interrupted."""

_INTERRUPT_WAIT = 2.0
"""Seconds to leave a call after an interruption; a rank in native code (a collective) does not heed one."""


class DataFuture:
    """The value of a call that may still be running.

    A future is also accepted as an argument of another call, of any group: its device processes wait for the value, and
    the driver does not.

    Args:
        group: whose call it is.
        invocation: the call as the driver made it.
        asked: what was asked of each rank.
        arrived: gets these as they are answered.
        timeout: seconds the call may take, from when its arguments are there; None for no limit.
        dispatched: the call with its arguments, and the ranks' shares, where they were known when it was submitted.
        awaits: the calls whose values it takes, which were running then.
        kept: what was sent. It has the references that keep its objects in the store, which the ranks only borrow.
    """

    def __init__(
        self,
        group: WorkerGroup,
        invocation: Invocation,
        asked: list[Asked],
        arrived: SimpleQueue[Asked],
        timeout: float | None,
        dispatched: tuple[Call, Dispatch] | None,
        awaits: Sequence[DataFuture] = (),
        kept: Sequence[Any] = (),
    ) -> None:
        self._group, self._invocation, self._asked, self._arrived = group, invocation, asked, arrived
        self._timeout, self._dispatched, self._awaits, self._kept = timeout, dispatched, list(awaits), kept
        self._deadline = math.inf if timeout is None else time.monotonic() + timeout
        self._pending = set(range(len(asked)))
        self._outputs: list[Any] = [None] * len(asked)
        self._errors: dict[int, WorkerError] = {}
        self._failure: Failure | None = None
        self._value: Any = None
        self._collected = False
        # Held by the thread that waits: any other finds the call as it stands. Reentrant, because Ctrl-C may come
        # between the lock and what gives it back.
        self._reading = threading.RLock()

    def __repr__(self) -> str:
        state = "failed" if self._failure else "waiting" if self._awaits else "running" if self._pending else "done"
        return f"DataFuture({self._invocation.call.where}, {state})"

    def __reduce__(self) -> tuple[Any, ...]:
        raise DataError(
            f"{self!r} cannot be sent inside of another value: give it to a method as an argument of its own, or read "
            f"its .result() first."
        )

    def done(self) -> bool:
        """Whether :meth:`result` returns (or raises) without waiting."""
        self.wait(timeout=0)
        return not self._pending

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the call's end, good or bad, or for ``timeout`` seconds."""
        self._read_alone(math.inf if timeout is None else time.monotonic() + timeout)
        if not self._pending:
            self._group.pool.open_calls.pop(self, None)

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the value.

        Args:
            timeout: seconds to wait at most; the call goes on after it, and the result may be asked for again.

        Raises:
            WorkerError: as soon as one rank raises, also while others hang; its cause starts with ``TimeoutError``
                where ranks have not answered in time. Where a call whose value it takes has failed, that call's error.
            WorkerDiedError: where a process is gone.
        """
        self.wait(timeout)
        if self._failure is not None:
            self._failure.tell()
            raise copy.copy(self._failure.error)  # the pool keeps the other, without what a traceback holds
        if self._pending:
            raise self._timed_out(timeout or 0.0)
        if not self._collected:
            invocation = self._invocation
            call, dispatch = self._dispatched or invocation.distribute(_result)
            self._value, self._collected = invocation.collect(call, dispatch, self._outputs), True
            self._let_go()
        return self._value

    # ----------------------------------------------------------------------------------------------- internals

    def _let_go(self) -> None:
        """What the call was made of is not needed once it has ended, and would keep its batches alive."""
        self._outputs, self._asked, self._dispatched, self._awaits, self._kept = [], [], None, [], []
        self._arrived = SimpleQueue()  # answers that come after a failure have rows too
        self._invocation = replace(self._invocation, call=Call(where=self._invocation.call.where))

    def _read_alone(self, until: float) -> None:
        if self._reading.acquire(timeout=-1 if until == math.inf else max(0.0, until - time.monotonic())):
            try:
                self._read(until)
            finally:
                self._reading.release()

    def _read(self, until: float) -> None:
        """Take answers as they come until all are in, one is an error, or the time or the call's own time is over."""
        while self._awaits and self._failure is None:
            first = self._awaits[0]
            first._read_alone(until)
            if first._failure is not None:
                self._leave_out(first._failure)
            elif first._pending:
                return
            else:
                self._awaits.pop(0)
                self._deadline = math.inf if self._timeout is None else time.monotonic() + self._timeout
        while self._failure is None and (self._pending or self._errors):
            if self._errors:
                if not self._earlier_calls_ended(until):
                    return
                error = next(iter(self._errors.values()))
                self._fail(error, _LOST_PEER_WAIT if _lost_peer(error) else _ALIKE_WAIT)
            elif not self._take(min(until, self._deadline)):
                if self._deadline <= until:
                    self._fail(self._timed_out(self._timeout or 0.0, with_stacks=True), wait=0.0)
                return

    def _take(self, until: float) -> bool:
        """Read the answer of the next rank that has one: value or error is kept. False if none came in time."""
        # By what the ranks hold: what was taken from the queue is lost where Ctrl-C comes before it has been read.
        while (asked := next((one for one in self._asked if one.rank in self._pending and one.done), None)) is None:
            try:
                self._arrived.get(timeout=None if until == math.inf else max(0.0, until - time.monotonic()))
            except Empty:
                return False
        answer = self._answer(asked)
        self._pending.discard(asked.rank)
        self._outputs[asked.rank] = answer.value
        if answer.error is not None:
            self._errors[asked.rank] = answer.error
        if answer.measured is not None:
            self._group.pool.spans.append(self._span(asked.rank, *answer.measured))
        return True

    def _span(self, rank: int, begin: float, end: float, peak: int) -> Span:
        call = self._invocation
        return Span(self._group.pool.name, rank, call.role, call.method, call.step, begin, end, peak)

    def _answer(self, asked: Asked) -> Answer:
        role, method, step, rank = self._invocation.role, self._invocation.method, self._invocation.step, asked.rank
        try:
            if asked.error is not None:
                raise asked.error
            assert asked.message is not None
            return Answer(*held(opened(asked.message)))
        except (RayActorError, OutOfMemoryError) as error:
            cause = f"the process is gone ({self._place(rank)}): {self._why_gone(rank, error)}"
            return Answer(error=WorkerDiedError(role, rank, method, step, cause))
        except RayError as error:
            return Answer(error=WorkerError(role, rank, method, step, f"{type(error).__name__}: {error}"))
        except Exception as error:
            cause = f"its value cannot be read on the driver: {type(error).__name__}: {error}"
            return Answer(error=WorkerError(role, rank, method, step, cause))

    def _place(self, rank: int) -> str:
        places = self._group.pool.places
        return str(places[rank]) if places else "its pool has been stopped"

    def _why_gone(self, rank: int, error: RayError) -> str:
        pool = self._group.pool
        for failure in pool.failures:
            if rank in failure.ended:
                call = f"{failure.error.role}.{failure.error.method}"
                return f"it was ended, because it did not leave {call} after that had failed"
        return outside.cause_of_death(error, pool.places[rank] if pool.places else None)

    def _fail(self, error: WorkerError, wait: float) -> None:
        """End the call on all ranks, and let the pool remember what that has done to it.

        The others get a moment to fail alike, then an exception where they are; a process that is still inside after
        that (in a collective, whose peer will not come) is ended.
        """
        pool, places = self._group.pool, self._group.pool.places
        self._take_all(wait)
        cancelled = sorted(self._pending)
        if cancelled and places:
            outside.interrupt([places[rank] for rank in cancelled])
            self._take_all(_INTERRUPT_WAIT)
        ended = sorted(self._pending)
        self._pending.clear()
        cancelled = [rank for rank in cancelled if rank in self._errors]
        own = [found for rank, found in self._errors.items() if rank not in cancelled]
        deaths = [found for found in own if isinstance(found, WorkerDiedError)]
        causes = [found for found in (error, *own) if not _lost_peer(found)]
        self._failure = Failure(
            role=self._group.role,
            error=[*deaths, *causes, error][0],
            ended=ended,
            cancelled=cancelled,
            dead=bool(ended or deaths),
            apart=bool(cancelled) or 0 < len(self._errors) < len(self._outputs),
        )
        pool.remember(self._failure)
        pool.end(ended)
        self._let_go()

    def _earlier_calls_ended(self, until: float) -> bool:
        """A rank without an answer may be inside of a call that was queued before, which is not to be interrupted.

        Returns:
            Whether there is no such call, or it has ended in time.
        """
        for call in list(self._group.pool.open_calls):
            if call is self:
                break
            if call._pending & self._pending:
                call.wait(None if until == math.inf else max(0.0, until - time.monotonic()))
                if call._pending:
                    return False
        return True

    def _leave_out(self, failure: Failure) -> None:
        """The call did not run on any rank, because one whose value it takes has failed. Its ranks agree on that."""
        where = self._invocation.call.where
        self._failure = Failure(self._group.role, failure.error, left_out=where, because=failure)
        self._pending.clear()
        self._group.pool.remember(self._failure)
        self._let_go()

    def _take_all(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self._pending and self._take(until):
            pass

    def _timed_out(self, seconds: float, with_stacks: bool = False) -> WorkerError:
        waiting, places = sorted(self._pending), self._group.pool.places
        cause = (
            f"TimeoutError: no answer within {seconds:g} s from ranks {waiting} of {len(self._outputs)} "
            f"({'; '.join(self._place(rank) for rank in waiting[:8])})"
            + (f", which wait for {self._awaits[0]._invocation.call.where}" if self._awaits else "")
        )
        stacks = outside.stacks([places[rank] for rank in waiting]) if with_stacks and places else ""
        call = self._invocation
        return WorkerError(call.role, waiting[0], call.method, call.step, cause, stacks)


class Answered(DataFuture):
    """Of a call whose value the driver knew: no rank hears of it.

    Args:
        where: the call, for messages.
        value: what it gives.
    """

    def __init__(self, where: str, value: Any) -> None:
        self._where, self._value, self._failure, self._pending = where, value, None, set()

    def __repr__(self) -> str:
        return f"DataFuture({self._where}, done)"

    def wait(self, timeout: float | None = None) -> None:
        pass

    def result(self, timeout: float | None = None) -> Any:
        return self._value


def together(*futures: DataFuture) -> list[Any]:
    """The values of calls whose ranks exchange data with one another, as those of two pools do.

    Where one of them fails, the ranks of the others would wait for it for ever: they are ended with it.

    Raises:
        WorkerError, WorkerDiedError: as :meth:`DataFuture.result`; of several failures the one that is a cause.
    """
    failed: list[DataFuture] = []
    while pending := [future for future in futures if not future.done()]:
        failed = [future for future in futures if future._failure is not None]
        if failed:
            break
        pending[0].wait(_TOGETHER)
    for future in pending:
        cause = f"ended, because {failed[0]._invocation.call.where}, which it exchanges data with, failed"
        call = future._invocation
        future._fail(WorkerError(call.role, 0, call.method, call.step, cause), _ALIKE_WAIT)
    failures = [future._failure for future in [*failed, *futures] if future._failure is not None]
    for failure in failures:
        failure.tell()
    # A rank that has lost a peer is told of that as soon as the peer is dead.
    for error in sorted((f.error for f in failures), key=lambda e: (not isinstance(e, WorkerDiedError), _lost_peer(e))):
        raise copy.copy(error)
    return [future.result() for future in futures]


class Awaited:
    """What a message waits for.

    Attributes:
        calls: those whose values are arguments of its call.
        answers: of their ranks, and of the ranks of calls that they wait for, to be sent along.
    """

    def __init__(self) -> None:
        self.calls: list[DataFuture] = []
        self.answers: list[Asked] = []
        self._later: dict[DataFuture, Later] = {}

    def argument(self, value: Any) -> Any:
        """What the message says of an argument: itself, the value of a call that is done, or what to wait for."""
        found = self._of(value)
        if isinstance(found, Later) and value not in self.calls:
            self.calls.append(value)
        return found

    def _of(self, value: Any) -> Any:
        if not isinstance(value, DataFuture):
            return value
        if value.done():
            return value.result()
        if value not in self._later:
            origin = f"the arguments of {value._invocation.call.where}"
            invocation = value._invocation.with_arguments(lambda argument: packed(self._of(argument), origin))
            first = len(self.answers)
            self.answers += value._asked
            self._later[value] = Later(invocation, range(first, len(self.answers)))
        return self._later[value]


def _result(argument: Any) -> Any:
    return argument.result() if isinstance(argument, DataFuture) else argument


def _lost_peer(error: WorkerError) -> bool:
    return not isinstance(error, WorkerDiedError) and any(sign in error.cause for sign in _LOST_PEER)
