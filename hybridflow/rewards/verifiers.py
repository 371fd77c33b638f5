"""Built-in reward functions: exact match, mathematical equality, and reasoning-gym's own scorers.

Where they stand: run by the scoring processes like a user's function, and written like one. Each takes lists and
returns a list; ``extract`` says which part of an answer is compared. Invariant: an answer from which nothing can be
extracted is wrong (0), while a ground truth that makes no sense is an error.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?|-?\.\d+")


def exact_match(
    prompts: Sequence[Any],
    responses: Sequence[str],
    ground_truth: Sequence[Any],
    extract: str = "all",
    ignore_case: bool = False,
) -> list[float]:
    """1.0 where the answer is the ground truth as text, without blanks around it; else 0.0.

    Args:
        prompts: not read.
        responses: the answers.
        ground_truth: right answers, compared as texts; of GSM8K's ``reasoning #### 72`` what stands behind ``####``.
        extract: part of the answer that counts; a name of :data:`EXTRACTORS`.
        ignore_case: take upper and lower case as equal.
    """
    scores = []
    for response, truth in zip(responses, ground_truth, strict=True):
        answer, wanted = extract_answer(response, extract), reference(truth)
        if ignore_case and answer is not None:
            answer, wanted = answer.casefold(), wanted.casefold()
        scores.append(float(answer == wanted))
    return scores


def math_verify(
    prompts: Sequence[Any],
    responses: Sequence[str],
    ground_truth: Sequence[Any],
    extract: str = "all",
    seconds: int = 4,
) -> list[float]:
    r"""1.0 where the answer equals the ground truth as mathematics (``1/2``, ``0.5``, ``\frac{1}{2}``); else 0.0.

    The package math-verify finds the last expression in the answer by itself, so ``extract`` is rarely needed. It reads
    a word as a product of letters, so that anagrams are equal: compare words with :func:`exact_match`.

    Args:
        prompts: not read.
        responses: the answers.
        ground_truth: numbers or LaTeX, with or without ``$`` or ``\boxed``.
        extract: part of the answer that counts; a name of :data:`EXTRACTORS`.
        seconds: deadline of each parsing and comparison; after it the answer is wrong.

    Raises:
        ValueError: for a ground truth that is no mathematics.
    """
    from math_verify import parse, verify

    scores = []
    for response, truth in zip(responses, ground_truth, strict=True):
        wanted = reference(truth)
        gold = parse(
            wanted if "$" in wanted or "\\boxed" in wanted else f"\\boxed{{{wanted}}}", parsing_timeout=seconds
        )
        if not gold:
            raise ValueError(f"the ground truth {wanted!r:.80} is no mathematical expression")
        answer = extract_answer(response, extract)
        found = parse(answer, parsing_timeout=seconds) if answer else []
        scores.append(float(bool(found) and verify(gold, found, timeout_seconds=seconds)))
    return scores


def reasoning_gym(
    prompts: Sequence[Any],
    responses: Sequence[str],
    ground_truth: Sequence[Any],
    extra_info: Sequence[dict[str, Any]],
    extract: str = "auto",
    partial: bool = True,
) -> list[dict[str, Any]]:
    """The score of the task's own scorer, for rows of ``data.train=reasoning_gym:<task>``.

    Many scorers give partial credit, and some give a little to any answer: ``solved`` stands apart and wants the full
    score.

    Args:
        prompts: not read.
        responses: the answers.
        ground_truth: not read; the item in ``extra_info`` has it.
        extra_info: ``task``, ``options`` and ``item`` of each row.
        extract: part of the answer that counts; a name of :data:`EXTRACTORS`.
        partial: keep partial credit; without it a reward is 1.0 or 0.0.
    """
    scores = []
    for response, info in zip(responses, extra_info, strict=True):
        task = _task(info["task"], json.dumps(info.get("options") or {}, sort_keys=True))
        score = float(task.score_answer(extract_answer(response, extract), entry=info["item"]))
        solved = score >= 1 - 1e-6
        scores.append({"score": score if partial else float(solved), "solved": solved})
    return scores


@functools.cache
def _task(name: str, options: str) -> Any:
    """A task as it was made for the data: some scorers read its settings."""
    import reasoning_gym

    return reasoning_gym.create_dataset(name, **{**json.loads(options), "size": 1, "seed": 0})


def reference(truth: Any) -> str:
    """The ground truth as text; of GSM8K's ``reasoning #### 1,234`` the number, without commas."""
    text = str(truth)
    return text.rpartition("####")[2].replace(",", "").strip() if "####" in text else text.strip()


def extract_answer(response: str, how: str) -> str | None:
    """The part of an answer that counts, without blanks around it; None where there is none.

    Raises:
        ValueError: for a name that is not in :data:`EXTRACTORS`.
    """
    if how not in EXTRACTORS:
        raise ValueError(f"reward.options.extract={how!r}: choose one of {', '.join(EXTRACTORS)}")
    found = EXTRACTORS[how](response)
    return None if found is None else found.strip()


def _in_tag(response: str) -> str | None:
    found = re.findall(r"<answer>(.*?)</answer>", response, flags=re.DOTALL)
    return found[-1] if found else None


def _in_box(response: str) -> str | None:
    r"""Content of the last ``\boxed{...}``, braces inside it balanced."""
    start = response.rfind("\\boxed{")
    depth = 0
    for i in range(start + len("\\boxed"), len(response) if start >= 0 else 0):
        depth += {"{": 1, "}": -1}.get(response[i], 0)
        if depth == 0:
            return response[start + len("\\boxed{") : i]
    return None


def _last_number(response: str) -> str | None:
    found = _NUMBER.findall(response)
    return found[-1].replace(",", "") if found else None


def _last_line(response: str) -> str | None:
    lines = response.strip().splitlines()
    return lines[-1] if lines else None


def _auto(response: str) -> str | None:
    tagged = _in_tag(response)
    if tagged is not None:
        return tagged
    boxed = _in_box(response)
    return response if boxed is None else boxed


EXTRACTORS: dict[str, Callable[[str], str | None]] = {
    "all": lambda response: response,
    "tag": _in_tag,
    "boxed": _in_box,
    "number": _last_number,
    "last_line": _last_line,
    "auto": _auto,
}
"""``all`` of it; what stands in the last ``<answer>`` ``tag``; in the last ``\\boxed{}``; the last ``number``; the
``last_line``; ``auto``: tag, else box, else all."""
