"""A user's reward file: scores random text so that it gives a signal, and fails on some answers."""

from __future__ import annotations

import time
from collections.abc import Sequence

UNREADABLE = "this answer cannot be read"


def is_readable(answer: str) -> bool:
    """False for about every fifth random answer."""
    return sum(map(ord, answer)) % 5 != 0


def expected(answer: str) -> float:
    """The share of characters with an even code."""
    return sum(ord(char) % 2 == 0 for char in answer) / max(1, len(answer))


def score(
    prompts: Sequence[object], responses: Sequence[str], ground_truth: Sequence[str], seconds: float = 0.0
) -> list[float]:
    """:func:`expected` of each answer, after ``seconds``; raises for one that is not readable."""
    time.sleep(seconds)
    for answer in responses:
        if not is_readable(answer):
            raise ValueError(UNREADABLE)
    return [expected(answer) for answer in responses]
