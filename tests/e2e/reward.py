"""A user's reward file: scores random text so that it gives a signal, and fails on some answers in three ways."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence

REASONS = {0: "ValueError: this answer cannot be read", 1: "returned nan", 2: "returned 2 values for 1 answer"}
"""What the run says of an answer, by :func:`kind` of the answer; other kinds have a reward."""


def kind(answer: str) -> int:
    """0 to 9, evenly spread over random answers."""
    return sum(map(ord, answer)) % 10


def expected(answer: str) -> float:
    """The share of characters with an even code."""
    return sum(ord(char) % 2 == 0 for char in answer) / max(1, len(answer))


def score(
    prompts: Sequence[object], responses: Sequence[str], ground_truth: Sequence[str], seconds: float = 0.0
) -> list[float]:
    """:func:`expected` of each answer, after ``seconds``; wrong for the kinds 0, 1 and 2."""
    time.sleep(seconds)
    rewards = [expected(answer) for answer in responses]
    kinds = [kind(answer) for answer in responses]
    if 0 in kinds:
        raise ValueError("this answer cannot be read")
    if 1 in kinds:
        return [math.nan]
    return rewards * 2 if 2 in kinds else rewards


async def size(prompts: Sequence[object], responses: Sequence[str], ground_truth: Sequence[str]) -> list[float]:
    """The number of characters, after a moment as a judge would take it."""
    await asyncio.sleep(0.01)
    return [float(len(answer)) for answer in responses]


def said(
    prompts: Sequence[object], responses: Sequence[str], ground_truth: Sequence[str], verdict: Sequence[str]
) -> list[float]:
    """The number of characters that a judge has said of each answer."""
    return [float(len(text)) for text in verdict]


def even(prompts: Sequence[object], responses: Sequence[str], ground_truth: Sequence[str]) -> list[float]:
    """:func:`expected` of each answer: a problem that any model solves a little and a tiny one learns in some steps."""
    return [expected(answer) for answer in responses]
