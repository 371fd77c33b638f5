"""A pool that the cluster cannot hold is refused before Ray is started, where this machine is the cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridflow import compose
from hybridflow.checks import Plan, check, cluster
from hybridflow.config import GRPOConfig
from hybridflow.errors import ConfigError
from tests.assets import overrides_for


def checked(folder: Path, *overrides: str) -> Plan:
    return check(compose.load("grpo", GRPOConfig, [*overrides_for(folder), *overrides]))


MANY = "asked for 2 nodes x 4 devices; the cluster has this one machine. Write one number, or join a larger cluster"


@pytest.mark.parametrize(
    ("overrides", "at", "message"),
    [
        (["pools.train.devices=[4,4]"], (8, 0), f"pools.train.devices=[4, 4]: {MANY} with ray.address (empty"),
        (["pools.train.devices=[4,2]"], (8, 0), "asked for 2 nodes of 4 + 2 devices; the cluster has this one machine"),
        (
            ["pools.train.devices=[999]"],
            (2, 0),
            "pools.train.devices=[999]: pools ask for 999 (train) + 1 (cpu) devices of pools.*.cores_per_device cores "
            "(where that is 0, of at least 0.1), 100 cores in all; the cluster has 2. Lower it or a cores_per_device",
        ),
        (["pools.cpu={devices: [3], cores_per_device: 1}"], (3, 0), "3 (cpu) devices of"),
        (["pools.train.cores_per_device=100"], (3, 0), "Lower it or a cores_per_device, or join"),
        (["pools.cpu.cores_per_device=1e-5"], (3, 0), "pools.cpu.cores_per_device=1e-05: give at least 0.1, or 0 to"),
        (["pools.train.devices=[16]"], (64, 8), "ask for 16 GPUs in all; the cluster has 8. Lower it"),
    ],
)
def test_a_pool_larger_than_this_machine_is_refused_with_the_arithmetic(
    overrides: list[str], at: tuple[int, int], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "machine", lambda: at)
    with pytest.raises(ConfigError) as error:
        checked(tmp_path, *overrides)
    assert message in str(error.value) and "problems" not in str(error.value)


def test_a_cluster_that_is_joined_may_hold_more_than_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = ["pools.train.devices=[4,4]"]
    assert checked(tmp_path / "a", *many, "ray.address=auto").layouts["actor"].dp == 8
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert checked(tmp_path / "b", *many).layouts["actor"].dp == 8
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setattr(cluster, "machine", lambda: (8, 8))
    assert checked(tmp_path / "c", "pools.train.devices=[8]").layouts["actor"].dp == 8


@pytest.mark.parametrize("address", ["head", "head:port", "head:70000", ":6379", "http://head:8265/", " ", "6379"])
def test_what_is_no_address_is_refused_before_ray_is_asked(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ConfigError, match=f"^ray.address='{address}' is no address of a Ray cluster: it has to be 'auto'"
    ):
        checked(tmp_path / "a", f"ray.address='{address}'")
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match=f"^RAY_ADDRESS='{address}' is no address"):
        checked(tmp_path / "b")
    checked(tmp_path / "c", "ray.address='[::1]:6379'")
