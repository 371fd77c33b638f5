"""The demo's model is an ordinary Hugging Face folder, and the same seed gives the same one."""

from __future__ import annotations

import json
from pathlib import Path

from hybridflow.data.demo import additions, write_model


def test_the_model_is_a_tiny_qwen3_with_as_many_ids_as_its_tokenizer(demo: Path, tokenizer):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(demo / "model")
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert model.config.vocab_size == len(tokenizer) == 262
    assert 0.4e6 < sum(p.numel() for p in model.parameters()) < 0.5e6
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 260
    assert tokenizer.pad_token_id == 256


def test_the_seed_makes_the_weights(demo: Path, tmp_path: Path):
    write_model(tmp_path / "same", seed=0)
    write_model(tmp_path / "other", seed=1)
    weights = (demo / "model" / "model.safetensors").read_bytes()
    assert (tmp_path / "same" / "model.safetensors").read_bytes() == weights
    assert (tmp_path / "other" / "model.safetensors").read_bytes() != weights


def test_every_sum_stands_in_one_of_the_two_files(demo: Path):
    rows = [json.loads(line) for name in ("train", "heldout") for line in (demo / f"{name}.jsonl").open()]
    assert len({row["messages"][0]["content"] for row in rows}) == len(rows) == 8100
    for row in rows:
        a, b = row["messages"][0]["content"].rstrip("=").split("+")
        assert int(row["ground_truth"]) == int(a) + int(b)
    assert additions(seed=1)[1] != additions(seed=0)[1]


def test_the_pad_row_is_not_zero(demo: Path) -> None:
    """At a zero row RMSNorm's gradient is 1 / sqrt(eps): one sampled pad token would drown every other gradient."""
    from safetensors.torch import load_file

    rows = load_file(demo / "model" / "model.safetensors")["model.embed_tokens.weight"]
    assert rows.norm(dim=1).min() > 0.5 * rows.norm(dim=1).mean()
