"""What the rollout says of its tokens beside what the trainer says, for each pair of layouts in docs/layouts.md.

    python -m benchmarks.generation_parity             # all of it, in worlds of 1, 2 and 4 processes
    python -m benchmarks.generation_parity tp2:4       # generation with tp 2 on 4 processes

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


def pairs(world: int, tp: int) -> list[tuple[str, Pair]]:
    """(model, pair) of all that generate with ``tp`` on ``world`` processes."""
    dense = [(model, Pair(Case(layout, world), tp)) for model, layout in TRAINING[world]]
    half = [("qwen3", Pair(Case({}, world, torch.bfloat16), tp))]
    experts = [(model, Pair(Case(layout, world), tp, ep)) for ep in sorted({1, tp}) for model, layout in EXPERTS[world]]
    return dense + experts + half


def describe(case: Case) -> str:
    """The degrees with what they leave for dp."""
    degrees = {axis: case.layout.get(axis, 1) for axis in ("tp", "pp", "cp")}
    dp = case.world // (degrees["tp"] * degrees["pp"] * degrees["cp"])
    named = {**case.layout, **({"dp": dp} if dp > 1 else {})}
    return " ".join(f"{axis}{size}" for axis, size in named.items()) or "one process"


def main() -> None:
    wanted, failed = sys.argv[1:], []
    print("| training | generation | model | before | after 3 updates |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as parent:
        for world, tp in [(world, tp) for world in (1, 2, 4) for tp in (1, 2, 4) if tp <= world]:
            if wanted and f"tp{tp}:{world}" not in wanted:
                continue
            mine = pairs(world, tp)
            folders = {
                (model, pair.training.dtype): save_model(
                    Path(parent) / f"{model}-{world}-{tp}-{pair.training.dtype}",
                    model.split("-")[0],
                    dtype=str(pair.training.dtype).removeprefix("torch."),
                    **MODELS[model],
                )
                for model, pair in mine
            }
            jobs = [(folders[model, pair.training.dtype], pair) for model, pair in mine]
            answers = run_ranks(compare_on_rank, world, jobs, timeout=1800)
            for number, (model, pair) in enumerate(mine):
                before, after = (max(found) for found in zip(*filter(None, (a[number] for a in answers)), strict=True))
                ways = f"tp{pair.tp}" + (f" ep{pair.ep}" if pair.ep > 1 else ""), world // pair.tp
                half = pair.training.dtype == torch.bfloat16
                name = describe(pair.training) + (", bf16" if half else "")
                print(f"| {name} | {ways[0]}, {ways[1]} replicas | {model} | {before:.1e} | {after:.1e} |", flush=True)
                if not half and "moe" not in model and max(before, after) > LIMIT:
                    failed.append(f"{name} to {ways[0]}")
    if failed:
        sys.exit(f"above {LIMIT}: {', '.join(failed)}")


if __name__ == "__main__":
    main()
