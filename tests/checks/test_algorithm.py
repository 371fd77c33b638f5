"""Rules about the algorithm, and that the tables they read say what estimators and losses do."""

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hybridflow.algorithms.advantages import ESTIMATORS
from hybridflow.algorithms.losses import LOSSES
from hybridflow.algorithms.step import COLUMNS, SETTINGS
from hybridflow.checks import Plan
from hybridflow.checks.values import ESTIMATOR_SETTINGS, GROUPED, LOSS_SETTINGS, OTHER_COLUMNS
from hybridflow.config import LossConfig
from tests.assets import write_model


def test_estimators_read_the_settings_and_columns_of_the_tables() -> None:
    for name, function in ESTIMATORS.items():
        arguments = list(inspect.signature(function).parameters)
        assert tuple(a for a in arguments if a in SETTINGS) == ESTIMATOR_SETTINGS[name]
        columns = [COLUMNS.get(a, a) for a in arguments if a not in (*SETTINGS, "mask", "scores", "rewards", "groups")]
        assert (OTHER_COLUMNS.get(name) in columns) == bool(set(columns) - {"log_probs"})
        assert (name in GROUPED) == ("scores" in arguments)


def test_losses_read_the_settings_of_the_table() -> None:
    selection = {"clip_cov": {"cov_share", "cov_low", "cov_high"}, "kl_cov": {"cov_share"}}
    x, mask = torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)
    for name, loss in LOSSES.items():
        seen = selection.get(name, set()) | ({"old_log_probs"} if "old_log_probs" in loss.reads else set())

        class Recorder:
            def __getattr__(self, setting: str, seen: set[str] = seen) -> object:
                seen.add(setting)
                return getattr(LossConfig(), setting)

        extra = {column: mask for column in loss.reads if column == "high_covariance"}
        loss.function(x, x, x, mask, Recorder(), **extra)
        # A loss that clips checks all bounds; gmpo, cispo, dppo and kl_cov have no dual clip.
        assert seen - {"dual_clip"} == set(LOSS_SETTINGS[name]) - {"dual_clip"}, name


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["algorithm.estimator=gae"],
            "algorithm.estimator='gae' reads the column 'values', which this driver does not make. Choose one of grpo,",
        ),
        (["algorithm.estimator=rlo"], "algorithm.estimator='rlo' is not known. Did you mean 'rloo'?"),
        (["algorithm.single=one"], "algorithm.single='one' is not known."),
        (["algorithm.correction.level=tok"], "algorithm.correction.level='tok' is not known. Did you mean 'token'?"),
        (["algorithm.gamma=1.1"], "algorithm.gamma=1.1: has to be at least 0 and at most 1."),
        (["actor.loss.clip_low=-0.1"], "actor.loss.clip_low=-0.1: has to be at least 0 and at most 1."),
        (
            ["algorithm=pass_at_k", "algorithm.k=9"],
            "algorithm.k=9 answers cannot be drawn from rollout.n=8. Lower it to at most 8.",
        ),
        (
            ["actor.loss.aggregation=seq-mean-token-sum-norm"],
            "actor.loss.scale=0: actor.loss.aggregation='seq-mean-token-sum-norm' divides each sequence's sum by it. "
            "Set it above 0, such as to ${rollout.max_tokens}.",
        ),
        (
            ["algorithm.overlong_buffer=9"],
            "algorithm.overlong_buffer=9 is more than rollout.max_tokens=8. Lower it.",
        ),
        (
            ["algorithm.correction={level: token, low: 3}"],
            "algorithm.correction.low=3.0 has to be below algorithm.correction.high=2.0",
        ),
        (
            ["algorithm.correction.level=token", "actor.loss.old_log_probs=rollout_log_probs"],
            "samples would be corrected twice. Set algorithm.correction.level=none",
        ),
        (
            ["algorithm=clip_cov", "actor.loss.cov_low=5"],
            "actor.loss.cov_low=5.0 has to be below actor.loss.cov_high=5.0: tokens are drawn from those in between.",
        ),
        (
            ["actor.loss.old_log_probs=own", "actor.epochs=2"],
            "actor.loss.old_log_probs='own' takes every ratio to be 1, which holds for one update a step; here are 2 = "
            "actor.epochs * rows / actor.mini_batch_size = 2 * ",
        ),
        (
            ["actor.loss.old_log_probs=own", "algorithm.correction.reject=token"],
            "algorithm.correction.reject='token' reads the column log_probs, which actor.loss.old_log_probs='own' does "
            "not make. Set actor.loss.old_log_probs=log_probs.",
        ),
        (
            ["algorithm.kl_coef=0.1"],
            "algorithm.kl_coef=0.1 measures a KL to the reference, but roles.reference is not placed.",
        ),
        (["algorithm.estimator=no/where.py:f"], "algorithm.estimator='no/where.py:f': there is no file no/where.py."),
        (["actor.loss.name='mine:'"], "actor.loss.name='mine:': write package.module:name or path/file.py:name."),
    ],
)
def test_wrong_choices_are_refused(overrides: list[str], message: str, refused: Callable[..., str]) -> None:
    assert message in refused(*overrides)


