"""A user's reward functions: found by their import paths, called with one answer, their values checked.

Where it stands: inside each scoring process, and once in the driver before the run. A reward function has the signature
``f(prompts, responses, ground_truth, **columns) -> list``; every argument is a list with one entry an answer; it may be
``async``. Invariant: whatever a function does or returns becomes a finite reward or a reason why there is none.

This module is imported by every scoring process: it imports nothing heavy.
"""

from __future__ import annotations

import inspect
import math
import os
import pickle
import signal
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybridflow.errors import RewardError, nearest
from hybridflow.importing import describe_error, import_function, is_async, parameters_of

ARGUMENTS = ("prompts", "responses", "ground_truth")
"""Arguments that every reward function takes; the further columns are offered, not forced on it."""

MAX_REASON = 500
"""Characters of a reason that are kept."""


@dataclass(frozen=True)
class Outcome:
    """The score of one answer.

    Attributes:
        reward: finite, or NaN where the answer could not be scored.
        solved: what the function itself says; None leaves it to ``reward.solved_at``.
        extras: further numbers that the function reports.
        answer: the final answer as the function has read it, as text, so that equal answers are equal; or None.
        steps: scores of the steps of the answer, in order; None where the function gives none.
        error: why there is no reward; None where there is one.
    """

    reward: float = math.nan
    solved: bool | None = None
    extras: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    answer: str | None = None
    steps: tuple[float, ...] | None = None


def failure(reason: str) -> Outcome:
    """The outcome of an answer that could not be scored."""
    return Outcome(error=reason if len(reason) <= MAX_REASON else reason[: MAX_REASON - 4] + " ...")


@dataclass(frozen=True)
class Component:
    """One function of a reward, as the configuration names it.

    Attributes:
        setting: where it stands: ``reward``, or ``reward.components.<name>``.
        function: ``package.module:name`` or ``path/file.py:name``.
        options: keyword arguments of every call.
    """

    setting: str
    function: str
    options: Mapping[str, Any] = field(default_factory=dict)


class Call:
    """A component's function, imported and ready to be called with one answer.

    Attributes:
        is_async: what it returns has to be awaited.

    Raises:
        RewardError: if there is no such module, file or function, if its import fails, or if it cannot be called with
            the arguments of a reward function and the component's options.
    """

    def __init__(self, component: Component) -> None:
        setting = f"{component.setting}.function"
        self._function = import_function(component.function, setting, RewardError, may_be_async=True)
        self._options = dict(component.options)
        self._known = parameters_of(self._function)
        if self._known is not None:
            _check_signature(component, self._known)
        self.is_async = is_async(self._function)
        if inspect.isgeneratorfunction(self._function) or inspect.isasyncgenfunction(self._function):
            raise RewardError(f"{setting}={component.function!r} yields its values; return a list of them.")

    def reads(self, column: str) -> bool:
        """Whether the function is given a column where a batch has it."""
        return self._known is None or column in self._known

    def needs(self, column: str) -> bool:
        """Whether the function cannot be called without a column, by its signature."""
        if self._known is None or column not in self._known or column in self._options:
            return False
        return inspect.signature(self._function).parameters[column].default is inspect.Parameter.empty

    def check_options(self, setting: str) -> None:
        """Call a function of this package on no answers: it looks at its options first. Others may need an answer.

        Raises:
            RewardError: says what is wrong with an option.
        """
        if not self._function.__module__.startswith(f"{__package__}."):
            return
        assert self._known is not None
        hints = typing.get_type_hints(self._function)
        for name, value in self._options.items():
            fits = {float: (int, float), int: int, bool: bool, str: str}.get(hints[name], object)
            if not isinstance(value, fits) or (isinstance(value, bool) and hints[name] in (int, float)):
                raise RewardError(f"{setting}.options: {name}={value!r} is no {hints[name].__name__}. Mend it.")
        nothing = {name: [] for name in self._known if name in (*ARGUMENTS, "verdict", "extra_info")}
        try:
            self._function(**{**nothing, **self._options})
        except (TypeError, ValueError) as error:
            raise RewardError(f"{setting}.options: {error}") from error

    def __call__(self, row: Mapping[str, Any]) -> Any:
        """What the function returns for one row: one entry of each column. Options win over a column of their name."""
        columns = {key: [value] for key, value in row.items() if self._known is None or key in self._known}
        return self._function(**{**columns, **self._options})


