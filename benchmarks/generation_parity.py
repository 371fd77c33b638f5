"""What the rollout says of its tokens beside what the trainer says, for each pair of layouts in docs/layouts.md.

    python -m benchmarks.generation_parity             # all of it, in worlds of 1, 2 and 4 processes
    python -m benchmarks.generation_parity tp2:4 tp2:4:experts    # generation with tp 2 on 4 processes

Both engines run in each process. The trainer's weights are resharded into vLLM, eight prompts are answered, and the
trainer scores the answers; then it makes three updates and all of it is done again. Printed is the largest absolute
difference of a token's log-probability before and after the updates. It fails above 1e-5 in float32 for dense models.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from hybridflow.resharding.layout import ParallelLayout
from tests.engines.megatron.parity import Case
from tests.ranks import run_ranks
from tests.workers.parity import Pair, compare_on_rank, save_model

LIMIT = 1e-5
TIED = {"tie_word_embeddings": True}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3-tied": TIED,
    "qwen2": {},
    "llama": {},
    "llama-tied": TIED,
    "qwen3_moe": {},
    "qwen3_moe-tied": {**TIED, "norm_topk_prob": False},
}
TRAINING: dict[int, list[tuple[str, dict[str, int]]]] = {
    1: [("qwen3", {}), ("qwen3-tied", {}), ("qwen2", {}), ("llama", {})],
    2: [("llama-tied", {}), ("qwen3", {"tp": 2}), ("qwen3-tied", {"pp": 2}), ("qwen2", {"cp": 2})],
    4: [
        ("qwen3", {"tp": 4}),
        ("qwen2", {"pp": 4}),
        ("llama", {"cp": 4}),
        ("qwen3-tied", {}),
        ("qwen3-tied", {"tp": 2, "pp": 2}),
        ("llama", {"tp": 2, "cp": 2}),
        ("qwen2", {"tp": 2}),
        ("llama-tied", {"pp": 2, "cp": 2}),
        ("qwen3", {"pp": 2}),
        ("llama-tied", {"pp": 2, "vpp": 2}),
        ("qwen3", {"cp": 2}),
    ],
}
"""Layouts of dense models by the number of processes; what the degrees leave is dp."""
EXPERTS: dict[int, list[tuple[str, dict[str, int]]]] = {
    1: [("qwen3_moe", {})],
    2: [("qwen3_moe", {"ep": 2}), ("qwen3_moe-tied", {"tp": 2})],
    4: [
        ("qwen3_moe", {"ep": 4}),
        ("qwen3_moe-tied", {"tp": 2, "ep": 2, "etp": 1}),
        ("qwen3_moe", {"ep": 2, "etp": 2}),
        ("qwen3_moe-tied", {"tp": 2, "pp": 2, "ep": 2, "etp": 1}),
    ],
}


def sections() -> dict[str, list[tuple[str, Pair]]]:
    """(model, pair) of each part of the table, by its name on the command line."""
    found = {}
    for world, tp in [(world, tp) for world in TRAINING for tp in (1, 2, 4) if tp <= world]:
        half = [("qwen3", Pair(Case({}, 1, torch.bfloat16)))] if world == 1 else []
        found[f"tp{tp}:{world}"] = [(m, Pair(Case(layout, world), tp)) for m, layout in TRAINING[world]] + half
        found[f"tp{tp}:{world}:experts"] = [
            (m, Pair(Case(layout, world), tp, ep)) for ep in sorted({1, tp}) for m, layout in EXPERTS[world]
        ]
    return found


def describe(case: Case) -> str:
    """The degrees with what they leave for dp."""
    degrees = {axis: case.layout.get(axis, 1) for axis in ("tp", "pp", "cp")}
    dp = case.world // (degrees["tp"] * degrees["pp"] * degrees["cp"])
    named = {**case.layout, **({"dp": dp} if dp > 1 else {})}
    return " ".join(f"{axis}{size}" for axis, size in named.items()) or "one process"


def groups_of(pair: Pair) -> str:
    """The generation groups: strided where training has a larger tp. A process of vLLM's keeps one set of them."""
    training = ParallelLayout.on(pair.training.world, **pair.training.layout)
    return str(training.generation(tp=pair.tp, ep=pair.ep).tp_groups())


def measure(parent: Path, mine: list[tuple[str, Pair]]) -> list[tuple[float, float]]:
    """The largest difference before and after the updates of each (model, pair)."""
    jobs: dict[tuple[int, str], list[tuple[int, str, Pair]]] = {}
    for number, (model, pair) in enumerate(mine):
        dtype = str(pair.training.dtype).removeprefix("torch.")
        folder = parent / f"{model}-{dtype}"
        if not folder.exists():
            save_model(folder, model.split("-")[0], dtype=dtype, **MODELS[model])
        jobs.setdefault((pair.training.world, groups_of(pair)), []).append((number, str(folder), pair))
    found: dict[int, tuple[float, float]] = {}
    for (world, _), here in jobs.items():
        answers = run_ranks(compare_on_rank, world, [(folder, pair) for _, folder, pair in here], timeout=1800)
        for at, (number, _, _) in enumerate(here):
            before, after = zip(*(answer[at] for answer in answers if answer[at]), strict=True)
            found[number] = max(before), max(after)
    return [found[number] for number in range(len(mine))]


def main() -> None:
    mine = [row for name, rows in sections().items() if name in (sys.argv[1:] or sections()) for row in rows]
    failed = []
    print("| training | generation | model | before | after 3 updates |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as parent:
        for (model, pair), apart in zip(mine, measure(Path(parent), mine), strict=True):
            half, replicas = pair.training.dtype == torch.bfloat16, pair.training.world // pair.tp
            training = describe(pair.training) + (", bf16" if half else "")
            generation = f"tp{pair.tp}" + (f" ep{pair.ep}" if pair.ep > 1 else "") + f", {replicas} x"
            print(f"| {training} | {generation} | {model} | {apart[0]:.1e} | {apart[1]:.1e} |")
            if not half and "moe" not in model and max(apart) > LIMIT:
                failed.append(f"{training} to {generation}")
    if failed:
        sys.exit(f"above {LIMIT}: {', '.join(failed)}")


if __name__ == "__main__":
    main()
