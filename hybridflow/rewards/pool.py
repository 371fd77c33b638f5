"""Processes that score answers, each answer with a deadline, none able to hurt another.

Where it stands: under :class:`hybridflow.rewards.scorer.Scorer`. Each lane is one thread with one process
(:mod:`hybridflow.rewards.process`): it hands over a few answers, takes replies, and replaces a process that hung or
died. Invariant: one result per row, in order, whatever a reward function does. What one answer does to its process
costs no other answer its result: the process's :class:`Mark` says whose code was running, and the others are asked
again; where it does not say, each is asked again alone.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from hybridflow.errors import RewardError
from hybridflow.importing import describe_error
from hybridflow.rewards.functions import Component, Outcome, failure
from hybridflow.rewards.mark import NOBODY, SIZE, Mark

START_TIMEOUT = 180.0
"""Seconds a process may take to import the reward's functions."""

HAND_OVER = 0.01
"""Seconds of work that a lane hands over at once: many quick answers (a message each would cost more than they do), one
slow one (so that no other waits behind it while another lane is idle)."""

LOOK_AGAIN = 0.05
"""Seconds between looks for more answers while some are in flight."""

Row = Mapping[str, Any]


class ScorePool:
    """Scores rows by reward functions in processes of its own.

    Args:
        components: the functions; each row is scored by all, in order, up to the first that fails.
        timeout: seconds one answer may take.
        processes: processes; plain functions score one answer at once in each.
        in_flight: answers that each process has in flight at once where a function is async.

    Raises:
        RewardError: where a function cannot be imported or called.
    """

    def __init__(self, components: Sequence[Component], timeout: float, processes: int, in_flight: int) -> None:
        if processes < 1 or timeout <= 0 or in_flight < 1:
            raise RewardError(
                f"reward.processes={processes}, reward.timeout={timeout} and reward.in_flight={in_flight} have to be "
                "above 0."
            )
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._lanes = [_Lane(components, timeout, in_flight, self._tasks) for _ in range(processes)]
        for lane in self._lanes:
            lane.start()
        errors = [lane.started() for lane in self._lanes]
        if any(errors):
            self.close()
            raise RewardError(next(error for error in errors if error))

    def score(self, rows: Sequence[Row]) -> list[list[Outcome]]:
        """Score rows; blocks until each has a result: an outcome of each component, up to the first that failed."""
        left = _Countdown(len(rows))
        tasks = [_Task(row, left) for row in rows]
        for task in tasks:
            self._tasks.put(task)
        left.wait()
        return [task.outcomes for task in tasks]

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


class _Countdown:
    """Of things to be done: who waits for the last is woken once."""

    def __init__(self, number: int) -> None:
        self._left, self._lock, self._over = number, threading.Lock(), threading.Event()
        if not number:
            self._over.set()

    def one_is_done(self) -> None:
        with self._lock:
            self._left -= 1
            if not self._left:
                self._over.set()

    def wait(self) -> None:
        self._over.wait()


class _Task:
    def __init__(self, row: Row, left: _Countdown) -> None:
        self.row, self._left = row, left
        self.outcomes: list[Outcome] = []

    def finish(self, outcomes: list[Outcome]) -> None:
        self.outcomes = outcomes
        self._left.one_is_done()

    def fail(self, reason: str) -> None:
        self.finish([failure(reason)])


