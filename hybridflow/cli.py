"""``hybridflow check`` and ``hybridflow summary``: what can be said about a run without starting one.

Exit codes: 0 for success, 2 for wrong settings or arguments, 1 for any other error of HybridFlow.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from omegaconf import OmegaConf

from hybridflow import __version__
from hybridflow.checks import check
from hybridflow.compose import CommandLine, compose, exit_on_error, typed
from hybridflow.errors import ConfigError
from hybridflow.report import conclude, read_metrics
from hybridflow.rewards.components import check_reward
from hybridflow.settings import SCHEMAS


def main(arguments: Sequence[str] | None = None) -> None:
    """The command ``hybridflow``."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="hybridflow",
        description="RL post-training of language models. Training is started by a driver, such as examples/grpo.py.",
    )
    parser.add_argument("--version", action="version", version=f"hybridflow {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser(
        "check",
        help="compose a configuration and check every setting, without starting anything",
        usage="hybridflow check --config-name NAME [--config-dir FOLDER] [--cfg] [key=value ...]",
        add_help=False,
    )
    summary = commands.add_parser("summary", help="print the summary of a run and draw its plot again")
    summary.add_argument("run", type=Path, help="the run's folder, such as runs/grpo-tiny")
    if given[:1] == ["check"]:  # its arguments are Hydra's overrides, which argparse would not let pass
        with exit_on_error():
            return _check(given[1:])
    options = parser.parse_args(given)
    with exit_on_error():
        read_metrics(options.run / "metrics.jsonl")
        print("\n".join(conclude(options.run)).strip())


def _check(arguments: Sequence[str]) -> None:
    line = CommandLine.parse(arguments, "")
    if line.help:
        return print("usage: hybridflow check --config-name NAME [--config-dir FOLDER] [--cfg] [key=value ...]")
    if not line.config_name:
        raise ConfigError("say which configuration to check: hybridflow check --config-name grpo")
    composed = compose(line.config_name, line.overrides, config_dir=line.config_dir)
    if line.show:
        return print(OmegaConf.to_yaml(composed, resolve=True), end="")
    schema = SCHEMAS[getattr(OmegaConf.get_type(composed), "__name__", "")]
    config = typed(composed, schema, line.config_name)
    plan = check(config)
    if config.roles.get("reward") is not None:
        check_reward(config.reward)
    print(plan.placement_table())
    print("every setting is fine; nothing was started. Rows of data are read at the start of a run.")


if __name__ == "__main__":
    main()
