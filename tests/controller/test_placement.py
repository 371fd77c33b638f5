"""Choosing nodes is pure arithmetic: a cluster is a list of values here."""

from __future__ import annotations

from importlib import import_module

import pytest

from hybridflow.config import PoolConfig, PPOConfig, RewardConfig, RewardModelConfig, SafeRLHFConfig
from hybridflow.controller.placement import REWARD_MODEL, REWARD_MODEL_IN_TRAINING, WORKERS, worker_of
from hybridflow.controller.pool import Node, ResourcePool, build_pools, choose_nodes
from hybridflow.errors import ConfigError, PlacementError
from hybridflow.workers.base import Worker, registrations


def imported(path: str) -> type[Worker]:
    module, name = path.split(":")
    return getattr(import_module(module), name)


def node(name: str, cpus: float, gpus: float = 0, **taken: dict[str, float]) -> Node:
    return Node(name, f"host-{name}", {"CPU": cpus, "GPU": gpus}, taken)


def test_each_entry_of_devices_gets_a_node_of_its_own():
    assert choose_nodes("p", [4, 4], {"CPU": 1}, [node("a", 8), node("b", 8)]) == ["a", "b"]
    with pytest.raises(PlacementError, match=r"asked for 2 nodes x 4 devices of 1 CPU each, 8 CPU in all"):
        choose_nodes("p", [4, 4], {"CPU": 1}, [node("a", 8)])


def test_uneven_nodes_are_matched_largest_first_on_the_fullest_that_fits():
    nodes = [node("big", 8), node("small", 4)]
    assert choose_nodes("p", [2, 6], {"CPU": 1}, nodes) == ["small", "big"]
    assert choose_nodes("p", [3], {"CPU": 1}, nodes) == ["small"]


def test_a_device_needs_all_of_its_resources():
    nodes = [node("cores", 16, 0), node("gpus", 8, 2)]
    assert choose_nodes("p", [2], {"CPU": 1, "GPU": 1}, nodes) == ["gpus"]
    with pytest.raises(PlacementError):
        choose_nodes("p", [3], {"CPU": 1, "GPU": 1}, nodes)


def test_shares_of_a_core_add_up_without_rounding_away_a_device():
    # 3 * 0.33 = 0.99 <= 1, and 10 * 0.1 is 10 devices although 1 / 0.1 is not exact in binary.
    assert choose_nodes("p", [3], {"CPU": 0.33}, [node("a", 1)]) == ["a"]
    assert choose_nodes("p", [10], {"CPU": 0.1}, [node("a", 1)]) == ["a"]


def test_a_pool_that_does_not_fit_is_told_what_is_needed_free_and_taken():
    nodes = [node("a", 8, 0, train={"CPU": 6.0})]
    with pytest.raises(PlacementError) as error:
        choose_nodes("rollout", [4], {"CPU": 1.0}, nodes)
    for part in (
        "pools.rollout.devices=[4]",
        "asked for 1 node x 4 devices of 1 CPU each, 4 CPU in all; the cluster has 1 node(s):",
        "free 2 of 8 CPU",
    ):
        assert part in str(error.value)
    assert "'train' holds 6 CPU; room for 2" in str(error.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"devices": []}, r"pools\.p\.devices=\[\]"),
        ({"devices": [2, 0]}, r"pools\.p\.devices=\[2, 0\]"),
        ({"devices": [1], "kind": "gpu"}, "choose one of device, cpu"),
        ({"devices": [1], "cores_per_device": 0}, "needs a share of a core"),
    ],
)
def test_a_wrong_setting_names_its_field(settings: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        ResourcePool("p", **settings)


def test_a_pool_without_ray_says_what_to_call(monkeypatch: pytest.MonkeyPatch):
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(
        PlacementError, match=r"pool 'p': Ray is not running in this process\. Call hybridflow\.launch or"
    ):
        ResourcePool("p", [1]).start()


def test_cores_left_open_are_shared_over_the_smallest_node(monkeypatch: pytest.MonkeyPatch):
    # (8 - 2 * 1.0) / (4 + 2) = 1.0 per device; with 2 cores declared (2 - 0) / 6 = 0.33.
    import ray

    from hybridflow.controller import pool

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    open_pools = {"train": PoolConfig(devices=[4]), "rollout": PoolConfig(devices=[2])}
    monkeypatch.setattr(pool, "cluster_nodes", lambda: [node("a", 8), node("b", 16)])
    pools = build_pools({**open_pools, "cpu": PoolConfig(devices=[2], kind="cpu", cores_per_device=1.0)})
    assert {name: p.cores_per_device for name, p in pools.items()} == {"train": 1.0, "rollout": 1.0, "cpu": 1.0}
    monkeypatch.setattr(pool, "cluster_nodes", lambda: [node("a", 2)])
    assert {p.cores_per_device for p in build_pools(open_pools).values()} == {0.33}
    monkeypatch.setattr(pool, "cluster_nodes", lambda: [node("a", 64)])
    assert {p.cores_per_device for p in build_pools(open_pools).values()} == {10.0}
    with pytest.raises(PlacementError) as error:
        build_pools({**open_pools, "cpu": PoolConfig(devices=[64], kind="cpu", cores_per_device=1.0)})
    assert "asked for 4 (train) + 2 (rollout) devices that share a node's cores" in str(error.value)
    assert "has 64, of which pools with a cores_per_device hold 64: (64 - 64) / 6 = 0 cores each" in str(error.value)
    with pytest.raises(PlacementError, match=r"\(64 - 0\) / 999 = 0.0641 cores each.*at least 0.1"):
        build_pools({"train": PoolConfig(devices=[999])})


def test_every_role_has_a_class_and_a_model_may_score_in_place_of_functions():
    classes = {path: imported(path) for path in (*WORKERS.values(), REWARD_MODEL, REWARD_MODEL_IN_TRAINING)}
    assert all(issubclass(found, Worker) and "setup" in registrations(found) for found in classes.values())
    assert {"update", "values", "save", "load"} <= set(registrations(classes[WORKERS["critic"]]))
    by_model, functions = RewardConfig(path="folder"), RewardConfig()
    assert worker_of("reward", PPOConfig(reward=functions)) == WORKERS["reward"]
    assert worker_of("reward", PPOConfig(reward=by_model)) == REWARD_MODEL
    assert worker_of("cost", SafeRLHFConfig(cost=by_model)) == worker_of("reward", PPOConfig(reward=by_model))
    assert worker_of("actor", PPOConfig()) == WORKERS["actor"]
    assert worker_of("actor", RewardModelConfig()) == REWARD_MODEL_IN_TRAINING
