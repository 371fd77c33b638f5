"""The built-in reward functions on answers whose score is known."""

from __future__ import annotations

import pytest

from hybridflow.config import RewardConfig
from hybridflow.rewards.scorer import Scorer
from hybridflow.rewards.verifiers import exact_match, extract_answer, reasoning_gym, reference


@pytest.mark.parametrize(
    ("how", "response", "wanted"),
    [
        ("all", " 68\n", "68"),
        ("tag", "a <answer>1</answer> b <answer> 2\n</answer>", "2"),
        ("tag", "2", None),
        ("boxed", r"so \boxed{1} or \boxed{\frac{1}{2}} it is", r"\frac{1}{2}"),
        ("boxed", r"\boxed{1", None),
        ("boxed", "1", None),
        ("number", "7 + 5 = 12.", "12"),
        ("number", "about 1,234.50 in 2 parts: -3", "-3"),
        ("number", "it costs $1,234.50", "1234.50"),
        ("number", "none", None),
        ("last_line", "think\n\n42 \n", "42"),
        ("last_line", "", None),
        ("auto", "<answer>3</answer>\\boxed{4}", "3"),
        ("auto", "\\boxed{4} 5", "4"),
        ("auto", " 5 ", "5"),
    ],
)
def test_the_part_of_an_answer_that_counts(how: str, response: str, wanted: str | None):
    assert extract_answer(response, how) == wanted


def test_an_unknown_part_names_the_known_ones():
    with pytest.raises(ValueError, match=r"reward\.options\.extract='boxes': choose one of all, tag, boxed"):
        extract_answer("1", "boxes")


def test_ground_truth_of_gsm8k_is_what_stands_behind_its_mark():
    assert reference("48/2 = 24\n#### 1,072") == "1072"
    assert reference(68) == "68"


def test_exact_match_compares_texts():
    prompts, truth = ["p"] * 4, ["68", 68, "yes", "yes"]
    assert exact_match(prompts, ["68", " 68\n", "Yes", "no"], truth) == [1.0, 1.0, 0.0, 0.0]
    assert exact_match(prompts, ["068", "68.", "Yes", "no"], truth, ignore_case=True) == [0.0, 0.0, 1.0, 0.0]
    assert exact_match(["p"], ["It is 68."], ["68"], extract="number") == [1.0]
    assert exact_match(["p"], [""], [""], extract="number") == [0.0]


def test_math_verify_compares_mathematics_in_a_scoring_process():
    scorer = Scorer(RewardConfig(function="hybridflow.rewards.verifiers:math_verify", timeout=30))
    truth = ["1/2", r"\frac{1}{2}", r"$x^2+2x+1$", "1/2", "so 1 + 1 = 2 #### 2", ""]
    responses = [r"It is $\frac{2}{4}$.", "0.5", r"\boxed{(x+1)^2}", "0.6", "The answer is 2", "1"]
    scores = scorer.score(["p"] * len(truth), responses, truth)
    scorer.close()
    assert scores.rewards[:5] == [1.0, 1.0, 1.0, 0.0, 1.0]
    assert scores.errors[:5] == [None] * 5
    assert scores.errors[5] and "the ground truth '' is no mathematical expression" in scores.errors[5]


def test_reasoning_gym_scores_with_the_tasks_own_scorer_and_keeps_solved_apart():
    item = {"question": "?", "answer": "-4", "metadata": {}}
    info = [{"task": "chain_sum", "options": {"min_terms": 2}, "item": item}] * 4
    responses = ["-4", "<answer>-4</answer>", "It is -4", "5"]
    args = (["?"] * 4, responses, ["-4"] * 4, info)
    # The task's own rule for an answer that holds more than the right one: len("-4") / len("It is -4").
    assert [s["score"] for s in reasoning_gym(*args)] == [1.0, 1.0, 0.25, 0.0]
    assert [s["solved"] for s in reasoning_gym(*args)] == [True, True, False, False]
    assert [s["score"] for s in reasoning_gym(*args, partial=False)] == [1.0, 1.0, 0.0, 0.0]
    assert [s["score"] for s in reasoning_gym(*args, extract="number")] == [1.0, 1.0, 1.0, 0.0]


def test_reasoning_gym_scores_in_a_scoring_process():
    from hybridflow.config import DataConfig
    from hybridflow.data.sources import load_rows

    rows = load_rows("reasoning_gym:gsm_symbolic,leg_counting", DataConfig(train="", options={"size": 2}), seed=0)
    scorer = Scorer(RewardConfig(function="hybridflow.rewards.verifiers:reasoning_gym", timeout=60))
    info = [row.extra_info for row in rows]
    truth = [row.ground_truth for row in rows]
    right = scorer.score([row.messages for row in rows], truth, truth, extra_info=info)
    wrong = scorer.score([row.messages for row in rows], ["no idea"] * 4, truth, extra_info=info)
    scorer.close()
    assert right.rewards == [1.0] * 4 and all(right.solved)
    assert max(wrong.rewards) < 0.1 and not any(wrong.solved)
