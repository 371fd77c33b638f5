"""Composing a configuration: what the shipped configs say, and what each mistake is told."""

import dataclasses
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from hybridflow import compose
from hybridflow.config import GRPOConfig, LayoutConfig, OneStepOffConfig, RoleConfig, RunConfig, SFTConfig
from hybridflow.errors import ConfigError, DataError, WorkerError

ROOT = Path(__file__).resolve().parents[1]


def load(*overrides: str) -> GRPOConfig:
    return compose.load("grpo", GRPOConfig, overrides)


def test_grpo_defaults_are_a_tiny_model_on_two_devices_without_a_reference() -> None:
    config = load()
    assert type(config) is GRPOConfig
    assert (config.name, config.model.path) == ("grpo-tiny", "runs/demo/assets/model")
    assert (config.data.prompts_per_step, config.rollout.n, config.rollout.max_tokens) == (32, 8, 8)
    assert config.actor.optimizer.lr == 6e-4
    assert config.pools["train"].devices == [2]
    assert config.pools["cpu"].kind == "cpu"
    assert config.roles["actor"] == RoleConfig("train", LayoutConfig())
    assert config.roles["reference"] is None


def test_sft_defaults() -> None:
    config = compose.load("sft", SFTConfig)
    assert (config.name, config.actor.loss.name, config.rollout.n) == ("sft-tiny", "sft", 1)
    assert (config.data.prompts_per_step, config.actor.optimizer.lr, config.actor.optimizer.warmup_steps) == (
        64,
        4e-3,
        20,
    )


def test_a_model_brings_its_own_batch_and_learning_rate() -> None:
    config = load("model=smollm2", "data=arithmetic")
    assert config.name == "grpo-smollm2"
    assert (config.data.prompts_per_step, config.rollout.n, config.rollout.max_tokens) == (4, 4, 48)
    assert config.rollout.max_prompt_tokens == 64
    assert 1e-6 <= config.actor.optimizer.lr <= 5e-6


def test_what_is_given_wins_over_what_a_model_brings() -> None:
    assert load("model=smollm2", "actor.optimizer.lr=7e-6", "name=mine").actor.optimizer.lr == 7e-6


def test_dr_grpo_changes_estimator_and_aggregation_together() -> None:
    config = load("algorithm=dr_grpo")
    assert config.algorithm.normalize_std is False
    assert (config.actor.loss.aggregation, config.actor.loss.scale) == ("seq-mean-token-sum-norm", 8.0)


def test_a_reference_can_be_placed_by_group_or_by_value() -> None:
    by_group = load("placement=colocate_reference")
    assert by_group.roles == load("roles.reference={pool: train}").roles == load("roles.reference.pool=train").roles
    assert by_group.roles["reference"] == RoleConfig("train", LayoutConfig())


def test_names_of_pools_roles_and_options_are_the_users() -> None:
    config = load(
        "pools.gen={devices: [1]}", "roles.rollout.pool=gen", "data.options.size=50", "reward.options={a: [1]}"
    )
    assert config.pools["gen"].devices == [1]
    assert config.roles["rollout"] == RoleConfig("gen", LayoutConfig())
    assert config.data.options == {"size": 50}
    assert config.reward.options == {"a": [1]}
    assert "cpu" not in load("~pools.cpu").pools
    assert load("data=arithmetic", "data.options={}", "data.options.size=5").data.options == {"size": 5}


def test_text_with_special_characters_is_quoted() -> None:
    assert load('data.train="reasoning_gym:gcd,lcm"').data.train == "reasoning_gym:gcd,lcm"
    assert load("model.path=/a folder/x").model.path == "/a folder/x"


def test_the_result_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError, match="LayoutConfig.tp"):
        load().roles["actor"].layout.tp = 2  # type: ignore[union-attr]


