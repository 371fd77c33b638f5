"""A user's reward function: found by its import path, called with one answer, its value checked.

Where it stands: inside each scoring process, and once in the role's process before the run. A reward function has the
signature ``f(prompts, responses, ground_truth, **columns) -> list``; every argument is a list with one entry an answer.
Invariant: whatever a function returns becomes a finite reward or a reason why there is none.

This module is imported by every scoring process: it imports nothing heavy.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from hybridflow.errors import RewardError, nearest

RewardFunction = Callable[..., Any]
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
        error: why there is no reward; None where there is one.
    """

    reward: float = math.nan
    solved: bool | None = None
    extras: dict[str, float] = field(default_factory=dict)
    error: str | None = None


def failure(reason: str) -> Outcome:
    """The outcome of an answer that could not be scored."""
    return Outcome(error=reason if len(reason) <= MAX_REASON else reason[: MAX_REASON - 4] + " ...")


def load_function(path: str, options: Mapping[str, Any] | None = None) -> RewardFunction:
    """Import a reward function.

    Args:
        path: ``package.module:name`` or ``path/file.py:name``.
        options: ``reward.options``; checked against the signature.

    Raises:
        RewardError: if there is no such module, file or function, if its import fails, or if it cannot be called with
            the arguments of a reward function.
    """
    where, colon, name = path.rpartition(":")
    if not colon or not where or not name:
        raise RewardError(f"reward.function={path!r}: write package.module:name or path/file.py:name.")
    module = _load_file(where, path) if where.endswith(".py") else _load_module(where, path)
    function: Any = getattr(module, name, None)
    if function is None:
        raise RewardError(f"reward.function={path!r}: {where} has no {name!r}.{nearest(name, _functions_in(module))}")
    if not callable(function):
        raise RewardError(
            f"reward.function={path!r}: {name} is a {type(function).__name__}, not a function."
            f"{nearest(name, _functions_in(module))}"
        )
    if inspect.iscoroutinefunction(function):
        raise RewardError(f"reward.function={path!r}: {name} is async; a reward function returns its values directly.")
    _check_signature(function, path, options or {})
    return function


def _load_module(name: str, path: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            raise RewardError(
                f"reward.function={path!r}: there is no module {error.name!r}. Install it, put its folder on "
                "PYTHONPATH, or give the file: path/file.py:name."
            ) from error
        raise RewardError(f"reward.function={path!r}: importing {name} failed: {describe_error(error)}") from error


def _load_file(where: str, path: str) -> ModuleType:
    file = Path(where).resolve()
    if not file.is_file():
        beside = [p.name for p in file.parent.glob("*.py")]
        raise RewardError(f"reward.function={path!r}: there is no file {file}.{nearest(file.name, beside)}")
    name = f"hybridflow_reward_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise RewardError(f"reward.function={path!r}: {file} cannot be imported.")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickle look their module up by name while it is being executed.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise RewardError(f"reward.function={path!r}: importing {file} failed: {describe_error(error)}") from error
    return module


def _functions_in(module: ModuleType) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if inspect.isroutine(value) and not name.startswith("_") and value.__module__ == module.__name__
    ]


def _check_signature(function: RewardFunction, path: str, options: Mapping[str, Any]) -> None:
    parameters = _parameters(function)
    if parameters is None:
        return
    clash = set(options) & set(ARGUMENTS)
    if clash:
        raise RewardError(f"reward.options.{clash.pop()} is an argument that every call fills; rename the option.")
    for name in ARGUMENTS:
        if name not in parameters:
            raise RewardError(
                f"reward.function={path!r} takes ({', '.join(parameters)}): it has no argument {name!r}. A reward "
                "function is f(prompts, responses, ground_truth, **columns) -> list with one value an answer."
            )
    for name in options:
        if name not in parameters:
            raise RewardError(f"reward.options.{name}: {path} has no such argument.{nearest(name, parameters)}")


def _parameters(function: RewardFunction) -> list[str] | None:
    """Names a function can be called with; None where it takes any (``**columns``) or cannot be inspected.

    A function with ``**columns`` still has to name the three arguments or let ``**columns`` take them.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return [p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY]


def score_one(function: RewardFunction, row: Mapping[str, Any], options: Mapping[str, Any]) -> Outcome:
    """Call a reward function with one answer.

    Args:
        function: from :func:`load_function`.
        row: one entry of each column: ``prompts``, ``responses``, ``ground_truth``, and further ones.
        options: ``reward.options``; they win over a column of the same name.
    """
    known = _parameters(function)
    columns = {key: [value] for key, value in row.items() if known is None or key in known}
    try:
        return outcome_of(function(**{**columns, **options}))
    except BaseException as error:  # SystemExit from a user's function is a failing answer like any other.
        return failure(describe_error(error))


def outcome_of(values: Any) -> Outcome:
    """Check what a reward function returned for one answer."""
    try:
        return _outcome(values)
    except _NoReward as reason:
        return failure(f"returned {reason}")


class _NoReward(Exception):
    """What is wrong with a returned value, in words."""


def _outcome(values: Any) -> Outcome:
    is_list = hasattr(values, "__len__") and hasattr(values, "__getitem__")
    if not is_list or isinstance(values, str | bytes | Mapping):
        raise _NoReward(f"{_kind(values)}; a list with one value is wanted")
    if len(values) != 1:
        raise _NoReward(f"{len(values)} values for 1 answer")
    value = values[0]
    if not isinstance(value, Mapping):
        return Outcome(_number(value))
    if "score" not in value:
        raise _NoReward(f"a dict without 'score' (it has {', '.join(map(str, value)) or 'no key'})")
    numbers = {str(key): _number(x, f" for {key!r}") for key, x in value.items() if key != "solved"}
    solved = value.get("solved")
    if solved is not None and not isinstance(solved, bool | int) and type(solved).__module__ != "numpy":
        raise _NoReward(f"{_kind(solved)} for 'solved'; True or False is wanted")
    return Outcome(numbers.pop("score"), None if solved is None else bool(solved), numbers)


def _number(value: Any, place: str = "") -> float:
    """The value as a finite float."""
    if value is None:
        raise _NoReward(f"None{place}")
    if isinstance(value, str | bytes):  # float() would read a text that looks like a number
        raise _NoReward(f"{_kind(value)}, not a number{place}")
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        raise _NoReward(f"{_kind(value)}, not a number{place}") from None
    if not math.isfinite(number):
        raise _NoReward(f"{number}{place}")
    return number


def _kind(value: Any) -> str:
    return f"{type(value).__name__} {value!r:.60}" if isinstance(value, str | int | float) else type(value).__name__


def describe_error(error: BaseException) -> str:
    """An exception in one line: type, message, and the line of code it came from."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else text
