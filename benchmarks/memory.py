"""The memory of a device process over a whole GRPO step, part by part, drawn as a picture.

    python benchmarks/memory.py                                  # a model of 101 M parameters, one device, on a CPU
    python benchmarks/memory.py --out docs/memory.png rollout.max_tokens=16

Runs GRPO with a reference model under each of ``SETTINGS``, reads the resident memory of the device process every
20 ms, and shows the second step: by then the optimizer has its state. Prints the highest memory of each part of the
step, and what each change of phase gave and took. What follows ``--out`` overrides settings of all runs.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

import hybridflow
from hybridflow.algorithms.step import compute_advantages
from hybridflow.compose import load
from hybridflow.config import GRPOConfig
from hybridflow.controller.group import WorkerGroup
from hybridflow.controller.run import Run
from hybridflow.data import demo

FOLDER = Path("runs/benchmarks/memory")
HIDDEN, LAYERS = 1024, 8
SETTINGS = {
    "default": ["memory.offload=[gradients,parameters]", "memory.keep_rollout=false"],
    "everything takes turns": [
        "memory.offload=[gradients,optimizer,parameters,others]",
        "memory.keep_rollout=false",
    ],
    "everything stays": ["memory.offload=[]", "memory.keep_rollout=true"],
    "everything stays, weights shared": [
        "memory.offload=[]",
        "memory.keep_rollout=true",
        "memory.share_weights=true",
    ],
}
SHAPE = [
    "name=memory-run",
    "runs_dir=runs/benchmarks",
    f"model.path={FOLDER}/model",
    f"data.train={FOLDER}/train.jsonl",
    f"data.evaluate={FOLDER}/heldout.jsonl",
    "placement=colocate_reference",
    "pools.train.devices=[1]",
    "data.prompts_per_step=2",
    "rollout.n=4",
    "rollout.max_tokens=16",
    "rollout.kv_cache_gb=0.25",
    "actor.micro_batch_size=8",
    "actor.loss.kl_coef=0.1",
    "evaluate.at_start=false",
    "steps=2",
]


@dataclass
class Profile:
    """One step of one run.

    Attributes:
        parts: (name, begin, end) in seconds.
        readings: (seconds, GiB).
        moved: what the changes of phase did; see :meth:`hybridflow.resharding.hybrid.Phases.drain`.
    """

    parts: list[tuple[str, float, float]] = field(default_factory=list)
    readings: list[tuple[float, float]] = field(default_factory=list)
    moved: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.parts.append((name, begin, time.perf_counter()))

    @contextlib.contextmanager
    def reading(self, pid: int, seconds: float = 0.02) -> Iterator[None]:
        """Read the resident memory of a process meanwhile."""
        process, done = psutil.Process(pid), threading.Event()

        def read() -> None:
            while not done.wait(seconds):
                self.readings.append((time.perf_counter(), process.memory_info().rss / 2**30))

        reader = threading.Thread(target=read)
        reader.start()
        try:
            yield
        finally:
            done.set()
            reader.join()

    def within(self, name: str) -> list[float]:
        """The readings of a part."""
        spans = [(begin, end) for part, begin, end in self.parts if part == name]
        return [gb for at, gb in self.readings if any(begin <= at <= end for begin, end in spans)]


def measure(overrides: list[str]) -> Profile:
    """The last step of a run."""
    config = load("grpo", GRPOConfig, [*SHAPE, *overrides])
    shutil.rmtree(Path(config.runs_dir) / config.name, ignore_errors=True)
    with hybridflow.launch(config) as run:
        assert isinstance(run.rollout, WorkerGroup)
        pid = run.rollout.pool.places[0].pid
        for prompts in run.steps():
            profile = Profile()
            with profile.reading(pid):
                step(run, prompts, config, profile)
            if run.step == config.steps:
                return profile  # without the checkpoint that follows
    raise AssertionError("a run has at least one step")


def step(run: Run, prompts: hybridflow.DataProto, config: GRPOConfig, profile: Profile) -> None:
    """The loop body of ``examples/grpo.py``."""
    with profile.part("generate"):
        batch = run.rollout.generate(prompts.repeat(config.rollout.n))
    with profile.part("reward"):
        batch = batch.union(run.reward.score(batch))
    with profile.part("log_probs"):
        batch = batch.union(run.actor.log_probs(batch))
    with profile.part("ref_log_probs"):
        batch = batch.union(run.reference.log_probs(batch))
    with profile.part("advantage"):
        batch = batch.union(compute_advantages(batch, config))
    with profile.part("update_actor"):
        run.actor.update(batch)
    with profile.part("sync_weights"):
        profile.moved = {k: v for k, v in run.sync_weights().items() if k.startswith(("phase/", "sync/"))}


SHOWN = ("generate", "log_probs", "ref_log_probs", "update_actor", "sync_weights")


def table(profiles: dict[str, Profile]) -> str:
    """Highest GiB within each part, and seconds of the step."""
    rows = [f"{'GiB, highest of each part':<34}" + "".join(f"{name:>15}" for name in SHOWN) + f"{'step, s':>10}"]
    for setting, profile in profiles.items():
        seconds = profile.parts[-1][2] - profile.parts[0][1]
        cells = "".join(f"{max(profile.within(name)):15.2f}" for name in SHOWN)
        rows.append(f"{setting:<34}{cells}{seconds:10.1f}")
    return "\n".join(rows)


def draw(profiles: dict[str, Profile], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.2 * len(profiles)), layout="constrained")
    FigureCanvasAgg(figure)
    top = 1.15 * max(gb for profile in profiles.values() for _, gb in profile.readings)
    panels = figure.subplots(len(profiles), squeeze=False)[:, 0]
    for axes, (setting, profile) in zip(panels, profiles.items(), strict=True):
        start = profile.parts[0][1]
        for number, (name, begin, end) in enumerate(p for p in profile.parts if p[0] in SHOWN):
            axes.axvspan(begin - start, end - start, color="tab:gray", alpha=0.25 if number % 2 else 0.1, linewidth=0)
            axes.text((begin + end) / 2 - start, 0.97 * top, name, ha="center", va="top", fontsize=7)
        seconds, gb = zip(*profile.readings, strict=True)
        axes.plot([at - start for at in seconds], gb, color="tab:blue", linewidth=1.2)
        axes.set(title=setting, ylabel="resident, GiB", ylim=(0, top), xlim=(0, profile.parts[-1][2] - start))
        axes.title.set_fontsize(9)
    axes.set_xlabel("seconds of the step")
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=FOLDER / "memory.png", help="the picture")
    given, overrides = parser.parse_known_args()
    if not (FOLDER / "model").exists():
        demo.write_demo(FOLDER)
        demo.write_model(FOLDER / "model", hidden=HIDDEN, layers=LAYERS)
    profiles = {}
    for name, setting in SETTINGS.items():
        profiles[name] = measure([*setting, *overrides])
        draw(profiles, given.out)
        moved = "".join(f"\n  {what} {value:.3f}" for what, value in profiles[name].moved.items())
        print(f"{name}{moved}\n\n{table(profiles)}", flush=True)
    print(f"picture: {given.out}")


if __name__ == "__main__":
    main()
