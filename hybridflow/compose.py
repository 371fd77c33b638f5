"""From a config's name and overrides to one typed, checked-by-type configuration, by Hydra.

Where it stands: before everything else in a driver. :func:`driver` wraps a driver's ``main``; :func:`load` is the same
without a command line. Hydra composes YAML files over a dataclass schema; what comes out is a tree of the dataclasses
of ``config``, complete and of the right types. The invariant: every mistake is one ConfigError that names the
setting and the fix, and nothing has been started when it is raised.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import re
import sys
import textwrap
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import hydra
import yaml
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigTypeError, OmegaConfBaseException, ValidationError

from hybridflow.config import GRPOConfig, RunConfig
from hybridflow.errors import ConfigError, HybridFlowError, WorkerError, nearest
from hybridflow.settings import (
    SCHEMAS,
    children,
    doc_of,
    expand,
    free_dicts,
    groups_of,
    settings_of,
    type_at,
    type_text,
)

Config = TypeVar("Config", bound=RunConfig)
ConfigT_contra = TypeVar("ConfigT_contra", bound=RunConfig, contravariant=True)

SCHEMA_GROUP = "schema"


class Driver(Protocol[ConfigT_contra]):
    """A driver's ``main``: with a configuration it runs; without one it reads the command line.

    Attributes:
        config_name: the config file composed where ``--config-name`` names no other.
        schema: dataclass of the configuration.
    """

    config_name: str
    schema: type[RunConfig]

    def __call__(self, config: ConfigT_contra | None = None) -> None: ...


def driver(config_name: str, schema: type[Config]) -> Callable[[Callable[[Config], None]], Driver[Config]]:
    """Make a script's ``main(config)`` a command with Hydra's overrides.

    Args:
        config_name: the config file composed where ``--config-name`` names no other.
        schema: dataclass of the configuration.

    The decorated function reads ``sys.argv`` when called without an argument. A ConfigError, of the command line or of
    the run's checks, ends the process with one message and exit code 2; any other HybridFlowError with exit code 1.
    """

    def wrap(function: Callable[[Config], None]) -> Driver[Config]:
        @functools.wraps(function)
        def main(config: Config | None = None) -> None:
            if config is not None:
                return function(config)
            with exit_on_error():
                line = CommandLine.parse(sys.argv[1:], config_name)
                if line.help:
                    text = inspect.getdoc(inspect.getmodule(function)) or inspect.getdoc(function) or ""
                    return print(help_text(text, line, schema))
                composed = compose(line.config_name, line.overrides, schema, line.config_dir)
                if line.show:
                    return print(OmegaConf.to_yaml(composed, resolve=True), end="")
                return function(typed(composed, schema, line.config_name))

        made: Any = main
        made.config_name, made.schema = config_name, schema
        return made

    return wrap


def load(
    config_name: str,
    schema: type[Config],
    overrides: Sequence[str] = (),
    config_dir: str | os.PathLike[str] | None = None,
) -> Config:
    """The typed configuration of a config file and overrides.

    Args:
        config_name: name of a file, without ``.yaml``, in ``config_dir`` or among HybridFlow's own.
        schema: dataclass of the result.
        overrides: as on a command line, such as ``["model=smollm2", "rollout.n=4"]``.
        config_dir: a folder searched before HybridFlow's own configs.

    Raises:
        ConfigError: names the setting, its value and the fix.
    """
    return typed(compose(config_name, overrides, schema, config_dir), schema, config_name)


@dataclass
class CommandLine:
    """What a driver was called with."""

    config_name: str
    config_dir: str | None = None
    show: bool = False
    help: bool = False
    overrides: list[str] = field(default_factory=list)

    @classmethod
    def parse(cls, arguments: Sequence[str], config_name: str) -> CommandLine:
        """Flags may stand anywhere among the overrides; ConfigError for an unknown flag or one without its value."""
        found = cls(config_name)
        rest = list(arguments)
        while rest:
            flag, equals, value = (rest[0] if rest[0].startswith("-") else "").partition("=")
            argument = rest.pop(0)
            if flag in ("--config-name", "-cn", "--config-dir", "-cd"):
                if not equals and not rest:
                    raise ConfigError(f"{flag} needs a value, such as {flag} grpo.")
                value = value if equals else rest.pop(0)
                if flag in ("--config-name", "-cn"):
                    found.config_name = value.removesuffix(".yaml")
                else:
                    found.config_dir = value
            elif flag in ("--cfg", "-c"):
                found.show = True
                if rest and rest[0] in ("job", "all"):  # as in Hydra's own command line
                    rest.pop(0)
            elif flag in ("--help", "-h"):
                found.help = True
            elif flag:
                known = ("--config-name", "--config-dir", "--cfg", "--help")
                raise ConfigError(f"{flag} is not an option.{nearest(flag, known)} Settings are given as key=value.")
            else:
                found.overrides.append(argument)
        return found


def compose(
    config_name: str,
    overrides: Sequence[str] = (),
    schema: type[RunConfig] | None = None,
    config_dir: str | os.PathLike[str] | None = None,
) -> DictConfig:
    """The composed configuration, still an OmegaConf tree; values may be missing.

    Args:
        schema: the dataclass that the config file has to be made for; None accepts any of ``settings.SCHEMAS``.

    Raises:
        ConfigError: as :func:`load`.
    """
    schemas = SCHEMAS | ({schema.__name__: schema} if schema else {})
    for name, node in schemas.items():
        ConfigStore.instance().store(group=SCHEMA_GROUP, name=name, node=node, package="_global_", provider="schema")
    shipped = shipped_configs()
    if config_dir is not None and not Path(config_dir).is_dir():
        raise ConfigError(f"--config-dir {config_dir}: no such folder. Give the folder that holds your .yaml files.")
    guess = schema or GRPOConfig
    folders = [shipped, *([Path(config_dir)] if config_dir else [])]
    parsed = [_parsed(text) for text in overrides]
    groups = [p.input_line or "" for p in parsed if _chooses_group(p, folders)]
    Plugins.instance().register(ShippedConfigs)
    with hydra.initialize_config_dir(str(Path(config_dir or shipped).resolve()), version_base="1.3"):
        try:
            composed = hydra.compose(config_name, overrides=groups)
        except Exception as error:  # Hydra and OmegaConf share no base class
            raise _wrong_shape(error, folders, guess) or _explained(error, config_name, guess) from None
    made_for = OmegaConf.get_type(composed)
    if made_for is None or made_for not in schemas.values():
        want = guess.__name__
        raise ConfigError(
            f"config {config_name!r} has no schema: put `- {SCHEMA_GROUP}/{want}` (or another config that has it) "
            "first in its defaults list."
        )
    if schema is not None and made_for is not schema:
        raise ConfigError(
            f"config {config_name!r} is made for {made_for.__name__}, this driver needs {schema.__name__}. "
            "Choose another --config-name."
        )
    # Only the dataclasses decide which keys exist: names of pools and roles are the user's.
    OmegaConf.set_struct(composed, False)
    for change in parsed:
        if not _chooses_group(change, folders):
            composed = _changed(composed, change, made_for)
    return composed


class ShippedConfigs(SearchPathPlugin):
    """Lets Hydra find HybridFlow's own configs behind a user's."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append("hybridflow", f"file://{shipped_configs()}")


