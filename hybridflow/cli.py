"""``hybridflow check``, ``summary`` and ``report`` say what can be said about a run without starting one; ``hybridflow
bench`` starts many.

Exit codes: 0 for success, 2 for wrong settings or arguments, 1 for any other error of HybridFlow.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from hybridflow import __version__, bench
from hybridflow.checks import check
from hybridflow.checks.base import SCORERS
from hybridflow.compose import CommandLine, Driver, compose, exit_on_error, typed
from hybridflow.errors import ConfigError, nearest
from hybridflow.importing import NotThere, import_file
from hybridflow.report import conclude, read_metrics, write_page
from hybridflow.settings import SCHEMAS

CHECK_USAGE = """hybridflow check DRIVER.py [arguments of the driver]
       hybridflow check --config-name NAME [--config-dir FOLDER] [--cfg] [key=value ...]"""


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
        usage=CHECK_USAGE,
        add_help=False,
    )
    summary = commands.add_parser("summary", help="print the summary of a run and draw its plot again")
    summary.add_argument("run", type=Path, help="the run's folder, such as runs/grpo-tiny")
    page = commands.add_parser("report", help="write one HTML page of a run, which needs no network")
    page.add_argument("run", type=Path, help="the run's folder, such as runs/grpo-tiny")
    page.add_argument("--out", type=Path, help="the file; by default report.html in the run's folder")
    sweep = commands.add_parser(
        "bench", help="measure combinations of settings: key=a,b sweeps a setting, as in Hydra's multirun"
    )
    sweep.add_argument("drivers", nargs="+", metavar="DRIVER.py|key=a,b", help="drivers, then their settings")
    sweep.add_argument("--out", type=Path, required=True, help="folder of the results; the same one goes on")
    sweep.add_argument("--steps", type=int, default=5, help="measured steps of each point (5)")
    sweep.add_argument("--warm-up", type=int, default=2, help="steps before those (2)")
    sweep.add_argument("--timeout", type=float, default=3600, help="seconds a point may take (3600)")
    sweep.add_argument("--peak-tflops", type=float, default=0, help="of one device, for the utilisation (mfu)")
    sweep.add_argument("--retry", action="store_true", help="run points again that have failed")
    if given[:1] == ["check"]:  # its arguments are Hydra's overrides, which argparse would not let pass
        with exit_on_error():
            return _check(given[1:])
    options, rest = parser.parse_known_args(given)  # argparse itself wants all overrides on one side of the flags
    if rest and (options.command != "bench" or any(text.startswith("-") for text in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    with exit_on_error():
        if options.command == "bench":
            return _bench(options, [*options.drivers, *rest])
        read_metrics(options.run / "metrics.jsonl")
        if options.command == "report":
            return print(write_page(options.run, options.out))
        print("\n".join(conclude(options.run)).strip())


def _check(arguments: Sequence[str]) -> None:
    script = arguments[0] if arguments and arguments[0].partition(":")[0].endswith(".py") else ""
    driver = load_driver(script) if script else None
    line = CommandLine.parse(arguments[1:] if script else arguments, driver.config_name if driver else "")
    if line.help:
        return print(f"usage: {CHECK_USAGE}")
    if not line.config_name:
        raise ConfigError(
            "say what to check: hybridflow check examples/grpo.py (a driver), or hybridflow check --config-name grpo."
        )
    composed = compose(line.config_name, line.overrides, driver.schema if driver else None, line.config_dir)
    if line.show:
        return print(OmegaConf.to_yaml(composed, resolve=True), end="")
    schema = driver.schema if driver else SCHEMAS[getattr(OmegaConf.get_type(composed), "__name__", "")]
    config = typed(composed, schema, line.config_name)
    plan = check(config)
    # These load torch and the tokenizer's library, which is the longer part of a check: a wrong setting is told before.
    from hybridflow.algorithms.step import check_functions
    from hybridflow.models.folder import check_model
    from hybridflow.rewards.components import check_reward

    check_functions(config)
    check_model(config)
    for role in SCORERS:
        if config.roles.get(role) is not None:
            check_reward(getattr(config, role), role)
    print(plan.placement_table())
    print("every setting is fine; nothing was started. Rows of data are read at the start of a run.")


def _bench(options: argparse.Namespace, arguments: Sequence[str]) -> None:
    drivers = [text for text in arguments if text.partition(":")[0].endswith(".py")]
    overrides = [text for text in arguments if text not in drivers]
    for name, least in {"steps": 1, "warm_up": 0, "timeout": 1, "peak_tflops": 0}.items():
        if getattr(options, name) < least:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} {getattr(options, name)}: has to be at least {least}.")
    if not drivers:
        raise ConfigError("name a driver: hybridflow bench examples/grpo.py --out runs/bench rollout.n=4,8.")
    settings = bench.Settings(
        options.out, options.steps, options.warm_up, options.timeout, options.peak_tflops, options.retry
    )
    points = bench.points_of(drivers, overrides)
    loaded = {script: load_driver(script) for script in drivers}
    for point in points:  # an unknown setting would cost a process for each of them
        driver = loaded[point.driver]
        composed = compose(driver.config_name, [*bench.QUIET, *point.overrides], driver.schema)
        typed(composed, driver.schema, driver.config_name)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the run in progress is ended too
    rows = bench.bench(points, settings)
    failed = sum(row["status"] != "done" for row in rows)
    print(f"{len(rows)} points, {failed} failed: {options.out / 'results.csv'}, {options.out / 'report.html'}")


def load_driver(script: str) -> Driver:
    """The driver of a file, without running it.

    Args:
        script: ``path/file.py``, or ``path/file.py:name`` where the file has several.

    Raises:
        ConfigError: there is no such file, its import fails, or it has no driver, or several.
    """
    where, _, wanted = script.partition(":")
    sys.path.insert(0, str(Path(where).resolve().parent))  # as Python does for a script
    try:
        module = import_file(where)
    except NotThere as reason:
        raise ConfigError(f"{script}: {reason}") from reason.__cause__
    found: dict[str, Any] = {key: value for key, value in vars(module).items() if hasattr(value, "config_name")}
    own = {key: value for key, value in found.items() if value.__module__ == module.__name__}
    if not own:
        raise ConfigError(
            f"{script} has no driver: put @hybridflow.driver(config_name, Schema) above its main(config)."
        )
    if wanted not in own and (wanted or len(own) > 1):
        raise ConfigError(f"{script}: name a driver, as in {where}:NAME.{nearest(wanted, own)}")
    return own[wanted or next(iter(own))]


if __name__ == "__main__":
    main()
