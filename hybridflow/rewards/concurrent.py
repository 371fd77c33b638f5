"""Async reward functions: many answers in flight in one scoring process, each with its own deadline.

Where it stands: the other way of :mod:`hybridflow.rewards.process` to serve. All answers share one event loop, so that
a client (of a judge, a sandbox, a search engine) is made once a process. Invariants: every step of every task carries
the number of its answer in the :class:`Mark`, so that one that blocks the loop or kills the process is known; time
that other answers spend in the loop is not on an answer's clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import time
from collections import defaultdict
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from multiprocessing.connection import Connection
from typing import Any

from hybridflow.importing import describe_error
from hybridflow.rewards.functions import Call, Outcome, end_a_fork, failure, score_row, stop_alarms
from hybridflow.rewards.mark import NOBODY, Mark

MOST_THREADS = 1024
"""For ``asyncio.to_thread``; one that hangs keeps its thread until the process is replaced."""

_answer: ContextVar[int] = ContextVar("answer", default=NOBODY)


def serve_async(pipe: Connection, calls: Sequence[Call], timeout: float, mark: Mark) -> None:
    """Serve until the other end of the pipe closes.

    Args:
        calls: the reward's functions; plain ones among them hold the loop while they run.
        timeout: seconds one answer may take.
    """
    asyncio.run(_Loop(pipe, calls, timeout, mark).run())


class _Loop:
    def __init__(self, pipe: Connection, calls: Sequence[Call], timeout: float, mark: Mark) -> None:
        self._pipe, self._calls, self._timeout, self._mark = pipe, calls, timeout, mark
        self._own = os.getpid()
        self._busy: defaultdict[int, float] = defaultdict(float)
        self._total_busy = 0.0
        self._answers: set[asyncio.Task[None]] = set()
        # Replies go out in a thread: the pool may be sending while this end's buffer is full.
        self._sender = ThreadPoolExecutor(1)
        self._closed = asyncio.Event()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(MOST_THREADS))
        loop.set_task_factory(self._watched_task)
        loop.add_reader(self._pipe.fileno(), self._read)
        while not self._closed.is_set():
            self._mark.begin(NOBODY)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closed.wait(), min(0.25, self._timeout / 4))

    def _read(self) -> None:
        try:
            questions: list[tuple[int, bytes]] = self._pipe.recv()
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(self._pipe.fileno())
            self._closed.set()
            return
        for number, question in questions:
            task = asyncio.create_task(self._reply(number, question))
            self._answers.add(task)
            task.add_done_callback(self._answers.discard)

    async def _reply(self, number: int, question: bytes) -> None:
        outcomes = await self._outcomes(number, question)
        self._sender.submit(self._pipe.send_bytes, pickle.dumps((number, outcomes)))

    async def _outcomes(self, number: int, question: bytes) -> list[Outcome]:
        _answer.set(number)  # the tasks that are made from here on belong to the answer
        task = asyncio.create_task(score_row(self._calls, question))
        start, others_at_start = time.monotonic(), self._total_busy
        left = self._timeout
        while left > 0 and not task.done():
            await asyncio.wait({task}, timeout=left)
            others = self._total_busy - others_at_start - self._busy[number]
            left = self._timeout - (time.monotonic() - start - others)
        self._busy.pop(number, None)
        if not task.done():
            task.cancel()
            return [failure(f"timeout after {self._timeout:g} s")]
        try:
            return task.result()
        except BaseException as error:  # cancelled from inside, or an alarm that a function left behind
            return [failure(describe_error(error))]

    def _watched_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        number = _answer.get()
        return asyncio.Task(coroutine if number == NOBODY else _Watched(coroutine, number, self), loop=loop, **options)

    def step(self, number: int, advance: Any, arguments: Sequence[Any]) -> Any:
        """One step of a task, on the clock of its answer."""
        begin = time.monotonic()
        self._mark.begin(number)
        try:
            return advance(*arguments)
        except (SystemExit, KeyboardInterrupt) as error:  # would end the loop, and with it every other answer
            raise RuntimeError(describe_error(error)) from error
        finally:
            end_a_fork(self._own)
            self._mark.begin(NOBODY)
            seconds = time.monotonic() - begin
            self._busy[number] += seconds
            self._total_busy += seconds
            stop_alarms()


class _Watched(Coroutine[Any, Any, Any]):
    """A coroutine whose steps are known to belong to an answer."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], number: int, loop: _Loop) -> None:
        self._coroutine, self._number, self._loop = coroutine, number, loop

    def send(self, value: Any) -> Any:
        return self._loop.step(self._number, self._coroutine.send, (value,))

    def throw(self, *error: Any) -> Any:
        return self._loop.step(self._number, self._coroutine.throw, error)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Any:
        return self._coroutine.__await__()
