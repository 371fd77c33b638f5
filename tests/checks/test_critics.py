"""Rules about critics, costs and reward models: where they stand, what they begin from, and what reads them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hybridflow.checks import Plan
from tests.assets import write_model


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("placement=colocate", "roles.critic is not placed. Give it as roles.critic={pool: NAME}. Pools: cpu, train."),
        ("critic.path=no/where", "critic.path='no/where': no such folder."),
        ("critic.optimizer.schedule=linaer", "critic.optimizer.schedule='linaer' is not known. Did you mean 'linear'?"),
        ("critic.optimizer.min_lr=1", "critic.optimizer.min_lr=1.0 is above critic.optimizer.lr=0.001. Lower it."),
        ("critic.clip=-0.1", "critic.clip=-0.1: has to be at least 0."),
        (
            "critic.warmup_steps=150",
            "critic.warmup_steps=150 is no less than steps=150: the actor would never be trained. Lower it to below "
            "150.",
        ),
        (
            "algorithm.estimator=grpo",
            "algorithm.estimator='grpo' does not read the critic's values. Set it to gae, or take another driver, such "
            "as examples/grpo.py.",
        ),
        ("roles.critic.layout.pp=4", "roles.critic.layout"),
        ("roles.critic.pool=cpu", "roles.critic.pool='cpu' has kind 'cpu', whose processes have no device"),
    ],
)
def test_wrong_settings_of_a_critic_are_refused(override: str, message: str, refused: Callable[..., str]) -> None:
    assert message in refused(override, name="ppo")


def test_a_role_that_a_driver_has_not_is_refused(refused: Callable[..., str]) -> None:
    message = "roles.critic is placed, but this driver has no critic. Set roles.critic=null."
    assert refused("roles.critic={pool: train}", name="grpo") == message
    assert "roles.cost is placed, but this driver has no cost." in refused("roles.cost={pool: cpu}", name="ppo")


def test_a_critic_may_begin_from_a_classifier_and_the_actor_may_not(
    folder: Path, checked: Callable[..., Plan], refused: Callable[..., str]
) -> None:
    labels = {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    path = write_model(folder / "classifier", **labels)
    assert checked(f"critic.path={path}", name="ppo").warnings == ()
    assert refused(f"model.path={path}", name="ppo") == (
        f"model.path={str(path)!r} is a Qwen3ForSequenceClassification, which scores texts. Give a language model."
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("roles.cost=null", "roles.cost is not placed. Give it as roles.cost={pool: NAME}. Pools: cpu, train."),
        ("roles.cost_critic=null", "roles.cost_critic is not placed. Give it as roles.cost_critic={pool: NAME}."),
        ("cost.function=harm", "cost.function='harm': write package.module:name or path/file.py:name."),
        ("cost.timeout=0", "cost.timeout=0.0: has to be above 0."),
        (
            "cost.components={kl: {function: 'a:b'}}",
            "cost.components: 'kl' cannot be the name of a component: it is logged as cost/<name>",
        ),
        (
            "safety.multiplier=6",
            "safety.multiplier=6 is above safety.max_multiplier=5. Lower it, or raise the bound.",
        ),
        ("roles.cost.layout.tp=2", "roles.cost.layout"),
    ],
)
def test_wrong_settings_of_costs_are_refused(override: str, message: str, refused: Callable[..., str]) -> None:
    assert message in refused(override, name="safe_rlhf")


def test_one_warm_up_counts_for_both_critics(checked: Callable[..., Plan]) -> None:
    assert checked("cost_critic.warmup_steps=3", name="safe_rlhf").warnings == (
        "cost_critic.warmup_steps=3 is ignored: critic.warmup_steps counts for both.",
    )


def test_a_reward_model_is_a_classifier_on_devices(
    folder: Path, checked: Callable[..., Plan], refused: Callable[..., str]
) -> None:
    labels = {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    path, policy = write_model(folder / "scores", **labels), write_model(folder / "policy")
    placed = ["roles.reward={pool: train, layout: {tp: 2}}"]
    plan = checked(f"reward.path={path}", *placed)
    assert str(plan.layouts["reward"]) == "tp2 pp1 cp1 dp1"
    for given, message in {
        "reward.path=no/where": "reward.path='no/where': no such folder.",
        f"reward.path={policy}": f"reward.path='{policy}' is a language model: its scores would mean nothing. Give a "
        "classifier with one label, such as examples/reward_model.py trains, or set it as reward.judge.path.",
    }.items():
        assert message in refused(given, *placed)
    assert "roles.reward.pool='cpu' has kind 'cpu', whose processes have no device" in refused(f"reward.path={path}")
    both = refused(f"reward.path={path}", *placed, "reward.components={a: {function: 'b:c'}}")
    assert both.startswith("reward.components are functions, and reward.path=")


def test_the_training_of_a_reward_model_needs_one_role_and_one_update(
    checked: Callable[..., Plan], refused: Callable[..., str], folder: Path
) -> None:
    [warning] = checked("roles.reward={pool: train}", name="reward_model").warnings
    assert warning.startswith("roles.reward is placed, but a reward model's training never calls it.")
    assert "answers are weighed by the weights before the step" in refused("actor.epochs=2", name="reward_model")
    assert "rollout.n=4: a pair has two answers" in refused("rollout.n=4", name="reward_model")
    labels = {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    again = write_model(folder / "again", **labels)
    assert checked(f"model.path={again}", name="reward_model").warnings == ()
