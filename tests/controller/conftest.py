"""Pools shared by the controller's tests: each start costs seconds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridflow.config import RunConfig
from hybridflow.controller.group import WorkerGroup
from hybridflow.controller.pool import ResourcePool
from hybridflow.resharding.layout import ParallelLayout
from tests.controller.echo import Echo


@pytest.fixture(scope="module")
def pool(ray_session: str) -> Iterator[ResourcePool]:
    """Two devices with a gloo world."""
    with ResourcePool("main", [2], cores_per_device=0.5) as started:
        yield started


@pytest.fixture
def fresh_pool(ray_session: str) -> Iterator[ResourcePool]:
    """Two devices of one test's own, to be broken."""
    with ResourcePool("fresh", [2], cores_per_device=0.5) as started:
        yield started


def group_on(pool: ResourcePool, role: str, worker: type = Echo, tp: int = 1, **options: float) -> WorkerGroup:
    """A role that fills the pool."""
    return WorkerGroup(pool, role, worker, ParallelLayout.on(pool.size, tp=tp), RunConfig(name="test"), **options)


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pids: list[int], seconds: float) -> list[int]:
    """The processes that still run after at most this time."""
    deadline = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [pid for pid in pids if alive(pid)]
