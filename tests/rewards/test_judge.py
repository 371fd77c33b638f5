"""What a judge is asked, and what is read from its verdicts."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridflow.config import JudgeConfig, RewardComponentConfig, RewardConfig
from hybridflow.errors import ConfigError
from hybridflow.rewards.components import check_reward
from hybridflow.rewards.judge import question_of, score
from hybridflow.rewards.scorer import Scorer

SAY = [{"role": "user", "content": "1+1="}]
JUDGED = "hybridflow.rewards.judge:score"


def test_marks_are_replaced_once_and_other_braces_stay() -> None:
    template = "{prompt}|{response}|{ground_truth}|{other}|\\frac{1}{2}"
    assert question_of(template, SAY, "{ground_truth}", 2) == "1+1=|{ground_truth}|2|{other}|\\frac{1}{2}"
    talk = [{"role": "system", "content": "Be brief."}, *SAY]
    assert question_of("{prompt}", talk, "", "") == "system: Be brief.\nuser: 1+1="


def test_the_default_question_asks_for_what_is_read() -> None:
    asked = question_of(JudgeConfig().question, SAY, "3", "2")
    assert asked.startswith("Question:\n1+1=\n\nRight answer:\n2\n\nAnswer to judge:\n3\n\n")
    assert "'Score: N', where N is from 0 (useless) to 10 (perfect)" in asked


@pytest.mark.parametrize(
    ("text", "judged"),
    [
        ("Score: 7", 7),
        ("score = 2.5\nno: Score: 10", 10),
        ("**Score:** 4 of 10", 4),
        ("The score is good. SCORE: **0**", 0),
    ],
)
def test_the_last_score_of_a_verdict_counts(text: str, judged: float) -> None:
    assert score([SAY], ["3"], ["2"], [text]) == [{"score": judged / 10, "judged": judged}]


def test_scale_and_pattern_are_options() -> None:
    given = {"pattern": r"\[\[(\d)\]\]", "lowest": 1, "highest": 5}
    assert score([SAY], ["3"], ["2"], ["so [[4]]"], **given) == [{"score": 0.75, "judged": 4}]
    with pytest.raises(ValueError, match="lowest=2, highest=2: a scale goes from a lower to a higher number"):
        score([SAY], ["3"], ["2"], ["Score: 2"], lowest=2, highest=2)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("It is good.", "the verdict holds no score: 'It is good.'"),
        ("Scored 7", "the verdict holds no score: 'Scored 7'"),
        ("Score: 11", "the verdict's score 11 is not from 0 to 10: 'Score: 11'"),
        ("Score: -1", "the verdict's score -1 is not from 0 to 10: 'Score: -1'"),
    ],
)
def test_a_verdict_that_cannot_be_read_is_no_score_of_zero(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"^{reason}$"):
        score([SAY], ["3"], ["2"], [text])


def test_answers_without_a_readable_verdict_have_no_reward_and_say_why() -> None:
    scorer = Scorer(RewardConfig(function=JUDGED, max_failed=0.7, judge=JudgeConfig(path="judge")))
    found = scorer.score([SAY] * 3, ["2", "3", "4"], ["2"] * 3, {2: "too long"}, verdict=["Score: 9", "hm", ""])
    scorer.close()
    assert found.rewards[0] == 0.9 and str(found.rewards[1:]) == "[nan, nan]"
    assert found.solved == [False] * 3 and found.metrics["judged"] == 9
    first, second, third = found.errors
    assert (first, third) == (None, "too long")
    assert second is not None and second.startswith("ValueError: the verdict holds no score: 'hm' (judge.py, line ")


OWN = """
def own(prompts, responses, ground_truth, verdict):
    return [float(len(verdict[0]))]


def maybe(prompts, responses, ground_truth, verdict=None):
    return [0.0]
"""


def test_functions_and_judges_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    own, maybe, judge = f"{tmp_path / 'own.py'}:own", f"{tmp_path / 'own.py'}:maybe", JudgeConfig(path="judge")
    check_reward(RewardConfig(function=own, judge=judge))
    check_reward(RewardConfig(function=maybe))
    check_reward(RewardConfig(components={"said": RewardComponentConfig(own)}, judge=judge))
    with pytest.raises(ConfigError, match="reward.judge.path='judge', but no function of reward reads what the judge"):
        check_reward(RewardConfig(judge=judge))
    message = "cost.components.said.function='.*own.py:own' reads the column 'verdict', which a judge gives. Set "
    with pytest.raises(ConfigError, match=message + "cost.judge.path to the folder of a language model."):
        check_reward(RewardConfig(components={"said": RewardComponentConfig(own)}), "cost")


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        ("judge:score", {"pattern": "Score: ("}, r"pattern='Score: \(': missing \), unterminated"),
        ("judge:score", {"pattern": "Score: 7"}, r"pattern='Score: 7': has no group. Put the number in parentheses"),
        ("judge:score", {"lowest": 5, "highest": 5}, "lowest=5, highest=5: a scale goes from a lower"),
        ("judge:score", {"lowest": "a"}, "lowest='a' is no float"),
        ("judge:score", {"lowest": True}, "lowest=True is no float"),
        ("verifiers:exact_match", {"extract": ["number"]}, r"extract=\['number'\] is no str"),
        ("verifiers:exact_match", {"ignore_case": "maybe"}, "ignore_case='maybe' is no bool"),
        ("verifiers:math_verify", {"seconds": 0.5}, "seconds=0.5 is no int"),
        ("verifiers:math_verify", {"seconds": 0}, "seconds=0: has to be at least 1"),
        ("verifiers:format_match", {"pattern": 5}, "pattern=5 is no str"),
        ("verifiers:exact_match", {"extract": "boxd"}, "extract='boxd': choose one of all"),
        ("verifiers:math_verify", {"extract": "boxd"}, "extract='boxd': choose one of all"),
        ("verifiers:reasoning_gym", {"extract": "boxd"}, "extract='boxd': choose one of all"),
        ("verifiers:format_match", {"pattern": "("}, r"pattern='\(': missing \)"),
    ],
)
def test_options_of_the_built_in_functions_are_looked_at_before_a_run(
    function: str, options: dict[str, object], message: str
) -> None:
    judge = JudgeConfig(path="a/folder") if function.startswith("judge") else JudgeConfig()
    part = RewardComponentConfig(f"hybridflow.rewards.{function}", options=options)
    for where, config in (
        ("reward", RewardConfig(function=part.function, options=options, judge=judge)),
        ("reward.components.extra", RewardConfig(components={"extra": part}, judge=judge)),
    ):
        with pytest.raises(ConfigError, match=rf"{where}\.options: .*{message}"):
            check_reward(config)
