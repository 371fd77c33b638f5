"""Every error a user can meet, in one place.

A message names the field or key, the value, the rule and the fix. All classes here pickle, because errors raised in a
device process travel back to the driver through Ray: an exception keeps the arguments it was built from.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HybridFlowError(Exception):
    """Base of every error raised on purpose by HybridFlow."""


class ConfigError(HybridFlowError, ValueError):
    """A setting is wrong: raised before anything expensive starts."""


class DataError(HybridFlowError, ValueError):
    """A batch, a column or a data row breaks its contract."""


class MissingColumn(DataError, KeyError):
    """A batch has no column of that name; a KeyError too, for ``get`` and ``pop`` of a mapping."""

    def __str__(self) -> str:
        return str(self.args[0])


class ModelError(HybridFlowError, ValueError):
    """A checkpoint or a tokenizer cannot be used as asked."""


class CheckpointError(HybridFlowError, RuntimeError):
    """A checkpoint cannot be written or read."""


class RunFolderError(HybridFlowError, RuntimeError):
    """What a run reports cannot be written to its folder."""


class PlacementError(HybridFlowError, RuntimeError):
    """The cluster cannot hold what the placement asks for."""


class RewardError(HybridFlowError, RuntimeError):
    """A reward function cannot be used at all (a single failing answer is counted, not raised)."""


class PhaseError(HybridFlowError, RuntimeError):
    """A device process could not change between training and generation.

    Args:
        state: where the change has stopped.
        cause: one line, ``TypeName: message``.
        again: whether the attempt before stopped at the same place.
    """

    def __init__(self, state: str, cause: str, again: bool = False) -> None:
        super().__init__(state, cause, again)
        self.state, self.cause, self.again = state, cause, again

    def __str__(self) -> str:
        fix = (
            "It stopped there the last time too: start again from the last checkpoint"
            if self.again
            else "The next call goes on from there. If it is memory that is missing, start again"
        )
        return (
            f"stopped while {self.state}: {self.cause}. {fix} with a smaller rollout.kv_cache_gb, smaller "
            f"micro-batches or more in memory.offload."
        )


class WorkerError(HybridFlowError, RuntimeError):
    """A method of a role raised in a device process.

    Args:
        role: name of the role, such as ``"actor"``.
        rank: rank of the device process in its pool.
        method: the method that was called.
        step: training step of the run, or None outside of a step.
        cause: one line, ``TypeName: message``.
        traceback: the worker's own traceback as text.
    """

    def __init__(self, role: str, rank: int, method: str, step: int | None, cause: str, traceback: str = "") -> None:
        super().__init__(role, rank, method, step, cause, traceback)
        self.role, self.rank, self.method, self.step = role, rank, method, step
        self.cause, self.traceback = cause, traceback

    @property
    def headline(self) -> str:
        """The error without the traceback."""
        where = "" if self.step is None else f" in step {self.step}"
        return f"{self.role}.{self.method} failed on rank {self.rank}{where}: {self.cause}"

    @property
    def explains_itself(self) -> bool:
        """Whether the worker raised a message for the user, to which its traceback adds nothing."""
        own = (ConfigError, ModelError, CheckpointError, RewardError, PhaseError)
        return self.cause.partition(":")[0] in {kind.__name__ for kind in own}

    def __str__(self) -> str:
        if not self.traceback:
            return self.headline
        return f"{self.headline}\n\n--- traceback of {self.role} rank {self.rank} ---\n{self.traceback}"


class WorkerDiedError(WorkerError):
    """The device process that hosts a role is gone (killed, out of memory, node lost)."""


MOST_NAMES = 40
"""A message lists all known names up to this many."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Say what the user may have meant: ``" Did you mean 'lr'? Known: lr, betas."``; of many names, the closest few."""
    names = sorted(str(k) for k in known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    if len(names) > MOST_NAMES:
        shown = difflib.get_close_matches(name, names, n=5, cutoff=0.0)
        return f"{hint} Closest of {len(names)}: {', '.join(shown)}."
    return f"{hint} Known: {', '.join(names) or '(none)'}."
