"""Where a run stands in its prompts.

Where it stands: between a :class:`hybridflow.data.prompts.PromptSource`, which knows the endless order of prompts, and
the steps of a run, which use it up. Invariant: the state is one number, so a checkpoint that keeps ``position`` resumes
with the very prompt that would have come next, however many prompts each step has used.
"""

from __future__ import annotations

from typing import Any

from hybridflow.data.prompts import PromptSource
from hybridflow.errors import DataError
from hybridflow.protocol.data import DataProto


class PromptStream:
    """The prompts of a source, one after the other.

    Args:
        source: the prompts and their order.

    Attributes:
        position: prompts that are used up; the next one to come has this place in the order.
        meta: what every batch of prompts carries in its ``meta_info``.
    """

    def __init__(self, source: PromptSource) -> None:
        self.source = source
        self.position = 0
        self.meta: dict[str, Any] = {}

    def take(self, count: int, step: int) -> DataProto:
        """The next ``count`` prompts, for a training step: see :meth:`PromptSource.batch`; ``meta_info["step"]``."""
        prompts = self.source.batch(self.position, count)
        prompts.meta_info |= {**self.meta, "step": step}
        self.position += count
        return prompts

    def give_back(self, count: int) -> None:
        """The last ``count`` prompts have not been used: they come next.

        Raises:
            DataError: if fewer have been taken.
        """
        if not 0 <= count <= self.position:
            raise DataError(f"give_back({count}): {self.position} prompts have been taken; give back 0 to that many.")
        self.position -= count
