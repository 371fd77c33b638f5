"""What the schemas of ``config`` say about each setting: path, type, default and meaning.

Read by error messages, ``--help`` and ``docs/configuration.md``, so that none of them repeats the schema. The
invariant: every field of a schema is listed exactly once, by its path, in the schema's order.

``python -m hybridflow.settings docs/configuration.md`` writes the tables between the marks of that file anew.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from hybridflow.config import (
    DAPOConfig,
    DistillConfig,
    DPOConfig,
    GRPOConfig,
    OneStepOffConfig,
    PPOConfig,
    ReMaxConfig,
    RewardModelConfig,
    RunConfig,
    SafeRLHFConfig,
    SFTConfig,
)

SCHEMAS: dict[str, type[RunConfig]] = {
    schema.__name__: schema
    for schema in (
        *(GRPOConfig, DAPOConfig, OneStepOffConfig, ReMaxConfig, DistillConfig, PPOConfig, SafeRLHFConfig),
        *(SFTConfig, DPOConfig, RewardModelConfig),
    )
}
ANY_NAME = "*"
"""Stands in a path for a name that the user chooses, such as a pool's."""

_BEGIN, _END = "<!-- settings: begin -->", "<!-- settings: end -->"


@dataclasses.dataclass(frozen=True)
class Setting:
    """One field of a schema.

    Attributes:
        path: dotted path; ``*`` where the user chooses the name (``pools.*.devices``).
        type: the field's type; None of a ``X | None`` is left out.
        default: the default, or ``MISSING``.
        doc: what the class's docstring says of the field.
    """

    path: str
    type: Any
    default: Any
    doc: str

    @property
    def required(self) -> bool:
        return isinstance(self.default, str) and self.default == MISSING

    def default_text(self) -> str:
        if self.required:
            return "required"
        if isinstance(self.default, bool):
            return str(self.default).lower()
        return '""' if self.default == "" else str(self.default)


@functools.cache
def settings_of(schema: type) -> tuple[Setting, ...]:
    """Every leaf of a schema with its path."""
    return tuple(_walk(schema, "", schema()))


def free_dicts(schema: type) -> tuple[str, ...]:
    """Paths of the mappings whose keys the user chooses."""
    found = []
    for s in settings_of(schema):
        parts = s.path.split(".")
        path = parts[: parts.index(ANY_NAME)] if ANY_NAME in parts else parts if _origin(s.type) is dict else []
        if path and ".".join(path) not in found:
            found.append(".".join(path))
    return tuple(found)


def groups_of(schema: type, name: str) -> list[str]:
    """Paths of the groups whose dataclass has this name."""
    paths = {
        ".".join(parts[:end]) for s in settings_of(schema) for parts in [s.path.split(".")] for end in range(len(parts))
    }
    return sorted(path for path in paths if path and getattr(type_at(schema, path), "__name__", "") == name)


def children(schema: type, path: str) -> list[str]:
    """Names that may stand below ``path`` (``""`` is the top); empty below a leaf or where names are free."""
    at: Any = schema
    for name in path.split(".") if path else ():
        if dataclasses.is_dataclass(at):
            at = _types(at).get(name)
        elif _origin(at) is dict:
            at = typing.get_args(at)[1]
        at = _not_none(at)
    return list(_types(at)) if dataclasses.is_dataclass(at) else []


def type_at(schema: type, path: str) -> Any:
    """The type of the setting or group at ``path``, None where there is none."""
    at: Any = schema
    for name in path.split("."):
        if dataclasses.is_dataclass(at):
            at = _types(at).get(name)
        elif _origin(at) is dict:
            at = typing.get_args(at)[1]
        else:
            at = None
        at = _not_none(at)
    return at


def type_text(kind: Any) -> str:
    """A type in words: ``number``, ``list of integers``, ``mapping``."""
    words = {int: "integer", float: "number", bool: "true or false", str: "text", Any: "anything"}
    if kind in words:
        return words[kind]
    if _origin(kind) is list:
        item = type_text(typing.get_args(kind)[0])
        return f"list of {item if item == 'text' else item + 's'}"
    if _origin(kind) is dict:
        return "mapping"
    return f"mapping of {', '.join(_types(kind))}" if dataclasses.is_dataclass(kind) else "anything"


def doc_of(schema: type, path: str) -> str:
    """The documentation of one setting, ``""`` where there is none."""
    return next((s.doc for s in settings_of(schema) if _matches(s.path, path)), "")


