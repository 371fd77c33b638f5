"""What a language model that judges answers is asked, and how a score is read from what it says.

Where it stands: the judge's worker (:mod:`hybridflow.workers.judge`) asks; its verdicts reach the functions of the
reward as the column ``verdict``, and :func:`score` is such a function, run by the scoring processes like any other.
Invariant: a verdict from which nothing can be read is never a score of 0: the answer has no reward, and says why.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

MARKS = ("prompt", "response", "ground_truth")
"""What ``judge.question`` may hold in braces."""

_LAST = r"(?i)\bscore\W*?[:=]\W*?(-?\d+(?:\.\d+)?)"


def question_of(template: str, prompt: Sequence[dict[str, str]], response: str, ground_truth: Any) -> str:
    """The question about one answer.

    Args:
        template: a text with :data:`MARKS` in braces; other braces stay.
        prompt: the conversation. A single message stands for itself; of several, each has its role before it.
        response, ground_truth: what they are replaced with; marks inside of them stay as they are.
    """
    told = [m["content"] if len(prompt) == 1 else f"{m['role']}: {m['content']}" for m in prompt]
    texts = {"prompt": "\n".join(told), "response": response, "ground_truth": str(ground_truth)}
    return re.sub(rf"\{{({'|'.join(MARKS)})\}}", lambda mark: texts[mark[1]], template)


def score(
    prompts: Sequence[Any],
    responses: Sequence[str],
    ground_truth: Sequence[Any],
    verdict: Sequence[str],
    pattern: str = _LAST,
    lowest: float = 0.0,
    highest: float = 10.0,
) -> list[dict[str, Any]]:
    """The number of a verdict, from 0 (``lowest``) to 1 (``highest``).

    Args:
        prompts, responses, ground_truth: not read.
        verdict: what the judge says.
        pattern: regular expression whose first group is the number; its last match counts. The default finds
            ``Score: 7``.
        lowest, highest: the judge's scale.

    Returns:
        ``score``, and as ``judged`` the number on the judge's own scale.

    Raises:
        ValueError: an option is wrong; the verdict holds no such number, or one outside of the scale.
    """
    if not lowest < highest:
        raise ValueError(f"lowest={lowest}, highest={highest}: a scale goes from a lower to a higher number.")
    try:
        has_number = re.compile(pattern).groups > 0
    except re.error as error:
        raise ValueError(f"pattern={pattern!r}: {error}. Write a regular expression.") from None
    if not has_number:
        raise ValueError(f"pattern={pattern!r}: has no group. Put the number in parentheses, such as 'Score: (\\d+)'.")
    found = []
    for text in verdict:
        matches = [match[1] for match in re.finditer(pattern, text)]
        if not matches:
            raise ValueError(f"the verdict holds no score: {text[-200:]!r}")
        number = float(matches[-1])
        if not lowest <= number <= highest:
            raise ValueError(f"the verdict's score {number:g} is not from {lowest:g} to {highest:g}: {text[-200:]!r}")
        found.append({"score": (number - lowest) / (highest - lowest), "judged": number})
    return found
