"""What a run shows and keeps: a progress bar with one line a step, ``metrics.jsonl``, ``rollouts.jsonl``, other
trackers.

    <run>/config.yaml      the resolved configuration, itself a config file: --config-dir <run> --config-name config
    <run>/metrics.jsonl    one JSON object a step, flushed at once
    <run>/rollouts.jsonl   one JSON object a sample
    <run>/trace.json       the timeline, see ``hybridflow.trace``

Where it stands: the last call of a step. Invariants: a step has exactly one row in ``metrics.jsonl``, in the order of
the steps; after a resume no row of a step that is to come is left in any file. Samples and timeline are written while
the next step runs, samples one batch at a time, and are in the file before the next batch's or the end of the run. JSON
has no NaN: a value that is not finite is ``null`` in its row, and the row's ``not_finite`` names it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
from omegaconf import OmegaConf
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hybridflow import report
from hybridflow.checks.values import GROUPED
from hybridflow.config import RLConfig, RunConfig
from hybridflow.errors import DataError
from hybridflow.sinks import SINKS, Row, Sink, written_to
from hybridflow.trace import END, HEAD, Events, Span

if TYPE_CHECKING:
    import torch

    from hybridflow.checks import Plan
    from hybridflow.protocol.data import DataProto

log = logging.getLogger(__name__)

MAX_FIELDS = 10
FIELDS: tuple[tuple[str, str, str], ...] = (
    ("reward", "reward/mean", ".3f"),
    ("solved", "reward/solved", ".2f"),
    ("failed", "reward/failed", ".2f"),
    ("accuracy", "evaluate/accuracy", ".3f"),
    ("preferred", "preference/accuracy", ".2f"),
    ("from teacher", "teacher/kl", ".3f"),
    ("loss", "preference/loss", ".4f"),
    ("loss", "actor/loss", ".4f"),
    ("entropy", "actor/entropy", ".3f"),
    ("grad", "actor/grad_norm", ".2f"),
    ("length", "response/length", ".1f"),
    ("mismatch", "rollout_vs_trainer/max_diff", ".1e"),
    ("tokens/s", "throughput/tokens_per_second", ".0f"),
    ("s", "time/step", ".1f"),
)
"""Console fields after the step: label, metric, format. A line shows those that a step has, ``MAX_FIELDS`` in all."""

SILENT_STEPS = 10
"""Steps without a difference between any prompt's samples after which the run says so, once."""

_MISMATCH_LIMITS = {"float32": 1e-3, "bfloat16": 1.0}
_NOT_METRICS = ("step", "timestamp", "not_finite")