def value_at(config: Any, path: str) -> Any:
    """The value of a typed config at a path without ``*``."""
    for name in path.split("."):
        config = config[name] if isinstance(config, dict) else getattr(config, name)
    return config


def expand(config: Any, path: str) -> list[tuple[str, Any]]:
    """The (path, value) pairs of a typed config that a path with ``*`` stands for. Groups that are None have none."""
    found = [("", config)]
    for name in path.split("."):
        following = []
        for prefix, at in found:
            if at is None:
                continue
            names = list(at) if name == ANY_NAME else [name]
            following += [(f"{prefix}.{n}" if prefix else n, value_at(at, n)) for n in names]
        found = following
    return found


def markdown() -> str:
    """The tables of all settings, each setting once: those of all drivers first, then by the schemas that have them."""
    common = settings_of(RunConfig)
    listed = {s.path for s in common}
    parts: dict[str, list[Setting]] = {"Every driver": list(common)}
    for schema in SCHEMAS.values():
        for s in settings_of(schema):
            if s.path not in listed:
                having = (name for name, other in SCHEMAS.items() if s in settings_of(other))
                parts.setdefault("Only " + ", ".join(f"`{name}`" for name in having), []).append(s)
                listed.add(s.path)
    return "\n".join(_section(title, rows) for title, rows in parts.items())


def main(arguments: list[str]) -> None:
    """Write the tables of the given files anew."""
    for name in arguments:
        path = Path(name)
        path.write_text(with_tables(path.read_text("utf-8")), "utf-8")


def with_tables(text: str) -> str:
    """A document with the tables between its marks replaced."""
    head, rest = text.split(_BEGIN)
    return f"{head}{_BEGIN}\n\n{markdown()}\n{_END}{rest.split(_END)[1]}"


def _section(title: str, rows: typing.Sequence[Setting]) -> str:
    groups: dict[str, list[Setting]] = {}
    for s in rows:
        groups.setdefault(s.path.rpartition(".")[0], []).append(s)
    lines = [f"### {title}", ""]
    for head, members in groups.items():
        lines += [f"**`{head}`**" if head else "**top level**", ""]
        lines += ["| setting | type | default | meaning |", "|---|---|---|---|"]
        for s in members:
            doc = s.doc.replace("|", "\\|").replace("``", "`")
            lines.append(f"| `{s.path}` | {type_text(s.type)} | {s.default_text()} | {doc} |")
        lines.append("")
    return "\n".join(lines)


def _walk(schema: Any, prefix: str, defaults: Any) -> Iterator[Setting]:
    docs = _docs(schema)
    kinds = _types(schema)
    for f in dataclasses.fields(schema):
        kind, path = _not_none(kinds[f.name]), f"{prefix}{f.name}"
        value = getattr(defaults, f.name)
        if dataclasses.is_dataclass(kind):
            yield from _walk(kind, f"{path}.", value)
        elif _origin(kind) is dict and dataclasses.is_dataclass(_not_none(typing.get_args(kind)[1])):
            item: Any = _not_none(typing.get_args(kind)[1])
            yield from _walk(item, f"{path}.{ANY_NAME}.", item())
        else:
            yield Setting(path, kind, value, docs.get(f.name, ""))


@functools.cache
def _types(schema: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(schema)
    return {f.name: hints[f.name] for f in dataclasses.fields(schema)}


def _origin(kind: Any) -> Any:
    return typing.get_origin(kind)


def _not_none(kind: Any) -> Any:
    if _origin(kind) in (types.UnionType, typing.Union):
        return next(k for k in typing.get_args(kind) if k is not type(None))
    return kind


def _matches(pattern: str, path: str) -> bool:
    left, right = pattern.split("."), path.split(".")
    return len(left) == len(right) and all(p in (ANY_NAME, q) for p, q in zip(left, right, strict=True))


@functools.cache
def _docs(schema: type) -> dict[str, str]:
    """Field name -> text of the ``Attributes:`` of the class and its bases; ``a, b: text`` documents both."""
    found: dict[str, str] = {}
    for base in reversed(schema.__mro__):
        _, _, text = inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")
        names: list[str] = []
        for line in text.splitlines():
            entry = re.match(r" {4}(\w+(?:, \w+)*): (.*)", line)
            if entry:
                names = entry[1].split(", ")
                found |= dict.fromkeys(names, entry[2])
            elif line.startswith(" " * 8):
                found |= {name: f"{found[name]} {line.strip()}" for name in names}
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
