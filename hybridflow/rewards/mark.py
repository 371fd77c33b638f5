"""Sixteen bytes that a scoring process shares with its pool: which answer it is working on, and its last sign of life.

Where it stands: written by :mod:`hybridflow.rewards.process`, read by :mod:`hybridflow.rewards.pool`, which has to know
whom to blame when a process hangs or is gone. A message for each answer would cost more than most answers do.
Invariant: the time is written before the number, so a reader never takes a fresh number for one that hangs.
"""

from __future__ import annotations

import mmap
import struct
import time

NOBODY = -1
SIZE = 16


class Mark:
    """The shared memory behind a file descriptor of at least ``SIZE`` bytes."""

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, SIZE)

    def begin(self, number: int) -> None:
        """From now on the process works on this answer."""
        struct.pack_into("=d", self._memory, 8, time.monotonic())
        struct.pack_into("=q", self._memory, 0, number)

    def read(self) -> tuple[int, float]:
        """The answer that the process works on, or NOBODY; and when it last said so, by ``time.monotonic()``."""
        (number,) = struct.unpack_from("=q", self._memory, 0)
        (seconds,) = struct.unpack_from("=d", self._memory, 8)
        return number, seconds