KNOWN_LOSS = "Known: aggregation, clip_high, clip_low, cov_high, "


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "actor.loss.clip_hig=1",
            "there is no setting 'actor.loss.clip_hig': 'clip_hig' is unknown in 'actor.loss'. "
            f"Did you mean 'clip_high'? {KNOWN_LOSS}",
        ),
        ("stepz=3", "there is no setting 'stepz': 'stepz' is unknown. Did you mean 'steps'? Known: actor, algorithm, "),
        ("modle=tiny", "there is no setting 'modle': 'modle' is unknown. Did you mean 'model'?"),
        ("+actor.foo=1", "there is no setting 'actor.foo'"),
        ("++model.foo=1", "there is no setting 'model.foo'"),
        ("hydra.verbose=true", "there is no setting 'hydra'"),
        ("roles.actor.pol=x", "'pol' is unknown in 'roles.actor'. Did you mean 'pool'? Known: layout, pool."),
        ("pools.train={devices: [1], kin: cpu}", "'kin' is unknown in 'pools.train'. Did you mean 'kind'?"),
        ("steps=1.5", "steps=1.5 has the wrong type: expected integer."),
        ("actor.optimizer.lr=fast", "actor.optimizer.lr=fast has the wrong type: expected number."),
        ("evaluate.at_start=maybe", "evaluate.at_start=maybe has the wrong type: expected true or false."),
        ("name=null", "name=null has the wrong type: expected text."),
        (
            "pools.train.devices=2",
            "pools.train.devices=2 has the wrong type: expected list of integers. Write pools.train.devices=[...].",
        ),
        (
            "pools.train.devices=[a]",
            "pools.train.devices: a in the list has the wrong type: expected list of integers.",
        ),
        ("pools.train.devices=[[1]]", "pools.train.devices: [1] in the list has the wrong type"),
        ("memory.offload=[{a: 1}]", "memory.offload: {'a': 1} in the list has the wrong type: expected list of text."),
        (
            "rollout.stop_token_ids={a: 1}",
            "rollout.stop_token_ids={'a': 1} has the wrong type: expected list of integers",
        ),
        ("reward.components=[a]", "reward.components=['a'] has the wrong type: expected mapping."),
        (
            "roles.actor=train",
            "roles.actor=train has the wrong type: expected mapping of pool, layout. Write roles.actor={...}.",
        ),
        ("pools=3", "pools=3 has the wrong type: expected mapping. Write pools={...}."),
        (
            "model=tinny",
            "model=tinny is not an option of the group 'model'. Did you mean 'tiny'? Known: local, smollm2, tiny.",
        ),
        ("model=/models/x", "A model folder is given as model.path=/models/x."),
        ("placement=disagregate", "placement=disagregate is not an option of the group 'placement'."),
        ("data.train=a,b", "'data.train=a,b': a comma at the top of a value asks for a sweep"),
        ("foo bar", "'foo bar' is not an override (token recognition error at: ' '). Write key=value"),
        ("=3", "'=3' names no setting. Write key=value."),
        (
            "~name",
            "~name: only entries of pools, roles, data.options, actor.loss.options, reward.options, reward.components,",
        ),
        ("~pools.tpu", "~pools.tpu: only entries of pools"),
        ("model.path=${nope}", "model.path: Interpolation key 'nope' not found"),
    ],
)
def test_a_wrong_override_is_told_what_is_wrong(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(override)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_missing_value_is_named_with_its_meaning() -> None:
    with pytest.raises(ConfigError) as caught:
        load("model=local", "data=local")
    lines = str(caught.value).splitlines()
    assert [line.split()[0] for line in lines] == ["data.train", "model.path"]
    assert lines[1] == (
        "model.path has no value (local Hugging Face folder (config.json, safetensors, tokenizer)). "
        "Give it as model.path=VALUE on the command line, or in the config file 'grpo'."
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stepz: 7", "in config file 'mine': there is no setting 'stepz': 'stepz' is unknown. Did you mean 'steps'?"),
        ("actor: {optimizer: {lrr: 1}}", "in config file 'mine': there is no setting 'actor.optimizer.lrr'"),
        ("roles: {actor: {pol: x}}", "in config file 'mine': there is no setting 'roles.actor.pol'"),
        ("steps: many", "in config file 'mine': steps=many has the wrong type: expected integer."),
        ("pools: {train: {devices: 3}}", "in config file 'mine': pools.train.devices has the wrong type"),
        (
            "model: 3",
            "in config file 'mine': model=3 has the wrong type: expected mapping of path, dtype, tokenizer_path.",
        ),
        (
            "roles: {actor: train}",
            "in config file 'mine': roles.*=train has the wrong type: expected mapping of pool, layout.",
        ),
        ("reward: {components: [a]}", "in config file 'mine': reward.components has the wrong type: expected mapping."),
        (
            "rollout: {stop_token_ids: {a: 1}}",
            "in config file 'mine': rollout.stop_token_ids has the wrong type: expected",
        ),
        ("a: [", "config 'mine': not readable as YAML"),
    ],
)
def test_a_wrong_config_file_is_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(f"defaults: [grpo, _self_]\n{text}\n")
    with pytest.raises(ConfigError) as caught:
        compose.load("mine", GRPOConfig, config_dir=tmp_path)
    assert message in str(caught.value)