class _Lane(threading.Thread):
    """One process and the thread that speaks with it.

    The process dies with the thread that started it (see ``process._die_with``), so this thread starts every
    replacement itself and lives as long as the pool.
    """

    def __init__(
        self,
        components: Sequence[Component],
        timeout: float,
        in_flight: int,
        tasks: queue.SimpleQueue[_Task | None],
    ) -> None:
        super().__init__(name="reward-lane", daemon=True)
        self._components, self._timeout, self._in_flight, self._tasks = components, timeout, in_flight, tasks
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._first_start: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._too_late = f"timeout after {timeout:g} s"
        self._is_async = self._closing = False
        self._outlived = False  # the process may still run what was given up; it is replaced when it is idle
        self._out: dict[int, _Task] = {}  # handed over and not yet answered, by number
        self._number = 0
        self._again: deque[_Task] = deque()  # handed over to a process that was lost over another one
        self._suspects: deque[_Task] = deque()  # one of them did it: each goes alone
        self._alone = False
        self._at_once, self._sent = 1, 0.0

    def started(self) -> str | None:
        """Wait for the first process; what is wrong with the reward's functions, or None."""
        return self._first_start.get()

    def run(self) -> None:
        self._first_start.put(self._start())
        while self._hand_over():
            if self._out:
                self._collect()
        self._end(grace=0.5)

    # -- handing over

    def _hand_over(self) -> bool:
        """Give the process what it has room for; False once the pool closes and nothing is left to do."""
        if self._outlived and not self._out and self._tasks.empty():
            self._end()
            self._start()
        tasks = self._take()
        error = self._start() if tasks and self._pipe is None else None
        if error is not None:
            tasks.pop(0).fail(error)
            self._again.extend(tasks)
            return True
        questions: list[tuple[int, bytes]] = []
        for task in tasks:
            try:
                questions.append((self._number, pickle.dumps(dict(task.row), protocol=5)))
            except Exception as error:
                task.fail(f"the answer's columns cannot be sent: {type(error).__name__}: {error}")
                continue
            self._out[self._number] = task
            self._number += 1
        if questions:
            assert self._pipe is not None
            self._sent = time.monotonic()
            with contextlib.suppress(OSError):  # a process that is gone is noticed where its replies are taken
                self._pipe.send(questions)
        return bool(self._out or self._again or self._suspects) or not self._closing

    def _take(self) -> list[_Task]:
        """Tasks to hand over now; waits for one where nothing else is to be done."""
        if self._suspects or self._alone:
            if self._out:
                return []
            self._alone = bool(self._suspects)
            if self._alone:
                return [self._suspects.popleft()]
        room = self._in_flight - len(self._out) if self._is_async else 0 if self._out else self._at_once
        tasks: list[_Task] = []
        with contextlib.suppress(queue.Empty):
            while len(tasks) < room:
                if self._again:
                    tasks.append(self._again.popleft())
                    continue
                if self._closing:
                    break
                task = self._tasks.get(block=not (tasks or self._out))
                if task is None:
                    self._closing = True
                    break
                tasks.append(task)
        return tasks

    # -- taking replies

    def _collect(self) -> None:
        """Take replies; find out whether the process is lost, and over which answer."""
        assert self._pipe is not None
        count = len(self._out)
        try:
            while self._out:
                if not self._replies.poll(self._patience() * 1e3):
                    number, at = self._mark.read()
                    if time.monotonic() - max(at, self._sent) > self._timeout:
                        self._end()
                        return self._lost(number, self._too_late)
                    return
                number, outcomes = pickle.loads(self._pipe.recv_bytes())
                self._out.pop(number).finish(outcomes)
                if self._is_async:
                    self._outlived |= outcomes[-1].error == self._too_late
                    return
        except (EOFError, OSError):
            how = self._end(grace=1)
            return self._lost(self._mark.read()[0], f"the scoring process died ({how})")
        except Exception as error:  # something else was written into the pipe, or a reply to no question
            self._end()
            return self._lost(NOBODY, f"the scoring process sent what is no reply ({describe_error(error)})")
        per_answer = (time.monotonic() - self._sent) / count
        self._at_once = max(1, min(2 * self._at_once, int(HAND_OVER / max(per_answer, 1e-6))))

    def _patience(self) -> float:
        """Seconds to wait for a reply before looking at something else."""
        left = max(self._mark.read()[1], self._sent) + self._timeout - time.monotonic()
        return max(0.001, min(left, LOOK_AGAIN) if self._is_async else left)

    def _lost(self, number: int, reason: str) -> None:
        """The process is gone over the answer ``number``, or over NOBODY knows which. The others are asked again."""
        guilty = self._out.pop(number, None)
        if guilty is None and number == NOBODY and len(self._out) == 1:
            guilty = self._out.popitem()[1]
        if guilty is not None:
            guilty.fail(reason)
        # A number that is not out is an answer that was given up before, so none of those that are out is to blame.
        known = guilty is not None or number != NOBODY
        (self._again if known else self._suspects).extend(self._out.values())
        self._out.clear()

    # -- the process

    def _start(self) -> str | None:
        """Start a process and wait until it has the functions; what went wrong, or None."""
        try:
            return self._try_start()
        except (EOFError, OSError) as error:
            how = self._end(grace=1) or f"{type(error).__name__}: {error}"
            return f"{self._names()}: the process died while importing it ({how})"

    def _try_start(self) -> str | None:
        ours, theirs = socket.socketpair()
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            # One answer is one thread's work; the cores belong to the lanes.
            "OMP_NUM_THREADS": "1",
        }
        with theirs, tempfile.TemporaryFile() as memory:
            memory.truncate(SIZE)
            self._mark = Mark(memory.fileno())
            descriptors = theirs.fileno(), memory.fileno()
            program = "from hybridflow.rewards.process import main; main({}, {}, {})".format(*descriptors, os.getpid())
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", program],
                pass_fds=descriptors,
                env=environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._pipe = Connection(ours.detach())
        self._replies = select.poll()  # that of the pipe makes a new selector for each reply
        self._replies.register(self._pipe.fileno(), select.POLLIN)
        self._pipe.send((self._components, self._timeout))
        if not self._pipe.poll(START_TIMEOUT):
            self._end()
            return f"{self._names()} took more than {START_TIMEOUT:g} s to import."
        error, self._is_async = self._pipe.recv()
        self._outlived = False
        if error:
            self._end()
        return error

    def _names(self) -> str:
        return ", ".join(f"{part.setting}.function={part.function!r}" for part in self._components)

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