def test_a_group_of_one_is_fine_where_it_has_an_advantage(checked: Callable[..., Plan]) -> None:
    checked("rollout.n=1", "algorithm.single=raw")
    checked("rollout.n=1", "algorithm=reinforce_plus_plus")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.gamma=0.9"], "algorithm.gamma=0.9 is ignored by algorithm.estimator='grpo'."),
        (["algorithm=rloo", "algorithm.eps=1e-3"], "algorithm.eps=0.001 is ignored by algorithm.estimator='rloo'."),
        (["algorithm.options={a: 1}"], "algorithm.options={'a': 1} is ignored by algorithm.estimator='grpo'."),
        (["actor.loss.tau_positive=2"], "actor.loss.tau_positive=2.0 is ignored by actor.loss.name='ppo'."),
        (
            ["algorithm=rloo", "actor.loss.clip_low=0.1"],
            "actor.loss.clip_low=0.1 is ignored by actor.loss.name='reinforce'.",
        ),
        (["actor.loss.kl_kind=k2"], "actor.loss.kl_kind='k2' is ignored: actor.loss.kl_coef=0."),
        (["algorithm.kl_kind=k3"], "algorithm.kl_kind='k3' is ignored: algorithm.kl_coef=0."),
        (["algorithm.kl_horizon=5000"], "algorithm.kl_horizon=5000.0 is ignored: algorithm.kl_target=0."),
        (["algorithm.overlong_penalty=2"], "algorithm.overlong_penalty=2.0 is ignored: algorithm.overlong_buffer=0."),
        (
            ["algorithm.correction.bound=clip"],
            "algorithm.correction.bound='clip' is ignored: algorithm.correction.level='none'.",
        ),
        (
            ["algorithm.correction={level: token, bound: truncate, low: 0.5}"],
            "algorithm.correction.low=0.5 is ignored: algorithm.correction.bound='truncate'.",
        ),
        (
            ["algorithm.correction.reject_high=3"],
            "algorithm.correction.reject_high=3.0 is ignored: algorithm.correction.reject='none'.",
        ),
        (["reward.judge.max_tokens=5"], "reward.judge.max_tokens=5 is ignored: reward.judge.path=''."),
        (["actor.loss.scale=8"], "actor.loss.scale=8 is ignored by actor.loss.aggregation='token-mean'."),
        (
            ["placement=colocate_reference", "actor.loss={kl_coef: 0.1, kl_kind: k1}"],
            "actor.loss.kl_kind='k1' has a gradient of 0 in expectation",
        ),
    ],
)
def test_what_is_ignored_is_warned_of(overrides: list[str], message: str, checked: Callable[..., Plan]) -> None:
    warnings = checked(*overrides).warnings
    assert len(warnings) == 1
    assert message in warnings[0]


def test_the_updates_own_log_probs_save_a_pass_with_every_loss(checked: Callable[..., Plan]) -> None:
    assert checked("algorithm=rloo", "actor.loss.old_log_probs=own").warnings == ()


