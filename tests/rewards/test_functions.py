"""A reward function that cannot be used is refused before the run, with the path and what is there."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybridflow.errors import RewardError
from hybridflow.rewards.functions import Call, Component, Outcome, outcome_of, score_row

HOSTILE = "tests.rewards.hostile"
FILE = Path(__file__).with_name("hostile.py")


def call(path: str, setting: str = "reward", **options: Any) -> Call:
    return Call(Component(setting, path, options))


def score(call: Call, row: dict[str, Any]) -> Outcome:
    """The outcome of a plain function, which never suspends."""
    with pytest.raises(StopIteration) as done:
        score_row([call], pickle.dumps(row)).send(None)
    (outcome,) = done.value.value
    return outcome


def refusal(path: str, **options: Any) -> str:
    with pytest.raises(RewardError) as caught:
        call(path, **options)
    return str(caught.value)


def test_a_function_is_found_by_module_or_file():
    row = {"prompts": "p", "responses": "5", "ground_truth": "5"}
    for path in (f"{HOSTILE}:obey", f"{FILE}:obey", "hybridflow.rewards.verifiers:exact_match"):
        assert score(call(path), row).reward == 1.0


def test_a_missing_function_names_what_is_there():
    message = refusal(f"{HOSTILE}:obay")
    assert f"{HOSTILE} has no 'obay'. Did you mean 'obey'?" in message and "with_extra" in message
    assert "is a int, not a function" in refusal(f"{HOSTILE}:NOT_A_FUNCTION")


def test_a_missing_module_or_file_is_named(tmp_path: Path):
    assert "there is no module 'no_such_package'" in refusal("no_such_package.rewards:f")
    assert "there is no module 'hybridflow.rewards.verifier'" in refusal("hybridflow.rewards.verifier:f")
    assert "Did you mean 'hostile.py'?" in refusal(f"{FILE.with_name('hostil.py')}:obey")
    assert "write package.module:name" in refusal("exact_match")
    assert "write package.module:name" in refusal("module:")


def test_an_import_that_fails_says_why(tmp_path: Path):
    (tmp_path / "broken.py").write_text("import math\nx = math.nothing\n")
    (tmp_path / "needs.py").write_text("import no_such_package\n")
    assert "has no attribute 'nothing' (broken.py, line 2)" in refusal(f"{tmp_path}/broken.py:f")
    assert "No module named 'no_such_package'" in refusal(f"{tmp_path}/needs.py:f")


def test_a_wrong_signature_or_option_is_refused():
    assert "it has no argument 'prompts'" in refusal(f"{HOSTILE}:too_few")
    assert "Did you mean 'factor'?" in refusal(f"{HOSTILE}:with_extra", facter=2)
    assert "reward.options.responses is an argument" in refusal(f"{HOSTILE}:with_extra", responses=2)


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_function_that_yields_is_refused(kind: str, tmp_path: Path):
    path = tmp_path / f"yields_{kind[:3]}.py"
    path.write_text(f"{kind} each(prompts, responses, ground_truth):\n    yield 1.0\n")
    assert "py:each' yields its values; return a list of them." in refusal(f"{path}:each")


def test_an_error_names_the_component():
    with pytest.raises(RewardError, match=r"reward\.components\.length\.function='tests.*: tests.* has no 'lenght'"):
        call(f"{HOSTILE}:lenght", "reward.components.length")
    with pytest.raises(RewardError, match=r"reward\.components\.length\.options\.scala: .* Did you mean 'scale'"):
        call(f"{HOSTILE}:length", "reward.components.length", scala=1.0)


def test_async_functions_and_objects_are_known_as_such():
    assert call(f"{HOSTILE}:obey_later").is_async and call(f"{HOSTILE}:judge").is_async
    assert not call(f"{HOSTILE}:obey").is_async and not call(f"{HOSTILE}:returns_an_awaitable").is_async


def test_a_function_gets_the_columns_it_names_and_its_options():
    row = {"prompts": "p", "responses": "r", "ground_truth": "g", "extra_info": {"weight": 2.0}, "data_source": "d"}
    assert score(call(f"{HOSTILE}:with_extra", factor=3.0), row).reward == 6.0
    assert score(call(f"{HOSTILE}:any_columns", more=1), row).extras == {"columns": 3.0}


@pytest.mark.parametrize("value", [1, 1.0, True, np.float32(1), np.int64(1), np.array(1.0), torch.tensor(1.0)])
def test_numbers_of_every_kind_are_rewards(value: object):
    assert outcome_of([value]).reward == 1.0


@pytest.mark.parametrize("values", [[0.5], (0.5,), np.array([0.5]), torch.tensor([0.5])])
def test_lists_of_every_kind_are_read(values: object):
    assert outcome_of(values).reward == 0.5


def test_numpy_says_solved_too():
    assert outcome_of([{"score": 0.2, "solved": np.bool_(True)}]).solved is True


def test_a_file_that_leaves_the_process_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "leaves.py"
    path.write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(RewardError, match=r"leaves\.py failed"):
        call(f"{path}:f")


def test_a_function_may_say_what_answer_it_has_read():
    assert outcome_of([{"score": 1, "answer": "5"}]).answer == "5"
    assert outcome_of([{"score": 1, "answer": 5}]).answer == "5"
    assert outcome_of([{"score": 1, "answer": None}]).answer is None
    assert outcome_of([{"score": 1, "answer": "5"}]).extras == {}
    assert outcome_of([{"score": 1, "answer": ["5"]}]).error == "returned list for 'answer'; a text is wanted"
