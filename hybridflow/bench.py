"""``hybridflow bench``: sweeps of a driver's settings, each point a run of its own that is measured from its files.

Where it stands: beside the command line, which has refused unknown settings of a driver before; it starts drivers as a
user would and imports nothing of theirs. Its folder:

    points/<id>.json    the row of one point, written when it has ended, failed or not
    runs/<id>/          its run; printed.txt is what it said
    results.csv, results.parquet, report.html

The invariant: a point is identified by driver, settings and numbers of steps, so that the same command goes on where an
earlier one stopped, and a command with more values adds points to the same folder.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf

from hybridflow.errors import ConfigError
from hybridflow.models.spec import ModelSpec
from hybridflow.planner.flops import forward_flops, step_flops
from hybridflow.report.page import html, trace_columns
from hybridflow.report.summary import read_metrics
from hybridflow.trace import idle_shares, read_trace

QUIET = (
    "evaluate.at_start=false",
    "evaluate.every=0",
    "evaluate.size=1",
    "checkpoint.every=0",
    "tracking.trackers=[]",
    "tracking.rollouts_every=0",
)
"""What every point is given before its own settings: nothing that is not part of a step."""


@dataclass(frozen=True)
class Settings:
    """How points are run.

    Attributes:
        out: the folder.
        steps: measured of each point.
        warm_up: steps before those.
        timeout: seconds that a point may take.
        peak_tflops: of one device, for the utilisation; 0 leaves it out.
        retry: run points again that have failed.
    """

    out: Path
    steps: int = 5
    warm_up: int = 2
    timeout: float = 3600.0
    peak_tflops: float = 0.0
    retry: bool = False


@dataclass(frozen=True)
class Point:
    """One combination of settings.

    Attributes:
        driver: path of the script.
        chosen: (setting, value) of those that have several values in the sweep.
        overrides: all of them, as on the driver's command line.
    """

    driver: str
    chosen: tuple[tuple[str, str], ...]
    overrides: tuple[str, ...]

    def name(self, settings: Settings) -> str:
        """Readable, and the same for the same run."""
        key = json.dumps([self.driver, self.overrides, settings.steps, settings.warm_up])
        words = "_".join([Path(self.driver).stem, *(value for _, value in self.chosen)])
        return f"{re.sub(r'[^A-Za-z0-9.]+', '-', words)[:60].strip('-')}_{hashlib.sha256(key.encode()).hexdigest()[:8]}"


def points_of(drivers: Sequence[str], overrides: Sequence[str]) -> list[Point]:
    """Every combination: a value with commas at its top stands for several values, as in Hydra's multirun.

    Raises:
        ConfigError: for what is no override, or a sweep without an end.
    """
    axes: list[list[tuple[str, str, bool]]] = []
    for text in overrides:
        try:
            parsed = OverridesParser.create().parse_override(text)
        except HydraException as error:
            raise ConfigError(f"{text!r} is not an override ({str(error).splitlines()[0]}). Write key=a,b.") from None
        if parsed.is_sweep_override() and not parsed.is_discrete_sweep():
            raise ConfigError(f"{text!r}: only lists of values can be swept, such as {parsed.key_or_group}=1,2.")
        values = list(parsed.sweep_string_iterator()) if parsed.is_sweep_override() else [text.partition("=")[2]]
        key = parsed.get_key_element()
        axes.append([(key, value, len(values) > 1) for value in values])
    found = []
    for driver in drivers:
        if not Path(driver.partition(":")[0]).is_file():
            raise ConfigError(f"{driver}: no such file. Give drivers, such as examples/grpo.py, then key=value.")
        for choice in itertools.product(*axes):
            chosen = tuple((key, value) for key, value, swept in choice if swept)
            found.append(Point(driver, chosen, tuple(f"{key}={value}" for key, value, _ in choice)))
    return found


def bench(points: Sequence[Point], settings: Settings) -> list[dict[str, Any]]:
    """Run the points that have no row yet, one after the other, and write the results of all.

    Returns:
        The rows of ``points``, in their order.
    """
    folder = settings.out / "points"
    folder.mkdir(parents=True, exist_ok=True)
    for number, point in enumerate(points, 1):
        name = point.name(settings)
        path = folder / f"{name}.json"
        known = json.loads(path.read_text("utf-8")) if path.is_file() else None
        if known is None or (known["status"] != "done" and settings.retry):
            print(f"[{number}/{len(points)}] {name}", flush=True)
            known = run_point(point, settings)
            fresh = path.with_suffix(".new")
            fresh.write_text(json.dumps(known, indent=1), "utf-8")
            fresh.replace(path)
        print(f"[{number}/{len(points)}] {name}: {told(known)}", flush=True)
        write_results(settings.out)
    return [json.loads((folder / f"{point.name(settings)}.json").read_text("utf-8")) for point in points]


def run_point(point: Point, settings: Settings) -> dict[str, Any]:
    """Run one point in a process of its own and measure it; a failure is a row too."""
    name = point.name(settings)
    run_dir = settings.out / "runs" / name
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.mkdir(parents=True)
    given = [*QUIET, *point.overrides, f"steps={settings.warm_up + settings.steps}", f"name={name}"]
    command = [sys.executable, point.driver, *given, f"runs_dir={settings.out / 'runs'}"]
    started = time.monotonic()
    code = _run(command, run_dir / "printed.txt", settings.timeout)
    row: dict[str, Any] = {"point": name, "status": "done", "driver": point.driver, **dict(point.chosen)}
    row["wall_seconds"] = round(time.monotonic() - started, 1)
    if code == 0:
        row |= measure(run_dir, settings)
        shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)
        (run_dir / "model").unlink(missing_ok=True)  # points into it
    else:
        lines = (run_dir / "printed.txt").read_text("utf-8", errors="replace").strip().splitlines()
        told = next((line for line in reversed(lines) if line.startswith("error:")), lines[-1] if lines else "")
        reason = f"no end within {settings.timeout:g} s" if code is None else f"exit code {code}"
        row |= {"status": "failed", "error": f"{reason}: {told}"}
    return row


def measure(run_dir: Path, settings: Settings) -> dict[str, Any]:
    """The numbers of one finished run, over the steps after its warm-up.

    Returns:
        ``devices`` (of kind ``device``, all pools), ``step_seconds``, ``tokens_per_second`` and the same per device,
        ``seconds/<phase>`` (means), ``sync_bytes`` and ``sync_seconds`` of a step, ``transition_seconds`` (both changes
        of phase, syncs included), ``idle/<pool>`` (mean over its ranks), ``peak_gb/<role>``, ``peak_gb/<process>``,
        ``mfu`` where the peak is given, and ``config``, the resolved configuration as JSON.
    """
    config: Any = OmegaConf.load(run_dir / "config.yaml")
    rows = [row for row in read_metrics(run_dir / "metrics.jsonl") if row["step"] > settings.warm_up]
    rows = [row for row in rows if "time/step" in row]
    seconds = sum(row["time/step"] for row in rows)
    tokens = sum(row["throughput/tokens_per_second"] * row["time/step"] for row in rows)
    devices = sum(sum(pool.devices) for pool in config.pools.values() if pool.get("kind", "device") == "device")

    def mean(name: str) -> float:
        return sum(row.get(name) or 0.0 for row in rows) / len(rows)

    found: dict[str, Any] = {
        "devices": devices,
        "step_seconds": seconds / len(rows),
        "tokens_per_second": tokens / seconds,
        "tokens_per_second_per_device": tokens / seconds / devices,
    }
    names = dict.fromkeys(name for row in rows for name in row)
    found |= {f"seconds/{n[5:]}": mean(n) for n in names if n.startswith("time/") and n != "time/step"}
    found |= {"sync_bytes": mean("sync/bytes"), "sync_seconds": mean("sync/seconds")}
    found["transition_seconds"] = mean("phase/training/seconds") + mean("phase/generation/seconds")
    for name in names:
        if name.startswith("memory/") and name.endswith("_peak_gb"):
            found[f"peak_gb/{name[7:-8]}"] = max(row.get(name) or 0.0 for row in rows)
    steps = {row["step"] for row in rows}
    found |= of_processes([event for event in read_trace(run_dir / "trace.json") if event["step"] in steps])
    if settings.peak_tflops:
        flops = _flops(config, tokens, len(rows))
        found["mfu"] = flops / (seconds * devices * settings.peak_tflops * 1e12)
    found["config"] = json.dumps(OmegaConf.to_container(config), sort_keys=True)
    return found


def of_processes(events: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """``idle/<pool>``, the mean of its ranks, and ``peak_gb/<process>`` of the given events."""
    pools: dict[str, list[float]] = {}
    for process, share in idle_shares(events).items():
        pools.setdefault(process.removeprefix("pool ").partition(" rank ")[0], []).append(share)
    found = {f"idle/{pool}": sum(shares) / len(shares) for pool, shares in pools.items()}
    for event in events:
        if event["peak_gb"] is not None:
            name = f"peak_gb/{event['process']}"
            found[name] = max(found.get(name, 0.0), event["peak_gb"])
    return found


def write_results(out: Path) -> None:
    """``results.csv``, ``results.parquet`` and ``report.html`` of all points in the folder."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    rows = [json.loads(path.read_text("utf-8")) for path in sorted((out / "points").glob("*.json"))]
    names = [*dict.fromkeys(name for row in rows for name in row if name != "config"), "config"]
    with (out / "results.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
    columns = {name: [row.get(name) for row in rows] for name in names}
    # A setting may be a number in one point and text in another.
    texts = {name for name, values in columns.items() if any(isinstance(value, str) for value in values)}
    table = {n: [None if v is None else str(v) for v in c] if n in texts else c for n, c in columns.items()}
    parquet.write_table(pa.table(table), out / "results.parquet")
    shown = [{name: value for name, value in row.items() if name != "config"} for row in rows]
    timelines = {row["point"]: _last_step(out / "runs" / row["point"]) for row in rows if row["status"] == "done"}
    data = {"title": f"HybridFlow bench {out.resolve().name}", "rows": shown, "timelines": timelines}
    (out / "report.html").write_text(html(data, "bench.js"), "utf-8")


def told(row: Mapping[str, Any]) -> str:
    """A row in a line."""
    if row["status"] != "done":
        return f"failed: {row['error']}"
    return f"{row['tokens_per_second']:.0f} tokens/s, {row['step_seconds']:.2f} s a step"


def _last_step(run_dir: Path) -> dict[str, Any]:
    """The timeline of the last step but one: to the last belongs what a run does at its end."""
    events = read_trace(run_dir / "trace.json", tail_bytes=2**20)
    steps = [event["step"] for event in events if event["process"] == "driver" and event["step"] > 0]
    steps = sorted(set(steps))[-2:-1] or steps
    return trace_columns([event for event in events if event["step"] in steps])


def _flops(config: Any, tokens: float, num_steps: int) -> float:
    """Model FLOPs of all measured steps."""
    rows = num_steps * config.data.prompts_per_step * config.rollout.n
    forward = forward_flops(ModelSpec.from_folder(config.model.path), tokens, tokens / rows)
    placed = [role for role, at in config.roles.items() if at is not None]
    scored = ("reference" in placed) + (config.actor.loss.old_log_probs != "own")
    return step_flops(forward, epochs=config.actor.epochs, num_scored=scored, generates="rollout" in placed)


def _run(command: Iterable[str], printed: Path, timeout: float) -> int | None:
    """The exit code of a driver, None where it was ended because its time was over."""
    with printed.open("wb") as file:
        process = subprocess.Popen([*command], stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            return process.wait(timeout)
        except BaseException as error:
            for number, patience in ((signal.SIGINT, 1), (signal.SIGINT, 30), (signal.SIGKILL, 30)):
                # A second Ctrl-C ends a driver at once, and Ray with it.
                with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, number)
                    process.wait(patience)
            if isinstance(error, subprocess.TimeoutExpired):
                return None
            raise