def test_a_function_of_the_users_own_may_read_anything(checked: Callable[..., Plan], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("")
    own = f"{tmp_path}/mine.py"
    plan = checked(f"algorithm.estimator={own}:f", "algorithm.gamma=0.9", "algorithm.options={a: 1}")
    assert plan.warnings == ()
    kl = ["placement=colocate_reference", "actor.loss.kl_coef=0.1", f"actor.loss.kl_kind={own}:g"]
    plan = checked(f"actor.loss.name={own}:f", "actor.loss.tau_positive=2", *kl)
    assert plan.warnings == ()


def test_kl_in_the_reward_takes_the_reference(checked: Callable[..., Plan]) -> None:
    assert checked("placement=colocate_reference", "algorithm.kl_coef=0.1").warnings == ()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.n=1", "rollout.n=1: a pair has two answers, the chosen and the rejected. Set it to 2."),
        ("actor.loss.name=ppo", "actor.loss.name='ppo': DPO's gradient is that of 'reinforce' with a weight for each"),
        ("actor.loss.aggregation=token-mean", "actor.loss.aggregation='token-mean': DPO's gradient is that of 'seq-"),
        (
            "actor.mini_batch_size=64",
            "2 updates a step = actor.epochs * rows / actor.mini_batch_size = 1 * 128 / 64: answers are weighed by the "
            "weights before the step, which holds for one update. Set actor.epochs=1 and actor.mini_batch_size=0;",
        ),
        ("roles.reference=null", "roles.reference is not placed. Give it as roles.reference={pool: NAME}."),
        ("preference.beta=0", "preference.beta=0.0: has to be above 0."),
        ("preference.label_smoothing=0.5", "preference.label_smoothing=0.5: has to be at least 0 and below 0.5."),
    ],
)
def test_dpo_is_one_update_on_pairs(override: str, message: str, refused: Callable[..., str]) -> None:
    assert message in refused(override, name="dpo")


def test_training_on_given_answers_needs_neither_rollout_nor_reward(checked: Callable[..., Plan]) -> None:
    alone = ["roles.rollout=null", "roles.reward=null", "~pools.cpu"]
    assert set(checked(*alone, name="sft").layouts) == {"actor"}
    assert set(checked(*alone, name="dpo").layouts) == {"actor", "reference"}


