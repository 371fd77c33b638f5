"""GRPO's estimator against hand arithmetic."""

import math

import pytest
import torch

from hybridflow.algorithms.advantages import grpo, grpo_advantages
from hybridflow.config import AdvantageConfig
from hybridflow.errors import DataError
from hybridflow.protocol.data import DataProto

MASK = torch.tensor([[True, True, False]] * 6)
GROUPS = torch.tensor([7, 7, 7, 3, 3, 9])
NAN = float("nan")


def first_column(scores: list[float], **kwargs) -> list[float]:
    advantages, returns = grpo(torch.tensor(scores), GROUPS, MASK, **kwargs)
    assert torch.equal(advantages, returns)
    assert torch.equal(advantages[:, 0], advantages[:, 1])
    assert (advantages[:, 2] == 0).all()
    return advantages[:, 0].tolist()


def test_scores_are_centred_and_divided_by_the_unbiased_deviation():
    # group 7: 1, 0, 2: mean 1, unbiased std 1. group 3: 1, 0: mean 0.5, std sqrt(0.5). group 9: one row.
    deviation = math.sqrt(0.5)
    expected = [0.0, -1 / (1 + 1e-6), 1 / (1 + 1e-6), 0.5 / (deviation + 1e-6), -0.5 / (deviation + 1e-6), 0.0]
    assert first_column([1, 0, 2, 1, 0, 5]) == pytest.approx(expected, abs=1e-7)


def test_without_the_deviation_only_the_mean_is_taken_off():
    assert first_column([1, 0, 2, 1, 0, 5], normalize_std=False) == [0.0, -1.0, 1.0, 0.5, -0.5, 0.0]


def test_a_group_of_equal_scores_gives_exactly_zero():
    assert first_column([0.1, 0.1, 0.1, 0.3, 0.3, 1]) == [0.0] * 6


def test_a_group_of_one_gives_its_score_where_asked():
    assert first_column([1, 1, 1, 1, 1, 5], single="raw") == [0, 0, 0, 0, 0, 5]


def test_a_failed_reward_leaves_its_row_at_zero_and_out_of_mean_and_deviation():
    # group 7 without its NaN: 1 and 2: mean 1.5, std sqrt(0.5). group 3 has one valid row: a group of one.
    deviation = math.sqrt(0.5)
    expected = [-0.5 / (deviation + 1e-6), 0.0, 0.5 / (deviation + 1e-6), 0.0, 0.0, 0.0]
    assert first_column([1, NAN, 2, NAN, 4, NAN]) == pytest.approx(expected, abs=1e-7)


def test_the_order_of_rows_does_not_matter():
    scores = torch.tensor([1.0, 0.0, 2.0, 1.0, 0.0, 5.0])
    order = torch.tensor([5, 2, 0, 4, 1, 3])
    straight, _ = grpo(scores, GROUPS, MASK)
    shuffled, _ = grpo(scores[order], GROUPS[order], MASK)
    assert torch.equal(straight[order], shuffled)


def test_mismatched_shapes_are_refused_with_both_sizes():
    with pytest.raises(DataError, match=r"scores \(5,\), groups \(6,\) and mask \(6, 3\)"):
        grpo(torch.zeros(5), GROUPS, MASK)


def test_the_drivers_step_keeps_the_responses_lengths():
    mask = DataProto.jagged([torch.tensor([True, True]), torch.tensor([True]), torch.tensor([True, False, True])])
    batch = DataProto.from_dict(
        tensors={
            "rewards": torch.tensor([1.0, 0.0, 2.0]),
            "group_ids": torch.tensor([0, 0, 0]),
            "response_mask": mask,
        }
    )
    found = grpo_advantages(batch, AdvantageConfig(normalize_std=False))
    assert found.lengths("advantages").tolist() == [2, 1, 3]
    assert found.flat("advantages").tolist() == [0, 0, -1, 1, 0, 1]
