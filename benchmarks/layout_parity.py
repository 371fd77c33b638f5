"""Every training layout of docs/layouts.md against transformers and torch.optim.AdamW, as a Markdown table.

    python -m benchmarks.layout_parity                 # all of it, in worlds of 1, 2 and 4 processes
    python -m benchmarks.layout_parity cp2 tp2         # rows whose name has one of these words

Each row trains a tiny model for four updates. It prints the largest relative difference of loss and gradient norm over
the updates, and the largest absolute difference of log-probabilities and entropies after them. It fails where one of
the first two is above 1e-5 in float32, or 1e-2 in bfloat16.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.engines.megatron.parity import Case, Trained, differences, train_on_rank, train_oracle
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny_model

LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
TIED = {"tie_word_embeddings": True}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": TIED,
    "llama-bias": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {},
    "qwen2-tied": TIED,
    "qwen3": {},
    "qwen3-tied": TIED,
}
NO_SP, FULL, SELECTIVE = {"sequence_parallel": False}, {"recompute": "full"}, {"recompute": "selective"}
TWO, FOUR = 2, 4
ROWS: list[tuple[str, str, Case]] = [
    ("one process", "qwen3", Case()),
    ("one process, one row a micro-batch", "qwen2-tied", Case(micro=1)),
    ("one process, micro-batches of 20 tokens", "llama", Case(micro=20, tokens=True)),
    ("one process, recompute full", "qwen3-tied", Case(options=FULL)),
    ("one process, recompute selective", "qwen3-tied", Case(options=SELECTIVE)),
    ("dp2", "qwen2", Case({}, TWO, distributed=False)),
    ("dp2 distributed optimizer", "qwen3-tied", Case({}, TWO)),
    ("tp2", "llama-bias", Case({"tp": 2}, TWO, options=NO_SP)),
    ("tp2 sp", "qwen2-tied", Case({"tp": 2}, TWO)),
    ("tp2 sp, recompute full", "qwen3", Case({"tp": 2}, TWO, options=FULL)),
    ("pp2 1F1B", "llama", Case({"pp": 2}, TWO)),
    ("pp2 1F1B, tied", "qwen3-tied", Case({"pp": 2}, TWO, micro=20, tokens=True)),
    ("pp2 vpp2 interleaved", "qwen2", Case({"pp": 2, "vpp": 2}, TWO)),
    ("pp2 vpp2 interleaved, tied, recompute full", "qwen3-tied", Case({"pp": 2, "vpp": 2}, TWO, options=FULL)),
    ("cp2", "qwen3", Case({"cp": 2}, TWO)),
    ("cp2, recompute selective", "llama-tied", Case({"cp": 2}, TWO, options=SELECTIVE)),
    ("dp4 distributed optimizer", "qwen3", Case({}, FOUR)),
    ("tp2 sp dp2 distributed optimizer", "qwen2-tied", Case({"tp": 2}, FOUR)),
    ("tp2 sp pp2", "qwen3-tied", Case({"tp": 2, "pp": 2}, FOUR)),
    ("tp2 sp pp2 vpp2", "llama-bias", Case({"tp": 2, "pp": 2, "vpp": 2}, FOUR)),
    ("tp2 sp cp2", "qwen3", Case({"tp": 2, "cp": 2}, FOUR)),
    ("pp2 dp2 distributed optimizer", "qwen2", Case({"pp": 2}, FOUR)),
    ("pp2 vpp2 dp2 distributed optimizer", "llama-tied", Case({"pp": 2, "vpp": 2}, FOUR)),
    ("pp2 cp2", "qwen3-tied", Case({"pp": 2, "cp": 2}, FOUR)),
    ("pp4", "llama", Case({"pp": 4}, FOUR)),
    ("cp2 dp2 distributed optimizer", "qwen2-tied", Case({"cp": 2}, FOUR)),
    ("cp4", "qwen3", Case({"cp": 4}, FOUR)),
]
BFLOAT16 = ("one process", "dp2 distributed optimizer", "tp2 sp", "pp2 1F1B, tied", "pp2 vpp2 interleaved", "cp2")


def rows(words: list[str]) -> list[tuple[str, str, Case]]:
    """The table's rows, those in bfloat16 last, as far as a name has one of the words."""
    halves = [
        (f"{name}, bf16", model, replace(case, dtype=torch.bfloat16)) for name, model, case in ROWS if name in BFLOAT16
    ]
    return [row for row in ROWS + halves if not words or any(word in row[0].split() for word in words)]


def save_models(parent: Path) -> dict[tuple[str, torch.dtype], str]:
    """Models of four layers, also with weights that bfloat16 holds exactly."""
    return {
        (name, dtype): save_tiny_model(
            parent / f"{name}-{dtype}",
            name.split("-")[0],
            dtype=str(dtype).removeprefix("torch."),
            num_hidden_layers=4,
            **changes,
        )
        for name, changes in MODELS.items()
        for dtype in LIMITS
    }


def main() -> None:
    chosen = rows(sys.argv[1:])
    with tempfile.TemporaryDirectory() as parent:
        folders = save_models(Path(parent))
        expected: dict[str, Trained] = {}
        found: dict[str, dict[str, float]] = {}
        for world in (1, TWO, FOUR):
            mine = [(name, folders[model, case.dtype], case) for name, model, case in chosen if case.world == world]
            if not mine:
                continue
            answers = run_ranks(train_on_rank, world, [(folder, case) for _, folder, case in mine], timeout=1800)
            for number, (name, folder, _) in enumerate(mine):
                expected[folder] = expected.get(folder) or train_oracle(folder)
                apart = [differences(answer[number], expected[folder]) for answer in answers]
                found[name] = {key: max(a[key] for a in apart if key in a) for key in apart[-1]}
    print("| layout | model | loss | gradient norm | log-probabilities |\n|---|---|---|---|---|")
    failed = []
    for name, model, case in chosen:
        apart = found[name]
        print(f"| {name} | {model} | {apart['loss']:.1e} | {apart['grad_norm']:.1e} | {apart['log_probs']:.1e} |")
        if max(apart["loss"], apart["grad_norm"]) > LIMITS[case.dtype]:
            failed.append(name)
    if failed:
        sys.exit(f"above the limit: {', '.join(failed)}")


if __name__ == "__main__":
    main()