def test_a_teacher_scores_the_students_token_ids(
    refused: Callable[..., str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)  # where no quickstart has run
    assert "teacher.path='no/where': no such folder." in refused("teacher.path=no/where", name="distill")
    assert refused("teacher.path=", name="distill") == "teacher.path='': no such folder."
    made = refused("teacher.path=runs/demo/grpo-tiny/other", name="distill")
    assert "no such folder. Make it with: make quickstart" in made
    made = refused("model.path=runs/demo/sft-tiny/model", "teacher.path=runs/demo/assets/model", name="distill")
    assert "model.path='runs/demo/sft-tiny/model': no such folder. Make it with: make quickstart" in made
    other = write_model(folder / "other")
    (other / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    assert (
        "its tokenizer is not the one of model.path (1 tokens and 0; 1 differ, such as 'a'): a teacher scores the "
        "student's token ids. Choose a teacher of the same family."
    ) in refused(f"teacher.path={other}", name="distill")
    for broken, reason in (("{", "cannot be read as JSON"), ("[]", "holds a list, not a JSON object")):
        (other / "tokenizer.json").write_text(broken)
        assert f"{other}/tokenizer.json: {reason}" in refused(f"teacher.path={other}", name="distill")
    (other / "tokenizer.json").write_text("{}")
    (other / "config.json").write_text('{"model_type": "mamba"}')
    assert f"teacher.path={str(other)!r}: " in refused(f"teacher.path={other}", name="distill")


def test_a_teacher_is_placed_and_its_heads_split(refused: Callable[..., str]) -> None:
    assert "roles.teacher is not placed." in refused("roles.teacher=null", name="distill")
    assert "roles.teacher is placed, but this driver has no teacher." in refused("roles.teacher={pool: train}")
    split = refused("roles.teacher.layout.tp=3", "pools.teacher.devices=[3]", name="distill")
    assert "roles.teacher.layout" in split


def test_a_driver_offers_the_estimators_whose_columns_it_makes(refused: Callable[..., str]) -> None:
    message = refused("algorithm.estimator=distill", name="remax")
    assert "reads the column 'teacher_log_probs', which this driver does not make. Choose one of grpo," in message
    assert "remax" in message.split("Choose one of")[1]


@pytest.mark.parametrize("estimator", ["distill", "distill_hybrid"])
def test_distillation_needs_the_students_own_log_probs(estimator: str, refused: Callable[..., str]) -> None:
    message = refused(f"algorithm.estimator={estimator}", "actor.loss.old_log_probs=own", name="distill")
    assert f"algorithm.estimator={estimator!r} reads the column log_probs, which" in message


def test_an_adapted_kl_has_to_begin_somewhere(refused: Callable[..., str]) -> None:
    assert "algorithm.kl_coef=0: algorithm.kl_target=0.1 multiplies it step by step, so it would stay 0." in refused(
        "algorithm.kl_target=0.1"
    )


def test_an_adapted_kl_stays_above_zero(checked: Callable[..., Plan], refused: Callable[..., str]) -> None:
    given = ["placement=colocate_reference", "algorithm.kl_coef=0.1", "algorithm.kl_target=0.1"]
    shape = ["data.prompts_per_step=16", "rollout.n=8"]
    assert refused(*given, *shape, "algorithm.kl_horizon=25.6") == (
        "algorithm.kl_horizon=25.6: has to be above 0.2 * data.prompts_per_step * rollout.n = 0.2 * 16 * 8 = 25.6, "
        "else one step could bring the weight of the KL to 0 or below. Raise it, such as to 1280."
    )
    assert checked(*given, *shape, "algorithm.kl_horizon=26").warnings == ()


@pytest.mark.parametrize(
    ("overrides", "name", "warning"),
    [
        (
            ["actor.loss.kl_coef=0.1", "reference.update_every=9", "steps=9"],
            "grpo",
            "=9 is no less than steps=9: the re",
        ),
        (
            ["actor.loss.kl_coef=0.1", "reference.update_every=1"],
            "grpo",
            "=1 makes the log-ratio that actor.loss.kl_coef",
        ),
        (
            ["algorithm.kl_coef=0.1", "reference.update_every=1"],
            "grpo",
            "=1 makes the log-ratio that algorithm.kl_coef",
        ),
        (["reference.update_every=1"], "dpo", "=1 makes the log-ratio that preference.beta weighs 0 in every step."),
        (["actor.loss.kl_coef=0.1", "actor.epochs=2", "reference.update_every=1"], "grpo", ""),
    ],
)
def test_a_reference_that_is_never_or_always_renewed_is_warned_of(
    overrides: list[str], name: str, warning: str, checked: Callable[..., Plan]
) -> None:
    placed = ["placement=colocate_reference"] if name == "grpo" else []
    warnings = checked(*placed, *overrides, name=name).warnings
    assert len(warnings) == bool(warning) and warning in "".join(warnings)


def test_a_column_that_costs_and_is_not_read_is_warned_of(checked: Callable[..., Plan]) -> None:
    assert checked("algorithm.estimator=rloo", "rollout.n=4", name="remax").warnings == (
        "algorithm.estimator='rloo' does not read the column 'baseline_rewards', which this driver pays for. Set it to "
        "remax, or take another driver, such as examples/grpo.py.",
    )
    assert checked("algorithm=distill_hybrid", "rollout.n=4", name="distill").warnings == ()


def test_rewards_of_steps_need_their_end(checked: Callable[..., Plan], refused: Callable[..., str]) -> None:
    message = refused("algorithm.estimator=grpo_stepwise")
    assert message.endswith("pass_at_k. For rewards of single steps set reward.step_end.")
    checked("algorithm.estimator=grpo_stepwise", "reward.step_end='. '")


def test_a_reference_that_follows_has_to_be_placed(checked: Callable[..., Plan], refused: Callable[..., str]) -> None:
    assert refused("reference.update_every=5") == (
        "reference.update_every=5: roles.reference is not placed. Use placement=colocate_reference, or set it to 0."
    )
    placed = ["placement=colocate_reference", "actor.loss.kl_coef=0.1"]
    assert checked("reference.update_every=5", *placed).warnings == ()
    assert "reference.update_every=-1: has to be at least 0." in refused("reference.update_every=-1", *placed)
