"""Every rule: the message for a setting that breaks it, and every shipped config passing all of them."""

import dataclasses
import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridflow import compose
from hybridflow.checks import Plan, check, placement
from hybridflow.checks.base import Facts
from hybridflow.checks.values import CHOICES, RANGES
from hybridflow.config import GRPOConfig, RunConfig
from hybridflow.resharding.layout import ParallelLayout
from hybridflow.settings import SCHEMAS, settings_of
from tests.assets import DRIVER_OF
from tests.checks.conftest import DRIVERS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def all_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rules behind the one that refuses what a role cannot use."""
    monkeypatch.setattr(placement, "AVAILABLE_AXES", dict.fromkeys(placement.ROLES, tuple(placement.AXES)))


WITH_CRITIC = ("ppo", "safe_rlhf")
CRITIC_PLACED = ("split", "standalone_critic")
"""Placements that only drivers with a critic can have, besides ``colocate_critic``."""
AHEAD = ("one_step_off", "async_grpo")
APART = ("placement=disaggregate", "placement=standalone")
"""Placements whose rollout has a pool of its own."""
REFERENCE_PLACED = ("colocate_reference", "standalone", *CRITIC_PLACED)


def options_of(group: str) -> list[str]:
    return sorted(path.stem for path in (ROOT / "configs" / group).glob("*.yaml"))


@pytest.mark.parametrize(
    ("name", "override"),
    [
        *(
            (name, f"{group}={option}")
            for name in DRIVERS
            for group in ("model", "data")
            for option in options_of(group)
        ),
        *((DRIVER_OF.get(option, "grpo"), f"algorithm={option}") for option in options_of("algorithm")),
        *(
            (name, f"placement={option}")
            for name in DRIVERS
            for option in options_of("placement")
            if (name in WITH_CRITIC or option not in (*CRITIC_PLACED, "colocate_critic"))
            and (name == "reward_model") == (option == "trainer")
        ),
    ],
)
def test_every_shipped_config_passes(name: str, override: str, folder: Path, checked: Callable[..., Plan]) -> None:
    needs = {f"placement={option}": ["actor.loss.kl_coef=0.1"] for option in REFERENCE_PLACED}
    needs["data=arithmetic"] = ["data.options={}"]
    if name in WITH_CRITIC and override.removeprefix("placement=") not in CRITIC_PLACED:
        critic = ["roles.critic={pool: ${roles.actor.pool}}"]
    else:
        critic = []
    more = [*critic, *needs.get(override, [])]
    if (name, override) == ("dpo", "placement=standalone"):
        more = [*more, "roles.reference.pool=reference"]
    if name in AHEAD and override.startswith("placement=") and override not in APART:
        more = [*more, "max_staleness=0"]
    plan = checked(override, *more, name=name)
    assert plan.warnings == ()
    assert set(plan.layouts) >= ({"actor"} if name == "reward_model" else {"actor", "rollout", "reward"})


def test_every_group_of_the_configs_is_tested() -> None:
    groups = {path.name for path in (ROOT / "configs").iterdir() if path.is_dir()}
    for_models = {name for name in groups if name.endswith("_for")}
    assert groups - for_models == {"model", "data", "algorithm", "placement"}
    assert {option for group in for_models for option in options_of(group)} <= set(options_of("model"))
    assert {path.stem for path in (ROOT / "configs").glob("*.yaml")} == set(DRIVERS)


def test_the_plan_of_the_demo(checked: Callable[..., Plan], folder: Path) -> None:
    plan = checked("actor.mini_batch_size=64", "actor.micro_batch_size=10", "actor.epochs=2")
    assert plan.run_dir == folder / "runs" / "grpo-tiny"
    assert (plan.rows, plan.rows_per_update, plan.updates) == (32 * 8, 64, 2 * 256 // 64)
    assert plan.micro_batches == math.ceil(64 / 2 / 10)
    assert plan.max_tokens == 256 * (32 + 8)
    assert {role: str(layout) for role, layout in plan.layouts.items()} == {
        "actor": "tp1 pp1 cp1 dp2",
        "rollout": "tp1 pp1 cp1 dp2",
        "reward": "tp1 pp1 cp1 dp1",
    }


def test_the_placement_table(checked: Callable[..., Plan]) -> None:
    lines = checked().placement_table().splitlines()
    assert lines[:5] == [
        "pool   devices     role     layout",
        "-----  ----------  -------  ---------------",
        "train  [2] device  actor    tp1 pp1 cp1 dp2",
        "train  [2] device  rollout  tp1 pp1 cp1 dp2",
        "cpu    [1] cpu     reward   tp1 pp1 cp1 dp1",
    ]
    assert lines[6].split() == ["rows", "of", "how"]
    assert lines[8:13] == [
        "a step                  256  32 prompts * 8 samples; at most 10240 tokens",
        "a rollout replica       128  2 replicas",
        "an update               256  actor.mini_batch_size=0: the whole batch; 1 update(s) a step, in 1 epoch(s)",
        "an update on a replica  128  2 data-parallel replicas of the actor",
        "a forward               128  actor.micro_batch_size=128; 1 forward(s) an update",
    ]
    assert lines[14].split() == ["pool", "memory", "of", "a", "device,", "GiB", "update", "sync", "generate"]
    assert [line.split()[1] for line in lines[16:20]] == [
        "process",
        "actor.parameters",
        "actor.gradients",
        "actor.optimizer",
    ]


def test_a_token_budget_leaves_the_number_of_micro_batches_open(checked: Callable[..., Plan]) -> None:
    assert checked("actor.micro_batch_tokens=40").micro_batches is None


def test_checking_takes_less_than_a_second(given: list[str]) -> None:
    config = compose.load("grpo", GRPOConfig, given)
    begin = time.process_time()  # another process may have the cores
    check(config)
    assert time.process_time() - begin < 1.0


def test_all_problems_are_reported_at_once(refused: Callable[..., str]) -> None:
    text = refused("rollout.n=0", "actor.loss.name=pppo", "roles.rollout.pool=tran", "data.train=no/where.jsonl")
    assert text.splitlines()[0] == "4 problems:"
    assert "  - rollout.n=0: has to be at least 1." in text
    assert "  - actor.loss.name='pppo' is not known. Did you mean 'ppo'? Known: cispo, " in text
    assert "  - roles.rollout.pool='tran': no such pool. Did you mean 'train'? Known: cpu, train." in text
    assert "  - data.train='no/where.jsonl': no such file or folder." in text


def test_a_problem_that_two_roles_have_is_told_once(refused: Callable[..., str]) -> None:
    assert refused("roles.actor.layout.tp=3").startswith("roles.actor.layout: tp*pp*cp = 3*1*1 = 3 does not divide")


# ---------------------------------------------------------------------------------------- values of single settings


def numeric_settings() -> set[str]:
    settings = [s for schema in [RunConfig, *SCHEMAS.values()] for s in settings_of(schema)]
    return {s.path for s in settings if s.type in (int, float)}


def test_every_number_has_a_range() -> None:
    assert set(RANGES) == numeric_settings()


def test_choices_are_those_of_the_registries() -> None:
    from hybridflow.algorithms.advantages import ESTIMATORS
    from hybridflow.algorithms.correction import BOUNDS, LEVELS
    from hybridflow.algorithms.kl import KINDS
    from hybridflow.algorithms.losses import LOSSES
    from hybridflow.algorithms.masked import SINGLES
    from hybridflow.algorithms.objective import AGGREGATIONS, OLD_LOG_PROBS
    from hybridflow.controller.pool import KINDS as POOL_KINDS
    from hybridflow.data.prompts import LONG_PROMPTS
    from hybridflow.engines.megatron.optimizer import SCHEDULES

    assert set(CHOICES["actor.loss.kl_kind"]) == set(CHOICES["algorithm.kl_kind"]) == set(KINDS)
    assert set(CHOICES["actor.loss.old_log_probs"]) == set(OLD_LOG_PROBS)
    assert set(CHOICES["algorithm.estimator"]) == set(ESTIMATORS)
    assert set(CHOICES["algorithm.single"]) == set(SINGLES)
    assert set(CHOICES["algorithm.correction.level"]) == set(CHOICES["algorithm.correction.reject"]) == set(LEVELS)
    assert set(CHOICES["algorithm.correction.bound"]) == set(BOUNDS)
    assert set(CHOICES["actor.loss.name"]) == set(LOSSES)
    assert set(CHOICES["actor.loss.aggregation"]) == set(AGGREGATIONS)
    assert set(CHOICES["actor.optimizer.schedule"]) == set(SCHEDULES)
    assert set(CHOICES["data.long_prompts"]) == set(LONG_PROMPTS)
    assert set(CHOICES["pools.*.kind"]) == set(POOL_KINDS)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps=0", "steps=0: has to be at least 1."),
        ("seed=-1", "seed=-1: has to be at least 0 and at most 4294967295."),
        ("seed=4294967296", "seed=4294967296: has to be at least 0 and at most 4294967295."),
        ("data.prompts_per_step=0", "data.prompts_per_step=0: has to be at least 1."),
        ("data.evaluate_share=1", "data.evaluate_share=1.0: has to be at least 0 and below 1."),
        ("actor.micro_batch_size=0", "actor.micro_batch_size=0: has to be at least 1."),
        ("actor.optimizer.lr=0", "actor.optimizer.lr=0.0: has to be above 0."),
        ("actor.optimizer.lr=nan", "actor.optimizer.lr=nan: has to be finite and above 0."),
        ("actor.optimizer.lr=inf", "actor.optimizer.lr=inf: has to be finite and above 0."),
        ("reward.solved_at=nan", "reward.solved_at=nan: has to be finite."),
        ("actor.optimizer.beta2=1", "actor.optimizer.beta2=1.0: has to be at least 0 and below 1."),
        ("actor.loss.dual_clip=0.5", "actor.loss.dual_clip=0.5: has to be above 1, or 0."),
        ("actor.loss.clip_low=1.5", "actor.loss.clip_low=1.5: has to be at least 0 and at most 1."),
        ("rollout.sampling.temperature=-1", "rollout.sampling.temperature=-1.0: has to be at least 0.01, or 0."),
        ("evaluate.sampling.temperature=0.001", "evaluate.sampling.temperature=0.001: has to be at least 0.01, or 0."),
        ("rollout.sampling.top_p=0", "rollout.sampling.top_p=0.0: has to be above 0 and at most 1."),
        ("reward.timeout=0", "reward.timeout=0.0: has to be above 0."),
        ("reward.max_failed=2", "reward.max_failed=2.0: has to be at least 0 and at most 1."),
        ("roles.actor.layout.tp=0", "roles.actor.layout.tp=0: has to be at least 1."),
        ("pools.train.devices=[]", "pools.train.devices=[]: name the devices of each node, such as [2] or [4,4]."),
        ("pools.train.devices=[2,0]", "pools.train.devices=[2, 0]: name the devices"),
        (
            "rollout.stop_token_ids=[-1]",
            "rollout.stop_token_ids=[-1]: token ids have to be at least 0 and at most",
        ),
        ("model.dtype=bf16", "model.dtype='bf16' is not known. Did you mean 'bfloat16'? Known: bfloat16, float32."),
        ("actor.optimizer.schedule=cosin", "actor.optimizer.schedule='cosin' is not known. Did you mean 'cosine'?"),
        (
            "actor.loss.aggregation=tokenmean",
            "actor.loss.aggregation='tokenmean' is not known. Did you mean 'token-mean'?",
        ),
        ("actor.loss.kl_kind=k4", "actor.loss.kl_kind='k4' is not known. Did you mean"),
        (
            "data.long_prompts=filtr",
            "data.long_prompts='filtr' is not known. Did you mean 'filter'? Known: error, filter.",
        ),
        ("pools.cpu.kind=cpus", "pools.cpu.kind='cpus' is not known. Did you mean 'cpu'? Known: cpu, device."),
        (
            "tracking.trackers=[tensorbord]",
            "tracking.trackers: 'tensorbord' is not known. Did you mean 'tensorboard'? "
            "Known: mlflow, tensorboard, wandb.",
        ),
        ("tracking.trackers=[wandb,wandb]", "tracking.trackers: 'wandb' stands there 2 times. Name it once."),
        ("name=a/b", "name='a/b': has to be the name of one folder, without '/'. Its parent is runs_dir."),
        ('name="a\nb"', r"name='a\nb': has to be the name of one folder"),
        (f"name={'x' * 256}", "x': has to be the name of one folder"),
        ("name=..", "name='..': has to be the name of one folder"),
    ],
)
def test_a_wrong_value_is_refused(override: str, message: str, refused: Callable[..., str]) -> None:
    assert message in refused(override)


def test_a_tracker_that_is_not_installed_names_the_extra(refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    text = refused("tracking.trackers=[wandb]")
    assert text == "tracking.trackers: wandb is not installed. Install it with: pip install 'hybridflow[tracking]'"


# ------------------------------------------------------------------------------------------------------- placement


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "roles.critc={pool: train}",
            "roles.critc: there is no role 'critc'. Did you mean 'critic'? Known: actor, cost, ",
        ),
        ("roles.rolout={pool: train}", "there is no role 'rolout'. Did you mean 'rollout'?"),
        ("roles.reward=null", "roles.reward is not placed. Give it as roles.reward={pool: NAME}. Pools: cpu, train."),
        ("roles.actor.pool=trian", "roles.actor.pool='trian': no such pool. Did you mean 'train'? Known: cpu, train."),
        (
            "roles.actor.pool=cpu",
            "roles.actor.pool='cpu' has kind 'cpu', whose processes have no device; actor computes",
        ),
        (
            "roles.rollout.layout.vpp=2",
            "roles.rollout.layout.vpp=2: in this version rollout can use tp, ep. Set it to 1.",
        ),
        ("roles.reward.layout.pp=1", ""),
        (
            "roles.rollout.layout.cp=2",
            "roles.rollout.layout.cp=2: generation does not split sequences. Set it to 1.",
        ),
        (
            "roles.rollout.layout.pp=2",
            "roles.rollout.layout.pp=2: an engine has no pipeline stages. Set it to 1.",
        ),
        (
            "actor.loss.kl_coef=0.1",
            "actor.loss.kl_coef=0.1 measures a KL to the reference, but roles.reference is not placed. "
            "Use placement=colocate_reference or roles.reference={pool: NAME}, or set actor.loss.kl_coef=0.",
        ),
    ],
)
def test_a_wrong_placement_is_refused(override: str, message: str, refused, checked) -> None:
    if not message:
        checked(override)
    else:
        assert message.replace(".  Known", ". Known") in refused(override)


def test_generation_ahead_of_training_needs_a_pool_of_its_own(
    refused: Callable[..., str], checked: Callable[..., Plan]
) -> None:
    assert refused("placement=colocate", name="one_step_off") == (
        "max_staleness=1 generates while the actor trains, but both are on pool 'train', whose processes do one at a "
        "time. Use placement=disaggregate, or set max_staleness=0."
    )
    assert "max_staleness=2 generates while the actor trains" in refused("placement=single", name="async_grpo")
    assert "max_staleness=-1" in refused("max_staleness=-1", name="one_step_off")
    checked("placement=colocate", "max_staleness=0", name="one_step_off")


def test_answers_of_older_policies_are_weighed_or_warned_of(checked):
    told = "max_staleness=2 trains on answers of older policies"
    warns = lambda *overrides: told in "\n".join(checked(*overrides, name="async_grpo").warnings)  # noqa: E731
    assert warns("algorithm=grpo") and warns("algorithm.correction.level=none")
    assert not warns() and not warns("algorithm=grpo", "actor.loss.old_log_probs=rollout_log_probs")
    assert not warns("algorithm=grpo", "max_staleness=0", "placement=disaggregate")
    layouts = checked("pools.rollout.devices=[4]", "roles.rollout.layout.tp=2", name="one_step_off").layouts
    assert (layouts["actor"].world_size, layouts["rollout"].world_size, layouts["rollout"].dp) == (1, 4, 2)


def test_degrees_have_to_divide_the_pool(refused: Callable[..., str], all_axes: None) -> None:
    text = refused("pools.train.devices=[3]", "roles.actor.layout={tp: 2, pp: 1}", "data.prompts_per_step=6")
    assert "roles.actor.layout: tp*pp*cp = 2*1*1 = 2 does not divide the pool's 3 devices." in text


def test_degrees_have_to_divide_the_model(refused: Callable[..., str], all_axes: None) -> None:
    reference = "roles.reference={pool: train, layout: {pp: 2, vpp: 2}}"
    text = refused("pools.train.devices=[8]", "roles.actor.layout={tp: 4}", "roles.rollout.layout={tp: 8}", reference)
    assert text.splitlines()[1:] == [
        "  - roles.actor.layout.tp=4 does not divide the model's num_kv_heads=2. Choose one of 1, 2.",
        "  - roles.rollout.layout.tp=8 does not divide the model's num_heads=4. Choose one of 1, 2, 4.",
        "  - roles.reference.layout.pp*vpp = 2*2 = 4 does not divide the model's num_layers=2. Choose one of 1, 2.",
    ]


def test_a_layout_that_fits_passes(checked: Callable[..., Plan], all_axes: None) -> None:
    plan = checked("pools.train.devices=[8]", "roles.actor.layout={tp: 2, pp: 2}", "roles.rollout.layout.tp=2")
    assert str(plan.layouts["actor"]) == "tp2 pp2 cp1 dp2"
    assert str(plan.layouts["rollout"]) == "tp2 pp1 cp1 dp4"
    assert plan.layouts["rollout"] == plan.layouts["actor"].generation(tp=2)


def test_a_rollout_on_its_own_pool_generates_in_its_own_degrees(given: list[str]) -> None:
    overrides = ["pools.gen.devices=[4]", "roles.rollout={pool: gen, layout: {tp: 2}}"]
    layout = Facts(compose.load("grpo", GRPOConfig, [*given, *overrides])).layout("rollout")
    assert layout == ParallelLayout(tp=2, dp=2).generation(tp=2)


def test_a_generation_layout_that_makes_weights_travel_more_is_told(
    checked: Callable[..., Plan], all_axes: None
) -> None:
    shape = ("pools.train.devices=[4]", "roles.actor.layout={pp: 2}", "roles.rollout.layout={tp: 2}")
    (text,) = checked(*shape).warnings
    # A stage is half of the layers; a generation rank has half of every layer, of which it trains half.
    assert text.startswith("roles.rollout.layout: generation tp=2 pp=1 does not divide training tp=1 pp=2")
    assert "a rank receives 1/4 of the model on average and 1/4 at most, within groups of 2 ranks" in text
    assert checked("pools.train.devices=[4]", "roles.rollout.layout={tp: 2}").warnings == ()


@pytest.mark.parametrize(
    ("overrides", "warnings"),
    [
        (["data.prompts_per_step=3", "rollout.n=3"], []),
        (["data.prompts_per_step=3", "rollout.n=3", "actor.mini_batch_size=3"], []),
        (
            ["actor.mini_batch_size=1"],
            [
                "actor.mini_batch_size=1 is less than the 2 data-parallel ranks of roles.actor, so some of them have "
                "nothing to compute in an update. Raise it to at least 2."
            ],
        ),
    ],
)
def test_rows_need_not_divide_among_the_ranks(
    overrides: list[str], warnings: list[str], checked: Callable[..., Plan]
) -> None:
    assert [text for text in checked(*overrides).warnings if "data-parallel" in text] == warnings


def test_a_useless_reference_and_an_empty_pool_are_warned_of(checked: Callable[..., Plan]) -> None:
    plan = checked("roles.reference={pool: train}", "pools.spare.devices=[1]")
    assert plan.warnings == (
        "pools.spare has no role, so it is not started.",
        "roles.reference is placed, but actor.loss.kl_coef=0 and algorithm.kl_coef=0 never use it: it costs memory and "
        "a forward a step. Set roles.reference=null.",
    )
    assert "warning: pools.spare has no role" in plan.placement_table()


# -------------------------------------------------------------------------------------------------- batch arithmetic


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["actor.mini_batch_size=48"],
            "actor.mini_batch_size=48 does not divide data.prompts_per_step * rollout.n = 32 * 8 = 256 rows. "
            "Set it to one of 1, 2, 4, 8, 16, 32, 64, 128, 256, or to 0 for the whole batch.",
        ),
        (
            ["actor.micro_batch_tokens=39"],
            "actor.micro_batch_tokens=39 is less than one row may have: rollout.max_prompt_tokens + rollout.max_tokens "
            "= 32 + 8 = 40. Raise it to at least 40, or set it to 0 to cut by actor.micro_batch_size.",
        ),
        (["actor.optimizer.min_lr=1"], "actor.optimizer.min_lr=1.0 is above actor.optimizer.lr=0.0006. Lower it."),
        (
            ["actor.optimizer={schedule: cosine, warmup_steps: 20, decay_steps: 10}"],
            "actor.optimizer.decay_steps=10 ends the decay before the warm-up of actor.optimizer.warmup_steps=20 does.",
        ),
        (
            ["rollout.n=1"],
            "rollout.n=1: algorithm.estimator='grpo' compares the samples of one prompt, so one alone has advantage 0.",
        ),
        (["rollout.sampling.temperature=0"], "rollout.sampling.temperature=0: all samples of a prompt would be equal"),
        (["actor.loss.name=sft"], "actor.loss.name='sft' ignores advantages; choose a policy loss, such as 'ppo'."),
    ],
)
def test_wrong_arithmetic_is_refused(overrides: list[str], message: str, refused: Callable[..., str]) -> None:
    assert message in refused(*overrides)


def test_supervised_batches_have_one_answer_a_prompt(refused: Callable[..., str]) -> None:
    assert "rollout.n=2: a supervised batch has one answer a prompt. Set it to 1." in refused("rollout.n=2", name="sft")
    assert "actor.loss.name='ppo': supervised fine-tuning needs 'sft'." in refused("actor.loss.name=ppo", name="sft")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.sampling.top_p=0.9"], "rollout.sampling.top_p=0.9, top_k=0: rollouts are drawn from a truncated"),
        (["rollout.sampling.top_k=5"], "the trainer's log_probs are over the full one. Expect a mismatch"),
        (
            ["steps=5", "actor.optimizer.warmup_steps=5"],
            "actor.optimizer.warmup_steps=5 is no less than the run's 5 updates (steps * updates a step = 5 * 1)",
        ),
        (
            ["actor.optimizer={schedule: constant, decay_steps: 5}"],
            "actor.optimizer.schedule='constant' ignores actor.optimizer.decay_steps",
        ),
        (["data.evaluate=''", "data.evaluate_share=0"], "nothing is held out, so the run is not evaluated."),
        (["data.options={size: 5}"], "data.options={'size': 5} is ignored: it is for reasoning_gym:<task>."),
    ],
)
def test_what_is_likely_not_meant_is_warned_of(overrides: list[str], message: str, checked) -> None:
    warnings = checked(*overrides).warnings
    assert len(warnings) == 1
    assert message in warnings[0]


def test_checking_a_plan_starts_nothing_and_writes_nothing(checked: Callable[..., Plan], folder: Path) -> None:
    plan = checked()
    assert not plan.run_dir.exists()
    assert (
        json.dumps(dataclasses.asdict(plan.layouts["actor"]))
        == '{"tp": 1, "pp": 1, "cp": 1, "dp": 2, "ep": 1, "etp": 1, "vpp": 1}'
    )
