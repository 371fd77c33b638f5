"""Names that settings may have, and what may be shared in memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest


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