def _check_signature(component: Component, known: Sequence[str]) -> None:
    clash = set(component.options) & set(ARGUMENTS)
    if clash:
        raise RewardError(
            f"{component.setting}.options.{clash.pop()} is an argument that every call fills; rename the option."
        )
    for name in ARGUMENTS:
        if name not in known:
            raise RewardError(
                f"{component.setting}.function={component.function!r} takes ({', '.join(known)}): it has no argument "
                f"{name!r}. A reward function is f(prompts, responses, ground_truth, **columns) -> list with one value "
                "an answer."
            )
    for name in component.options:
        if name not in known:
            raise RewardError(
                f"{component.setting}.options.{name}: {component.function} has no such argument.{nearest(name, known)}"
            )


async def score_row(calls: Sequence[Call], question: bytes) -> list[Outcome]:
    """Score one answer by one function after the other, up to the first that fails. Suspends in async functions only.

    Args:
        question: the row of the answer, pickled.
    """
    try:
        row: Mapping[str, Any] = pickle.loads(question)
    except Exception as error:
        return [failure(f"the answer's columns cannot be read: {describe_error(error)}")]
    outcomes: list[Outcome] = []
    for call in calls:
        try:
            values = call(row)
            outcome = outcome_of(await values if inspect.isawaitable(values) else values)
            stop_alarms()
        except BaseException as error:  # SystemExit, or an alarm that was left behind, is a failing answer too.
            stop_alarms()
            outcome = failure(describe_error(error))
        outcomes.append(outcome)
        if outcome.error is not None:
            break
    return outcomes


def stop_alarms() -> None:
    """Stop the timers that a function has left running; they would end the answer after it."""
    for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
        signal.setitimer(timer, 0)


def end_a_fork(own: int) -> None:
    """End the process here if it is not ``own``: a child that a function has forked and let return would reply too."""
    if os.getpid() != own:
        os._exit(0)


def outcome_of(values: Any) -> Outcome:
    """Check what a reward function returned for one answer."""
    try:
        return _outcome(values)
    except _NoReward as reason:
        return failure(f"returned {reason}")


class _NoReward(Exception):
    """What is wrong with a returned value, in words."""


def _outcome(values: Any) -> Outcome:
    is_list = hasattr(values, "__len__") and hasattr(values, "__getitem__") and getattr(values, "ndim", 1) > 0
    if not is_list or isinstance(values, str | bytes | Mapping):
        raise _NoReward(f"{_kind(values)}; a list with one value is wanted")
    if len(values) != 1:
        raise _NoReward(f"{len(values)} values for 1 answer")
    value = values[0]
    if not isinstance(value, Mapping):
        return Outcome(_number(value))
    if "score" not in value:
        raise _NoReward(f"a dict without 'score' (it has {', '.join(map(str, value)) or 'no key'})")
    words = ("solved", "answer", "steps")
    numbers = {str(key): _number(x, f" for {key!r}") for key, x in value.items() if key not in words}
    solved = value.get("solved")
    if solved is not None and not isinstance(solved, bool | int) and type(solved).__module__ != "numpy":
        raise _NoReward(f"{_kind(solved)} for 'solved'; True or False is wanted")
    answer = value.get("answer")
    if answer is not None and not isinstance(answer, str | int | float):
        raise _NoReward(f"{_kind(answer)} for 'answer'; a text is wanted")
    steps = value.get("steps")
    if isinstance(steps, str | bytes) or not isinstance(steps, Sequence | None):
        raise _NoReward(f"{_kind(steps)} for 'steps'; a list of numbers is wanted")
    scores = None if steps is None else tuple(_number(step, " for a step") for step in steps)
    score = numbers.pop("score")
    read = None if answer is None else str(answer)
    return Outcome(score, None if solved is None else bool(solved), numbers, answer=read, steps=scores)


def _number(value: Any, place: str = "") -> float:
    """The value as a finite float."""
    if value is None:
        raise _NoReward(f"None{place}")
    if isinstance(value, str | bytes):  # float() would read a text that looks like a number
        raise _NoReward(f"{_kind(value)}, not a number{place}")
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise _NoReward(f"{_kind(value)}, not a number{place}") from None
    if not math.isfinite(number):
        raise _NoReward(f"{number}{place}")
    return number


def _kind(value: Any) -> str:
    return f"{type(value).__name__} {value!r:.60}" if isinstance(value, str | int | float) else type(value).__name__
