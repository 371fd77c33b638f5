"""PPO's run: what the critic says and leaves behind, its warm-up, that it learns; what may change no weight."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.conftest import Finished
from tests.e2e.drivers import metrics_of, rows_of

# A test that comes first for a run waits for it.
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

STEPS, WARM_UP = 14, 2
CRITIC = {"loss", "grad_norm", "lr", "clip_fraction", "value", "return", "explained_variance", "updates"}


def saved(run: Finished, step: int, model: str = "model") -> dict[str, torch.Tensor]:
    folder: Path = run.run_dir / "checkpoints" / f"step_{step:06d}" / model
    return load_file(folder / "model.safetensors")


def test_every_step_reports_the_critic_and_the_actor_after_its_warm_up(ppo: Finished) -> None:
    rows = metrics_of(ppo.run_dir)
    for step in range(1, STEPS + 1):
        row = rows[step]
        assert {f"critic/{name}" for name in CRITIC} | {"time/values", "time/update_critic"} <= set(row)
        assert all(math.isfinite(value) for value in row.values())
        assert row["critic/updates"] == 2 and row["critic/lr"] == 2e-3
        assert ("actor/loss" in row) == ("time/update_actor" in row) == (step > WARM_UP)
    # A return is what is left of the answer's reward: with lam = 0.95, a mixture of it and later values.
    assert rows[STEPS]["critic/return"] == pytest.approx(rows[STEPS]["reward/mean"], abs=0.1)


def test_the_critic_alone_is_trained_at_first(ppo: Finished) -> None:
    before, after, moved = (saved(ppo, step) for step in (1, WARM_UP, WARM_UP + 1))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert max((after[name] - moved[name]).abs().max() for name in after) > 1e-3
    critics = [saved(ppo, step, "critic/model") for step in (1, WARM_UP)]
    assert max((critics[0][name] - critics[1][name]).abs().max() for name in critics[0]) > 1e-3


def test_the_critic_is_saved_as_a_classifier_of_tokens(ppo: Finished) -> None:
    folder = ppo.run_dir / "checkpoints" / f"step_{STEPS:06d}" / "critic"
    assert json.loads((folder / "model" / "config.json").read_text())["architectures"] == [
        "Qwen3ForTokenClassification"
    ]
    assert saved(ppo, STEPS, "critic/model")["score.weight"].abs().max() > 0
    assert json.loads((folder / "optimizer" / "state.json").read_text()) == {"updates": 2 * STEPS}


def test_it_learns(ppo: Finished) -> None:
    rows = metrics_of(ppo.run_dir)
    solved = [rows[step]["reward/solved"] for step in range(1, STEPS + 1)]
    assert sum(solved[-4:]) / 4 > sum(solved[:4]) / 4 + 0.15
    errors = [2 * rows[step]["critic/loss"] for step in range(1, STEPS + 1)]
    assert sum(errors[-4:]) < sum(errors[:2]) * 2, "values stay near the returns"


def test_devices_and_micro_batches_change_no_weight(ppo_runs: tuple[Finished, Finished]) -> None:
    """After three steps with two updates each, of 8 rows: on two devices whole, on one in pieces of 3 rows."""
    for model in ("model", "critic/model"):
        whole, pieces = (saved(run, 3, model) for run in ppo_runs)
        for name, weight in whole.items():
            torch.testing.assert_close(pieces[name], weight, rtol=0, atol=1e-6, msg=f"{model} {name}")


@pytest.mark.parametrize("name", ["split", "standalone"])
def test_pools_of_their_own_change_no_answer_no_value_and_no_update(
    name: str, ppo_runs: tuple[Finished, Finished], placements: dict[str, Finished]
) -> None:
    together, apart = ppo_runs[1], placements[name]
    assert rows_of(apart.run_dir / "rollouts.jsonl") == rows_of(together.run_dir / "rollouts.jsonl")
    found, expected = metrics_of(apart.run_dir), metrics_of(together.run_dir)
    names = ("reward/mean", "reward/kl", "critic/loss", "critic/grad_norm", "rollout_vs_trainer/max_diff")
    for metric in names:
        assert [found[step][metric] for step in (1, 2, 3)] == [expected[step][metric] for step in (1, 2, 3)], metric
    for metric in ("actor/loss", "actor/grad_norm"):  # from the first step after the critic's warm-up
        assert found[3][metric] == expected[3][metric] != 0, metric
    assert found[3]["reward/kl"] == expected[3]["reward/kl"]
    # A pool's processes have one phase each; only where training and generation share one does it change.
    assert ("phase/generation/seconds" in found[3]) == (name == "split")
