"""One self-contained HTML page of a run: ``report.html``.

All data is embedded as gzipped JSON in columns; the page fetches nothing and opens from a file. What would make it slow
is thinned or left out, newest first kept, and the page says so: points of long curves, steps of the timeline, samples,
and the tokens of samples.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridflow.errors import HybridFlowError
from hybridflow.report.summary import read_metrics, summarize
from hybridflow.trace import idle_shares, read_trace

HERE = Path(__file__).resolve().parent
MAX_POINTS = 1000
MAX_STEPS_OF_TIMELINE, MAX_EVENTS = 20, 8000
MAX_SAMPLES, MAX_TOKENS, MAX_TEXT = 10_000, 1_500_000, 2000
NOT_METRICS = ("step", "timestamp", "not_finite")
TEXTS = ("prompt", "response", "ground_truth")
PLAIN = ("step", "tag", "reward", "solved", "finish_reason", "version")
TOKENS = {
    "ids": "response_ids",
    "log_probs": "log_probs",
    "trainer_log_probs": "trainer_log_probs",
    "mask": "mask",
    "advantages": "advantages",
}
"""Columns of tokens on the page, and the keys of ``rollouts.jsonl`` that they come from."""


def write_page(run_dir: Path, out: Path | None = None) -> Path:
    """Write the page of a run.

    Args:
        out: the file; by default ``report.html`` in the run's folder.

    Raises:
        DataError: the folder has no metrics.
    """
    path = out or run_dir / "report.html"
    path.write_text(html(run_data(run_dir), "run.js"), "utf-8")
    return path


def html(data: Mapping[str, Any], script: str) -> str:
    """The page with its data and scripts inside.

    Args:
        script: file beside this one that defines ``show(data)``.
    """
    packed = gzip.compress(json.dumps(data, allow_nan=False, separators=(",", ":")).encode(), compresslevel=6, mtime=0)
    parts = {
        "css": (HERE / "page.css").read_text("utf-8"),
        "js": "\n".join((HERE / name).read_text("utf-8") for name in (script, "page.js")),
        "data": base64.b64encode(packed).decode("ascii"),
    }
    page = (HERE / "page.html").read_text("utf-8")
    for name, text in parts.items():
        page = page.replace(f"{{{{{name}}}}}", text)
    return page


def run_data(run_dir: Path) -> dict[str, Any]:
    """What the page of a run embeds; see ``run.js`` for how it is shown."""
    rows = read_metrics(run_dir / "metrics.jsonl")
    samples = sample_columns(newest_samples(run_dir / "rollouts.jsonl"))
    config = run_dir / "config.yaml"
    return {
        "title": f"HybridFlow run {run_dir.resolve().name}",
        "tiles": _tiles(run_dir),
        "metrics": metric_columns(rows),
        "trace": trace_columns(read_trace(run_dir / "trace.json")),
        "samples": samples,
        "tokens": _words(run_dir, {i for ids in samples["ids"] for i in ids or ()}),
        "config": config.read_text("utf-8") if config.is_file() else "",
    }


def metric_columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """``steps`` and ``series`` by name, null where a step has no value; at most ``MAX_POINTS`` steps, evenly chosen.

    Steps with an evaluation stay, since they are few.
    """
    every = math.ceil(len(rows) / MAX_POINTS)
    kept = [
        row
        for i, row in enumerate(rows)
        if i % every == 0 or i == len(rows) - 1 or any(name.startswith("evaluate/") for name in row)
    ]
    names = dict.fromkeys(name for row in kept for name in row if name not in NOT_METRICS)
    return {
        "steps": [row["step"] for row in kept],
        "series": {name: [_digits(row.get(name)) for row in kept] for name in names},
    }


def trace_columns(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The events of the last steps: names as numbers into lists, begin and length in milliseconds."""
    last = sorted({event["step"] for event in events})[-MAX_STEPS_OF_TIMELINE:]
    kept = [event for event in events if event["step"] in last][-MAX_EVENTS:]
    first = min((event["begin"] for event in kept), default=0.0)
    found: dict[str, Any] = {
        "step": [event["step"] for event in kept],
        "begin": [round((event["begin"] - first) * 1e3, 3) for event in kept],
        "length": [round((event["end"] - event["begin"]) * 1e3, 3) for event in kept],
        "peak": [event["peak_gb"] for event in kept],
        "idle": {step: idle_shares([event for event in kept if event["step"] == step]) for step in last},
    }
    for key, values in (("name", "names"), ("process", "processes"), ("role", "roles")):
        known = {value: number for number, value in enumerate(dict.fromkeys(event[key] for event in kept))}
        found[values], found[key] = list(known), [known[event[key]] for event in kept]
    return found


