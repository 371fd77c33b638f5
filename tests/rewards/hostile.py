"""Reward functions that do what their answer says: everything that goes wrong in users' functions."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import math
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection

import numpy as np

NOT_A_FUNCTION = 3


def obey(prompts, responses, ground_truth):
    match responses[0]:
        case "sleep":
            time.sleep(600)
        case "regex":  # holds the interpreter lock, so no thread or signal handler of Python can stop it
            re.match(r"(a+)+$", "a" * 40 + "b")
        case "child":
            subprocess.Popen(["sleep", ground_truth[0]])
            time.sleep(600)
        case "crash":
            os._exit(3)
        case "segfault":
            ctypes.string_at(0)
        case "exit":
            sys.exit("bye")
        case "raise":
            raise ValueError("no\nsuch answer")
        case "alarm":  # ends its own work, as math libraries do
            _alarm_in(0.1)
            time.sleep(600)
        case "late alarm":  # forgets its alarm, which would go off in the next answer
            _alarm_in(0.3)
        case "slow":
            time.sleep(0.5)
        case "fork":  # and lets its child return
            os.fork()
        case "fork and exit":
            if os.fork() == 0:
                sys.exit(0)
        case "reply":  # to a question that nobody has asked
            pipe = next(thing for thing in gc.get_objects() if isinstance(thing, Connection))
            pipe.send_bytes(pickle.dumps((10**9, [])))
    values = {
        "nan": [math.nan],
        "inf": [math.inf],
        "none": [None],
        "text": ["1"],
        "two": [1.0, 2.0],
        "empty": [],
        "scalar": 1.0,
        "nothing": None,
        "array": np.array(1.0),
        "huge": [10**400],
        "single": np.array([1.0], dtype=np.float32),
        "dict": [{"score": 0.5, "solved": True, "length": 3}],
        "no score": [{"reward": 1.0}],
        "bad extra": [{"score": 1.0, "why": "good"}],
        "bad solved": [{"score": 1.0, "solved": "yes"}],
        "nan score": [{"score": math.nan}],
        "true": [True],
        "pid": [float(os.getpid())],
    }
    return values.get(responses[0], [float(responses[0] == ground_truth[0])])


def _alarm_in(seconds: float) -> None:
    def ring(*_: object) -> None:
        raise TimeoutError("the alarm")

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)


_running: set[str] = set()
_most = 0


async def obey_later(prompts, responses, ground_truth):
    """As :func:`obey`, and what goes wrong only where many answers share a loop."""
    global _most
    answer = responses[0]
    _running.add(str(ground_truth[0]))
    _most = max(_most, len(_running))
    try:
        await asyncio.sleep(0.05)
        match answer:
            case "wait":
                await asyncio.sleep(600)
            case "stubborn":
                while True:
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.sleep(600)
            case "cancel":
                raise asyncio.CancelledError
            case "task sleep":  # blocks the loop in a task of its own
                await asyncio.gather(_sleep(), asyncio.sleep(0))
            case "task exit":
                await asyncio.create_task(_exit())
            case "thread":
                await asyncio.to_thread(time.sleep, 600)
            case "thread regex":  # holds the interpreter lock: nothing else runs, and nothing says who did it
                await asyncio.to_thread(re.match, r"(a+)+$", "a" * 40 + "b")
            case "thread crash":
                threading.Thread(target=lambda: os._exit(3)).start()
                await asyncio.sleep(600)
            case "most":
                return [float(_most)]
        return obey(prompts, responses, ground_truth)
    finally:
        _running.discard(str(ground_truth[0]))


async def _sleep() -> None:
    time.sleep(600)


async def _exit() -> None:
    sys.exit("bye")


class Judge:
    """An object whose call is async."""

    async def __call__(self, prompts, responses, ground_truth):
        await asyncio.sleep(0)
        return [0.5]


judge = Judge()


def returns_an_awaitable(prompts, responses, ground_truth):
    return judge(prompts, responses, ground_truth)


def length(prompts, responses, ground_truth, scale=1.0):
    if responses[0] == "no length":
        return [None]
    return [{"score": scale * len(responses[0]), "characters": len(responses[0])}]


def with_extra(prompts, responses, ground_truth, extra_info, factor=1.0):
    return [factor * info["weight"] for info in extra_info]


def any_columns(prompts, responses, ground_truth, **columns):
    return [{"score": 1.0, "columns": len(columns)}]


def too_few(responses):
    return [1.0]
