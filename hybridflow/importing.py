"""A user's function by its import path: ``package.module:name`` or ``path/file.py:name``.

Where it stands: behind every setting that names a function (rewards, estimators, losses). Imports nothing heavy, for
every scoring process imports it. Invariant: whatever is wrong with the path or with the import becomes one error that
names the setting, the value and what is there instead.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from hybridflow.errors import ConfigError, HybridFlowError, nearest

T = TypeVar("T")
FORMS = "package.module:name or path/file.py:name"


def named(name: str, known: Mapping[str, T], setting: str) -> T | Callable[..., Any]:
    """The entry of a registry, or a user's function where the name is an import path.

    Args:
        setting: dotted path of the setting that holds the name, for messages.

    Raises:
        ConfigError: lists the known names.
    """
    if ":" in name:
        return _imported(name, setting)
    if name not in known:
        raise ConfigError(f"{setting}={name!r} is not known.{nearest(name, known)} A function of your own: {FORMS}.")
    return known[name]


def import_function(
    path: str, setting: str, error: type[HybridFlowError] = ConfigError, may_be_async: bool = False
) -> Callable[..., Any]:
    """Import a function.

    Args:
        setting: dotted path of the setting that holds the path, for messages.
        error: what to raise.
        may_be_async: whether its caller awaits what it returns.

    Raises:
        error: if there is no such module, file or function, or if its import fails.
    """
    where, colon, name = path.rpartition(":")
    if not colon or not where or not name:
        raise error(f"{setting}={path!r}: write {FORMS}.")
    try:
        module = import_file(where) if where.endswith(".py") else _module(where)
    except NotThere as reason:
        raise error(f"{setting}={path!r}: {reason}") from reason.__cause__
    function: Any = getattr(module, name, None)
    if function is None:
        raise error(f"{setting}={path!r}: {where} has no {name!r}.{nearest(name, _functions_in(module))}")
    if not callable(function):
        raise error(
            f"{setting}={path!r}: {name} is a {type(function).__name__}, not a function."
            f"{nearest(name, _functions_in(module))}"
        )
    if not may_be_async and is_async(function):
        raise error(f"{setting}={path!r}: {name} is async; the function returns its values directly.")
    return function


@functools.cache
def _imported(path: str, setting: str) -> Callable[..., Any]:
    """Imported once in a process: an algorithm's functions are looked up in every micro-batch."""
    return import_function(path, setting)


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a function, or the call of an object, is declared with ``async def``."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def parameters_of(function: Callable[..., Any]) -> list[str] | None:
    """Names a function can be called with; None where it takes any (``**columns``) or cannot be inspected."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return [p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY]


def describe_error(error: BaseException) -> str:
    """An exception in one line: type, message, and the line of code it came from."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else text


class NotThere(Exception):
    """Why a module cannot be had, in words."""


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            raise NotThere(
                f"there is no module {error.name!r}. Install it, put its folder on PYTHONPATH, or give the file: "
                "path/file.py:name."
            ) from error
        raise NotThere(f"importing {name} failed: {describe_error(error)}") from error


def import_file(where: str) -> ModuleType:
    """Import a Python file; NotThere says why that cannot be done."""
    file = Path(where).resolve()
    if not file.is_file():
        beside = [p.name for p in file.parent.glob("*.py")]
        raise NotThere(f"there is no file {file}.{nearest(file.name, beside)}")
    name = f"hybridflow_user_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise NotThere(f"{file} cannot be imported.")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickle look their module up by name while it is being executed.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise NotThere(f"importing {file} failed: {describe_error(error)}") from error
    return module


def _functions_in(module: ModuleType) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if inspect.isroutine(value) and not name.startswith("_") and value.__module__ == module.__name__
    ]
