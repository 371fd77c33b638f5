"""Rows and failures across the nodes of a cluster: two Ray nodes that stand on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.conftest import RAY_ENVIRONMENT

pytestmark = pytest.mark.ray

TWO_NODES = """
    import socket
    import time
    import ray
    import torch
    from ray._private.internal_api import node_stats
    from ray.cluster_utils import Cluster
    from hybridflow.controller.pool import ResourcePool
    from hybridflow.errors import DataError, WorkerDiedError
    from hybridflow.protocol.data import DataProto
    from tests.controller.conftest import group_on
    from tests.controller.rows import WIDE, RowWorker

    small = dict(num_gpus=0, object_store_memory=80 * 2**20)
    cluster = Cluster(initialize_head=True, head_node_args=dict(num_cpus=2, include_dashboard=False, **small))
    second = cluster.add_node(num_cpus=2, **small)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")

    def objects():
        return [
            node_stats(node["NodeManagerAddress"], node["NodeManagerPort"]).store_stats.num_local_objects
            for node in ray.nodes()
        ]

    def settled():
        deadline = time.monotonic() + 20
        while any(objects()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return objects()

    makers = ResourcePool("makers", [1, 1], kind="cpu", cores_per_device=0.5).start()
    readers = ResourcePool("readers", [1, 1], kind="cpu", cores_per_device=0.5).start()
    assert len({place.node_id for place in makers.places}) == len({place.node_id for place in readers.places}) == 2
    maker, reader = group_on(makers, "maker", RowWorker), group_on(readers, "reader", RowWorker)
    here = ray.get_runtime_context().get_node_id()
    for line, place in zip(makers.lines, makers.places):
        assert (line._socket.family == socket.AF_UNIX) == (place.node_id == here), (line._socket, place)
    made = maker.make(DataProto({"x": torch.arange(4)}))
    assert objects() == [1, 1], ("a shard on each node", objects())
    assert reader.first_of(made)["first"].tolist() == [0, 1, 2, 3]
    assert objects() == [1, 1], ("each reader has read its own node's shard", objects())
    assert reader.pass_on(made.reorder([2, 3, 0, 1])).keys() and objects() == [1, 1], "unread rows have not moved"
    assert reader.first_of(made.reorder([2, 3, 0, 1]))["first"].tolist() == [2, 3, 0, 1]
    assert objects() == [2, 2], ("each node has got the other's shard", objects())
    assert made["wide"][:, WIDE - 1].tolist() == [0, 1, 2, 3], "the driver reads both"
    del made
    assert settled() == [0, 0], ("freed on both", objects())

    on_second = next(place for place in makers.places if place.node_id == second.node_id)
    made = maker.make(DataProto({"x": torch.arange(4)}))
    future = maker.work(DataProto({"x": torch.arange(4)}), 600.0, blocking=False)
    time.sleep(1.0)
    cluster.remove_node(second, allow_graceful=False)
    before = time.monotonic()
    try:
        future.result()
    except WorkerDiedError as error:
        assert error.rank == on_second.rank and "maker.work failed" in str(error), error
    seconds = time.monotonic() - before
    print("a lost node was named after", seconds, "s")
    assert seconds < 10
    here = 1 - on_second.rank
    assert made[2 * here : 2 * here + 2]["wide"][:, 0].tolist() == [2.0 * here, 2.0 * here + 1]
    try:
        made["wide"]
        raise SystemExit("rows of a lost node were read")
    except DataError as error:
        assert f"column 'wide' of maker.make on rank {on_second.rank} cannot be read any more" in str(error), error
    ray.shutdown()
    cluster.shutdown()
    print("two nodes")
"""


def test_rows_cross_nodes_only_when_they_are_read_and_a_lost_node_is_named():
    root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, **RAY_ENVIRONMENT, "PYTHONPATH": root}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(TWO_NODES)],
        env=environment,
        cwd=root,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.stdout.strip().endswith("two nodes"), done.stdout[-2000:] + done.stderr[-4000:]
