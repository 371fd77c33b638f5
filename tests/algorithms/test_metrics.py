"""Step metrics, NaN kept."""

import math

import pytest
import torch

from hybridflow.algorithms.metrics import batch_metrics, evaluation_metrics, mismatch, staleness
from hybridflow.errors import DataError
from hybridflow.protocol.data import DataProto


def test_mismatch_has_the_written_values():
    found = mismatch(torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -2.0 + math.log(2.0)]))
    assert found["max_diff"] == pytest.approx(math.log(2), rel=1e-6)
    assert found["mean_diff"] == pytest.approx(math.log(2) / 2, rel=1e-6)
    assert found["mult_prob_error"] == pytest.approx((1 + 2) / 2, rel=1e-6)
    assert found["k3"] == pytest.approx((1 - math.log(2)) / 2, rel=1e-5)


def test_one_nan_shows_in_every_mismatch_metric():
    found = mismatch(torch.tensor([-1.0, float("nan"), -1.0]), torch.tensor([-1.0, -1.0, -1.0]))
    assert all(math.isnan(value) for value in found.values())


def test_mismatch_of_different_lengths_is_an_error():
    with pytest.raises(DataError, match="rollout_log_probs has 2 tokens, log_probs 3"):
        mismatch(torch.zeros(2), torch.zeros(3))


def test_tokens_that_the_policy_did_not_say_are_no_mismatch():
    rows = {"rollout_log_probs": [-1.0, math.nan, -2.0], "log_probs": [-1.5, -9.0, -2.0]}
    columns = {key: DataProto.jagged([torch.tensor(row)]) for key, row in rows.items()}
    found = batch_metrics(DataProto.from_dict(columns))
    assert math.isnan(found["rollout_vs_trainer/max_diff"])
    mask = DataProto.from_dict({"response_mask": DataProto.jagged([torch.tensor([True, False, True])])})
    found = batch_metrics(DataProto.from_dict(columns).union(mask))
    assert found["rollout_vs_trainer/max_diff"] == 0.5 and found["rollout_vs_trainer/mean_diff"] == 0.25


def test_groups_without_signal_are_counted_and_failed_rewards_left_out():
    batch = DataProto.from_dict(
        tensors={
            "rewards": torch.tensor([1.0, 1.0, 0.0, 1.0, float("nan"), 1.0]),
            "solved": torch.tensor([True, True, False, True, False, True]),
            "group_ids": torch.tensor([0, 0, 1, 1, 2, 2]),
        }
    )
    found = batch_metrics(batch)
    assert found["reward/groups_without_signal"] == found["reward/groups_all_solved"] == pytest.approx(2 / 3)
    assert found["reward/groups_none_solved"] == 0
    assert found["reward/mean"] == pytest.approx(4 / 5)
    assert found["reward/failed"] == pytest.approx(1 / 6)
    assert found["reward/solved"] == pytest.approx(4 / 6)


def test_one_answer_a_prompt_has_no_group_to_speak_of():
    columns = {"rewards": torch.ones(3), "solved": torch.ones(3, dtype=torch.bool), "group_ids": torch.arange(3)}
    assert set(batch_metrics(DataProto.from_dict(columns))) == {"reward/mean", "reward/failed", "reward/solved"}


def answered(solved: list[bool], groups: list[int], sources: list[str]) -> DataProto:
    return DataProto.from_dict(
        tensors={
            "solved": torch.tensor(solved),
            "rewards": torch.tensor([float(s) for s in solved[:-1]] + [float("nan")]),
            "group_ids": torch.tensor(groups),
            "responses": DataProto.jagged([[1] * (1 + i) for i in range(len(solved))]),
        },
        non_tensors={"data_source": sources},
    )


