"""Pools on a real Ray cluster: processes, their world, what they hold and that they let go of it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import ray

from hybridflow.controller.pool import ResourcePool, cluster_nodes
from hybridflow.errors import PlacementError
from hybridflow.platform import CPU, CUDA
from tests.conftest import RAY_ENVIRONMENT
from tests.controller.conftest import alive, group_on, wait_until_gone
from tests.controller.echo import LoudEcho

pytestmark = [pytest.mark.ray, pytest.mark.distributed]


def test_every_process_knows_its_rank_and_the_world_reduces_over_all(pool: ResourcePool):
    group = group_on(pool, "world", tp=2)
    group.setup()
    facts = group.facts()
    assert [f["rank"] for f in facts] == [0, 1]
    assert [f["coordinates"].tp for f in facts] == [0, 1]
    assert [f["environment"] for f in facts] == [
        {"RANK": str(r), "LOCAL_RANK": str(r), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"} for r in range(2)
    ]
    assert facts[0]["store"] == facts[1]["store"] and int(facts[0]["store"][1]) > 0
    assert all(f["ready"] and f["distributed"] and f["device"] == "cpu" and f["threads"] == 1 for f in facts)
    assert [f["pid"] for f in facts] == [place.pid for place in pool.places]
    assert group.sum_of_ranks() == [3.0, 3.0]  # 1 + 2


def test_a_second_pool_runs_beside_the_first_and_a_cpu_pool_has_no_world(pool: ResourcePool):
    with ResourcePool("other", [2], cores_per_device=0.5) as other, ResourcePool("cpu", [1], kind="cpu") as cpu:
        first, second = group_on(pool, "two_pools"), group_on(other, "two_pools")
        sums = [group.sum_of_ranks(blocking=False) for group in (first, second)]
        assert [future.result() for future in sums] == [[3.0, 3.0], [3.0, 3.0]]
        assert first.facts()[0]["store"] != second.facts()[0]["store"]
        (facts,) = group_on(cpu, "reward").facts()
        assert not facts["distributed"] and facts["environment"]["RANK"] is None
        pids = [place.pid for place in (*pool.places, *other.places, *cpu.places)]
        assert len(set(pids)) == 5


def test_a_pool_larger_than_the_cluster_is_refused_at_once_with_the_arithmetic(pool: ResourcePool):
    before = time.monotonic()
    with pytest.raises(PlacementError) as error:
        ResourcePool("huge", [16]).start()
    assert time.monotonic() - before < 30.0
    text = str(error.value)
    assert "pools.huge.devices=[16] asked for 1 node x 16 devices of 1 CPU each, 16 CPU in all; the cluster" in text
    assert "free 7 of 8 CPU; 'main' holds 1 CPU; room for 7" in text
    with pytest.raises(PlacementError, match="asked for 2 nodes x 1 devices"):
        ResourcePool("two_nodes", [1, 1]).start()


def test_processes_that_do_not_come_up_are_named_and_the_devices_given_back(ray_session: str):
    pool = ResourcePool("late", [2], cores_per_device=0.5)
    with pytest.raises(
        PlacementError, match=r"pool 'late': the processes of ranks \[0, 1\] did not start within 0.01 s\. Give start"
    ):
        pool.start(timeout=0.01)
    assert not pool.started and "late" not in cluster_nodes()[0].taken

    @ray.remote(num_cpus=0)
    def fail() -> None:
        raise RuntimeError("no such interface")

    with pytest.raises(
        PlacementError, match=r"(?s)pool 'late': the process of rank 0 did not start: .*no such interface"
    ):
        pool._wait([fail.remote()], 60.0, "start")


def test_a_stopped_pool_closes_its_workers_ends_its_processes_and_gives_its_cores_back(
    ray_session: str, tmp_path: Path
):
    pool = ResourcePool("short", [2], cores_per_device=1.5)
    with pool:
        group = group_on(pool, "loud", LoudEcho)
        group.put("close_file", str(tmp_path / "closed"))
        pids = [place.pid for place in pool.places]
        assert "short" in cluster_nodes()[0].taken and all(map(alive, pids))
        assert "running" in repr(pool)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["closed.0", "closed.1"]
    assert wait_until_gone(pids, 5.0) == []
    assert "short" not in cluster_nodes()[0].taken
    with pytest.raises(PlacementError, match=r"loud\.facts: pool 'short' has been stopped"):
        group.facts()
    pool.stop()  # a second time changes nothing


def test_a_pool_can_be_started_again(ray_session: str):
    pool = ResourcePool("again", [1])
    pids = []
    for _ in range(2):
        with pool:
            pids.append(group_on(pool, "again").facts()[0]["pid"])
            with pytest.raises(PlacementError, match="runs already"):
                pool.start()
    assert len(set(pids)) == 2


def test_devices_are_gpus_where_the_cluster_has_them_but_never_in_a_cpu_pool(ray_session: str):
    (node,) = cluster_nodes()
    with_gpus = [type(node)("n", "host", {"CPU": 8.0, "GPU": 2.0})]
    device, cpu = ResourcePool("device", [2]), ResourcePool("cpu", [2], kind="cpu")
    assert device._choose_platform(with_gpus) is CUDA and cpu._choose_platform(with_gpus) is CPU
    assert device._choose_platform([node]) is CPU
    device.platform = CUDA
    assert device._bundle() == {"CPU": 1.0, "GPU": 1} and cpu._bundle() == {"CPU": 1.0}


DRIVER = """
    import sys, time
    import ray
    sys.path.insert(0, {root!r})
    ray.init(address={address!r}, log_to_driver=False, logging_level="ERROR")
    from hybridflow.controller.pool import ResourcePool
    from tests.controller.conftest import group_on
    pool = ResourcePool("orphan", [2], cores_per_device=0.5).start()
    group = group_on(pool, "orphan")
    group.reduce_while_waiting_for(0, {started!r}, blocking=False)
    print(*[place.pid for place in pool.places], flush=True)
    time.sleep(600)
