"""The timeline of a run, ``trace.json``: what the driver waited for, and what each rank did meanwhile.

Chrome's trace event format (JSON array of complete events), which https://ui.perfetto.dev and chrome://tracing open.
The format allows the array to stay open, so a run appends the events of each step as lines and a run that was killed
leaves a file that still opens. ``pid`` stands for a device process and ``tid`` for a role; ``pid`` 0 is the driver.
Pure: ``tracking`` owns the file.

Invariant: all times are of :func:`hybridflow.timing.now`, measured where the work was done, so spans of processes on
one node compare exactly; between nodes they are as far apart as the nodes' clocks.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

HEAD, END = b"[\n", b",\n"
"""What the file begins with, and how each line ends."""

_TAIL_BYTES = 8 * 2**20


class Span(NamedTuple):
    """One call on one rank.

    Attributes:
        pool, rank: the device process.
        step: training step in which the driver made the call; None outside of a run.
        begin, end: seconds since the epoch.
        peak: most bytes that the process held in between; 0 of a call too short to ask.
    """

    pool: str
    rank: int
    role: str
    method: str
    step: int | None
    begin: float
    end: float
    peak: int


class Events:
    """Makes events of spans; names each process and role once, before its first event."""

    def __init__(self) -> None:
        self._named: set[tuple[int, int | None]] = set()

    def of_step(
        self, step: int, timers: Iterable[tuple[str, float, float]], spans: Iterable[Span]
    ) -> Iterator[dict[str, Any]]:
        """The events to append.

        Args:
            step: that is being reported; a resumed run drops events of later steps.
            timers: (name, begin, end) of the driver.
            spans: calls that have ended since the last report.
        """
        for name, begin, end in timers:
            yield from self._names(step, 0, "driver", 0, "timers", order=0)
            yield {"step": step, **_complete(name, begin, end, 0, 0)}
        for span in spans:
            pid, tid = _number(f"{span.pool} {span.rank}"), _number(span.role)
            yield from self._names(step, pid, f"pool {span.pool} rank {span.rank}", tid, span.role, order=span.rank + 1)
            event = _complete(f"{span.role}.{span.method}", span.begin, span.end, pid, tid)
            yield {"step": step, **event, "args": {"step": span.step, "peak_gb": round(span.peak / 2**30, 4)}}

    def _names(self, step: int, pid: int, process: str, tid: int, role: str, order: int) -> Iterator[dict[str, Any]]:
        for key, kind, args in (
            ((pid, None), "process_name", {"name": process}),
            ((pid, None), "process_sort_index", {"sort_index": order}),
            ((pid, tid), "thread_name", {"name": role}),
        ):
            if key not in self._named:
                yield {"step": step, "name": kind, "ph": "M", "pid": pid, "tid": tid, "args": args}
        self._named |= {(pid, None), (pid, tid)}


def read_trace(path: Path, tail_bytes: int = _TAIL_BYTES) -> list[dict[str, Any]]:
    """The events of a ``trace.json``, with their names resolved; empty where there is no file.

    Args:
        tail_bytes: how much of the file's end is read, since that of a long run is large.

    Returns:
        ``name``, ``begin`` and ``end`` in seconds, ``step`` (of the report), ``process`` and ``role`` as text, and of a
        call ``peak_gb``. Ordered as written.
    """
    if not path.is_file():
        return []
    names: dict[tuple[int, int | None], str] = {}
    found = []
    for event in _events(path, tail_bytes):
        if event["ph"] == "M":
            key = (event["pid"], event["tid"] if event["name"] == "thread_name" else None)
            if event["name"] != "process_sort_index":
                names[key] = event["args"]["name"]
            continue
        begin = event["ts"] / 1e6
        found.append(
            {
                "name": event["name"],
                "begin": begin,
                "end": begin + event["dur"] / 1e6,
                "step": event["step"],
                "process": names.get((event["pid"], None), str(event["pid"])),
                "role": names.get((event["pid"], event["tid"]), str(event["tid"])),
                "peak_gb": event.get("args", {}).get("peak_gb"),
            }
        )
    return found


def idle_shares(events: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Share of the driver's time in which each process ran no call.

    Args:
        events: as of :func:`read_trace`; the driver's give the first and the last moment.

    Returns:
        By process; overlapping calls of one process count once.
    """
    driver = [e for e in events if e["process"] == "driver"]
    if not driver:
        return {}
    first, last = min(e["begin"] for e in driver), max(e["end"] for e in driver)
    shares = {}
    for process in dict.fromkeys(e["process"] for e in events if e["process"] != "driver"):
        busy, reached = 0.0, first
        for e in sorted((e for e in events if e["process"] == process), key=lambda e: e["begin"]):
            busy += max(0.0, min(e["end"], last) - max(e["begin"], reached))
            reached = max(reached, e["end"])
        shares[process] = 1.0 - busy / (last - first) if last > first else 0.0
    return shares


def _events(path: Path, tail_bytes: int) -> Iterator[dict[str, Any]]:
    """Names from the beginning of the file, where they stand, then the events of its end."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        if size > tail_bytes:
            head = file.read(2**20).splitlines()[:-1]
            yield from (event for event in map(_parsed, head) if event and event["ph"] == "M")
            file.seek(size - tail_bytes)
            file.readline()  # the rest of a line
        yield from (event for event in map(_parsed, file) if event)


def _parsed(line: bytes) -> dict[str, Any] | None:
    """An event, or None for the array's bracket and for a torn line."""
    try:
        event = json.loads(line.strip().removesuffix(b","))
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


def _complete(name: str, begin: float, end: float, pid: int, tid: int) -> dict[str, Any]:
    return {
        "name": name,
        "ph": "X",
        "ts": round(begin * 1e6),
        "dur": round((end - begin) * 1e6),
        "pid": pid,
        "tid": tid,
    }


def _number(name: str) -> int:
    """The same in every process and after a resume."""
    return zlib.crc32(name.encode()) & 0x7FFFFFFF
