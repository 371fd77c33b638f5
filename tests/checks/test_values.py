"""Names that settings may have, and what may be shared in memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hybridflow.checks import Plan
from hybridflow.checks.values import LARGEST
from hybridflow.settings import ANY_NAME, SCHEMAS, settings_of


def test_an_unknown_kind_of_memory_is_refused_with_the_nearest(refused: Callable[..., str]) -> None:
    assert "memory.offload: 'optimiser' is not known. Did you mean 'optimizer'?" in refused(
        "memory.offload=[optimiser]"
    )


def test_weights_that_leave_the_memory_cannot_be_shared(refused: Callable[..., str]) -> None:
    sharing = "memory.share_weights=true"
    message = (
        "memory.share_weights=true: weights that leave the memory cannot be shared. Set memory.keep_rollout=true (is "
        "{}) and leave 'parameters' out of memory.offload={}."
    )
    text = refused(sharing, "memory.keep_rollout=false", "memory.offload=[]")
    assert message.format("false", []) in text
    text = refused(sharing, "memory.keep_rollout=true", "memory.offload=[parameters]")
    assert message.format("true", ["parameters"]) in text


def test_compiled_models_do_not_share_weights(refused: Callable[..., str]) -> None:
    given = ["memory.share_weights=true", "memory.keep_rollout=true", "memory.offload=[]"]
    assert (
        "memory.share_weights=true with rollout.enforce_eager=false: compiled models read weights at the addresses "
        "they were compiled with. Set one of the two the other way."
    ) in refused(*given, "rollout.enforce_eager=false")


@pytest.mark.parametrize(
    "path", ["ray.object_store_gb", "rollout.kv_cache_gb", "rollout.sync_bucket_mb", "pools.train.memory_gb"]
)
@pytest.mark.parametrize("value", ["inf", "1e+308"])
def test_a_size_that_is_no_number_of_bytes_is_refused(path: str, value: str, refused: Callable[..., str]) -> None:
    assert f"{path}={value}: has to be " in refused(f"{path}={value}")


def test_more_devices_than_a_node_can_have_are_refused_at_once(refused: Callable[..., str]) -> None:
    text = refused("pools.train.devices=[99999999999999999999]", "ray.address=auto")
    assert "such as [2] or [4,4]. A number has to be at least 1 and at most 1024." in text


def test_a_layout_that_is_wrong_in_itself_is_named_with_its_role(refused: Callable[..., str]) -> None:
    assert refused("roles.actor.layout.vpp=2").startswith("roles.actor.layout.vpp=2 interleaves the stages")
    text = refused("roles.rollout.layout.ep=2")
    assert text.startswith("roles.rollout.layout.ep=2 of a generation layout with tp=1") and "Set ep to 1." in text


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_no_whole_number_goes_beyond_32_bits(name: str, refused: Callable[..., str]) -> None:
    schema = SCHEMAS[f"{name.upper()}Config"]
    paths = [s.path for s in settings_of(schema) if s.type is int and ANY_NAME not in s.path]
    assert {"steps", "seed", "data.prompts_per_step", "rollout.n", "actor.micro_batch_tokens"} <= set(paths)
    text = refused(*(f"{path}={10**20}" for path in paths), name=name)
    for path in paths:
        assert f"{path}={10**20}: has to be " in text
    assert f"data.prompts_per_step={10**20}: has to be at least 1 and at most {LARGEST}." in text


@pytest.mark.parametrize(("path", "name"), [("memory.offload", "gradients"), ("tracking.trackers", "tensorboard")])
def test_a_name_that_stands_twice_in_a_set_is_refused(path: str, name: str, refused: Callable[..., str]) -> None:
    assert refused(f"{path}=[{name},{name}]") == f"{path}: '{name}' stands there 2 times. Name it once."


def test_a_token_id_beyond_all_vocabularies_is_refused(refused: Callable[..., str]) -> None:
    text = refused("rollout.stop_token_ids=[99999999999999999999]")
    assert f"token ids have to be at least 0 and at most {LARGEST}." in text


def test_answers_that_are_all_drawn_before_the_first_update_are_warned_of(checked: Callable[..., Plan]) -> None:
    given = ["placement=disaggregate", "steps=5"]
    assert checked(*given, "max_staleness=5", name="one_step_off").warnings == ()
    (warning,) = checked(*given, "max_staleness=1000", name="one_step_off").warnings
    assert warning.startswith("max_staleness=1000 with steps=5: the answers of all steps may be drawn before the first")
