"""A reward function that does what its answer says: everything that goes wrong in users' functions."""

from __future__ import annotations

import ctypes
import math
import os
import re
import subprocess
import sys
import time

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
    values = {
        "nan": [math.nan],
        "inf": [math.inf],
        "none": [None],
        "text": ["1"],
        "two": [1.0, 2.0],
        "empty": [],
        "scalar": 1.0,
        "nothing": None,
        "dict": [{"score": 0.5, "solved": True, "length": 3}],
        "no score": [{"reward": 1.0}],
        "bad extra": [{"score": 1.0, "why": "good"}],
        "bad solved": [{"score": 1.0, "solved": "yes"}],
        "nan score": [{"score": math.nan}],
        "true": [True],
        "pid": [float(os.getpid())],
    }
    return values.get(responses[0], [float(responses[0] == ground_truth[0])])


def with_extra(prompts, responses, ground_truth, extra_info, factor=1.0):
    return [factor * info["weight"] for info in extra_info]


def any_columns(prompts, responses, ground_truth, **columns):
    return [{"score": 1.0, "columns": len(columns)}]


def too_few(responses):
    return [1.0]


async def later(prompts, responses, ground_truth):
    return [1.0]