"""


def test_no_process_outlives_a_killed_driver_even_inside_a_collective(ray_session: str, tmp_path: Path):
    started = tmp_path / "started"
    root = str(Path(__file__).resolve().parents[2])
    script = textwrap.dedent(DRIVER.format(root=root, address=ray_session, started=str(started)))
    driver = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=root,
    )
    try:
        assert driver.stdout is not None
        pids = [int(word) for word in driver.stdout.readline().split()]
        assert len(pids) == 2, driver.stderr.read() if driver.stderr else ""
        while not started.exists():
            time.sleep(0.05)
        assert all(map(alive, pids))
    finally:
        driver.kill()
        driver.wait()
    assert wait_until_gone(pids, 20.0) == []


TWO_NODES = """
    import ray
    from ray.cluster_utils import Cluster
    from hybridflow.controller.pool import ResourcePool, cluster_nodes
    from hybridflow.errors import PlacementError, WorkerError
    from tests.controller.conftest import group_on
    small = dict(num_gpus=0, object_store_memory=80 * 2**20)
    cluster = Cluster(initialize_head=True, head_node_args=dict(num_cpus=4, include_dashboard=False, **small))
    cluster.add_node(num_cpus=2, **small)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    try:
        ResourcePool("three", [1, 1, 1]).start()
    except PlacementError as error:
        assert "asked for 3 nodes x 1 devices" in str(error) and "has 2 node(s)" in str(error), error
    with ResourcePool("uneven", [1, 2]) as pool:
        held = {node.total["CPU"]: node.taken["uneven"]["CPU"] for node in cluster_nodes()}
        assert held == {4: 1, 2: 2}, held
        group = group_on(pool, "split")
        assert group.sum_of_ranks() == [6.0] * 3
        local = [(f["environment"]["LOCAL_RANK"], f["environment"]["LOCAL_WORLD_SIZE"]) for f in group.facts()]
        assert local == [("0", "1"), ("0", "2"), ("1", "2")], local
        try:  # the stack is taken, and the process is interrupted, on its own node
            group.nap(600.0, ranks=[2], timeout=1.0)
        except WorkerError as error:
            assert "no answer within 1 s from ranks [2] of 3" in error.cause, error
            assert "in Echo.nap" in error.traceback, error
        assert group_on(pool, "other").sum_of_ranks() == [6.0] * 3, "it was interrupted, not ended"
    ray.shutdown()
    cluster.shutdown()
    print("two nodes")
"""


def test_a_pool_of_uneven_nodes_is_split_as_asked_over_two_ray_nodes():
    # Both Ray nodes stand on this machine: 4 cores and 2. The entry of 2 has to go to the fullest, the 1 to the other.
    root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, **RAY_ENVIRONMENT, "PYTHONPATH": root}
    script = textwrap.dedent(TWO_NODES)
    done = subprocess.run([sys.executable, "-c", script], env=environment, cwd=root, capture_output=True, text=True)
    assert done.stdout.strip().endswith("two nodes"), done.stderr
