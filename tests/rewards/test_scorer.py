"""Whatever a reward function does with one answer, the other answers are scored."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybridflow.config import RewardComponentConfig, RewardConfig
from hybridflow.errors import RewardError
from hybridflow.rewards.components import combine
from hybridflow.rewards.functions import Outcome
from hybridflow.rewards.scorer import Scorer

OBEY, OBEY_LATER = "tests.rewards.hostile:obey", "tests.rewards.hostile:obey_later"
LENGTH = "tests.rewards.hostile:length"

# What an answer makes the function do, and the reason that is recorded.
FAILING = {
    "sleep": "timeout after 1 s",
    "regex": "timeout after 1 s",
    "crash": "the scoring process died (exit code 3)",
    "segfault": "the scoring process died (killed by SIGSEGV)",
    "exit": "SystemExit: bye (hostile.py, line",
    "raise": "ValueError: no such answer (hostile.py, line",
    "nan": "returned nan",
    "inf": "returned inf",
    "none": "returned None",
    "text": "returned str '1', not a number",
    "two": "returned 2 values for 1 answer",
    "empty": "returned 0 values for 1 answer",
    "scalar": "returned float 1.0; a list with one value is wanted",
    "array": "returned ndarray; a list with one value is wanted",
    "huge": "returned int 1000000",
    "nothing": "returned NoneType; a list with one value is wanted",
    "no score": "returned a dict without 'score' (it has reward)",
    "bad extra": "returned str 'good', not a number for 'why'",
    "bad solved": "returned str 'yes' for 'solved'",
    "nan score": "returned nan for 'score'",
    "alarm": "TimeoutError: the alarm (hostile.py, line",
}

# What goes wrong only where an async function has many answers in flight.
FAILING_LATER = {
    "wait": "timeout after 1 s",
    "stubborn": "timeout after 1 s",
    "cancel": "CancelledError",
    "task sleep": "timeout after 1 s",
    "task exit": "RuntimeError: SystemExit: bye (hostile.py, line",
    "thread": "timeout after 1 s",
}


def scorer(function: str = OBEY, **settings) -> Scorer:
    return Scorer(RewardConfig(function=function, **{"timeout": 1.0, "max_failed": 1.0, **settings}))


def score(scorer: Scorer, responses: list[str], truth: str = "right", **columns):
    return scorer.score(["p"] * len(responses), responses, [truth] * len(responses), **columns)


def values(scores) -> list[float | None]:
    return [None if math.isnan(reward) else reward for reward in scores.rewards]


def test_a_failing_answer_has_no_reward_and_a_reason_and_the_others_are_scored():
    responses = [word for failing in FAILING for word in (failing, "right")]
    with_two = scorer(processes=2)
    scores = score(with_two, responses)
    with_two.close()
    assert scores.rewards[1::2] == [1.0] * len(FAILING) and all(scores.solved[1::2])
    assert not any(scores.errors[1::2])
    assert all(math.isnan(reward) for reward in scores.rewards[::2]) and not any(scores.solved[::2])
    for reason, wanted in zip(scores.errors[::2], FAILING.values(), strict=True):
        assert reason and reason.startswith(wanted)


def test_answers_handed_over_together_fail_alone_and_keep_their_order():
    alone = scorer(processes=1)
    # Quick answers make the lane hand over many at once.
    assert score(alone, ["right"] * 200).rewards == [1.0] * 200
    responses = ["right", "wrong"] * 20 + ["crash", "right", "sleep", "wrong", "segfault"] + ["right", "wrong"] * 20
    scores = score(alone, responses)
    alone.close()
    assert values(scores) == [1.0, 0.0] * 20 + [None, 1.0, None, 0.0, None] + [1.0, 0.0] * 20
    reasons = [error for error in scores.errors if error]
    assert reasons == [FAILING["crash"], FAILING["sleep"], FAILING["segfault"]]


@pytest.mark.parametrize("function", [OBEY, OBEY_LATER])
def test_a_child_that_a_function_forks_and_lets_return_does_not_reply(function: str):
    one = scorer(function)
    for _ in range(2):
        assert score(one, ["right", "fork", "right", "fork and exit", "right"]).rewards == [1.0, 0.0, 1.0, 0.0, 1.0]
    one.close()


def test_a_reply_that_nobody_has_asked_for_costs_the_answer_that_sent_it_alone():
    one = scorer()
    scores = score(one, ["right", "reply", "right"])
    one.close()
    assert values(scores) == [1.0, None, 1.0]
    assert str(scores.errors[1]).startswith("the scoring process sent what is no reply (KeyError: 1000000000")


def test_an_alarm_that_is_left_behind_does_not_go_off_in_the_next_answer():
    one = scorer()
    scores = score(one, ["late alarm", "slow", "late alarm"], truth="slow")
    one.close()
    assert values(scores) == [0.0, 1.0, 0.0]


def test_async_answers_are_in_flight_together_and_keep_their_order():
    one = scorer(OBEY_LATER, processes=1, in_flight=16, timeout=10.0)
    responses = ["a", "b"] * 20 + ["most"]
    start = time.monotonic()
    scores = one.score(["p"] * 41, responses, ["a", *range(1, 41)])
    seconds = time.monotonic() - start
    one.close()
    # Each waits 0.05 s: 41 in turn would take 2 s, 16 at once three rounds.
    assert seconds < 1.0
    assert scores.rewards == [1.0] + [0.0] * 39 + [16.0]


def test_async_answers_fail_alone():
    """Every way to fail, the plain ones among them, with a good answer before and behind each."""
    failing = {**FAILING, **FAILING_LATER}
    one = scorer(OBEY_LATER, processes=1)
    responses = [word for bad in failing for word in (bad, "right")]
    scores = score(one, ["right", *responses])
    one.close()
    assert scores.rewards[::2] == [1.0] * (len(failing) + 1)
    for reason, wanted in zip(scores.errors[1::2], failing.values(), strict=True):
        assert reason and reason.startswith(wanted)


@pytest.mark.parametrize(
    ("answer", "reason"), [("thread regex", "timeout after 1 s"), ("thread crash", "the scoring process died (exit")]
)
def test_an_async_answer_that_takes_its_process_along_unseen_is_found(answer: str, reason: str):
    """A thread did it, so nobody knows whose: all that were in flight are asked again, each alone."""
    one = scorer(OBEY_LATER, processes=1)
    scores = score(one, ["right", answer, "right", "wrong", answer])
    one.close()
    assert values(scores) == [1.0, None, 1.0, 0.0, None]
    assert all(error.startswith(reason) for error in scores.errors if error)


def test_an_async_answer_has_its_own_clock():
    """Three that compute for 0.5 s each hold the loop for 1.5 s; that is on nobody else's clock."""
    one = scorer(OBEY_LATER, processes=1, timeout=1.0)
    scores = score(one, ["slow", "slow", "slow", "right", "wait"])
    one.close()
    assert values(scores) == [0.0, 0.0, 0.0, 1.0, None]