@pytest.mark.parametrize(("head", "key"), [("", "options"), ("# @package _global_\n", "data: {options")])
def test_a_list_in_a_file_of_a_group_is_named_too(head: str, key: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.yaml").write_text(f"{head}{key}: [1]{'}' if head else ''}\n")
    with pytest.raises(ConfigError, match="in config file 'data/mine': data.options has the wrong type: expected mapp"):
        compose.load("grpo", GRPOConfig, ["data=mine"], config_dir=tmp_path)


def test_a_wrong_file_of_a_group_is_named(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("pathh: x\n")
    with pytest.raises(ConfigError, match="in config file 'model/mine': there is no setting 'model.pathh'"):
        compose.load("grpo", GRPOConfig, ["model=mine"], tmp_path)


def test_own_configs_extend_the_shipped_ones(tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "mine.yaml").write_text("path: some/where\n")
    (folder / "mine.yaml").write_text(
        "defaults: [grpo, override /model: mine, _self_]\nname: x\n".replace(
            "override /model: mine", "{override /model: mine}"
        )
    )
    config = compose.load("mine", GRPOConfig, ["algorithm=dr_grpo"], folder)
    assert (config.name, config.model.path, config.algorithm.normalize_std) == ("x", "some/where", False)


def test_a_placement_of_ones_own_extends_a_shipped_one(tmp_path: Path) -> None:
    (tmp_path / "placement").mkdir()
    (tmp_path / "placement" / "mine.yaml").write_text(
        "# @package _global_\ndefaults: [disaggregate, _self_]\npools: {rollout: {devices: [4, 2]}}\n"
        "roles: {rollout: {layout: {tp: 2}}}\n"
    )
    (tmp_path / "mine.yaml").write_text("defaults: [grpo, _self_]\nname: x\n")
    config = compose.load("mine", GRPOConfig, ["placement=mine"], tmp_path)
    assert (config.pools["train"].devices, config.pools["rollout"].devices) == ([1], [4, 2])
    assert config.roles["rollout"] == RoleConfig("rollout", LayoutConfig(tp=2))


@pytest.mark.parametrize(("name", "max_staleness"), [("one_step_off", 1), ("async_grpo", 2)])
def test_answers_of_older_policies_are_corrected_by_default(name: str, max_staleness: int) -> None:
    config = compose.load(name, OneStepOffConfig)
    assert config.max_staleness == max_staleness
    correction = config.algorithm.correction
    assert (correction.level, correction.bound, correction.high) == ("token", "truncate", 2.0)


def test_a_config_without_a_schema_is_told_to_have_one(tmp_path: Path) -> None:
    (tmp_path / "bare.yaml").write_text("steps: 3\n")
    with pytest.raises(ConfigError, match="'bare' has no schema: put `- schema/GRPOConfig` .* first"):
        compose.load("bare", GRPOConfig, config_dir=tmp_path)


def test_a_config_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="config 'binary': 'utf-8' codec can't decode"):
        compose.load("binary", GRPOConfig, config_dir=tmp_path)


def test_another_drivers_config_is_refused() -> None:
    with pytest.raises(ConfigError, match="'sft' is made for SFTConfig, this driver needs GRPOConfig"):
        compose.load("sft", GRPOConfig)


def test_a_group_that_a_config_does_not_use_is_named() -> None:
    with pytest.raises(ConfigError, match=r"config 'sft' does not use the group 'algorithm'\. Leave it out\."):
        compose.load("sft", SFTConfig, ["algorithm=grpo"])


def test_an_unknown_config_is_told_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"no config file 'grp'\. Did you mean 'grpo'\? Known: async_grpo, dapo, "):
        compose.load("grp", GRPOConfig)


def test_a_missing_config_folder_is_named() -> None:
    with pytest.raises(ConfigError, match="--config-dir /no/where: no such folder"):
        compose.load("grpo", GRPOConfig, config_dir="/no/where")


@dataclass
class MineConfig(RunConfig):
    """A user's own settings."""

    beta: float = 0.5