def newest_samples(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The last ``MAX_SAMPLES`` rows of a ``rollouts.jsonl`` and how many there are; a torn last line is left out."""
    if not path.is_file():
        return [], 0
    with path.open("rb") as file:
        lines = [line for line in file if line.endswith(b"\n")]
    return [json.loads(line) for line in lines[-MAX_SAMPLES:]], len(lines)


def sample_columns(samples: tuple[Sequence[Mapping[str, Any]], int]) -> dict[str, Any]:
    """Samples by column. Tokens of the newest ones until ``MAX_TOKENS`` are reached; of older ones null.

    Args:
        samples: as of :func:`newest_samples`.
    """
    rows, total = samples
    found: dict[str, Any] = {key: [row.get(key) for row in rows] for key in PLAIN}
    found |= {key: [_cut(row.get(key)) for row in rows] for key in TEXTS}
    found["length"] = [len(row.get("response_ids") or ()) for row in rows]
    budget, first = MAX_TOKENS, len(rows)
    while first and budget >= found["length"][first - 1]:
        first -= 1
        budget -= found["length"][first]
    for name, key in TOKENS.items():
        found[name] = [_numbers(row.get(key)) if i >= first else None for i, row in enumerate(rows)]
    notes = []
    if total > len(rows):
        notes.append(f"The run has {total} samples; this page has the newest {len(rows)}.")
    if first:
        notes.append(f"The tokens of the oldest {first} are left out.")
    found["left_out"] = " ".join(notes)
    return found


def _tiles(run_dir: Path) -> list[tuple[str, str]]:
    s = summarize(run_dir)
    found = [("steps", str(s.steps)), ("training time", f"{s.seconds:.0f} s")]
    if s.accuracy:
        found.append(("held-out accuracy, first and last", f"{s.accuracy[0][1]:.3f} → {s.accuracy[1][1]:.3f}"))
    if s.reward:
        found.append(("mean reward, first and last tenth", f"{s.reward[0]:.3f} → {s.reward[1]:.3f}"))
    if s.tokens_per_second is not None:
        found.append(("tokens per second", f"{s.tokens_per_second:.0f}"))
    return found


def _words(run_dir: Path, ids: set[int]) -> dict[int, str]:
    """The text of each token id; empty where the run's tokenizer is not there any more."""
    from omegaconf import OmegaConf

    from hybridflow.models.tokenizer import load_tokenizer

    path = run_dir / "config.yaml"
    if not ids or not path.is_file():
        return {}
    config: Any = OmegaConf.load(path)
    try:
        tokenizer = load_tokenizer(config.model.get("tokenizer_path") or config.model.path)
    except (HybridFlowError, OSError, ValueError):
        return {}
    return {i: tokenizer.decode([i]) for i in sorted(ids)}


def _digits(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def _numbers(value: Any) -> Any:
    """A number or a list of numbers in four decimals."""
    if isinstance(value, list):
        return [_numbers(each) for each in value]
    return round(value, 4) if isinstance(value, float) else value


def _cut(text: Any) -> Any:
    return text[:MAX_TEXT] + " …" if isinstance(text, str) and len(text) > MAX_TEXT else text
