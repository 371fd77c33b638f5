"""The end of a run in one screen: accuracy before and after, speed, where the time went, where everything lies.

Reads ``metrics.jsonl`` and nothing else of a run, so ``hybridflow summary RUN`` says the same at any later time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridflow.errors import DataError

ACCURACY, REWARD, STEP_TIME = "evaluate/accuracy", "reward/mean", "time/step"
TOKENS_PER_SECOND = "throughput/tokens_per_second"
FILES = (
    ("config.yaml", "configuration"),
    ("metrics.jsonl", "metrics"),
    ("rollouts.jsonl", "samples"),
    ("reward.png", "plot"),
    ("checkpoints", "checkpoints"),
    ("tensorboard", "TensorBoard"),
)


@dataclass(frozen=True)
class Summary:
    """A run in numbers; None where the run did not measure something.

    Attributes:
        steps: number of the last training step.
        accuracy: (step, accuracy) of the first and of the last evaluation.
        reward: mean reward of the first and last tenth of the training steps.
        seconds: total of ``time/step`` over the training steps.
        tokens_per_second: tokens of all training steps over their seconds.
        times: (name, seconds) by ``time/<name>``, longest first.
    """

    run_dir: Path
    steps: int
    accuracy: tuple[tuple[int, float], tuple[int, float]] | None
    reward: tuple[float, float] | None
    seconds: float
    tokens_per_second: float | None
    times: list[tuple[str, float]] = field(default_factory=list)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a ``metrics.jsonl``; a torn last line, of a run that was killed, is left out.

    Raises:
        DataError: there is no such file, or a line before the last is not a row.
    """
    if not path.is_file():
        raise DataError(f"{path} does not exist. Give the folder of a run, such as runs/grpo-tiny.")
    rows = []
    lines = path.read_text("utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            row["step"] = int(row["step"])
            rows.append(row)
        except (ValueError, KeyError, TypeError) as error:
            if number < len(lines):
                raise DataError(f"{path}, line {number}: not a row of metrics ({error}).") from error
    return rows


def summarize(run_dir: Path) -> Summary:
    """Read a run's metrics; DataError where there are none."""
    rows = read_metrics(run_dir / "metrics.jsonl")
    if not rows:
        raise DataError(f"{run_dir / 'metrics.jsonl'} has no row yet: the run ended before its first step.")
    evaluated = _series(rows, ACCURACY)
    training = [row for row in rows if row["step"] > 0]
    rewards = [value for _, value in _series(training, REWARD)]
    tenth = max(1, len(rewards) // 10)
    timed = [row for row in training if row.get(STEP_TIME) is not None]
    seconds = sum(row[STEP_TIME] for row in timed)
    spoken = [row for row in timed if row.get(TOKENS_PER_SECOND) is not None]
    tokens = sum(row[TOKENS_PER_SECOND] * row[STEP_TIME] for row in spoken)
    spoken_seconds = sum(row[STEP_TIME] for row in spoken)
    totals: dict[str, float] = {}
    for row in timed:
        for name, value in row.items():
            if name.startswith("time/") and name != STEP_TIME and value is not None:
                totals[name[5:]] = totals.get(name[5:], 0.0) + value
    return Summary(
        run_dir=run_dir,
        steps=rows[-1]["step"],
        accuracy=(evaluated[0], evaluated[-1]) if evaluated else None,
        reward=(_mean(rewards[:tenth]), _mean(rewards[-tenth:])) if rewards else None,
        seconds=seconds,
        tokens_per_second=tokens / spoken_seconds if spoken_seconds else None,
        times=sorted(totals.items(), key=lambda item: -item[1]),
    )


def render(summary: Summary) -> str:
    """A summary as plain text."""
    s = summary
    lines = [f"run {s.run_dir.name}: {s.steps} steps, {s.seconds:.0f} s in training steps"]
    if s.accuracy:
        (first, before), (last, after) = s.accuracy
        lines.append(f"accuracy on held-out prompts: {before:.3f} (step {first}) -> {after:.3f} (step {last})")
    if s.reward:
        lines.append(f"mean reward: {s.reward[0]:.3f} (first tenth of the steps) -> {s.reward[1]:.3f} (last tenth)")
    if s.tokens_per_second is not None:
        lines.append(f"tokens per second: {s.tokens_per_second:.0f} (prompts and responses, over whole steps)")
    if s.times and s.seconds > 0:
        lines += ["", "where the time went    seconds   share"]
        lines += [f"  {name:<18} {value:>10.1f} {value / s.seconds:>7.1%}" for name, value in s.times]
    present = [(label, s.run_dir / name) for name, label in FILES if (s.run_dir / name).exists()]
    lines += ["", "written:", *(f"  {label:<14} {path}" for label, path in present)]
    return "\n".join(lines)


def plot(run_dir: Path) -> Path | None:
    """Draw reward (or, without one, loss) and held-out accuracy over the steps into ``reward.png``.

    Returns:
        The file, or None where the run has nothing to draw.

    Raises:
        ImportError: matplotlib is not installed.
    """
    rows = read_metrics(run_dir / "metrics.jsonl")
    training = [row for row in rows if row["step"] > 0]
    left = next(((label, s) for label, s in _left_axes(training) if s), None)
    accuracy = _series(rows, ACCURACY)
    if left is None and not accuracy:
        return None

    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_xlabel("step")
    axes.set_title(run_dir.name)
    if left is not None:
        label, series = left
        steps, values = zip(*series, strict=True)
        axes.plot(steps, values, color="tab:blue", alpha=0.35, linewidth=1)
        axes.plot(steps, _smooth(values), color="tab:blue", label=label)
        axes.set_ylabel(label)
    if accuracy:
        beside = axes if left is None or left[0] == REWARD else axes.twinx()
        steps, values = zip(*accuracy, strict=True)
        beside.plot(steps, values, "o-", color="tab:orange", label="held-out accuracy")
        beside.legend(loc="lower right")
    axes.legend(loc="upper left")
    path = run_dir / "reward.png"
    figure.savefig(path, dpi=120)
    return path


def conclude(run_dir: Path) -> list[str]:
    """Draw the plot and give the summary as lines; never fails for a run that simply has little to show."""
    notes = []
    try:
        plot(run_dir)
    except ImportError as error:
        notes = ["", f"no plot: {error}. Install it with: pip install matplotlib"]
    try:
        return ["", *render(summarize(run_dir)).splitlines(), *notes]
    except DataError as error:
        return [str(error)]


def _left_axes(rows: Sequence[dict[str, Any]]) -> list[tuple[str, list[tuple[int, float]]]]:
    return [(name, _series(rows, name)) for name in (REWARD, "actor/loss")]


def _series(rows: Sequence[dict[str, Any]], name: str) -> list[tuple[int, float]]:
    """(step, value) where the metric is there and finite."""
    return [(row["step"], row[name]) for row in rows if row.get(name) is not None]


def _smooth(values: Sequence[float], window: int = 10) -> list[float]:
    """Trailing mean."""
    return [_mean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
