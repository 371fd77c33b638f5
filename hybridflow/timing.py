"""Where a step's seconds go: named timers that a driver puts around the parts of its loop.

Step name = timer name = metric prefix. The invariant: ``time/step`` is the sum of all the other times of a flush, so
nothing is counted twice and what no timer covers shows as ``time/other``. The beginning and end of each use are kept
for the run's trace (``hybridflow.trace``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hybridflow.errors import HybridFlowError, nearest

STEP_NAMES = (
    "generate",
    "reward",
    "log_probs",
    "ref_log_probs",
    "teacher_log_probs",
    "values",
    "scores",
    "advantage",
    "update_critic",
    "update_actor",
    "sync_weights",
    "update_reference",
    "evaluate",
    "save",
)


_EPOCH = time.time() - time.perf_counter()


def now() -> float:
    """Seconds since the epoch, never going back. Processes of one node agree, those of several as their clocks do."""
    return _EPOCH + time.perf_counter()


class Timer:
    """Accumulates seconds by name, from its construction or the last :meth:`flush` on.

    Args:
        clock: seconds as a float, never going back.

    Attributes:
        spans: (name, begin, end) of each use; whoever reads them empties the list.
    """

    def __init__(self, clock: Callable[[], float] = now) -> None:
        self.spans: list[tuple[str, float, float]] = []
        self._clock = clock
        self._started = clock()
        self._seconds: dict[str, float] = {}
        self._inside: str | None = None

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time what happens inside; several uses of one name add up.

        Raises:
            HybridFlowError: for an unknown name, or inside another timer, whose seconds would count twice.
        """
        if name not in STEP_NAMES:
            raise HybridFlowError(f"timer({name!r}) is not the name of a step.{nearest(name, STEP_NAMES)}")
        if self._inside is not None:
            raise HybridFlowError(f"timer({name!r}) stands inside timer({self._inside!r}): end that one first.")
        self._inside = name
        begin = self._clock()
        try:
            yield
        finally:
            end = self._clock()
            self._seconds[name] = self._seconds.get(name, 0.0) + end - begin
            self.spans.append((name, begin, end))
            self._inside = None

    def flush(self) -> dict[str, float]:
        """``time/<name>`` for each name used, ``time/other`` and ``time/step``; then start anew."""
        now = self._clock()
        step = now - self._started
        found = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        found["time/other"] = step - sum(self._seconds.values())
        found["time/step"] = step
        self._started, self._seconds = now, {}
        return found
