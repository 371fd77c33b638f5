"""Runs of the drivers that differ from GRPO's: each makes a small problem better, and says what is its own."""

from __future__ import annotations

import math
import re

import pytest

from tests.e2e.conftest import Finished
from tests.e2e.drivers import metrics_of, rows_of

# A test that comes first for a run waits for it.
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def course(run: Finished, metric: str) -> list[float]:
    """A metric of all training steps."""
    return [row[metric] for step, row in metrics_of(run.run_dir).items() if step > 0]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def test_remax_raises_its_reward(remax: Finished) -> None:
    rewards = course(remax, "reward/mean")
    assert len(rewards) == 12 and mean(rewards[-4:]) > mean(rewards[:4]) + 0.05


def test_the_greedy_answers_of_remax_train_nothing_and_count_in_no_metric(remax: Finished) -> None:
    rows = [row for row in rows_of(remax.run_dir / "rollouts.jsonl") if row["tag"] == "train"]
    for step, reward in enumerate(course(remax, "reward/mean"), 1):
        sampled = [row["reward"] for row in rows if row["step"] == step]
        assert len(sampled) == 64 and mean(sampled) == pytest.approx(reward, abs=1e-6)
    assert course(remax, "actor/grad_norm")[0] > 0


def test_a_student_comes_closer_to_its_teacher_on_a_pool_of_its_own(distill: Finished) -> None:
    assert re.search(r"^teacher  \[1\] device  teacher +tp1 pp1 cp1 dp1$", distill.ended.out, re.M)
    away = course(distill, "teacher/kl")
    assert len(away) == 14 and away[0] > 0.5
    assert mean(away[-3:]) < 0.95 * mean(away[:3])
    assert all(seconds > 0 for seconds in course(distill, "time/teacher_log_probs"))


def test_dpo_prefers_the_chosen_answers(dpo: Finished) -> None:
    losses, margins = course(dpo, "preference/loss"), course(dpo, "preference/margin")
    # Before the first update the actor is its reference.
    assert losses[0] == pytest.approx(math.log(2), abs=1e-5) and margins[0] == pytest.approx(0, abs=1e-5)
    assert mean(losses[-3:]) < math.log(2) - 0.01 and mean(margins[-3:]) > 0
    assert mean(course(dpo, "preference/accuracy")[-3:]) > 0.55


def test_dpo_without_rollout_and_reward_is_trained_and_not_evaluated(dpo: Finished) -> None:
    assert "rollout" not in dpo.ended.out.split("\n\n")[0]
    last = metrics_of(dpo.run_dir)[12]
    assert "evaluate/accuracy" not in last and last["time/update_actor"] > 0
    assert (dpo.run_dir / "model" / "model.safetensors").is_file()
    rows = rows_of(dpo.run_dir / "rollouts.jsonl")
    assert [row["group"] for row in rows[:4]] == [0, 0, 1, 1]


@pytest.mark.parametrize("name", ["remax", "distill", "dpo"])
def test_every_step_has_finite_metrics_and_no_noise(name: str, request: pytest.FixtureRequest) -> None:
    run = request.getfixturevalue(name)
    rows = metrics_of(run.run_dir)
    assert list(rows) == list(range(min(rows), 15 if name == "distill" else 13))
    assert all("not_finite" not in row for row in rows.values())
    assert run.ended.err == ""
