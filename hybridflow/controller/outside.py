"""Device processes seen from outside: where they stand, what their logs say of their end, and how they are interrupted.

Where it stands: ``group.py`` comes here when a call has failed or its time is over. A process may then hang in native
code, so nothing here asks the process itself. What has to be done on a process's node is done there: in the driver
where it is the driver's own node, else in a Ray task that needs no resources. Invariant: nothing here raises; what
cannot be found out is said in the text.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import ray
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hybridflow.controller.process import INTERRUPT, Place

MOST_RANKS = 4
"""Ranks whose stacks are shown."""

MOST_FRAMES = 10
"""Innermost frames of a stack that are shown."""

_NODE_SECONDS = 20.0
"""What all nodes together may take to answer: a node that is busy starts the process of a Ray task in seconds."""

_LOG_SECONDS = 5.0
"""The same for the log of a process that has died; its node may have died with it."""


def stacks(places: Sequence[Place]) -> str:
    """Where the main threads of processes stand, by py-spy; short, innermost frame first."""
    shown = places[:MOST_RANKS]
    parts = [
        f"rank {place.rank} ({place}) stands at\n{text}"
        for place, text in zip(shown, _each(_stack, shown, "    (not known: its node does not answer)"), strict=True)
    ]
    more = len(places) - len(shown)
    return "\n".join([*parts, *([f"(and {more} more ranks)"] if more else [])])


def interrupt(places: Sequence[Place]) -> None:
    """Raise :class:`~hybridflow.controller.process.CallCancelled` in the methods that processes are inside of."""
    _each(_interrupt, places)


def cause_of_death(error: RayError, place: Place | None) -> str:
    """Why a process is gone, in one line: what matters of Ray's long message, and of the process's log.

    Args:
        error: what Ray raised for the call: RayActorError or OutOfMemoryError.
        place: where the process was; None where that is not known any more.
    """
    text = " ".join(str(error).split())
    memory = re.search(r"was ([\d.]+ ?[KMGT]?B) used / ([\d.]+ ?[KMGT]?B) limit", text)
    if memory:
        users = re.findall(r"^(\d+)\t([\d.]+)\t(.+)$", str(error), re.M)
        largest = ", ".join(f"{gb} GB {command[:40]} (pid {pid})" for pid, gb, command in users[:3])
        most = f"; largest: {largest}" if largest else ""
        return f"its node ran out of memory ({memory[1]} used of {memory[2]}), so Ray ended it{most}"
    if isinstance(error, ActorUnavailableError):
        return "the connection to it was lost: a child of its own outlives it, or its node is gone or silent"
    if "killed by `ray.kill`" in text:
        return "it was ended by ray.kill"
    crash = _each(_last_words, [place], seconds=_LOG_SECONDS)[0] if place else ""
    ray_says = re.search(r"Worker exit type: (\S+) Worker exit detail: (.*?)(?: Some common causes.*)?$", text)
    if crash:
        why = f"it crashed: {crash}"
    elif ray_says and "connection error code 2" in text:
        why = f"it was killed, crashed or exited without a word (Ray's {ray_says[1]}, end of file)"
    elif ray_says:
        why = f"{ray_says[1]}: {ray_says[2]}"
    else:
        why = re.sub(r"^.*?(?=The actor (?:is dead|died) because)", "", text)[:300]
    return f"{why}; its log: {place.log}" if place and place.log else why


def _each(
    function: Callable[[Place], str], places: Sequence[Place], unanswered: str = "", seconds: float = _NODE_SECONDS
) -> list[str]:
    """The function's value for each process, found out on its node; ``unanswered`` where that is silent or gone."""
    here = ray.get_runtime_context().get_node_id()
    task = ray.remote(num_cpus=0, max_retries=0)(function)
    asked = {
        place.rank: task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(place.node_id, soft=False)).remote(
            place
        )
        for place in places
        if place.node_id != here
    }
    found = {place.rank: function(place) for place in places if place.node_id == here}
    deadline = time.monotonic() + seconds
    for rank, ref in asked.items():
        try:
            found[rank] = ray.get(ref, timeout=max(0.0, deadline - time.monotonic()))
        except RayError:
            found[rank] = unanswered
    return [found[place.rank] for place in places]


def _stack(place: Place) -> str:
    program = shutil.which("py-spy", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if program is None:
        return "    (not known: py-spy is not installed on its node)"
    try:
        dumped = subprocess.run(
            [program, "dump", "--json", "--pid", str(place.pid)], capture_output=True, text=True, timeout=5
        )
        threads = json.loads(dumped.stdout) if dumped.returncode == 0 else []
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        return f"    (not known: py-spy: {type(error).__name__})"
    for thread in threads:
        if thread["thread_name"] == "MainThread":
            return _frames(thread["frames"])
    said = dumped.stderr.strip().splitlines()
    return f"    (not known: py-spy: {said[0] if said else 'found no main thread'})"


def _frames(frames: Sequence[dict]) -> str:
    """The worker's own frames of a stack: those inside of DeviceProcess."""
    lines = []
    for frame in frames:
        if frame["filename"].endswith("hybridflow/controller/process.py"):
            break
        lines.append(f"    {frame['short_filename'] or frame['filename']}:{frame['line']} in {frame['name']}")
    more = [f"    ... {len(lines) - MOST_FRAMES} more"] if len(lines) > MOST_FRAMES else []
    return "\n".join([*lines[:MOST_FRAMES], *more]) or "    (between two calls)"


def _interrupt(place: Place) -> str:
    with contextlib.suppress(OSError):
        # The process may have ended, and its number may be another's by now.
        if Path(f"/proc/{place.pid}/cmdline").read_bytes().startswith(b"ray::DeviceProcess"):
            _signal_main_thread(place.pid)
    return ""


def _signal_main_thread(pid: int) -> None:
    """Only the main thread runs Python's handlers, and only a signal of its own wakes it from a system call.

    The kernel gives a signal for the whole process to any other thread while the main one is held by a tracer, and
    until it runs again after that: py-spy has just looked at it.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "tgkill"):
        libc.tgkill(pid, pid, int(INTERRUPT))
    else:  # glibc before 2.30
        os.kill(pid, INTERRUPT)


def _last_words(place: Place) -> str:
    """Python's faulthandler, which Ray turns on, writes the reason and the stack of a crash."""
    try:
        text = Path(place.log).read_text(errors="replace")[-20_000:]
    except OSError:
        return ""
    reason = re.search(r"^Fatal Python error: (.+)$", text, re.M)
    frame = re.search(r'^  File "(.+)", line (\d+) in (\S+)$', text[reason.end() :], re.M) if reason else None
    where = f" in {frame[3]} ({Path(frame[1]).name}, line {frame[2]})" if frame else ""
    return f"{reason[1]}{where}" if reason else ""
