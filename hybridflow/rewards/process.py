"""A scoring process: imports the reward's functions once, then answers questions.

Where it stands: at the far end of a pipe from :mod:`hybridflow.rewards.pool`, which starts it as a program of its own
(no fork, no re-import of the caller's main module), kills it when it hangs and starts another. Functions run in the
main thread, so they may use signals and alarms: plain ones one answer at a time, async ones many at once
(:mod:`hybridflow.rewards.concurrent`). Invariant: each question gets one reply, and at each moment the shared
:class:`Mark` names the answer whose code is running.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
from multiprocessing.connection import Connection

from hybridflow.errors import RewardError
from hybridflow.importing import describe_error
from hybridflow.rewards.functions import Call, Outcome, end_a_fork, failure, score_row
from hybridflow.rewards.mark import NOBODY, Mark

_PR_SET_PDEATHSIG = 1


def main(descriptor: int, mark_descriptor: int, parent: int) -> None:
    """Serve until the other end closes.

    Args:
        descriptor: file descriptor of this end of the pipe.
        mark_descriptor: file descriptor of the mark's memory.
        parent: process id of the pool's process.
    """
    _die_with(parent)
    os.set_inheritable(descriptor, False)
    pipe, mark = Connection(descriptor), Mark(mark_descriptor)
    os.close(mark_descriptor)
    components, timeout = pipe.recv()
    try:
        calls = [Call(component) for component in components]
    except RewardError as error:
        pipe.send((str(error), False))
        return
    except BaseException as error:  # The import of a user's module may raise anything, SystemExit too.
        pipe.send((f"reward: {describe_error(error)}", False))
        return
    is_async = any(call.is_async for call in calls)
    pipe.send((None, is_async))
    if is_async:
        from hybridflow.rewards.concurrent import serve_async  # asyncio takes a while to import

        serve_async(pipe, calls, timeout, mark)
    else:
        _serve(pipe, calls, mark)


def _serve(pipe: Connection, calls: list[Call], mark: Mark) -> None:
    own = os.getpid()
    while True:
        try:
            questions: list[tuple[int, bytes]] = pipe.recv()
        except (EOFError, OSError):
            return
        for number, question in questions:
            mark.begin(number)
            outcomes = _outcomes(calls, question)
            end_a_fork(own)
            mark.begin(NOBODY)
            pipe.send_bytes(pickle.dumps((number, outcomes)))
        sys.stdout.flush()


def _outcomes(calls: list[Call], question: bytes) -> list[Outcome]:
    scoring = score_row(calls, question)
    try:
        scoring.send(None)
    except StopIteration as done:
        return done.value
    scoring.close()
    return [failure("returned an awaitable, not a list; declare the function with async def")]


def _die_with(parent: int) -> None:
    """Have the kernel end this process with its parent, even while a user's function holds the interpreter."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(0)
