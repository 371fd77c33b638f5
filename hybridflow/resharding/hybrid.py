"""Training and generation by turns: what one device process holds in memory, and when.

A process whose pool both trains and generates is in one of two phases. Everything large that only one of them needs is
a :class:`Part`, and the parts stand in a fixed order of slots:

    slot              training    generation
    GRADIENTS         held        away
    OPTIMIZER         held        away
    OTHERS            held        away          weights of models that the rollout takes nothing from
    ROLLOUT_WEIGHTS   away        held          restoring them is the transition of weights
    PARAMETERS        held        away          of the model that the rollout's weights are taken from
    KV_CACHE          away        held

Generation is entered from the first slot to the last, training from the last to the first. So what goes makes room
before anything comes, and the trainer's and the rollout's weights meet only while one is filled from the other, with
neither gradients, optimizer state nor KV cache beside them.

A part that a process does not register stays in memory in both phases. Workers enter the phase that a method needs at
its beginning, so a driver never has to. Pure: what releasing, measuring and time are is given from outside.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum

from hybridflow.errors import HybridFlowError, PhaseError

TRAINING, GENERATION = "training", "generation"


class Slot(IntEnum):
    """The place of a part in the order; see the module."""

    GRADIENTS = 0
    OPTIMIZER = 1
    OTHERS = 2
    ROLLOUT_WEIGHTS = 3
    PARAMETERS = 4
    KV_CACHE = 5

    @property
    def phase(self) -> str:
        """The phase that needs it."""
        return GENERATION if self in (Slot.ROLLOUT_WEIGHTS, Slot.KV_CACHE) else TRAINING


@dataclass(frozen=True)
class Part:
    """Something in memory that one phase needs.

    Attributes:
        name: such as ``actor.optimizer``; names metrics and errors.
        release: gives the memory back; None for a part that keeps it, and only has to be made usable again.
        restore: makes the part usable again. Both may be called again after they raised, and then finish what is left.
    """

    name: str
    slot: Slot
    release: Callable[[], object] | None
    restore: Callable[[], object]


@dataclass
class Change:
    """One change of phase: seconds, bytes in use before and after, and (seconds, bytes gained) of each part."""

    phase: str
    seconds: float
    before: int
    after: int
    parts: dict[str, tuple[float, int]] = field(default_factory=dict)


class Phases:
    """The phase of one device process.

    Args:
        used: bytes in use.
        trim: gives freed memory back to the system or the device, called where parts come and go: the next to need
            memory has to ask for it again.
        clock: seconds as a float, never going back.

    Attributes:
        phase: ``training``, ``generation``, or "" where a change has stopped half-way.
    """

    def __init__(
        self,
        used: Callable[[], int] = lambda: 0,
        trim: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.phase = TRAINING
        self._used, self._trim, self._clock = used, trim, clock
        self._parts: dict[str, Part] = {}
        self._held: dict[str, bool | None] = {}  # None: the last move of the part failed
        self._stopped = ""
        self._changes: list[Change] = []

    def add(self, part: Part) -> None:
        """Take part in the changes from now on. The part is in memory; what this phase does not need is released at
        the next :meth:`enter`."""
        if part.name in self._parts:
            raise ValueError(f"part {part.name!r} exists already")
        self._parts[part.name] = part
        self._held[part.name] = True

    def enter(self, phase: str) -> None:
        """Be in ``phase`` with every part where it belongs; free where that is so already.

        After an error the next call, for either phase, moves the part that failed and all that are not in place.

        Raises:
            PhaseError: releasing or restoring a part failed; names it, where that leaves the process, and the fix. An
                error that is one of ours passes as it is.
        """
        waiting = [part for part in self._in_order(phase) if self._held[part.name] != (part.slot.phase == phase)]
        if not waiting:
            self.phase, self._stopped = phase, ""
            return
        stopped_before, started = self._stopped, self._clock()
        if any(part.release is not None for part in waiting):
            self._trim()  # what the last phase has freed is no part's
        before = self._used()
        change = Change(phase, 0.0, before, before)
        self.phase = ""
        for part in waiting:
            verb = "restoring" if part.slot.phase == phase else "releasing"
            self._stopped = f"entering {phase}, {verb} {part.name}"
            try:
                self._move(part, phase, change)
            except HybridFlowError:
                raise
            except Exception as error:
                cause = f"{type(error).__name__}: {error}"
                raise PhaseError(self._stopped, cause, again=self._stopped == stopped_before) from error
        change.seconds, change.after = self._clock() - started, self._used()
        self._changes.append(change)
        self.phase, self._stopped = phase, ""

    def __str__(self) -> str:
        return self.phase or f"stopped while {self._stopped}"

    def drain(self) -> dict[str, float]:
        """What the changes since the last call took, and forget them.

        Returns:
            For each phase that was entered ``phase/<phase>/seconds`` (the sum), ``phase/<phase>/before_gb`` and
            ``after_gb`` (GiB in use, of the last change), and of each part that moved ``phase/<phase>/<part>/seconds``
            (the sum) and ``phase/<phase>/<part>/gb`` (GiB gained, below 0 where memory was freed, of the last change).
        """
        found: dict[str, float] = {}
        for change in self._changes:
            at = f"phase/{change.phase}"
            found[f"{at}/seconds"] = found.get(f"{at}/seconds", 0.0) + change.seconds
            found |= {f"{at}/before_gb": change.before / 2**30, f"{at}/after_gb": change.after / 2**30}
            for name, (seconds, gained) in change.parts.items():
                found[f"{at}/{name}/seconds"] = found.get(f"{at}/{name}/seconds", 0.0) + seconds
                found[f"{at}/{name}/gb"] = gained / 2**30
        self._changes = []
        return found

    def _in_order(self, phase: str) -> list[Part]:
        return sorted(self._parts.values(), key=lambda part: part.slot, reverse=phase == TRAINING)

    def _move(self, part: Part, phase: str, change: Change) -> None:
        started, before = self._clock(), self._used()
        self._held[part.name] = None
        if part.slot.phase == phase:
            part.restore()
        elif part.release is not None:
            part.release()
            self._trim()
        self._held[part.name] = part.slot.phase == phase
        change.parts[part.name] = self._clock() - started, self._used() - before