def test_a_process_that_may_still_run_what_was_given_up_is_replaced():
    one = scorer(OBEY_LATER)
    before, _, _ = score(one, ["pid", "stubborn", "thread"]).rewards
    after = score(one, ["pid"]).rewards[0]
    one.close()
    assert before != after


def test_an_awaitable_from_a_plain_function_is_a_failure_that_says_so():
    one = scorer("tests.rewards.hostile:returns_an_awaitable")
    assert score(one, ["a"]).errors == ["returned an awaitable, not a list; declare the function with async def"]
    one.close()


def test_components_are_added_with_their_weights_and_logged_one_by_one():
    parts = {
        "size": RewardComponentConfig(LENGTH, options={"scale": 2.0}, weight=-0.1),
        "judge": RewardComponentConfig("tests.rewards.hostile:judge"),
        "off": None,
    }
    one = scorer(components=parts, solved_at=0.5)
    scores = score(one, ["right", "wrongly", "dict", "no length", "raise"])
    one.close()
    # score - 0.1 * 2 * characters + 0.5
    assert [round(x, 6) if x is not None else x for x in values(scores)] == [0.5, -0.9, 0.2, None, None]
    assert scores.solved == [True, False, True, False, False]
    assert scores.errors[3] == "size: returned None" and str(scores.errors[4]).startswith("ValueError: no such answer")
    assert scores.components[:3] == [
        {"score": 1.0, "size": 10.0, "judge": 0.5},
        {"score": 0.0, "size": 14.0, "judge": 0.5},
        {"score": 0.5, "size": 8.0, "judge": 0.5},
    ]
    assert scores.components[3:] == [None, None]
    means = {name: value for name, value in scores.metrics.items() if name != "seconds"}
    assert means == {"score": 0.5, "size": 32 / 3, "size/characters": 16 / 3, "judge": 0.5, "length": 3.0}


