"""The rule about memory: what the fullest device of each pool needs, where it is known what a device has.

The estimate itself is ``hybridflow/planner/memory.py``. What is certain (weights, gradients, optimizer, KV cache) and
does not fit is an error; what only does not fit with the longest rows is a warning.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

from hybridflow.checks.base import CRITICS, SCORERS, Facts, Problem, rule
from hybridflow.checks.cluster import machine, starts_ray_here
from hybridflow.planner.memory import GIB, DeviceMemory, estimate

CPU_PROCESS_BYTES = int(0.72 * GIB)
"""A device process with torch, megatron-core, vLLM and Ray loaded, measured; more than half of it are pages of
libraries that processes of one machine share."""
GPU_PROCESS_BYTES = 1 * GIB
"""Assumed, not measured: the CUDA context, cuBLAS' workspaces and NCCL's buffers."""
REST_BYTES = int(1.5 * GIB)
"""Driver, reward process and Ray's own processes on a machine without GPUs, measured."""

_FIXES = (
    "Raise tp or pp in roles.*.layout, lower rollout.kv_cache_gb, name more in memory.offload, or use more or larger "
    "devices"
)
_BOUND_FIXES = "Lower actor.micro_batch_size or actor.micro_batch_tokens, or set actor.recompute=full"


def device_memory(facts: Facts) -> list[DeviceMemory]:
    """The estimate of a configuration whose layouts fit its model."""
    layouts = {role: facts.layout(role) for role in facts.placed}
    specs = {role: facts.spec_of(role) for role in facts.model_roles()}
    gpus = machine()[1] > 0
    process = GPU_PROCESS_BYTES if gpus else CPU_PROCESS_BYTES
    return estimate(facts.config, specs, layouts, process, packs=not gpus)


@rule(
    *("model", "roles", "pools", "rollout", "actor", "memory", "data.prompts_per_step", "teacher"),
    *("ray.object_store_gb", *CRITICS, *SCORERS),
)
def memory_suffices(facts: Facts) -> Iterator[Problem]:
    devices = device_memory(facts)
    for device in devices:
        yield from _of_a_device(facts, device)
    if not starts_ray_here(facts.config.ray.address) or machine()[1]:
        return
    have = machine_bytes()
    pools = facts.config.pools
    for bounds in (False, True):
        terms = {d.pool: (sum(pools[d.pool].devices), d.most(bounds=bounds)[1]) for d in devices}
        rest = REST_BYTES + int(facts.config.ray.object_store_gb * GIB)
        need = rest + sum(n * each for n, each in terms.values())
        if need > have:
            sums = " + ".join(f"{n} x {_gib(each)} ({pool})" for pool, (n, each) in terms.items())
            text = (
                f"{sums} + {_gib(rest)} (driver, rewards, Ray and ray.object_store_gb) = {_gib(need)} GiB, and this "
                f"machine has {_gib(have)} GiB."
            )
            largest = max(terms, key=lambda pool: terms[pool][0] * terms[pool][1])
            path = f"pools.{largest}.devices"
            if bounds:
                yield Problem(path, f"{path}: with the longest rows {text} {_BOUND_FIXES}.", warning=True)
            else:
                yield Problem(path, f"{path}={pools[largest].devices}: {text} {_FIXES}.")
            return


def _of_a_device(facts: Facts, device: DeviceMemory) -> Iterator[Problem]:
    have = capacity(facts, device.pool)
    where = f"pools.{device.pool}"
    for bounds in (False, True) if have else ():
        situation, need = device.most(bounds=bounds)
        if need > have:
            parts = [(p.name, getattr(p, situation)) for p in device.parts if bounds or not p.bound]
            sums = " + ".join(f"{name} {_gib(size)}" for name, size in parts if size)
            text = (
                f"rank {device.rank} needs {_gib(need)} GiB to {situation} ({sums}), and a device has {_gib(have)} GiB."
            )
            if bounds:
                yield Problem(where, f"{where}: with the longest rows {text} {_BOUND_FIXES}.", warning=True)
            else:
                yield Problem(where, f"{where}: {text} {_FIXES}.")
            return


def capacity(facts: Facts, pool: str) -> int:
    """Bytes of one device of a pool; 0 where that is not known."""
    config = facts.config.pools[pool]
    if config.memory_gb:
        return int(config.memory_gb * GIB)
    if config.kind == "device" and machine()[1] and starts_ray_here(facts.config.ray.address):
        return smallest_gpu(_nvidia_smi())
    return 0


def machine_bytes() -> int:
    """Memory of this machine, or of the container that this process is in if that has less."""
    found = [
        int(line.split()[1]) * 1024 for line in Path("/proc/meminfo").read_text().splitlines() if "MemTotal" in line
    ]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = Path(path).read_text().strip() if Path(path).is_file() else ""
        found += [int(text)] if text.isdigit() else []
    return min(found)


def smallest_gpu(listed: str) -> int:
    """Bytes of the smallest GPU in nvidia-smi's list of MiB, one a line; 0 where it lists none."""
    sizes = [int(line) for line in listed.split() if line.isdigit()]
    return min(sizes, default=0) * 2**20


def _nvidia_smi() -> str:
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=3, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}"
