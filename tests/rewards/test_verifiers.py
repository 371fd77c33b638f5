"""The built-in reward functions on answers whose score is known."""

# ruff: noqa: RUF001 - look-alike characters are the subject here.

from __future__ import annotations

from typing import Any

import pytest

from hybridflow.config import RewardConfig
from hybridflow.rewards.scorer import Scorer
from hybridflow.rewards.verifiers import (
    exact_match,
    extract_answer,
    format_match,
    math_verify,
    reasoning_gym,
    reference,
)


@pytest.mark.parametrize(
    ("how", "response", "wanted"),
    [
        ("all", " 68\n", "68"),
        ("tag", "a <answer>1</answer> b <answer> 2\n</answer>", "2"),
        ("tag", "2", None),
        ("boxed", r"so \boxed{1} or \boxed{\frac{1}{2}} it is", r"\frac{1}{2}"),
        ("boxed", r"\boxed{1", None),
        ("boxed", "1", None),
        ("boxed", r"\boxed{\boxed{5}}", "5"),
        ("boxed", r"\boxed{\left\{1\right.}", r"\left\{1\right."),
        ("tag", "<answer><answer>5</answer>", "5"),
        ("answer_line", "Answer: 4\nso\n**Answer:** 5.\n", "5"),
        ("answer_line", "The answer: is 5", None),
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
    with pytest.raises(ValueError, match=r"extract='boxes': choose one of all, tag, boxed"):
        extract_answer("1", "boxes")


def test_ground_truth_of_gsm8k_is_what_stands_behind_its_mark():
    assert reference("48/2 = 24\n#### 1,072") == "1072"
    assert reference("#### -1,072.5") == "-1072.5"
    assert reference("#### (1,2)") == "(1,2)"
    assert reference(68) == "68"


def scores_of(found: list[dict[str, Any]]) -> list[float]:
    return [score["score"] for score in found]


def test_exact_match_compares_texts():
    prompts, truth = ["p"] * 4, ["68", 68, "yes", "yes"]
    assert scores_of(exact_match(prompts, ["68", " 68\n", "Yes", "no"], truth)) == [1.0, 1.0, 0.0, 0.0]
    assert scores_of(exact_match(prompts, ["068", "68.", "Yes", "no"], truth, ignore_case=True)) == [0.0, 0.0, 1.0, 0.0]
    assert scores_of(exact_match(["p"], ["It is 68."], ["68"], extract="number")) == [1.0]
    assert scores_of(exact_match(["p"], [""], [""], extract="number")) == [0.0]


@pytest.mark.parametrize(
    ("response", "truth", "wanted"),
    [
        ("It is 1,234.", "1234", 1.0),
        ("It is 1234", "1,234", 1.0),
        ("It is 18.00 dollars", "$18", 1.0),
        ("−5", "-5", 1.0),
        ("5 - 10 = -5", "-5", 1.0),
        ("10-5", "-5", 0.0),
        ("½", "0.5", 1.0),
        ("2 1/2", "2.5", 1.0),
        (r"$\frac{1}{2}$", "1/2", 1.0),
        ("1/0", "1", 0.0),
        ("4", "3, 4", 0.0),  # a truth with two numbers is compared as text
        ("72", "50%", 0.0),
    ],
)
def test_exact_match_of_numbers_compares_values(response: str, truth: str, wanted: float):
    assert scores_of(exact_match(["p"], [response], [truth], extract="number")) == [wanted]


EQUAL = [
    # fractions
    ("0.5", "1/2"), ("½", "1/2"), ("2½", "5/2"), ("-2 1/2", "-5/2"), (r"\frac12", "1/2"), (r"$\tfrac{1}{2}$", "0.5"),
    (r"1\frac{1}{2}", "3/2"), ("0.333333333333", "1/3"), (r"0.\overline{3}", "1/3"), (r"It is $\frac{2}{4}$.", "1/2"),
    # percent
    ("50%", "0.5"), ("50%", "50"), ("50", "50%"), ("0.5", "50%"), (r"\boxed{50\%}", "50%"), (r"$50\%$", "1/2"),
    ("The answer is 50%.", "50%"), ("50 percent", "50%"), (r"\[\boxed{50\%}\]", "50%"), ("150%", "1.5"),
    # thousands
    ("1,234", "1234"), ("1234", "1,234"), ("1 234", "1234"), ("1\u202f234", "1234"), ("1{,}234", "1234"),
    (r"$1\,234$", "1234"), ("1'000", "1000"), ("$1,234.50", "1234.5"), ("1,234,567.89", "1234567.89"),
    # signs, digits, powers, roots
    ("\u22125", "-5"), ("- 5", "-5"), ("５", "5"), ("٥", "5"), ("5\u200b", "5"), ("10²", "100"), ("1.5e-3", "0.0015"),
    ("1.5 × 10³", "1500"), ("√2", r"\sqrt{2}"), ("sqrt(2)", r"\sqrt{2}"), ("2π", r"2\pi"), ("pi", r"\pi"),
    ("∞", r"\infty"), ("x²", "x^2"), ("x≥2", r"x\geq 2"),
    # units and currency
    ("5 cm", "5"), ("5 km/h", "5"), ("5 m²", "5"), ("5", "5 cm"), (r"\boxed{5\text{ cm}}", "5"), ("5°", "5"),
    (r"\$5", "5"), ("€5", "5"), ("-$5", "-5"),
    # boxes, tags, marks
    (r"\boxed{\boxed{5}}", "5"), (r"\boxed{x=5}", "5"), (r"\boxed {5}", "5"), ("<answer>5</answer>", "5"),
    ("#### 5", "5"), ("**5**", "5"), ("The answer is 5, not 6.", "5"), ("72", "so 70 + 2 = 72 #### 72"),
    ("(1,2)", "#### (1,2)"),
    # formulas, sets, intervals, letters, words
    (r"\boxed{(x+1)^2}", "$x^2+2x+1$"), ("2(x+1)", "2x+2"), ("(1, 2)", "(1,2)"), (r"\{1,2\}", r"\{2,1\}"),
    ("1, 2", "2,1"), (r"(-\infty,2]", "(-∞,2]"), ("(A)", "A"), (r"\boxed{\textbf{(B)}}", "B"),
    ("tuesday.", r"\text{Tuesday}"),
    (r"\boxed{\text{no solution}}", "no solution"),
]  # fmt: skip
DIFFERENT = [
    ("0.33", "1/3"), ("0.5%", "50%"), ("5%", "50%"), ("50", "0.5"), ("50%", "5"), ("12,34", "1234"), ("1 23", "123"),
    ("(1,234)", "1234"), ("5", "-5"), ("5 apples", "6"), (r"\boxed{5", "5"), (r"\boxed{\left\{1\right.}", "1"),
    ("(2,1)", "(1,2)"), ("[1,2)", "(1,2]"), ("x+1", "x+2"), ("x<2", "x>2"), ("2-3i", "2+3i"), ("five", "5"), ("", "0"),
    ("1" + 20 * "0", "1" + 19 * "0" + "1"), ("Monday", "Tuesday"), (r"\boxed{yadseuT}", "Tuesday"),
    (r"\boxed{C}", r"\text{(B)}"), ("no idea", "5"), ("1/0", "1"), ("((((((((((", "1"), ("\\frac" * 100, "1"),
]  # fmt: skip


def test_math_verify_knows_equal_values_in_every_notation():
    found = {pair: scores_of(math_verify(["p"], [pair[0]], [pair[1]]))[0] for pair in EQUAL}
    assert [pair for pair, score in found.items() if score != 1.0] == []


def test_math_verify_tells_different_values_apart():
    found = {pair: scores_of(math_verify(["p"], [pair[0]], [pair[1]]))[0] for pair in DIFFERENT}
    assert [pair for pair, score in found.items() if score != 0.0] == []


def test_math_verify_in_a_scoring_process_refuses_a_truth_that_is_none():
    scorer = Scorer(RewardConfig(function="hybridflow.rewards.verifiers:math_verify", timeout=30))
    scores = scorer.score(["p"] * 3, [r"It is $\frac{2}{4}$.", "0.6", "1"], ["1/2", "1/2", ""])
    scorer.close()
    assert scores.rewards[:2] == [1.0, 0.0] and scores.errors[:2] == [None, None]
    assert scores.errors[2] and "the ground truth '' is no mathematical expression" in scores.errors[2]


def test_a_verifier_says_what_answer_it_has_read():
    """Votes are counted on it, so equal answers are equal texts."""
    read = [score["answer"] for score in exact_match(["p"] * 3, ["It is 5.0", "$5", "no"], ["5"] * 3, extract="number")]
    assert read[0] == read[1] and read[2] is None
    words = exact_match(["p"] * 2, ["YES ", "yes"], ["yes"] * 2, ignore_case=True)
    assert [score["answer"] for score in words] == ["yes", "yes"]
    sums = math_verify(["p"] * 3, [r"$\frac{1}{2}$", "It is 1/2", "no idea"], ["1/2"] * 3)
    assert sums[0]["answer"] == sums[1]["answer"] == "1/2" and sums[2]["answer"] is None
    days = math_verify(["p"] * 2, ["Monday", r"\text{monday}"], ["Monday"] * 2)
    assert [score["answer"] for score in days] == ["monday", "monday"]


@pytest.mark.parametrize(
    ("pattern", "response", "wanted"),
    [
        ("think_answer", "<think>a\nb</think>\n<answer>5</answer>\n", 1.0),
        ("think_answer", "<think>a</think> so <answer>5</answer>", 0.0),
        ("think_answer", "<think>a</think><answer>5</answer><answer>6</answer>", 0.0),
        ("think_answer", "<think><think>a</think></think><answer>5</answer>", 0.0),
        ("think_answer", "<think>a<answer>5</answer>", 0.0),
        ("answer_line", "so\nAnswer: 5", 1.0),
        ("answer_line", "Answer: 5", 1.0),
        ("answer_line", "Answer: 5\nAnswer: 6", 0.0),
        ("answer_line", "so\nAnswer:", 0.0),
        ("answer_line", "the Answer: 5", 0.0),
        ("boxed", r"so \boxed{5}.", 1.0),
        ("boxed", r"\boxed{}", 0.0),
        (r"\d+", "42", 1.0),
        (r"\d+", "42 apples", 0.0),
    ],
)
def test_a_format_is_of_the_whole_answer(pattern: str, response: str, wanted: float):
    assert format_match(["p"], [response], ["x"], pattern) == [wanted]


def test_a_format_that_is_no_expression_says_so():
    with pytest.raises(ValueError, match=r"pattern='\(': .* or one of think_answer, answer_line, boxed"):
        format_match(["p"], ["a"], ["x"], "(")


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


def test_an_answer_that_makes_the_tasks_scorer_fail_is_wrong_but_a_broken_scorer_fails():
    item = {"question": "?", "answer": "2 × 2", "metadata": {"number": 4, "factors": [2, 2]}}
    info = {"task": "prime_factorization", "item": item}
    scores = reasoning_gym(["?"] * 2, ["no idea", "2 × 2"], ["2 × 2"] * 2, [info] * 2)
    assert [s["score"] for s in scores] == [0.0, 1.0]
    with pytest.raises(ValueError, match="invalid literal"):
        reasoning_gym(["?"], ["2 × 2"], ["two"], [{**info, "item": {**item, "answer": "two"}}])


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
