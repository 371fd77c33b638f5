"""A whole GRPO step against the sum of its parts done bare, in turn, in the same processes on the same rows.

    python benchmarks/step.py                                    # 8 prompts x 8 samples x up to 64 tokens
    python benchmarks/step.py data.prompts_per_step=16 rollout.max_tokens=8
    python benchmarks/step.py --apart data.prompts_per_step=64   # answers are scored before the actor works, not beside

Takes the overrides of ``examples/grpo.py``. Prints the median seconds of each, and their ratio; then what the driver
spent in each part of a step, the bare part over it, and the share of the step that is none of them.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import hybridflow
from hybridflow.algorithms.step import compute_advantages
from hybridflow.compose import load
from hybridflow.config import GRPOConfig
from hybridflow.controller.group import WorkerGroup
from hybridflow.controller.run import Run
from hybridflow.data import demo
from hybridflow.report.summary import read_metrics

ASSETS = Path("runs/benchmarks/assets")
APART = "--apart"
WARM_UP = 3
PARTS = ("generate", "log_probs", "update")
SHAPE = [
    "name=step",
    "runs_dir=runs/benchmarks",
    f"model.path={ASSETS}/model",
    f"data.train={ASSETS}/train.jsonl",
    f"data.evaluate={ASSETS}/heldout.jsonl",
    "data.prompts_per_step=8",
    "rollout.n=8",
    "rollout.max_tokens=64",
    "actor.micro_batch_size=64",
    "evaluate.at_start=false",
    "evaluate.every=0",
    "checkpoint.every=0",
    "steps=20",
]


def step(run: Run, prompts: hybridflow.DataProto, config: GRPOConfig, apart: bool) -> hybridflow.DataProto:
    """The loop body of ``examples/grpo.py``; with ``apart`` its parts have the cores for themselves."""
    with run.timer("generate"):
        batch = run.rollout.generate(prompts.repeat(config.rollout.n))
    with run.timer("reward"):
        scored = run.reward.score(batch, blocking=False)
        if apart:
            scored.result()
    with run.timer("log_probs"):
        batch = batch.union(run.actor.log_probs(batch))
    with run.timer("ref_log_probs"):
        batch = batch.union(run.reference.log_probs(batch))
    with run.timer("reward"):
        batch = batch.union(scored.result())
    with run.timer("advantage"):
        batch = batch.union(compute_advantages(batch, config))
    with run.timer("update_actor"):
        metrics = run.actor.update(batch)
    run.finish_step(metrics, batch)
    return batch


def main() -> None:
    if not (ASSETS / "model").exists():
        demo.write_demo(ASSETS, 0)
    overrides = [argument for argument in sys.argv[1:] if argument != APART]
    config = load("grpo", GRPOConfig, [*SHAPE, *overrides])
    shutil.rmtree(Path(config.runs_dir) / config.name, ignore_errors=True)
    whole: list[float] = []
    parts: dict[str, list[float]] = {}
    with hybridflow.launch(config) as run:
        assert isinstance(run.actor, WorkerGroup)
        bare = WorkerGroup(run.actor.pool, "bare", "bare:BareWorker", run.actor.layout, config)
        bare.setup()
        steps = run.steps()
        while True:
            start = time.perf_counter()
            prompts = next(steps, None)
            if prompts is None:
                break
            batch = step(run, prompts, config, apart=APART in sys.argv)
            seconds = time.perf_counter() - start
            found = bare.run_parts(batch.select(["prompts", "responses"], []))
            if run.step > WARM_UP:
                whole.append(seconds)
                for name, value in found.items():
                    parts.setdefault(name, []).append(value)
    print_table(whole, parts)
    rows = [row for row in read_metrics(Path(config.runs_dir) / config.name / "metrics.jsonl") if row["step"] > WARM_UP]
    print_shares([row for row in rows if "time/step" in row], whole, parts)


def print_shares(rows: list[dict[str, Any]], whole: list[float], parts: dict[str, list[float]]) -> None:
    """What the driver spent, by its timers, and in no timer (logging too); against plain vLLM, and a plain loop over
    the same megatron-core model."""
    seconds = {name[5:]: [row.get(name, 0.0) for row in rows] for name in rows[0] if name.startswith("time/")}
    del seconds["step"], seconds["other"]
    seconds["other"] = [all_of_it - sum(row) for all_of_it, *row in zip(whole, *seconds.values(), strict=True)]
    print("\n  part            driver, s   share of step   bare, s   bare / driver")
    for name, bare in (
        ("generate", "generate"),
        ("log_probs", "megatron_log_probs"),
        ("update_actor", "megatron_update"),
    ):
        ratios = [b / s for b, s in zip(parts[bare], seconds[name], strict=True)]
        print_part(
            name, seconds[name], whole, f"{statistics.median(parts[bare]):9.4f} {statistics.median(ratios):15.3f}"
        )
    print_part("sync_weights", seconds["sync_weights"], whole)
    others = [name for name in seconds if name not in ("generate", "log_probs", "update_actor", "sync_weights")]
    for name in others:
        print_part(name, seconds[name], whole)
    print_part("outside", [sum(row) for row in zip(*(seconds[name] for name in others), strict=True)], whole)


def print_part(name: str, seconds: list[float], whole: list[float], more: str = "") -> None:
    share = statistics.median(s / w for s, w in zip(seconds, whole, strict=True))
    print(f"  {name:<14} {statistics.median(seconds):10.4f} {share:15.1%} {more}")


def print_table(whole: list[float], parts: dict[str, list[float]]) -> None:
    bare = [sum(row) for row in zip(*(parts[name] for name in PARTS), strict=True)]
    print(f"\nmedians of {len(whole)} steps after {WARM_UP} of warm-up; bare parts in the same processes, in turn")
    for name, values in parts.items():
        print(f"  bare {name:<10} {statistics.median(values):8.3f} s")
    print(f"  bare sum        {statistics.median(bare):8.3f} s")
    print(f"  whole step      {statistics.median(whole):8.3f} s")
    ratios = [w / b for w, b in zip(whole, bare, strict=True)]
    print(f"  ratio           {statistics.median(ratios):8.3f}   (min {min(ratios):.3f}, max {max(ratios):.3f})")


if __name__ == "__main__":
    main()
