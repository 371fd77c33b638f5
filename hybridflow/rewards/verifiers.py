"""Built-in reward functions: exact match, mathematical equality, reasoning-gym's own scorers, and the format.

Where they stand: run by the scoring processes like a user's function, and written like one. Each takes lists and
returns a list, most of them of dicts with the ``answer`` that was read; ``extract`` says which part of an answer is
compared. Invariant: an answer from which nothing can be extracted is wrong (0), while a ground truth that makes no
sense is an error.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from hybridflow.rewards import notation

_THOUSANDS = re.compile(r"[-$]*\d{1,3}(,\d{3})+(\.\d+)?")
_UNTAGGED = re.compile(r"</?(?:answer|think)>")
_BOX = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_ANSWER_LINE = re.compile(r"^\W*answer\W*?:\**([^\n]*)", re.IGNORECASE | re.MULTILINE)


def exact_match(
    prompts: Sequence[Any],
    responses: Sequence[str],
    ground_truth: Sequence[Any],
    extract: str = "all",
    ignore_case: bool = False,
) -> list[dict[str, Any]]:
    """1.0 where the answer is the ground truth as text, without blanks around it; else 0.0.

    Args:
        prompts: not read.
        responses: the answers.
        ground_truth: right answers, compared as texts; of GSM8K's ``reasoning #### 72`` what stands behind ``####``.
        extract: part of the answer that counts; a name of :data:`EXTRACTORS`. With ``number``, a ground truth that has
            one number is compared by value: 1,234.50 is 1234.5, and so is $1234.50.
        ignore_case: take upper and lower case as equal.
    """
    _check_extract(extract)
    scores = []
    for response, truth in zip(responses, ground_truth, strict=True):
        answer, wanted = extract_answer(response, extract), reference(truth)
        in_truth = notation.numbers(notation.plain(wanted)) if extract == "number" else []
        value = notation.value(in_truth[0]) if len(in_truth) == 1 else None
        if answer is not None and value is not None:
            found = notation.value(answer)
            right, answer = found == value, answer if found is None else str(found)
        elif answer is not None and ignore_case:
            answer = answer.casefold()
            right = answer == wanted.casefold()
        else:
            right = answer == wanted
        scores.append({"score": float(right), "answer": answer})
    return scores


def math_verify(
    prompts: Sequence[Any],
    responses: Sequence[str],
    ground_truth: Sequence[Any],
    extract: str = "all",
    seconds: int = 4,
) -> list[dict[str, Any]]:
    r"""1.0 where the answer equals the ground truth as mathematics (``1/2``, ``0.5``, ``\frac{1}{2}``); else 0.0.

    The package math-verify compares; what it would misread is put into its notation first (:mod:`.notation`). It finds
    the last expression in a text by itself, so ``extract`` is rarely needed. Units are left out, and 50% is 50 and 0.5.
    A ground truth that is words is compared as text, in lower case: math-verify would read a product of letters.

    Args:
        prompts: not read.
        responses: the answers.
        ground_truth: numbers or LaTeX, with or without ``$`` or ``\boxed``; or words.
        extract: part of the answer that counts; a name of :data:`EXTRACTORS`.
        seconds: deadline of each parsing and comparison; after it the answer is wrong.

    Raises:
        ValueError: for a ground truth that is no mathematics.
    """
    from math_verify import parse, verify

    _check_extract(extract)
    if seconds < 1:
        raise ValueError(f"seconds={seconds}: has to be at least 1")
    scores = []
    for response, truth in zip(responses, ground_truth, strict=True):
        wanted = notation.plain(reference(truth))
        if (wanted_word := notation.word(extract_answer(wanted, "auto") or "")) is not None:
            answer = notation.word(extract_answer(response, "auto" if extract == "all" else extract) or "")
            scores.append({"score": float(answer == wanted_word), "answer": answer})
            continue
        gold = parse(notation.formula(wanted, whole=True), parsing_timeout=seconds)
        if not gold:
            raise ValueError(f"the ground truth {wanted!r:.80} is no mathematical expression")
        answer = extract_answer(_UNTAGGED.sub(" ", response) if extract == "all" else response, extract)
        answer = notation.plain(answer or "")
        answer = answer if notation.has_variables(wanted) else notation.without_unit(answer)
        answer = notation.formula(answer, whole=extract in ("boxed", "number"))
        found = parse(answer, parsing_timeout=seconds) if answer else []
        right = bool(found) and verify(gold, found, timeout_seconds=seconds)
        scores.append({"score": float(right), "answer": str(found[0]) if found else None})
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
    _check_extract(extract)
    scores = []
    for response, info in zip(responses, extra_info, strict=True):
        task = _task(info["task"], json.dumps(info.get("options") or {}, sort_keys=True))
        answer = extract_answer(response, extract)
        score = 0.0 if answer is None else _task_score(task, answer, info["item"])
        solved = score >= 1 - 1e-6
        scores.append({"score": score if partial else float(solved), "solved": solved, "answer": answer})
    return scores


def format_match(
    prompts: Sequence[Any], responses: Sequence[str], ground_truth: Sequence[Any], pattern: str = "think_answer"
) -> list[float]:
    """1.0 where the whole answer has a format, blanks around it aside; else 0.0. Meant as one of ``reward.components``.

    Args:
        prompts: not read.
        responses: the answers.
        ground_truth: not read.
        pattern: a name of :data:`FORMATS`, or a regular expression for the whole answer, in which a dot stands for any
            character, line ends too.
    """
    wanted = _format(FORMATS.get(pattern, pattern))
    return [float(wanted.fullmatch(response.strip()) is not None) for response in responses]


FORMATS = {
    "think_answer": r"<think>((?!</?(think|answer)>).)*</think>\s*<answer>((?!</?(think|answer)>).)*</answer>",
    "answer_line": r"((?!(^|\n)Answer:).)*(^|\n)Answer:[^\n]*\S",
    "boxed": r".*\\boxed\s*\{.*\S.*\}.*",
}
r"""``think_answer``: ``<think>...</think><answer>...</answer>``, each tag once; ``answer_line``: the last line, and no
other, begins with ``Answer:`` (DAPO's prompt asks for it); ``boxed``: something stands in a ``\boxed{}``."""


@functools.cache
def _format(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(
            f"pattern={pattern!r}: {error}. Write a regular expression, or one of {', '.join(FORMATS)}."
        ) from None


@functools.cache
def _task(name: str, options: str) -> Any:
    """A task as it was made for the data: some scorers read its settings."""
    import reasoning_gym

    return reasoning_gym.create_dataset(name, **{**json.loads(options), "size": 1, "seed": 0})


def _task_score(task: Any, answer: str, item: dict[str, Any]) -> float:
    """What the task's scorer says; 0 where it fails on this answer, but not on the right one."""
    try:
        return float(task.score_answer(answer, entry=item))
    except Exception:
        task.score_answer(item["answer"], entry=item)  # a scorer that is broken fails here too
        return 0.0


def reference(truth: Any) -> str:
    """The ground truth as text; of GSM8K's ``reasoning #### 1,234`` the number, without commas."""
    text = str(truth)
    if "####" not in text:
        return text.strip()
    marked = text.rpartition("####")[2].strip()
    return marked.replace(",", "") if _THOUSANDS.fullmatch(marked) else marked


def extract_answer(response: str, how: str) -> str | None:
    """The part of an answer that counts, without blanks around it; None where there is none.

    Raises:
        ValueError: for a name that is not in :data:`EXTRACTORS`.
    """
    _check_extract(how)
    found = EXTRACTORS[how](response)
    return None if found is None else found.strip()


def _check_extract(how: str) -> None:
    if how not in EXTRACTORS:
        raise ValueError(f"extract={how!r}: choose one of {', '.join(EXTRACTORS)}")


def _in_tag(response: str) -> str | None:
    found = re.findall(r"<answer>((?:(?!<answer>).)*?)</answer>", response, flags=re.DOTALL)
    return found[-1] if found else None


def _in_box(response: str) -> str | None:
    r"""Content of the last ``\boxed{...}``, braces inside it balanced; an escaped brace (``\{``) is none."""
    opened = list(_BOX.finditer(response))
    if not opened:
        return None
    start, depth = opened[-1].end(), 1
    for brace in _BRACE.finditer(response, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return response[start : brace.start()]
    return None


def _last_number(response: str) -> str | None:
    found = notation.numbers(notation.plain(response))
    return found[-1] if found else None


def _last_line(response: str) -> str | None:
    lines = response.strip().splitlines()
    return lines[-1] if lines else None


def _answer_line(response: str) -> str | None:
    found = _ANSWER_LINE.findall(response)
    return found[-1].strip().strip("*").rstrip(".") if found else None


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
    "answer_line": _answer_line,
    "auto": _auto,
}
"""``all`` of it; what stands in the last ``<answer>`` ``tag``; in the last ``\\boxed{}``; the last ``number``; the
``last_line``; behind the last ``Answer:`` that begins a line (DAPO's prompt asks for it); ``auto``: tag, else box, else
all."""