def test_a_users_own_schema_works_like_ours(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "defaults: [schema/MineConfig, model: tiny, placement: single, _self_]\n".replace(
            "model: tiny, placement: single", "{model: tiny}, {placement: single}"
        )
        + "name: mine\ndata: {train: x}\n"
    )
    config = compose.load("mine", MineConfig, ["beta=2"], tmp_path)
    assert (config.beta, config.pools["train"].devices) == (2.0, [1])
    with pytest.raises(ConfigError, match="Did you mean 'beta'"):
        compose.load("mine", MineConfig, ["betta=2"], tmp_path)


# ------------------------------------------------------------------------------------------------ the driver's side

DRIVER = """
'''A driver of a test.'''
from hybridflow import compose
from hybridflow.config import GRPOConfig
from hybridflow.errors import {error}

@compose.driver("grpo", GRPOConfig)
def main(config: GRPOConfig) -> None:
    if config.name == "fail":
        raise {error}("as asked")
    print("ran", config.name, config.steps)

if __name__ == "__main__":
    main()
"""


def run(tmp_path: Path, *arguments: str, error: str = "ConfigError") -> subprocess.CompletedProcess:
    script = tmp_path / "driver.py"
    script.write_text(DRIVER.format(error=error))
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    return subprocess.run(
        [sys.executable, str(script), *arguments], capture_output=True, text=True, env=environment, check=False
    )


def test_a_driver_runs_from_any_folder_with_overrides(tmp_path: Path) -> None:
    done = run(tmp_path, "steps=7", "--config-name", "grpo", "name=x")
    assert (done.returncode, done.stdout) == (0, "ran x 7\n"), done.stderr


def test_a_mistake_ends_a_driver_with_one_message_and_code_2(tmp_path: Path) -> None:
    done = run(tmp_path, "stepz=7")
    assert done.returncode == 2
    assert done.stderr.startswith("error: there is no setting 'stepz'")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(("error", "code"), [("ConfigError", 2), ("PlacementError", 1)])
def test_an_error_of_the_run_is_a_message_too(tmp_path: Path, error: str, code: int) -> None:
    done = run(tmp_path, "name=fail", error=error)
    assert (done.returncode, done.stderr) == (code, "error: as asked\n")


@pytest.mark.parametrize(
    ("cause", "told"),
    [
        ("ModelError: no head", False),
        ("CheckpointError: disk full", False),
        ("KeyError: 'x'", True),
        ("DataError", True),
    ],
)
def test_the_traceback_of_a_worker_is_shown_where_its_message_does_not_explain_itself(
    cause: str, told: bool, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit) as caught:
        with compose.exit_on_error():
            raise WorkerError("actor", 1, "update", 7, cause, "Traceback: here")
    printed = capsys.readouterr().err
    assert caught.value.code == 1
    assert printed.startswith(f"error: actor.update failed on rank 1 in step 7: {cause}\n")
    assert ("Traceback: here" in printed) == told


def test_cfg_prints_a_configuration_that_composes_to_itself(tmp_path: Path) -> None:
    done = run(tmp_path, "--cfg", "steps=9")
    (tmp_path / "again.yaml").write_text("defaults: [schema/GRPOConfig, _self_]\n" + done.stdout)
    assert compose.load("again", GRPOConfig, config_dir=tmp_path) == load("steps=9")


def test_help_names_the_groups_and_every_setting(tmp_path: Path) -> None:
    done = run(tmp_path, "--help")
    assert done.stdout.startswith("A driver of a test.")
    assert "  model: local, smollm2, tiny" in done.stdout
    assert "  actor.optimizer.lr (number; default 1e-06)" in done.stdout
    assert "  model.path (text; default required)" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--confg-name=x"], "--confg-name is not an option. Did you mean '--config-name'?"),
        (["--config-name"], "--config-name needs a value, such as --config-name grpo."),
    ],
)
def test_wrong_flags_are_told_the_known_ones(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose.CommandLine.parse(arguments, "grpo")
    assert message in str(caught.value)


def test_a_driver_can_be_called_with_a_configuration() -> None:
    seen = []
    main = compose.driver("grpo", GRPOConfig)(lambda config: seen.append(config.steps))
    main(load("steps=3"))
    assert seen == [3]


def test_errors_of_a_direct_call_are_raised() -> None:
    @compose.driver("grpo", GRPOConfig)
    def main(config: GRPOConfig) -> None:
        raise DataError("as asked")

    with pytest.raises(DataError):
        main(load())