def test_an_evaluation_gives_accuracy_by_source_and_pass_at_k():
    found = evaluation_metrics(
        answered([True, False, False, False, True, True], [0, 0, 0, 1, 1, 1], ["a"] * 3 + ["b"] * 3)
    )
    assert found["evaluate/accuracy"] == pytest.approx(1 / 2)
    assert found["evaluate/accuracy/a"] == pytest.approx(1 / 3)
    assert found["evaluate/accuracy/b"] == pytest.approx(2 / 3)
    assert found["evaluate/reward"] == pytest.approx(2 / 5)
    assert found["evaluate/length"] == pytest.approx(3.5)
    # 1 and 2 of 3: pass@2 is 1 - C(2,2)/C(3,2) = 2/3 and 1; pass@3 is 1.
    assert found["evaluate/pass@2"] == pytest.approx(5 / 6)
    assert (found["evaluate/pass@2/low"], found["evaluate/pass@2/high"]) == pytest.approx((2 / 3, 1.0))
    assert found["evaluate/pass@3"] == 1.0
    assert (found["evaluate/pass@2/a"], found["evaluate/pass@2/b"]) == pytest.approx((2 / 3, 1.0))
    assert (found["evaluate/reward/b"], found["evaluate/length/a"]) == pytest.approx((0.5, 2.0))
    assert "evaluate/pass@1" not in found and "evaluate/majority@3" not in found


def test_every_k_has_its_pass_at_k_and_answers_that_were_read_a_majority():
    batch = answered([True, False, False, False, True, True, False, True], [0] * 4 + [1] * 4, ["a"] * 8)
    found = evaluation_metrics(batch.union(DataProto.from_dict(non_tensors={"answer": list("5676") + list("7787")})))
    # Of 4 answers 1 and 3 are right: 1 - C(3, k) / C(4, k) and 1. The first prompt's majority is wrong.
    assert [found[f"evaluate/pass@{k}"] for k in (2, 3, 4)] == pytest.approx([(1 / 2 + 1) / 2, (3 / 4 + 1) / 2, 1.0])
    assert found["evaluate/majority@4"] == 0.5


def test_a_majority_is_of_the_answers_to_one_prompt():
    batch = answered([True, True, False, False, False, True], [0, 0, 0, 1, 1, 1], ["a"] * 3 + ["b"] * 3)
    found = evaluation_metrics(batch.union(DataProto.from_dict(non_tensors={"answer": ["5", "5", "6", "6", "6", "5"]})))
    assert found["evaluate/majority@3"] == 0.5
    assert (found["evaluate/majority@3/a"], found["evaluate/majority@3/b"]) == (1.0, 0.0)


def test_a_policy_is_as_far_from_its_teacher_as_its_own_tokens_say():
    rows = {"log_probs": [[-1.0, -2.0], [-0.5]], "teacher_log_probs": [[-3.0, -2.0], [-1.5]]}
    found = batch_metrics(DataProto.from_dict({key: DataProto.jagged(value) for key, value in rows.items()}))
    assert found["teacher/kl"] == pytest.approx(1.0)


def test_one_answer_a_prompt_has_no_pass_at_k():
    found = evaluation_metrics(answered([True, False], [0, 1], ["a", "a"]))
    assert set(found) == {"evaluate/accuracy", "evaluate/reward", "evaluate/length", "evaluate/failed"}


def test_staleness_counts_the_steps_since_the_weights_of_an_answer():
    found = staleness(DataProto.from_dict({"weight_version": torch.tensor([4, 3, 1, 4])}), version=4)
    assert found == {"rollout/staleness": (0 + 1 + 3 + 0) / 4, "rollout/staleness_max": 3.0}
    assert staleness(DataProto.from_dict({"x": torch.zeros(2)}), version=4) == {}


def test_staleness_of_tokens_tells_answers_of_several_versions():
    tokens = DataProto.jagged([torch.tensor(row) for row in ([4, 4], [2, 2, 3, 4], [3], [3, 4])])
    batch = DataProto.from_dict({"weight_version": torch.tensor([4, 2, 3, 3]), "token_versions": tokens})
    assert staleness(batch, version=4) == {
        "rollout/staleness": (0 + 2 + 1 + 1) / 4,
        "rollout/staleness_max": 2.0,
        "rollout/token_staleness": (0 + 0 + 2 + 2 + 1 + 0 + 1 + 1 + 0) / 9,
        "rollout/mixed": 2 / 4,
    }
    fresh = DataProto.from_dict({"weight_version": torch.tensor([5, 5, 5, 5]), "token_versions": tokens})
    assert set(staleness(fresh, version=5)) == {"rollout/staleness", "rollout/staleness_max"}
