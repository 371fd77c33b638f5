"""Names that settings may have, and what may be shared in memory."""

from __future__ import annotations

from collections.abc import Callable


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
