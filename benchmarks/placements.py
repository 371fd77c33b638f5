"""The same work on two devices, by turns and at the same time: colocate, disaggregate, one step off, asynchronous.

    python benchmarks/placements.py                                     # runs/benchmarks/placements
    python benchmarks/placements.py rollout.max_tokens=32 --steps 10

Each is a run of `hybridflow bench`, so the same command goes on where it was stopped. Random weights, and many tokens
that end an answer, give answers of 1 to `rollout.max_tokens` tokens. Prints a table and draws two steps of each as a
Gantt chart, `gantt.png`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from hybridflow.bench import Settings, bench, points_of
from hybridflow.data import demo
from hybridflow.trace import read_trace

OUT = Path("runs/benchmarks/placements")
MODES = {
    "colocate": ("examples/grpo.py", ["placement=colocate"]),
    "disaggregate": ("examples/grpo.py", ["placement=disaggregate"]),
    "one_step_off": ("examples/one_step_off.py", ["max_staleness=1"]),
    "async_grpo": ("examples/async_grpo.py", ["max_staleness=2"]),
}
SHAPE = [
    f"model.path={OUT}/assets/model",
    f"data.train={OUT}/assets/train.jsonl",
    f"data.evaluate={OUT}/assets/heldout.jsonl",
    "data.prompts_per_step=16",
    "rollout.n=8",
    "rollout.max_tokens=96",
    f"rollout.stop_token_ids={[*range(100, 110)]}",
    "pools.cpu.cores_per_device=0.1",
]
COLORS = {
    "generate": "tab:blue",
    "log_probs": "tab:green",
    "update": "tab:red",
    "sync_weights": "tab:purple",
    "send_weights": "tab:purple",
    "score": "tab:gray",
    "begin": "tab:orange",
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    options, overrides = parser.parse_known_args()
    if not (OUT / "assets" / "model").exists():
        demo.write_demo(OUT / "assets", 0)
    settings = Settings(out=OUT, steps=options.steps, warm_up=3)
    rows: dict[str, dict[str, Any]] = {}
    for mode, (driver, own) in MODES.items():
        # A list is one value here, not a sweep.
        [rows[mode]] = bench(points_of([driver], [*SHAPE, *own, *overrides]), settings)
    print_table(rows)
    draw({mode: OUT / "runs" / row["point"] for mode, row in rows.items()}, OUT / "gantt.png")


def print_table(rows: dict[str, dict[str, Any]]) -> None:
    columns = ("tokens_per_second", "step_seconds", "seconds/generate", "seconds/update_actor", "seconds/sync_weights")
    print("\n| run | " + " | ".join(columns) + " | idle |")
    print("|---|" + "---|" * (len(columns) + 1))
    for mode, row in rows.items():
        values = [f"{row[name]:.0f}" if row[name] > 100 else f"{row[name]:.3f}" for name in columns]
        idle = {name[5:]: value for name, value in row.items() if name.startswith("idle/") and name != "idle/cpu"}
        print(f"| {mode} | " + " | ".join(values) + " | " + ", ".join(f"{p} {v:.0%}" for p, v in idle.items()) + " |")


def draw(runs: dict[str, Path], path: Path) -> None:
    """Two steps of each run on one scale of time: a row for each device."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    figure, axes = plt.subplots(len(runs), 1, figsize=(10, 1.5 * len(runs)), sharex=True, layout="constrained")
    for axis, (mode, run_dir) in zip(axes, runs.items(), strict=True):
        events = read_trace(run_dir / "trace.json")
        # To the last step belongs what a run does at its end.
        steps = sorted({event["step"] for event in events if event["process"] == "driver"})[-3:-1]
        driver = [e for e in events if e["process"] == "driver" and e["step"] in steps]
        first, last = min(e["begin"] for e in driver), max(e["end"] for e in driver)
        devices = sorted({e["process"] for e in events if e["process"] not in ("driver", "pool cpu rank 0")})
        for at, device in enumerate(devices):
            for event in events:
                begin, end = max(event["begin"], first), min(event["end"], last)
                if event["process"] == device and begin < end:
                    color = COLORS.get(event["name"].partition(".")[2], "lightgray")
                    axis.barh(at, end - begin, left=begin - first, color=color, height=0.8)
        axis.axvline(max(e["end"] for e in driver if e["step"] == steps[0]) - first, color="black", linewidth=0.8)
        axis.set_yticks(range(len(devices)), [name.removeprefix("pool ") for name in devices])
        axis.set_title(f"{mode}: {(last - first) / 2:.2f} s a step", loc="left", fontsize=9)
    axes[-1].set_xlabel("seconds; the line ends the first of two steps")
    shown = {color: name for name, color in reversed(COLORS.items())}
    figure.legend([Patch(color=color) for color in shown], shown.values(), loc="outside right upper", fontsize=8)
    figure.savefig(path, dpi=110)
    print(f"\n{path}")


if __name__ == "__main__":
    main()
