"""Saving and resuming a Megatron engine: bit for bit, in float32 and bfloat16."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hybridflow.config import ModelConfig, OptimizerConfig
from hybridflow.errors import CheckpointError
from hybridflow.resharding.layout import ParallelLayout
from tests.ranks import run_ranks
from tests.tiny_models import VOCAB, save_tiny_model

pytestmark = pytest.mark.distributed


def train_save_resume_on_rank(rank: int, layout: ParallelLayout, model: str, out: str, dtype: torch.dtype):
    """Five updates straight, against two, a save, a fresh engine, a load and three more."""
    from hybridflow.engines.megatron import checkpoint
    from hybridflow.engines.megatron.batch import make_micro_batch
    from hybridflow.engines.megatron.engine import MegatronEngine

    settings = OptimizerConfig(lr=1e-2, warmup_steps=3, weight_decay=0.1, schedule="cosine")

    def build() -> MegatronEngine:
        return MegatronEngine(model, layout, dtype, VOCAB, settings, total_updates=6)

    def train(engine: MegatronEngine, steps: range) -> list[dict[str, float]]:
        found = []
        for step in steps:
            generator = torch.Generator().manual_seed(100 * step + engine.parallel.coordinates.dp)
            draw = lambda n, g=generator: torch.randint(2, VOCAB, (n,), generator=g)  # noqa: E731
            micro = make_micro_batch([draw(4)], [draw(6)], None, [0], engine.device, engine.token_multiple)
            _, stepped = engine.update([micro], lambda log_probs, entropy, micro: (-log_probs.mean(), {}))
            found.append(stepped)
        return found

    straight = build()
    expected = train(straight, range(2))
    checkpoint.save(straight, out, ModelConfig(path=model))
    expected = train(straight, range(2, 5))
    resumed = build()
    checkpoint.load(resumed, out)
    _, states = resumed.optimizer_states()
    _, others = straight.optimizer_states()
    steps = [
        id(s["step"]) for part in resumed.optimizer.inner.chained_optimizers for s in part.optimizer.state.values()
    ]
    shared_clock = len(set(steps)) != len(steps)
    found = train(resumed, range(2, 5))
    same = all(torch.equal(p, resumed.parameters()[name]) for name, p in straight.parameters().items())
    moments = all(
        torch.equal(tensor, others[kind][name]) for kind, tensors in states.items() for name, tensor in tensors.items()
    )
    return expected, found, same, moments, shared_clock, sorted(states)


@pytest.mark.parametrize(
    ("dtype", "layout"),
    [
        (torch.float32, ParallelLayout(tp=2, dp=2)),
        (torch.float32, ParallelLayout(pp=2)),
        (torch.bfloat16, ParallelLayout()),
    ],
)
def test_resuming_is_bit_exact_past_the_load(tmp_path, dtype, layout):
    model = save_tiny_model(
        tmp_path / "model", "qwen3", dtype=str(dtype).removeprefix("torch."), tie_word_embeddings=True
    )
    answers = run_ranks(train_save_resume_on_rank, layout.world_size, layout, model, str(tmp_path / "out"), dtype)
    for expected, found, same, moments, shared_clock, kinds in answers:
        assert found == expected
        assert found[0]["lr"] != found[1]["lr"], "the schedule's clock must go on"
        assert same and moments
        assert not shared_clock, "Adam would count one shared step once per parameter"
        assert kinds == ["exp_avg", "exp_avg_sq"] + ["main"] * (dtype == torch.bfloat16)


def load_on_rank(rank: int, model: str, out: str) -> str:
    from hybridflow.engines.megatron import checkpoint
    from hybridflow.engines.megatron.engine import MegatronEngine

    engine = MegatronEngine(model, ParallelLayout(), torch.float32, VOCAB, OptimizerConfig())
    checkpoint.save(engine, out, ModelConfig(path=model))
    for file in sorted((Path(out) / "optimizer" / "exp_avg").iterdir()):
        file.unlink()
    (Path(out) / "optimizer" / "exp_avg").rmdir()
    try:
        checkpoint.load(engine, out)
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_missing_moment_is_named_and_the_model_folder_stands_alone(tmp_path):
    from transformers import AutoModelForCausalLM

    model = save_tiny_model(tmp_path / "model", "llama")
    [message] = run_ranks(load_on_rank, 1, model, str(tmp_path / "out"))
    assert "exp_avg is missing" in message
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model").state_dict()
    for name, tensor in AutoModelForCausalLM.from_pretrained(model).state_dict().items():
        assert torch.equal(tensor, exported[name]), name
    assert json.loads((tmp_path / "out" / "optimizer" / "state.json").read_text()) == {"updates": 0}
