"""Memory that does not suffice is refused where it is certain, and warned of where it depends on the rows."""

from collections.abc import Callable
from pathlib import Path

import pytest

from hybridflow.checks import Plan, memory
from hybridflow.planner.memory import GIB


def test_weights_that_do_not_fit_are_refused_with_the_sum_and_the_fix(refused: Callable[..., str]) -> None:
    text = refused("pools.train.memory_gb=2.0", "rollout.kv_cache_gb=4", "memory={offload: [], keep_rollout: false}")
    assert text.startswith("pools.train: rank 0 needs 4.7")
    assert "GiB to generate (process 0.72 + actor.parameters 0.00 + actor.gradients 0.00" in text
    assert "rollout.kv_cache 4.00), and a device has 2.00 GiB. Raise tp or pp in roles.*.layout, lower" in text


def test_long_rows_that_do_not_fit_are_warned_of(checked: Callable[..., Plan]) -> None:
    plan = checked("pools.train.memory_gb=1.0", "rollout.max_tokens=900", "data.long_prompts=filter")
    (text,) = [text for text in plan.warnings if "pools.train" in text]
    assert text.startswith("pools.train: with the longest rows rank 0 needs ")
    assert "actor.activations " in text
    assert text.endswith("or actor.micro_batch_tokens, or set actor.recompute=full.")
    assert not [t for t in checked("pools.train.memory_gb=8.0").warnings if "pools.train" in t]


def test_the_processes_of_a_machine_without_gpus_share_its_memory(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "machine_bytes", lambda: 8 * GIB)
    text = refused("rollout.kv_cache_gb=3", "memory.keep_rollout=false")
    assert text.startswith("pools.train.devices=[2]: 2 x 3.73 (train) + 2.00 (driver, rewards, Ray and ray.object")
    assert "= 9.46 GiB, and this machine has 8.00 GiB." in text


def test_the_machines_memory_is_known() -> None:
    assert GIB < memory.machine_bytes() < 2**50


def test_the_smallest_gpu_counts() -> None:
    assert memory.smallest_gpu("81559\n40960\n") == 40960 * 2**20
    assert memory.smallest_gpu("") == 0
    assert memory.smallest_gpu("No devices were found") == 0


def test_an_unknown_size_of_a_device_is_no_problem(checked: Callable[..., Plan], tmp_path: Path) -> None:
    assert checked("ray.address=auto", "rollout.kv_cache_gb=500").memory[0].total("generate") > 500 * GIB
