"""The rule about what the cluster has, where that can be known without Ray: where a run starts Ray on this machine.

A cluster that is joined is asked by the pools themselves (``controller/pool.py``), in the same words.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from hybridflow.checks.base import Facts, Problem, rule

LEAST_CORES = 0.1
"""Of a device process: with less it does not come up in time."""


@rule()
def the_address_is_one(facts: Facts) -> Iterator[Problem]:
    for name, address in (
        ("ray.address", facts.config.ray.address),
        ("RAY_ADDRESS", os.environ.get("RAY_ADDRESS", "")),
    ):
        host, _, port = address.removeprefix("ray://").rpartition(":")
        whole = bool(host.strip()) and "/" not in host and port.isdecimal() and 0 < int(port) < 2**16
        if address not in ("", "auto", "local") and not whole:
            yield Problem(
                "ray.address",
                f"{name}={address!r} is no address of a Ray cluster: it has to be 'auto' or host:port with a port of 1 "
                "to 65535, such as 10.0.0.1:6379. Mend it, or leave it empty, so that Ray is started on this machine.",
            )
        if address:
            return  # ray.address goes before RAY_ADDRESS


@rule("roles", "pools")
def pools_fit_this_machine(facts: Facts) -> Iterator[Problem]:
    if not starts_ray_here(facts.config.ray.address):
        return  # the pool itself asks the cluster
    pools = {name: facts.config.pools[name] for name in {at.pool: None for at in facts.placed.values()}}
    join = "or join a larger cluster with ray.address (empty, so that Ray is started on this machine alone)."
    for name, pool in pools.items():
        if len(pool.devices) > 1:
            yield Problem(
                f"pools.{name}.devices",
                f"pools.{name}.devices={pool.devices}: asked for {nodes_text(pool.devices)}; the cluster has this one "
                f"machine. Write one number, {join}",
            )
            return
    for name, pool in pools.items():
        if 0 < pool.cores_per_device < LEAST_CORES:
            setting = f"pools.{name}.cores_per_device"
            yield Problem(
                setting, f"{setting}={pool.cores_per_device}: give at least {LEAST_CORES}, or 0 to share cores."
            )
            return
    largest = max(pools, key=lambda name: sum(pools[name].devices))
    cores, gpus = machine()
    on_gpus = [name for name in pools if pools[name].kind == "device"] if gpus else []
    wanted = sum(sum(pools[name].devices) for name in on_gpus)
    asked = " + ".join(f"{sum(pool.devices)} ({name})" for name, pool in pools.items())
    need = sum(sum(pool.devices) * (pool.cores_per_device or LEAST_CORES) for pool in pools.values())
    if wanted > gpus > 0:
        name = max(on_gpus, key=lambda name: sum(pools[name].devices))
        yield Problem(
            f"pools.{name}.devices",
            f"pools.{name}.devices={pools[name].devices}: pools of kind 'device' ask for {wanted} GPUs in all; the "
            f"cluster has {gpus}. Lower it, {join}",
        )
    elif need > cores + 1e-6:
        yield Problem(
            f"pools.{largest}.devices",
            f"pools.{largest}.devices={pools[largest].devices}: pools ask for {asked} devices of "
            f"pools.*.cores_per_device cores (where that is 0, of at least {LEAST_CORES}), {need:g} cores in all; the "
            f"cluster has {cores}. Lower it or a cores_per_device, {join}",
        )


def starts_ray_here(address: str) -> bool:
    """Whether a run with this ``ray.address`` starts Ray itself, so that this machine is all of its cluster."""
    ray = sys.modules.get("ray")  # imported by who has started it
    return not (address or os.environ.get("RAY_ADDRESS") or (ray is not None and ray.is_initialized()))


def machine() -> tuple[int, int]:
    """Cores and GPUs of this machine, as Ray counts them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = (
        len(list(Path("/dev").glob("nvidia[0-9]*"))) if visible is None else len(visible.split(",")) if visible else 0
    )
    return os.cpu_count() or 1, gpus


def nodes_text(devices: Sequence[int]) -> str:
    """``2 nodes x 4 devices``, or ``2 nodes of 4 + 2 devices`` where they differ."""
    if len(set(devices)) == 1:
        return f"{len(devices)} node{'s' if len(devices) > 1 else ''} x {devices[0]} devices"
    return f"{len(devices)} nodes of {' + '.join(map(str, devices))} devices"
