"""Rules about judges: where they stand, what they are asked, and what their model holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hybridflow.checks import Plan
from tests.assets import write_model

PLACED = ["pools.judge={devices: [1]}", "roles.reward.pool=judge"]
BESIDE = ["roles.reward.pool=train"]


@pytest.fixture(scope="module")
def judge(folder: Path) -> Path:
    return write_model(folder / "judge", max_position_embeddings=2048)


def test_a_judge_has_a_layout_of_its_own_or_the_rollouts(judge: Path, checked: Callable[..., Plan]) -> None:
    apart = checked(f"reward.judge.path={judge}", *PLACED)
    assert str(apart.layouts["reward"]) == "tp1 pp1 cp1 dp1"
    beside = checked(f"reward.judge.path={judge}", *BESIDE)
    assert str(beside.layouts["reward"]) == str(beside.layouts["rollout"]) == "tp1 pp1 cp1 dp2"
    [memory] = [device for device in apart.memory if device.pool == "judge"]
    parts = {part.name: part.update for part in memory.parts}
    # Two vocabularies (262 ids, padded to 320), two layers (attention 128 x 384, MLP 3 x 128 x 384, norms) and the
    # last norm.
    assert parts["reward.weights"] == 4 * (2 * 320 * 128 + 2 * (128 * 384 + 2 * 32 + 3 * 128 * 384 + 2 * 128) + 128)
    assert parts["reward.kv_cache"] == 2**29


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [*BESIDE, "roles.reward.layout.tp=2"],
            "roles.reward.layout: tp=2, ep=1 beside roles.rollout.layout with tp=1, ep=1 on pool 'train': vLLM keeps "
            "one set of groups in a process. Give both the same degrees, or reward a pool of its own: "
            "pools.reward.devices=[2] roles.reward.pool=reward.",
        ),
        ([], "roles.reward.pool='cpu' has kind 'cpu', whose processes have no device; reward computes with the model."),
        (
            [*PLACED, "reward.judge.question=good?"],
            "reward.judge.question has no {response}, so every answer would be judged alike.",
        ),
        (
            [*PLACED, "reward.judge.max_prompt_tokens=2000"],
            "reward.judge.max_prompt_tokens + reward.judge.max_tokens = 2000 + 128 = 2128 is more than the model's "
            "2048 positions. Lower one of them by 80.",
        ),
        (
            [*PLACED, "reward.judge.kv_cache_gb=1e-4"],
            "reward.judge.kv_cache_gb=0.0001 (107374 bytes) does not hold one sequence of 1152 tokens",
        ),
        ([*PLACED, "reward.judge.max_sequences=0"], "reward.judge.max_sequences=0: has to be at least 1."),
        ([*PLACED, "reward.judge.stop_token_ids=[-1]"], "reward.judge.stop_token_ids=[-1]: token ids have to be at"),
        ([*PLACED, "reward.judge.stop_token_ids=[400]"], "reward.judge.stop_token_ids=[400]: [400] are not below"),
        ([*PLACED, "roles.reward.layout.pp=2"], "roles.reward.layout"),
        ([*PLACED, "reward.judge.path=no/where"], "reward.judge.path='no/where': no such folder."),
        ([*PLACED, "reward.path=no/model"], "are two models for one role. Set one of them to ''."),
        ([*PLACED, "reward.components={judged: {function: 'a:b'}}"], "'judged' cannot be the name of a component"),
    ],
)
def test_wrong_settings_of_a_judge_are_refused(
    overrides: list[str], message: str, judge: Path, refused: Callable[..., str]
) -> None:
    assert message in refused(f"reward.judge.path={judge}", *overrides)


def test_a_classifier_is_no_judge_and_a_judge_no_classifier(folder: Path, refused: Callable[..., str]) -> None:
    labels = {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    path = write_model(folder / "label", **labels)
    assert refused(f"reward.judge.path={path}", *PLACED) == (
        f"reward.judge.path={str(path)!r} is a Qwen3ForSequenceClassification, which says nothing. Give a language "
        "model, or set it as reward.path."
    )
