"""A scoring process: imports the reward function once, then answers questions, one at a time.

Where it stands: at the far end of a pipe from :mod:`hybridflow.rewards.pool`, which starts it as a program of its own
(no fork, no re-import of the caller's main module), kills it when an answer takes too long and starts another. The
function runs in the main thread, so it may use signals and alarms. Invariant: each question gets exactly one reply, in
order.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

from hybridflow.errors import RewardError
from hybridflow.rewards.functions import describe_error, failure, load_function, score_one

_PR_SET_PDEATHSIG = 1


def main(descriptor: int, parent: int) -> None:
    """Serve until the other end closes.

    Args:
        descriptor: file descriptor of this end of the pipe.
        parent: process id of the pool's process.
    """
    _die_with(parent)
    os.set_inheritable(descriptor, False)
    pipe = Connection(descriptor)
    path, options = pipe.recv()
    try:
        function = load_function(path, options)
    except RewardError as error:
        pipe.send(str(error))
        return
    except BaseException as error:  # The import of a user's module may raise anything, SystemExit too.
        pipe.send(f"reward.function={path!r}: {describe_error(error)}")
        return
    pipe.send(None)
    while True:
        try:
            questions: list[bytes] = pipe.recv()
        except (EOFError, OSError):
            return
        for question in questions:
            try:
                row: dict[str, Any] = pickle.loads(question)
            except Exception as error:
                pipe.send(failure(f"the answer's columns cannot be read: {describe_error(error)}"))
                continue
            pipe.send(score_one(function, row, options))
        sys.stdout.flush()


def _die_with(parent: int) -> None:
    """Have the kernel end this process with its parent, even while a user's function holds the interpreter."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(0)
