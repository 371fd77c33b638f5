"""Processes that score answers, each answer with a deadline, none able to hurt another.

Where it stands: under :class:`hybridflow.rewards.scorer.Scorer`. Each lane is one thread with one process
(:mod:`hybridflow.rewards.process`): it hands over a few answers, waits for each reply until that answer's deadline, and
replaces a process that hung or died. Invariant: one outcome per row, in order, whatever a reward function does; what
one answer does to its process costs no other answer its outcome.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from hybridflow.errors import RewardError
from hybridflow.rewards.functions import Outcome, failure

START_TIMEOUT = 180.0
"""Seconds a process may take to import the reward function."""

HAND_OVER = 0.01
"""Seconds of work that a lane hands over at once: many quick answers (a message each would cost more than they do), one
slow one (so that no other waits behind it while another lane is idle)."""

Row = Mapping[str, Any]


class ScorePool:
    """Scores rows by a reward function in processes of its own.

    Args:
        function: import path, ``package.module:name`` or ``path/file.py:name``.
        options: keyword arguments of every call.
        timeout: seconds one answer may take.
        processes: answers scored at once.

    Raises:
        RewardError: where the function cannot be imported or called.
    """

    def __init__(self, function: str, options: Mapping[str, Any], timeout: float, processes: int) -> None:
        if processes < 1 or timeout <= 0:
            raise RewardError(f"reward.processes={processes} and reward.timeout={timeout} have to be above 0.")
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._lanes = [_Lane(function, dict(options), timeout, self._tasks) for _ in range(processes)]
        for lane in self._lanes:
            lane.start()
        errors = [lane.started() for lane in self._lanes]
        if any(errors):
            self.close()
            raise RewardError(next(error for error in errors if error))

    def score(self, rows: Sequence[Row]) -> list[Outcome]:
        """Score rows; blocks until each has an outcome. At most ``timeout`` a row, plus the start of a new process."""
        tasks = [_Task(row) for row in rows]
        for task in tasks:
            self._tasks.put(task)
        return [task.result() for task in tasks]

    def close(self) -> None:
        """End the processes. Rows still waiting are scored first."""
        for _ in self._lanes:
            self._tasks.put(None)
        for lane in self._lanes:
            lane.join()
        self._lanes = []

    def __enter__(self) -> ScorePool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Task:
    def __init__(self, row: Row) -> None:
        self.row = row
        self._done = threading.Event()
        self._outcome = failure("not scored")

    def finish(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._done.set()

    def result(self) -> Outcome:
        self._done.wait()
        return self._outcome


class _Lane(threading.Thread):
    """One process and the thread that speaks with it.

    The process dies with the thread that started it (see ``process._die_with``), so this thread starts every
    replacement itself and lives as long as the pool.
    """

    def __init__(
        self, function: str, options: dict[str, Any], timeout: float, tasks: queue.SimpleQueue[_Task | None]
    ) -> None:
        super().__init__(name="reward-lane", daemon=True)
        self._function, self._options, self._timeout, self._tasks = function, options, timeout, tasks
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._first_start: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def started(self) -> str | None:
        """Wait for the first process; what is wrong with the reward function, or None."""
        return self._first_start.get()

    def run(self) -> None:
        try:
            self._first_start.put(self._start())
        except Exception as error:
            self._first_start.put(f"a scoring process did not start: {type(error).__name__}: {error}")
        more, count = True, 1
        while more:
            tasks, more = self._take(count)
            start = time.monotonic()
            self._score(tasks)
            per_answer = (time.monotonic() - start) / max(1, len(tasks))
            count = max(1, min(2 * count, int(HAND_OVER / max(per_answer, 1e-6))))
        self._end(grace=0.5)

    def _take(self, count: int) -> tuple[list[_Task], bool]:
        """Wait for a task, take up to ``count`` that are there, and say whether to come back for more."""
        tasks: list[_Task] = []
        with contextlib.suppress(queue.Empty):
            while len(tasks) < count:
                task = self._tasks.get(block=not tasks)
                if task is None:
                    return tasks, False
                tasks.append(task)
        return tasks, True

    def _score(self, tasks: Sequence[_Task]) -> None:
        """Finish every task. Where the process is lost over one, the ones behind it go to the next process."""
        waiting: deque[tuple[_Task, bytes]] = deque()
        for task in tasks:
            try:
                waiting.append((task, pickle.dumps(dict(task.row), protocol=5)))
            except Exception as error:
                task.finish(failure(f"the answer's columns cannot be sent: {type(error).__name__}: {error}"))
        while waiting:
            try:
                error = self._start() if self._pipe is None else None
                if error is None:
                    self._exchange(waiting)
            except Exception as exception:
                self._end()
                error = f"{type(exception).__name__}: {exception}"
            if error is not None:
                waiting.popleft()[0].finish(failure(error))

    def _exchange(self, waiting: deque[tuple[_Task, bytes]]) -> None:
        """Hand over all that wait and take replies, until none waits or the process is lost over the first of them."""
        assert self._pipe is not None
        lost: str | None = None
        try:
            self._pipe.send([question for _, question in waiting])
            while waiting and lost is None:
                if self._pipe.poll(self._timeout):
                    outcome = self._pipe.recv()
                    waiting.popleft()[0].finish(outcome)
                else:
                    self._end()
                    lost = f"timeout after {self._timeout:g} s"
        except (EOFError, OSError):
            lost = f"the scoring process died ({self._end(grace=1)})"
        if lost is not None:
            waiting.popleft()[0].finish(failure(lost))

    def _start(self) -> str | None:
        """Start a process and wait until it has the function; what went wrong, or None."""
        ours, theirs = socket.socketpair()
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            # One answer is one thread's work; the cores belong to the lanes.
            "OMP_NUM_THREADS": "1",
        }
        program = f"from hybridflow.rewards.process import main; main({theirs.fileno()}, {os.getpid()})"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._pipe = Connection(ours.detach())
        try:
            self._pipe.send((self._function, self._options))
            if not self._pipe.poll(START_TIMEOUT):
                self._end()
                return f"reward.function={self._function!r} took more than {START_TIMEOUT:g} s to import."
            error = self._pipe.recv()
        except (EOFError, OSError):
            return f"reward.function={self._function!r}: the process died while importing it ({self._end(grace=1)})"
        if error:
            self._end()
        return error

    def _end(self, grace: float = 0.0) -> str:
        """End the process and whatever it started; how it ended, in words.

        Args:
            grace: seconds it gets to end by itself, where it is known to be ending.
        """
        if self._process is None or self._pipe is None:
            return ""
        self._pipe.close()
        process, self._process, self._pipe = self._process, None, None
        deadline = time.monotonic() + grace
        # Looking without reaping keeps the process id, so the group that is killed is this process's own.
        while not _has_ended(process.pid) and time.monotonic() < deadline:
            time.sleep(0.005)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