def typed(composed: DictConfig, schema: type[Config], config_name: str) -> Config:
    """The composed configuration as dataclasses; ConfigError names every value that is still missing."""
    try:
        missing = sorted(OmegaConf.missing_keys(composed))
        result = None if missing else OmegaConf.to_object(composed)
    except Exception as error:  # an interpolation that leads nowhere
        raise _explained(error, config_name, schema) from None
    if missing:
        docs = {path: doc_of(schema, path).replace("``", "").rstrip(".") for path in missing}
        raise ConfigError(
            "\n".join(
                f"{path} has no value{f' ({doc})' if doc else ''}. Give it as {path}=VALUE on the command line, or in "
                f"the config file {config_name!r}."
                for path, doc in docs.items()
            )
        )
    assert isinstance(result, schema)
    for setting in settings_of(schema):
        if typing.get_origin(setting.type) is list:  # of whose items OmegaConf lets containers pass
            for path, items in expand(result, setting.path):
                for item in items:
                    if not isinstance(item, typing.get_args(setting.type)[0]):
                        raise _wrong_item(path, item, setting.type)
    return result


def shipped_configs() -> Path:
    """The folder of HybridFlow's own configs: inside the package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent
    for folder in (package / "configs", package.parent / "configs"):
        if folder.is_dir():
            return folder
    raise ConfigError(f"HybridFlow's configs are neither in {package} nor beside it: the installation is broken.")


def help_text(description: str, line: CommandLine, schema: type[RunConfig]) -> str:
    """What ``--help`` prints: the driver's own words, the groups and every setting."""
    folders = [Path(d) for d in (line.config_dir, shipped_configs()) if d]
    names = sorted({p.stem for folder in folders for p in folder.glob("*.yaml")})
    groups: dict[str, set[str]] = {}
    for folder in folders:
        for path in folder.glob("*/*.yaml"):
            groups.setdefault(path.parent.name, set()).add(path.stem)
    flags = """
        --config-name NAME   another config file; default: {name} (there are: {names})
        --config-dir FOLDER  a folder with your own config files, searched first
        --cfg                print the composed configuration and exit
        --help               this text

        Choose from groups with group=option, set values with key=value (lists: [1,2]; mappings: {{a: 1}}).
        """
    parts = [description.strip(), textwrap.dedent(flags).strip().format(name=line.config_name, names=", ".join(names))]
    chosen = {g: o for g, o in sorted(groups.items()) if g in children(schema, "") or g == "placement"}
    parts.append("\n".join(["groups:"] + [f"  {g}: {', '.join(sorted(o))}" for g, o in chosen.items()]))
    rows = [f"  {s.path} ({type_text(s.type)}; default {s.default_text()})" for s in settings_of(schema)]
    docs = [s.doc.replace("``", "") for s in settings_of(schema)]
    parts.append("\n".join(["settings:"] + [f"{r}  {d}" if d else r for r, d in zip(rows, docs, strict=True)]))
    return "\n\n".join(parts)