class Tracker:
    """Everything a run reports, as a context manager.

    Args:
        config: the run's configuration; saved as ``config.yaml``.
        plan: names the run's folder.
        resumed_step: step of the checkpoint the run continues from; 0 starts the files anew.
        console: where to print; standard output by default. Without a terminal there are plain lines and no bar.
    """

    def __init__(self, config: RunConfig, plan: Plan, resumed_step: int = 0, console: Console | None = None) -> None:
        self.config, self.run_dir = config, Path(plan.run_dir)
        self.console = console or Console(highlight=False)
        with written_to(self.run_dir):
            self.run_dir.mkdir(parents=True, exist_ok=True)
            save_config(config, self.run_dir / "config.yaml")
        self._metrics, self._rollouts = (
            JsonLines(self.run_dir / name, resumed_step) for name in ("metrics.jsonl", "rollouts.jsonl")
        )
        self._trace, self._events = JsonLines(self.run_dir / "trace.json", resumed_step, HEAD, END), Events()
        earlier = [] if resumed_step == 0 else list(_rows(self.run_dir / "metrics.jsonl"))
        self._sinks: list[Sink] = [SINKS[name].make(config, self.run_dir, earlier) for name in config.tracking.trackers]
        self._bar: Progress | None = None
        self._first: tuple[int, float] | None = None
        self._silent_steps = 0
        self._tokenizer: Any = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="files")
        self._written: list[Future[None]] = []
        self.say(f"run folder: {self.run_dir} (configuration: {self.run_dir / 'config.yaml'})")

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def log(self, step: int, metrics: Mapping[str, Any], batch: DataProto | None = None, tag: str = "train") -> None:
        """Report a step; a second call for the step adds to its row.

        Args:
            step: from 1; 0 is before training.
            metrics: names to numbers.
            batch: the step's samples, dumped by ``tracking.rollouts_every``.
            tag: goes into the samples' rows: ``train`` or ``evaluate``.

        Raises:
            DataError: for a value that is no number, or a step before the last one.
            RunFolderError: the disk is full, or the folder cannot be written to any more.
        """
        found = {name: _number(name, value) for name, value in metrics.items()}
        now = time.time()
        self._metrics.write_step(step, as_json_row(found, now))
        for sink in self._sinks:
            sink.log((step, now, found))
        self._show(step, found)
        self._warn_of_mismatch(step, found)
        self._warn_of_silence(found)
        every = self.config.tracking.rollouts_every
        if batch is not None and every and step % every == 0:
            self.log_rollouts(step, batch, tag)

    def reported(self, step: int) -> Mapping[str, Any]:
        """What has been reported of a step, if it is the last one; else nothing."""
        last = self._metrics.last
        return last if last and last["step"] == step else {}

    def traced(self, step: int) -> bool:
        """Whether a resumed run has found the timeline of its last step, and so all that was written before it."""
        return self._trace.last.get("step") == step

    def history(self, metric: str) -> dict[int, float]:
        """What ``metrics.jsonl`` has of a metric by step; NaN where it was not finite."""
        return {
            step: metrics[metric] for step, _, metrics in _rows(self.run_dir / "metrics.jsonl") if metric in metrics
        }

    def log_rollouts(self, step: int, batch: DataProto, tag: str = "train") -> None:
        """Write each row of a batch to ``rollouts.jsonl``, in the background; columns it lacks are left out.

        Raises:
            RunFolderError, DataError: what went wrong with the batch before this one.
        """
        self._finish_writing()
        self._written.append(self._writer.submit(self._write_rollouts, step, batch, tag))

    def trace(self, step: int, timers: Sequence[tuple[str, float, float]], spans: Sequence[Span]) -> None:
        """Append to the timeline, in the background; arguments as of :meth:`hybridflow.trace.Events.of_step`."""
        done = [written for written in self._written if written.done()]
        self._written = [written for written in self._written if written not in done]
        for written in done:
            written.result()
        self._written.append(self._writer.submit(self._write_trace, step, timers, spans))

    def _write_trace(self, step: int, timers: Sequence[tuple[str, float, float]], spans: Sequence[Span]) -> None:
        for event in self._events.of_step(step, timers, spans):
            self._trace.append(event)
        self._trace.flush()

    def _write_rollouts(self, step: int, batch: DataProto, tag: str) -> None:
        if self._tokenizer is None:
            from hybridflow.models.tokenizer import load_tokenizer

            self._tokenizer = load_tokenizer(self.config.model.tokenizer_path or self.config.model.path)
        for row in rollout_rows(batch, self._tokenizer):
            self._rollouts.append({"step": step, "tag": tag, **row})
        self._rollouts.flush()

    def settle(self, kind: type[BaseException] | None = None, *_: object) -> None:
        """Wait for what is written in the background: an exit callback, called while Ray still has the rows.

        Raises:
            RunFolderError, DataError: what went wrong. Only said where an error is on its way, which may be the reason.
        """
        try:
            self._finish_writing()
        except Exception as error:
            if kind is None:
                raise
            self.say(f"warning: the samples or the timeline of the last step are not whole: {error}")

    def _finish_writing(self) -> None:
        written, self._written = self._written, []
        wait(written)
        for each in written:
            each.result()

    def say(self, text: str) -> None:
        """Print above the progress bar."""
        self.console.print(text, markup=False, soft_wrap=True)

    def finish(self) -> None:
        """Stop the bar, draw the plot and print the summary of the run."""
        self._stop_bar()
        self._finish_writing()
        with written_to(self.run_dir):
            lines = report.conclude(self.run_dir)
        for line in lines:
            self.say(line)

    def close(self) -> None:
        """Close all files; safe to call twice."""
        self._stop_bar()
        sinks, self._sinks = self._sinks, []
        for sink in sinks:
            sink.close()
        self._writer.shutdown()
        with contextlib.closing(self._metrics), contextlib.closing(self._rollouts):
            self._trace.close()
        self._finish_writing()

    def _show(self, step: int, metrics: Mapping[str, float]) -> None:
        total = self.config.steps
        # The first report is the clock's zero: a resumed run has not spent the earlier steps' time.
        self._first = self._first or (step, time.monotonic())
        line = console_line(step, total, metrics)
        if not self.console.is_terminal:
            done, left = step - self._first[0], total - step
            if done > 0 and left > 0:
                line += f"  eta {_duration((time.monotonic() - self._first[1]) / done * left)}"
            return self.say(line)
        if self._bar is None:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            remaining = TimeRemainingColumn()
            self._bar = Progress(*columns, remaining, console=self.console, speed_estimate_period=3600)
            self._bar.add_task(self.config.name, total=total, completed=step)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=step)
        self.say(line)

    def _stop_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _warn_of_mismatch(self, step: int, metrics: Mapping[str, float]) -> None:
        limit = self.config.tracking.mismatch_limit or _MISMATCH_LIMITS[self.config.model.dtype]
        if text := mismatch_above(limit, "tracking.mismatch_limit", metrics):
            self.say(f"warning: step {step}: {text}.")

    def _warn_of_silence(self, metrics: Mapping[str, float]) -> None:
        compares = isinstance(self.config, RLConfig) and self.config.algorithm.estimator in GROUPED
        if not compares or "reward/groups_without_signal" not in metrics:
            return
        self._silent_steps = self._silent_steps + 1 if metrics["reward/groups_without_signal"] == 1 else 0
        if self._silent_steps == SILENT_STEPS:
            self.say(
                f"warning: for {SILENT_STEPS} steps all samples of each prompt had the same reward, which teaches "
                "nothing. Look at rollouts.jsonl; take a model that gets some right, easier data, or a reward with "
                "parts."
            )


