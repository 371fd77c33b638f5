"""Processes that score answers, each answer with a deadline, none able to hurt another.

Where it stands: under :class:`hybridflow.rewards.scorer.Scorer`. Each lane is one thread with one process
(:mod:`hybridflow.rewards.process`): it hands over an answer, waits for the reply until the deadline, and replaces a
process that hung or died. Invariant: one outcome per row, in order, whatever a reward function does.
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
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from hybridflow.errors import RewardError
from hybridflow.rewards.functions import Outcome, failure

START_TIMEOUT = 180.0
"""Seconds a process may take to import the reward function."""

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
        while (task := self._tasks.get()) is not None:
            try:
                outcome = self._score(task.row)
            except Exception as error:
                self._end()
                outcome = failure(f"{type(error).__name__}: {error}")
            task.finish(outcome)
        self._end(grace=0.5)

    def _score(self, row: Row) -> Outcome:
        try:
            question = pickle.dumps(dict(row), protocol=5)
        except Exception as error:
            return failure(f"the answer's columns cannot be sent: {type(error).__name__}: {error}")
        error_at_start = self._start() if self._pipe is None else None
        if error_at_start or self._pipe is None:
            return failure(error_at_start or "the scoring process did not start")
        try:
            self._pipe.send_bytes(question)
            if not self._pipe.poll(self._timeout):
                self._end()
                return failure(f"timeout after {self._timeout:g} s")
            return self._pipe.recv()
        except (EOFError, OSError):
            return failure(f"the scoring process died ({self._end(grace=1)})")

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
