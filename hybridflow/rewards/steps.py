"""Steps inside an answer: which of them each token belongs to.

Where it stands: in the reward role, between the scores that a function gives to the steps of an answer's text and the
tokens that are trained on (the estimator ``grpo_stepwise``).
"""

from __future__ import annotations

from collections.abc import Sequence


def step_numbers(pieces: Sequence[str], end: str) -> list[int]:
    """The number of the step in which each token begins, from 0.

    Args:
        pieces: the text of each token.
        end: what ends a step and belongs to it; it may lie across tokens. Overlapping ones are not counted.
    """
    text = "".join(pieces)
    found, begin, numbers, number = text.find(end), 0, [], 0
    for piece in pieces:
        while found >= 0 and found + len(end) <= begin:
            number += 1
            found = text.find(end, found + len(end))
        numbers.append(number)
        begin += len(piece)
    return numbers