class JsonLines:
    """A file of JSON objects, one a line, each with the ``step`` it belongs to, in the order of steps.

    Args:
        path: the file.
        resumed_step: what is there is kept up to this step (a torn last line is dropped); 0 empties the file.
        head: what the file begins with.
        end: of each line.

    Attributes:
        last: the last row of :meth:`write_step`; empty where there is none.
    """

    def __init__(self, path: Path, resumed_step: int, head: bytes = b"", end: bytes = b"\n") -> None:
        self.path, self._head, self._end = path, head, end
        had_rows = path.is_file() and path.stat().st_size > 0
        if had_rows and not resumed_step:
            log.warning("%s of an earlier run is replaced.", path)
        with written_to(path):
            self._file = path.open("r+b" if had_rows else "w+b")
        position, self.last, self._last_at = self._position_after(resumed_step)
        self._file.seek(position)
        self._file.truncate()
        if position == 0:
            self._file.write(head)

    def append(self, row: Mapping[str, Any]) -> None:
        """Write a row, to the disk at the latest at the next flush. Here and below RunFolderError: it is full."""
        with written_to(self.path):
            self._file.write(_line(row, self._end))

    def write_step(self, step: int, row: Mapping[str, Any]) -> None:
        """Append the row of a step, or add to the last row where it is of the same step."""
        if self.last and step < self.last["step"]:
            raise DataError(
                f"{self.path}: step {step} is reported after step {self.last['step']}: steps do not go back."
            )
        if self.last and step == self.last["step"]:
            names = [*self.last.get("not_finite", ()), *row.get("not_finite", ())]
            row = {**self.last, **row} | ({"not_finite": names} if names else {})
        else:
            row = {"step": step, **row}
            self._last_at = self._file.tell()
        self.last = dict(row)
        with written_to(self.path):
            self._file.seek(self._last_at)
            self._file.write(_line(row, self._end))
            self._file.truncate()
            self._file.flush()

    def flush(self) -> None:
        with written_to(self.path):
            self._file.flush()

    def close(self) -> None:
        with written_to(self.path):
            self._file.close()

    def _position_after(self, resumed_step: int) -> tuple[int, dict[str, Any], int]:
        """Where the kept part ends, its last row, and where that begins."""
        end, last, last_at = 0, {}, 0
        if resumed_step and self._file.read(len(self._head)) == self._head:
            end = len(self._head)
        for line in self._file if resumed_step else ():
            try:
                row = json.loads(line.removesuffix(self._end))
                keep = line.endswith(self._end) and row["step"] <= resumed_step
            except (ValueError, KeyError, TypeError):
                keep = False
            if not keep:
                break
            end, last, last_at = end + len(line), row, end
        return end, last, last_at