class exit_on_error:
    """Context that ends the process with a message instead of a traceback: for HybridFlow's own errors, and Ctrl-C."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
        if isinstance(error, HybridFlowError):
            text = error.headline if isinstance(error, WorkerError) and error.explains_itself else error
            print(f"error: {text}{notes}", file=sys.stderr)
            raise SystemExit(2 if isinstance(error, ConfigError) else 1) from None
        if isinstance(error, KeyboardInterrupt):
            print(f"Interrupted.{notes}", file=sys.stderr)
            raise SystemExit(130) from None


def _parsed(text: str) -> Override:
    try:
        parsed = OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise ConfigError(
            f"{text!r} is not an override ({str(error).splitlines()[0]}). Write key=value, and quote text with special "
            "characters twice, as in 'data.system_prompt=\"Answer, please.\"'."
        ) from None
    if not parsed.key_or_group:
        raise ConfigError(f"{text!r} names no setting. Write key=value.")
    if parsed.is_sweep_override():
        raise ConfigError(
            f"{text!r}: a comma at the top of a value asks for a sweep, which a driver does not do. "
            f"""Write [a,b] for a list, or quote the text: '{parsed.key_or_group}="a,b"'."""
        )
    return parsed


def _chooses_group(override: Override, folders: Sequence[Path]) -> bool:
    """Whether an override picks a file of a group; otherwise it gives a setting its value."""
    is_group = any((folder / override.key_or_group).is_dir() for folder in folders)
    return is_group and not isinstance(override.value(), dict)


def _changed(composed: DictConfig, override: Override, schema: type) -> DictConfig:
    """The configuration with one setting changed; ``+`` and ``++`` add nothing, for the schema decides what exists."""
    path = override.key_or_group
    *parents, last = path.split(".")
    if not all([*parents, last]) or type_at(schema, path) is None:
        raise _unknown(path, "", schema)
    if override.is_delete():
        parent = OmegaConf.select(composed, ".".join(parents)) if parents else None
        if parent is None or ".".join(parents) not in free_dicts(schema) or last not in parent:
            raise ConfigError(f"~{path}: only entries of {', '.join(free_dicts(schema))} can be removed.")
        del parent[last]
        return composed
    if override.value() == {} and path in free_dicts(schema):
        OmegaConf.update(composed, path, {}, merge=False)
        return composed
    value: Any = override.value()
    for name in reversed(path.split(".")):
        value = {name: value}
    try:
        return OmegaConf.merge(composed, value)  # type: ignore[return-value]
    except (ValidationError, ConfigTypeError) as error:
        raise _wrong_type(error, "", schema, override.value(), path) from None
    except OmegaConfBaseException as error:
        raise _explained(error, "", schema) from None


def _cause(error: BaseException, *kinds: Any) -> Any:
    """The first exception of the given kinds in an exception's chain of causes."""
    at: BaseException | None = error
    while at is not None and not isinstance(at, kinds):
        at = at.__cause__ or at.__context__
    return at


