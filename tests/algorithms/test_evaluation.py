"""Pass@k, its intervals and the majority against enumeration."""

import itertools
import math

import pytest
import torch

from hybridflow.algorithms.evaluation import best_of, majority, pass_at_all_k, pass_at_k
from hybridflow.errors import DataError


@pytest.mark.parametrize(("n", "c"), [(5, 0), (5, 2), (5, 5), (1, 1)])
def test_pass_at_k_is_the_share_of_draws_that_hold_a_right_answer(n, c):
    answers = [True] * c + [False] * (n - c)
    for k in range(1, n + 1):
        draws = [any(draw) for draw in itertools.combinations(answers, k)]
        assert pass_at_k(n, c, k) == pytest.approx(sum(draws) / len(draws), abs=1e-15)


def test_impossible_counts_are_refused():
    with pytest.raises(DataError, match="pass@k with n=4 answers, c=5 right, k=1 drawn"):
        pass_at_k(4, 5, 1)
    with pytest.raises(DataError, match="k=5 drawn"):
        pass_at_k(4, 2, 5)


def test_all_k_are_means_over_prompts_and_stop_at_the_shortest_group():
    solved = torch.tensor([True, False, False, True, True, False, False])
    groups = torch.tensor([3, 3, 3, 5, 5, 5, 5])
    found = pass_at_all_k(solved, groups)
    assert list(found) == [1, 2, 3]
    # Prompt 3: 1 of 3; prompt 5: 2 of 4.
    assert found[1].value == pytest.approx((1 / 3 + 1 / 2) / 2)
    assert found[2].value == pytest.approx(((1 - 1 / 3) + (1 - 1 / 6)) / 2)
    assert found[3].value == pytest.approx(1.0)


def test_the_interval_holds_the_middle_of_the_resampled_means():
    # Of two prompts, one always right and one never, a resample has mean 0, 1/2 or 1 with chances 1/4, 1/2, 1/4.
    solved, groups = torch.tensor([True, True, False, False]), torch.tensor([0, 0, 1, 1])
    wide, narrow = pass_at_all_k(solved, groups)[1], pass_at_all_k(solved, groups, confidence=0.4)[1]
    assert (wide.low, wide.value, wide.high) == (0.0, 0.5, 1.0)
    assert (narrow.low, narrow.high) == (0.5, 0.5)
    same = pass_at_all_k(torch.tensor([True, False] * 8), torch.arange(16) // 2)[1]
    assert (same.low, same.value, same.high) == (0.5, 0.5, 0.5)


def test_the_interval_narrows_as_prompts_are_added():
    widths = []
    for prompts in (20, 2000):
        solved = torch.arange(prompts) % 2 == 0
        found = pass_at_all_k(solved, torch.arange(prompts), seed=1)[1]
        widths.append(found.high - found.low)
        # 2 * 1.96 standard errors of a share of one half.
        assert widths[-1] == pytest.approx(2 * 1.96 * 0.5 / prompts**0.5, rel=0.15)


def test_the_majority_votes_and_ties_share():
    answers = [["4", "4", "5"], ["1", "2", None], ["7", "7", "8"], [None, None]]
    solved = [[True, True, False], [True, False, False], [False, False, True], [False, False]]
    # Right; a tie of a right and a wrong answer; outvoted; no vote.
    assert majority(answers, solved) == pytest.approx((1 + 0.5 + 0 + 0) / 4)


def test_the_first_of_the_best_evaluations_is_the_best_and_nan_never():
    values = {0: 0.25, 10: 0.5, 20: math.nan, 30: 0.5, 40: 0.375}
    assert best_of(values, "max") == (10, 3)
    assert best_of(values, "min") == (0, 4)
    assert best_of({5: math.nan}, "max") == (5, 0)
    assert best_of({5: math.nan, 6: -1.0}, "max") == (6, 0)


def test_bad_input_is_refused():
    with pytest.raises(DataError, match="give at least one"):
        majority([], [])
    with pytest.raises(DataError, match=r"solved \[2\] and groups \[3\]"):
        pass_at_all_k(torch.tensor([True, False]), torch.tensor([0, 0, 1]))
    with pytest.raises(DataError, match="confidence=95"):
        pass_at_all_k(torch.tensor([True]), torch.tensor([0]), confidence=95)