def mismatch_above(limit: float, setting: str, metrics: Mapping[str, float]) -> str:
    """What to say where rollout and trainer differ by more than a limit, NaN included; "" where they do not, and for a
    limit of 0."""
    found = metrics.get("rollout_vs_trainer/max_diff")
    if not limit or found is None or found <= limit:
        return ""
    return f"the rollout's log_probs differ from the trainer's by up to {found:.3g}, more than {limit:g} ({setting})"


def save_config(config: RunConfig, path: Path) -> None:
    """Write a configuration as a config file that composes to the same configuration."""
    head = f"defaults:\n- schema/{type(config).__name__}\n- _self_\n"
    path.write_text(head + OmegaConf.to_yaml(OmegaConf.structured(config)), "utf-8")


def changed_settings(config: RunConfig, path: Path) -> list[str]:
    """The settings of a configuration that are others in a file of :func:`save_config`: ``steps=20 (was 10)``.

    Where a run goes and what it shows of itself is left out. A setting that only one of them has is not compared.
    """
    now, before = (_flat(OmegaConf.to_container(c)) for c in (OmegaConf.structured(config), OmegaConf.load(path)))
    free = ("name", "runs_dir", "checkpoint.", "tracking.")
    both = [key for key in now if key in before and not key.startswith(free)]
    return [f"{key}={now[key]!r} (was {before[key]!r})" for key in both if now[key] != before[key]]


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        return {path: value}
    return {k: v for name, part in value.items() for k, v in _flat(part, f"{path}.{name}".lstrip(".")).items()}


def as_json_row(metrics: Mapping[str, float], timestamp: float) -> dict[str, Any]:
    """Metrics as JSON values: numbers that are not finite become None and are named in ``not_finite``."""
    bad = [name for name, value in metrics.items() if not math.isfinite(value)]
    row: dict[str, Any] = {"timestamp": round(timestamp, 3), **metrics, **dict.fromkeys(bad)}
    return row | ({"not_finite": bad} if bad else {})


def console_line(step: int, total: int, metrics: Mapping[str, float]) -> str:
    """One step in at most ``MAX_FIELDS`` fields."""
    shown: dict[str, str] = {}
    for label, name, form in FIELDS:
        if metrics.get(name, 0.0) or (name in metrics and label != "failed"):
            shown.setdefault(label, f"{label} {metrics[name]:{form}}")
    return "  ".join([f"step {step}/{total}", *list(shown.values())[: MAX_FIELDS - 1]])