def _explained(error: BaseException, config_name: str, schema: type) -> ConfigError:
    """What an exception of Hydra or OmegaConf means for somebody who wrote a setting."""
    from omegaconf import errors as omega
    from yaml import YAMLError

    text = str(error)
    file = re.match(r"In '([^']+)':? ?", text)
    where = f"in config file {file[1]!r}: " if file else ""
    missing = _cause(error, MissingConfigException)
    if missing is not None:
        return _no_such_config(missing, config_name)
    unused = re.search(r"Could not override '([^']+)'\. No match in the defaults list", text)
    if unused:
        return ConfigError(f"{where}config {config_name!r} does not use the group {unused[1]!r}. Leave it out.")
    unknown = _cause(error, omega.ConfigKeyError, omega.ConfigAttributeError)
    if unknown is not None:
        return _unknown(unknown.full_key or str(unknown.key), where, schema)
    wrong = _cause(error, omega.ValidationError)
    if wrong is not None:
        return _wrong_type(wrong, where, schema)
    yaml = _cause(error, YAMLError)
    if yaml is not None:
        return ConfigError(f"{where or f'config {config_name!r}: '}not readable as YAML: {' '.join(str(yaml).split())}")
    key = getattr(error, "full_key", None)
    where = where or ("" if key else f"config {config_name!r}: ")
    return ConfigError(
        f"{where}{f'{key}: ' if key else ''}{text.removeprefix(file[0] if file else '').strip().splitlines()[0]}"
    )


def _no_such_config(error: Any, config_name: str) -> ConfigError:
    name = str(error.missing_cfg_file).removesuffix(".yaml")
    options = error.options
    if options is None:
        options = sorted(p.stem for p in shipped_configs().glob("*.yaml"))
        return ConfigError(f"there is no config file {name!r}.{nearest(name, options)}")
    group, _, option = name.partition("/")
    hint = f" A model folder is given as model.path={option}." if group == "model" and "/" in option else ""
    return ConfigError(f"{group}={option} is not an option of the group {group!r}.{nearest(option, options)}{hint}")


def _unknown(path: str, where: str, schema: type) -> ConfigError:
    """An unknown setting: blame the first part of the path that does not exist."""
    parts = path.split(".")
    for end in range(len(parts)):
        parent = ".".join(parts[:end])
        known = children(schema, parent)
        if known and parts[end] not in known:
            shown = ".".join(parts[: end + 1])
            inside = f" in {parent!r}" if parent else ""
            return ConfigError(
                f"{where}there is no setting {shown!r}: {parts[end]!r} is unknown{inside}.{nearest(parts[end], known)}"
            )
    return ConfigError(f"{where}there is no setting {path!r}.")


def _wrong_type(error: Any, where: str, schema: type, given: Any = None, at: str = "") -> ConfigError:
    path = re.sub(r"\[\d+\]", "", error.full_key or at)
    if not path:  # for a group, OmegaConf says which class it wants, not where
        wanted = re.search(r"not a subclass of (\w+)", str(error))
        path = next(iter(groups_of(schema, wanted[1] if wanted else "")), "a value")
    kind = type_at(schema, path)
    found = re.search(r"^(?:Value|Cannot convert) '(.*?)' (?:of type|\()|\. value: (.*)$", str(error), re.M)
    value = found[1] or found[2] if found else "null" if given is None else given
    if not found and where:
        value = None  # a config file's value is only known where OmegaConf repeats it
    if (error.full_key or "").endswith("]") and typing.get_origin(kind) is list:
        return _wrong_item(f"{where}{path}", value, kind)
    hints = {dict: f" Write {path}={{...}}.", list: f" Write {path}=[...]."}
    hint = hints.get(_container(kind), "")
    shown = "" if value is None else f"={value}"
    return ConfigError(f"{where}{path}{shown} has the wrong type: expected {type_text(kind)}.{hint}")


def _wrong_item(path: str, item: Any, kind: Any) -> ConfigError:
    return ConfigError(f"{path}: {item} in the list has the wrong type: expected {type_text(kind)}.")


def _container(kind: Any) -> Any:
    """``list`` or ``dict`` where a type is one or a group of settings, else None."""
    return dict if dataclasses.is_dataclass(kind) else typing.get_origin(kind)


def _wrong_shape(error: BaseException, folders: Sequence[Path], schema: type) -> ConfigError | None:
    """The list in a config file where a mapping belongs, or the mapping where a list does: OmegaConf does not say."""
    file = re.match(r"In '([^']+)':? ?", str(error))
    if file is None or _cause(error, ConfigTypeError) is None:
        return None
    path = next((p for folder in reversed(folders) if (p := folder / f"{file[1]}.yaml").is_file()), None)
    if path is None:
        return None
    whole = "@package _global_" in path.read_text("utf-8") or "/" not in file[1]
    places = [("" if whole else file[1].rpartition("/")[0], yaml.safe_load(path.read_text("utf-8")))]
    while places:
        at, value = places.pop(0)
        wanted = _container(type_at(schema, at)) if at else dict
        if wanted in (list, dict) and isinstance(value, list | dict) and not isinstance(value, wanted):
            return _wrong_type(_cause(error, ConfigTypeError), f"in config file {file[1]!r}: ", schema, value, at)
        if isinstance(value, dict):
            places += [(f"{at}.{key}" if at else str(key), below) for key, below in value.items() if key != "defaults"]
    return None
