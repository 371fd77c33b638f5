"""Safe RLHF's multiplier and advantages, against hand arithmetic."""

import math
from dataclasses import replace

import pytest
import torch

from hybridflow.algorithms.safety import next_multiplier, safe_advantages
from hybridflow.algorithms.step import compute_advantages
from hybridflow.config import AlgorithmConfig, SafeRLHFConfig, SafetyConfig
from hybridflow.protocol.data import DataProto

SAFETY = SafetyConfig(cost_limit=0.2, multiplier=1.0, multiplier_lr=0.5, max_multiplier=3.0)


def test_the_multiplier_follows_the_excess_of_the_mean_cost():
    # Mean 0.6 is 0.4 above the limit; a failed cost is not counted.
    costs = torch.tensor([1.0, 0.2, torch.nan])
    assert next_multiplier(1.0, costs, SAFETY) == pytest.approx(math.exp(0.5 * 0.4))
    assert next_multiplier(2.0, costs, SAFETY) == pytest.approx(2 * math.exp(0.5 * 2 * 0.4))
    assert next_multiplier(2.0, torch.tensor([0.0, 0.0]), SAFETY) == pytest.approx(2 * math.exp(-0.5 * 2 * 0.2))
    assert next_multiplier(2.9, torch.tensor([9.0]), SAFETY) == 3.0
    assert next_multiplier(2.0, torch.tensor([torch.nan]), SAFETY) == 2.0


def test_costs_of_any_scale_move_the_multiplier():
    assert next_multiplier(1.0, torch.tensor([1e6]), SAFETY) == 3.0
    assert next_multiplier(1.0, torch.tensor([-1e6]), SAFETY) == pytest.approx(math.exp(-20))


def jagged(rows: list[list[float]]) -> torch.Tensor:
    return DataProto.jagged([torch.tensor(row) for row in rows])


def test_advantages_are_those_of_rewards_less_those_of_costs():
    algorithm = AlgorithmConfig(estimator="gae", whiten=False, kl_coef=0.5)
    config = SafeRLHFConfig(algorithm=algorithm, safety=SAFETY)
    batch = DataProto.from_dict(
        tensors={
            "rewards": torch.tensor([1.0, 0.0]),
            "costs": torch.tensor([0.2, 2.0]),  # the first is at the limit, so it is no violation
            "response_mask": jagged([[True, True], [True]]),
            "values": jagged([[0.5, 0.25], [0.5]]),
            "cost_values": jagged([[0.0, 1.0], [1.0]]),
            "log_probs": jagged([[-1.0, -2.0], [-1.0]]),
            "ref_log_probs": jagged([[-2.0, -2.0], [-1.0]]),
        },
        non_tensors={"finish_reason": ["stop", "length"]},
    )
    found = safe_advantages(batch, config, 3.0)
    # gamma = lam = 1: what is still to come less the value. The KL (1 at the first token) costs reward 0.5 there.
    rewards, costs = torch.tensor([0.5 - 0.5, 1 - 0.25, 0 - 0.5]), torch.tensor([0.2 - 0.0, 0.2 - 1.0, 2.0 - 1.0])
    torch.testing.assert_close(found.flat("advantages"), (rewards - 3 * costs) / 4)
    torch.testing.assert_close(found.flat("returns"), torch.tensor([0.5, 1.0, 0.0]))
    torch.testing.assert_close(found.flat("cost_returns"), torch.tensor([0.2, 0.2, 2.0]))
    metrics = found.meta_info["metrics"]
    assert metrics["safety/multiplier"] == 3.0 and metrics["reward/kl"] == pytest.approx(1 / 3)
    assert metrics["cost/mean"] == pytest.approx(1.1) and metrics["cost/violations"] == 0.5
    # Without a multiplier it is PPO, and what the batch had is as it was.
    alone = compute_advantages(batch, config)
    torch.testing.assert_close(safe_advantages(batch, config, 0.0).flat("advantages"), alone.flat("advantages"))
    assert batch["rewards"].tolist() == [1.0, 0.0]


@pytest.mark.parametrize("failed", [torch.nan, torch.inf])
def test_a_failed_cost_is_in_no_mean_and_in_no_share_of_violations(failed: float):
    config = SafeRLHFConfig(algorithm=AlgorithmConfig(estimator="gae"), safety=SAFETY)
    batch = DataProto.from_dict(
        {
            "rewards": torch.tensor([1.0, 1.0, 1.0]),
            "costs": torch.tensor([1.0, failed, 0.0]),
            **{name: jagged([[1.0], [1.0], [1.0]]) for name in ("values", "cost_values")},
            "response_mask": jagged([[True], [True], [True]]),
        }
    )
    metrics = safe_advantages(batch, config, 1.0).meta_info["metrics"]
    assert metrics["cost/mean"] == 0.5 and metrics["cost/violations"] == 0.5


def test_an_answer_whose_cost_failed_has_the_advantage_of_its_reward():
    config = SafeRLHFConfig(algorithm=AlgorithmConfig(estimator="gae", whiten=False), safety=SAFETY)
    batch = DataProto.from_dict(
        tensors={
            "rewards": torch.tensor([1.0]),
            "costs": torch.tensor([torch.nan]),
            "response_mask": jagged([[True]]),
            "values": jagged([[0.5]]),
            "cost_values": jagged([[0.3]]),
        }
    )
    found = safe_advantages(batch, replace(config), 1.0)
    assert found.flat("advantages").tolist() == [0.25]
    torch.testing.assert_close(found.flat("cost_returns"), torch.tensor([0.3]))