def rollout_rows(batch: DataProto, tokenizer: Any) -> Iterator[dict[str, Any]]:
    """The samples of a batch as JSON objects.

    Keys, where the batch has the column: uid, group, prompt, response, reward, solved, ground_truth, finish_reason,
    reward_error, reward_components, verdict, version, prompt_ids, response_ids, log_probs (the rollout's own),
    trainer_log_probs, advantages (one number where all tokens have the same), mask (0 and 1; which tokens train, only
    in rows where not all do), versions (of each token, only in rows with several; ``version`` is the oldest).
    """
    names = ("prompts", "responses", "rollout_log_probs", "log_probs", "advantages", "loss_mask", "response_mask")
    names = (*names, "token_versions")
    ragged = {key: _ragged(batch, key) for key in names if key in batch}
    texts = {
        key: tokenizer.batch_decode([row.tolist() for row in ragged[key]])
        for key in ("prompts", "responses")
        if key in ragged
    }
    if "response_text" in batch:
        texts["responses"] = list(batch["response_text"])
    advantages = ragged.get("advantages")
    masks = ragged.get("loss_mask", ragged.get("response_mask"))
    versions = ragged.get("token_versions")
    columns: dict[str, Any] = {
        "uid": _column(batch, "uid"),
        "group": _column(batch, "group_ids"),
        "prompt": texts.get("prompts"),
        "response": texts.get("responses"),
        "reward": _column(batch, "rewards"),
        "solved": _column(batch, "solved"),
        "ground_truth": _column(batch, "ground_truth"),
        "finish_reason": _column(batch, "finish_reason"),
        "reward_error": _column(batch, "reward_error"),
        "reward_components": _column(batch, "reward_components"),
        "verdict": _column(batch, "verdict"),
        "version": _column(batch, "weight_version"),
        "prompt_ids": ragged.get("prompts"),
        "response_ids": ragged.get("responses"),
        "log_probs": ragged.get("rollout_log_probs"),
        "trainer_log_probs": ragged.get("log_probs"),
        "advantages": advantages and [row[0] if _all_same(row) else row for row in advantages],
    }
    present = {key: values for key, values in columns.items() if values is not None}
    for i in range(len(batch)):
        row = {key: value[i] for key, value in present.items()}
        if masks is not None and not masks[i].all():
            row["mask"] = masks[i].astype(np.int8)
        if versions is not None and len(versions[i]) and not _all_same(versions[i]):
            row["versions"] = versions[i]
        yield row


def _ragged(batch: DataProto, key: str) -> list[np.ndarray]:
    return np.split(_array(batch.flat(key)), batch.lengths(key).cumsum(0)[:-1].numpy())


def _column(batch: DataProto, key: str) -> np.ndarray | None:
    if key not in batch:
        return None
    column = batch[key]
    return column if isinstance(column, np.ndarray) else _array(column)


def _array(values: torch.Tensor) -> np.ndarray:
    return (values.float() if values.is_floating_point() else values).numpy()


def _all_same(row: np.ndarray) -> bool:
    return len(row) > 0 and bool((row == row[0]).all())


def _number(name: str, value: float | torch.Tensor) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise DataError(f"metric {name!r} is {value!r:.80}, not a number.") from error


def _rows(path: Path) -> Iterator[Row]:
    for row in report.read_metrics(path):
        metrics = {
            name: math.nan if value is None else value for name, value in row.items() if name not in _NOT_METRICS
        }
        yield row["step"], row["timestamp"], metrics


def _line(row: Mapping[str, Any], end: bytes) -> bytes:
    """A float32 in as few digits as give the same float32 back, what is not finite as null."""
    try:
        return orjson.dumps(row, _plain, orjson.OPT_SERIALIZE_NUMPY) + end
    except TypeError:  # half of a surrogate pair, as a reward's message may hold; an integer of more than 64 bits
        finite = json.loads(json.dumps(row, default=_plain), parse_constant=lambda _: None)
        return json.dumps(finite).encode() + end


def _plain(value: Any) -> Any:
    """What JSON has no word for: numpy's, and anything else as text."""
    if isinstance(value, np.ndarray) and value.dtype != object:
        return orjson.loads(orjson.dumps(np.ascontiguousarray(value), option=orjson.OPT_SERIALIZE_NUMPY))
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