@pytest.mark.parametrize("name", ["mean", "kl", "seconds", "groups_all_solved"])
def test_a_reported_number_with_the_name_of_a_metric_of_the_run_is_a_failure(name: str):
    found = combine([Outcome(1.0, extras={name: 2.0})], {}, solved_at=1.0)
    assert found.error == f"returned {name!r}, which the run logs itself, as something else; rename it"


def test_a_reported_number_with_the_name_of_a_component_is_a_failure():
    one = scorer(LENGTH, components={"characters": RewardComponentConfig(LENGTH)})
    assert score(one, ["a"]).errors == ["returned 'characters', which is also the name of a component; rename one"]
    one.close()


def test_too_many_failures_are_an_error_with_counts_and_the_first_reason():
    half = scorer(max_failed=0.5)
    assert score(half, ["raise", "right"]).rewards[1] == 1.0
    with pytest.raises(RewardError) as caught:
        score(half, ["none", "raise", "raise", "right"])
    half.close()
    message = str(caught.value)
    assert "3 of 4 answers could not be scored" in message and "max_failed=0.5 accepts 2" in message
    assert "First reason: returned None." in message and "2 x ValueError" in message


def test_a_process_that_is_not_to_blame_is_kept_and_one_that_hung_is_replaced():
    one = scorer()
    before, _, after_error, _, after_hang = score(one, ["pid", "raise", "pid", "sleep", "pid"]).rewards
    again = score(one, ["pid"]).rewards[0]
    one.close()
    assert before == after_error != after_hang == again
    for pid in (before, again):
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_children_of_a_hung_function_end_with_it():
    one = scorer()
    score(one, ["child"], truth="54321")
    one.close()
    deadline = time.monotonic() + 10
    while (found := subprocess.run(["pgrep", "-f", "^sleep 54321$"], check=False).returncode) == 0:
        assert time.monotonic() < deadline, "the child goes on"
        time.sleep(0.05)
    assert found == 1  # none


def test_scoring_processes_end_with_a_killed_parent_even_inside_a_function(tmp_path: Path):
    program = (
        "import sys; from hybridflow.config import RewardConfig; from hybridflow.rewards.scorer import Scorer\n"
        f"scorer = Scorer(RewardConfig(function={OBEY!r}, timeout=600))\n"
        "print(int(scorer.score(['p'], ['pid'], ['']).rewards[0]), flush=True)\n"
        "scorer.score(['p'], ['regex'], [''])\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    time.sleep(0.5)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()


def test_a_dict_reports_score_solved_and_further_numbers():
    one = scorer()
    scores = score(one, ["dict", "true", "single", "raise"])
    one.close()
    assert scores.rewards[:3] == [0.5, 1.0, 1.0] and scores.solved == [True, True, True, False]
    assert scores.metrics["length"] == 3.0 and set(scores.metrics) == {"length", "seconds"}


def test_solved_is_a_threshold_where_the_function_does_not_say():
    one = scorer("tests.rewards.hostile:with_extra", solved_at=0.7, options={"factor": 2.0})
    scores = score(one, ["a", "b"], extra_info=[{"weight": 0.3}, {"weight": 0.4}])
    one.close()
    assert scores.rewards == [0.6, 0.8] and scores.solved == [False, True]


def test_what_cannot_be_sent_fails_its_answer_alone():
    one = scorer("tests.rewards.hostile:any_columns")
    scores = score(one, ["a", "b"], extra_info=[lambda: 1, {}])
    one.close()
    assert scores.rewards[1] == 1.0
    assert scores.errors[0] and scores.errors[0].startswith("the answer's columns cannot be sent")


def test_a_function_that_cannot_be_used_is_refused_when_the_scorer_is_built(tmp_path: Path):
    with pytest.raises(RewardError, match="has no 'obay'"):
        scorer("tests.rewards.hostile:obay", processes=2)
    (tmp_path / "dies.py").write_text("import os\nos._exit(7)\n")
    with pytest.raises(RewardError, match=r"died while importing it \(exit code 7\)"):
        scorer(f"{tmp_path}/dies.py:f")
    with pytest.raises(RewardError, match=r"reward\.processes=0"):
        scorer(processes=0)
    with pytest.raises(RewardError, match=r"reward\.components\.x\.function=.*has no 'lenght'"):
        scorer(components={"x": RewardComponentConfig("tests.rewards.hostile:lenght")})
    with pytest.raises(RewardError, match=r"reward\.max_failed=2"):
        scorer(max_failed=2.0)


def test_columns_of_different_lengths_are_an_error():
    one = scorer()
    with pytest.raises(ValueError, match="zip"):
        one.score(["p"], ["a", "b"], ["x"])
    assert score(one, []).rewards == []
    one.close()
