"""A reward model trained on pairs, and Safe RLHF's run with it as the reward."""

from __future__ import annotations

import json
import math

import pytest
import torch

from tests.e2e.conftest import Finished
from tests.e2e.drivers import metrics_of, rows_of
from tests.e2e.reward import expected

PAD = 256

# A test that comes first for a run waits for it, and for the run before it.
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_held_out_pairs_are_told_apart(reward_model: Finished) -> None:
    rows = metrics_of(reward_model.run_dir)
    assert rows[0]["evaluate/accuracy"] == 0, "a new head gives every answer the same score"
    assert rows[12]["evaluate/accuracy"] > 0.9
    assert rows[12]["evaluate/score_gap"] > rows[4]["evaluate/score_gap"] > 0
    assert rows[1]["preference/loss"] == pytest.approx(math.log(2))
    assert rows[12]["preference/loss"] < 0.5 and rows[12]["preference/accuracy"] > 0.8


def test_the_reward_of_a_run_is_what_transformers_says_of_the_whole_text(
    safe: Finished, reward_model: Finished
) -> None:
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(reward_model.run_dir / "model")
    rows = [row for row in rows_of(safe.run_dir / "rollouts.jsonl") if row["tag"] == "train"]
    assert len(rows) == 12 * 32
    # transformers looks at the last token that is no padding, wherever it comes from.
    rows = [row for row in rows if row["response_ids"][-1] != PAD][:16]
    with torch.no_grad():
        for row in rows:
            text = torch.tensor([row["prompt_ids"] + row["response_ids"]])
            assert row["reward"] == pytest.approx(model(text).logits.item(), abs=1e-4)
            assert row["solved"] == (row["reward"] >= 0)


def test_a_step_weighs_costs_by_a_multiplier_that_a_checkpoint_keeps(safe: Finished) -> None:
    rows = metrics_of(safe.run_dir)
    multiplier = 4.0
    for step in range(1, 13):
        row = rows[step]
        samples = [r for r in rows_of(safe.run_dir / "rollouts.jsonl") if r["step"] == step and r["tag"] == "train"]
        costs = [expected(r["response"]) for r in samples]
        assert row["cost/mean"] == pytest.approx(sum(costs) / 32)
        assert row["cost/violations"] == sum(cost > 0.1 for cost in costs) / 32
        multiplier = min(5.0, multiplier * math.exp(0.1 * multiplier * (row["cost/mean"] - 0.1)))
        assert row["safety/multiplier"] == pytest.approx(multiplier)
        assert {"critic/loss", "cost_critic/loss", "actor/loss", "cost/seconds"} <= set(row)
        assert row["cost_critic/return"] == pytest.approx(row["cost/mean"], abs=0.3)
        saved = safe.run_dir / "checkpoints" / f"step_{step:06d}"
        assert json.loads((saved / "run.json").read_text())["driver"] == {"multiplier": pytest.approx(multiplier)}
        assert (saved / "cost_critic" / "model" / "model.safetensors").is_file()
    costs = [rows[step]["cost/mean"] for step in range(1, 13)]
    assert sum(costs[-4:]) < 0.85 * sum(costs[:4]), "the policy learns to cost less"
    # A critic that begins from a classifier stays one of its kind.
    config = json.loads((saved / "critic" / "model" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForSequenceClassification"]
