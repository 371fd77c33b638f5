"""DAPO's filters by hand."""

import pytest
import torch

from hybridflow.algorithms.filters import group_shares, overlong_penalty, with_signal, without_overlong
from hybridflow.errors import DataError

NAN = float("nan")
SCORES = torch.tensor([1.0, 1.0, 0.0, 1.0, NAN, 1.0, NAN, 0.0, NAN, NAN])
GROUPS = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, 4, 4])


def test_dynamic_sampling_keeps_whole_groups_whose_scores_differ():
    assert with_signal(SCORES, GROUPS).tolist() == [False, False, True, True] + [False] * 6
    scores = torch.tensor([1.0, NAN, 0.0])
    assert with_signal(scores, torch.zeros(3, dtype=torch.int64)).tolist() == [True] * 3


def test_groups_are_counted_by_what_their_answers_with_a_reward_say():
    # Groups 0 and 2: all that could be scored are right. 3: none is. 4 could not be scored. 1 has both.
    shares = group_shares(SCORES, SCORES == 1, GROUPS)
    assert shares == pytest.approx(
        {"groups_without_signal": 4 / 5, "groups_all_solved": 2 / 5, "groups_none_solved": 1 / 5}
    )
    # Rewards may differ where nothing is solved.
    shares = group_shares(torch.tensor([0.1, 0.2]), torch.tensor([False, False]), torch.tensor([7, 7]))
    assert shares == {"groups_without_signal": 0.0, "groups_all_solved": 0.0, "groups_none_solved": 1.0}


def test_overlong_filtering_masks_rows_that_were_cut():
    mask = torch.tensor([[True, False], [True, True]])
    assert without_overlong(mask, torch.tensor([False, True])).tolist() == [[True, False], [False, False]]


def test_the_overlong_penalty_grows_over_the_buffer():
    lengths = torch.tensor([1, 6, 7, 8, 10, 11])
    assert overlong_penalty(lengths, longest=10, buffer=4).tolist() == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    assert overlong_penalty(lengths, longest=10, buffer=4, penalty=2.0)[3].item() == -1.0
    with pytest.raises(DataError, match="algorithm.overlong_buffer=11: has to be above 0 and at most the limit of 10"):
        overlong_penalty(lengths, longest=10, buffer=11)
