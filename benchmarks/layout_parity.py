"""Every training layout of docs/layouts.md against transformers and torch.optim.AdamW, as a Markdown table.

    python -m benchmarks.layout_parity                 # all of it, in worlds of 1, 2 and 4 processes
    python -m benchmarks.layout_parity cp2 qwen3_moe   # rows with one of these words in their name, or of that model

Each row trains a tiny model for four updates. It prints the largest relative difference of loss and gradient norm over
the updates, and the largest absolute difference of log-probabilities and entropies after them. It fails where one of
the first two is above 1e-5 in float32, or 1e-2 in bfloat16. Rows in bfloat16 are compared with float32 training of the
same weights, and beside them stands how far transformers in bfloat16 is from that.
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
    "qwen3_moe": {},
    "qwen3_moe-tied": {**TIED, "norm_topk_prob": False},
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
    ("one process", "qwen3_moe", Case()),
    ("dp2", "qwen3_moe", Case({}, TWO)),
    ("ep2", "qwen3_moe", Case({"ep": 2}, TWO)),
    ("ep2, recompute full", "qwen3_moe-tied", Case({"ep": 2}, TWO, options=FULL)),
    ("tp2 sp", "qwen3_moe-tied", Case({"tp": 2}, TWO)),
    ("tp2 sp ep2 etp1", "qwen3_moe", Case({"tp": 2, "ep": 2, "etp": 1}, TWO)),
    ("cp2", "qwen3_moe", Case({"cp": 2}, TWO)),
    ("cp2 ep2", "qwen3_moe", Case({"cp": 2, "ep": 2}, TWO)),
    ("pp2", "qwen3_moe-tied", Case({"pp": 2}, TWO)),
    ("ep2, 4 ranks", "qwen3_moe", Case({"ep": 2}, FOUR)),
    ("ep2 etp2", "qwen3_moe", Case({"ep": 2, "etp": 2}, FOUR)),
    ("tp2 sp ep2", "qwen3_moe", Case({"tp": 2, "ep": 2}, FOUR)),
    ("tp2 sp ep4 etp1", "qwen3_moe-tied", Case({"tp": 2, "ep": 4, "etp": 1}, FOUR)),
    ("tp2 sp pp2 ep2 etp1", "qwen3_moe", Case({"tp": 2, "pp": 2, "ep": 2, "etp": 1}, FOUR)),
    ("cp2 pp2 ep2", "qwen3_moe", Case({"cp": 2, "pp": 2, "ep": 2}, FOUR)),
    ("pp2 vpp2 dp2", "qwen3_moe", Case({"pp": 2, "vpp": 2}, FOUR)),
]
BFLOAT16 = ("one process", "dp2 distributed optimizer", "tp2 sp", "pp2 1F1B, tied", "pp2 vpp2 interleaved", "cp2")
BFLOAT16 += ("tp2 sp dp2 distributed optimizer", "tp2 sp pp2", "pp2 cp2", "tp2 sp ep2", "pp2 vpp2 dp2")
HALF: dict[str, Any] = {"dtype": "bfloat16", "initializer_range": 0.02}
"""Of models in bfloat16: weights that it holds exactly, of the size that transformers draws. The float32 ones are ten
times larger, so that little hides in small differences; rounding alone then moves a gradient norm by more than 1e-2."""


def rows(words: list[str]) -> list[tuple[str, str, Case]]:
    """The table's rows, those in bfloat16 last, as far as a name has one of the words or a word is the model's."""
    halves = [
        (f"{name}, bf16", model, replace(case, dtype=torch.bfloat16)) for name, model, case in ROWS if name in BFLOAT16
    ]
    return [
        (name, model, case)
        for name, model, case in ROWS + halves
        if not words or {*name.replace(",", "").split(), model} & {*words}
    ]


class Oracle:
    """Models of four layers, and what training them by transformers gives; each made once."""

    def __init__(self, parent: str) -> None:
        self.parent, self.trained = Path(parent), dict[tuple[str, torch.dtype], Trained]()

    def folder(self, model: str, dtype: torch.dtype) -> str:
        folder = self.parent / f"{model}-{dtype}"
        changes: dict[str, Any] = MODELS[model] | (HALF if dtype == torch.bfloat16 else {}) | {"num_hidden_layers": 4}
        return str(folder) if folder.exists() else save_tiny_model(folder, model.split("-")[0], **changes)

    def train(self, folder: str, dtype: torch.dtype = torch.float32) -> Trained:
        if (folder, dtype) not in self.trained:
            self.trained[folder, dtype] = train_oracle(folder, dtype=dtype)
        return self.trained[folder, dtype]


def report(name: str, model: str, apart: dict[str, float]) -> None:
    print(
        f"| {name} | {model} | {apart['loss']:.1e} | {apart['grad_norm']:.1e} | {apart['log_probs']:.1e} |", flush=True
    )


def main() -> None:
    chosen, failed = rows(sys.argv[1:]), []
    print("| layout | model | loss | gradient norm | log-probabilities |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as parent:
        oracle = Oracle(parent)
        for world in (1, TWO, FOUR):
            mine = [row for row in chosen if row[2].world == world]
            cases = [(oracle.folder(model, case.dtype), case) for _, model, case in mine]
            answers = run_ranks(train_on_rank, world, cases, timeout=1800) if cases else []
            for number, (name, model, case) in enumerate(mine):
                expected = oracle.train(cases[number][0])
                by_rank = [differences(answer[number], expected) for answer in answers]
                apart = {key: max(found[key] for found in by_rank if key in found) for key in by_rank[-1]}
                report(name, model, apart)
                if max(apart["loss"], apart["grad_norm"]) > LIMITS[case.dtype]:
                    failed.append(name)
        for model in dict.fromkeys(model for _, model, case in chosen if case.dtype == torch.bfloat16):
            folder = oracle.folder(model, torch.bfloat16)
            found = differences(oracle.train(folder, torch.bfloat16), oracle.train(folder))
            report("transformers itself, bf16", model, found)
    if failed:
        sys.exit(f"above the limit: {', '.join(failed)}")


if __name__ == "__main__":
    main()
