"""A cluster of hosts with addresses of their own, started by scripts/ray_hosts.sh: network namespaces on this machine.

What the script does over ssh it does here by `ip netns exec`. Every host has a /tmp/ray and a ~/.ray of its own, and
a name that stands for 127.0.0.1 alone. The cable between the two is cut in the end.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import RAY_ENVIRONMENT

ROOT = Path(__file__).resolve().parents[2]
HEAD, SECOND = "10.213.77.1", "10.213.77.2"

ON = """#!/bin/bash
host=$1; shift
exec ip netns exec "$host" unshare --mount bash -c '
  mount --bind "{folder}/$0" /tmp/ray && mount --bind "{folder}/$0.token" ~/.ray && exec bash -c "$*"
' "$host" "$@"
"""

DRIVER = """
    import logging
    import sys
    import threading
    import time
    import ray
    from hybridflow.controller.launch import join_cluster
    from hybridflow.controller.pool import ResourcePool
    from hybridflow.errors import PlacementError, WorkerDiedError
    from tests.controller.conftest import group_on

    head, second = sys.argv[1:]
    join_cluster(f"{head}:6379", log_to_driver=False, logging_level=logging.ERROR)
    assert {node["NodeManagerAddress"] for node in ray.nodes()} == {head, second}

    # Two pools that start at once, each with a world over both hosts: addresses and ports do not collide.
    pools = [ResourcePool("uneven", [2, 1], cores_per_device=1), ResourcePool("even", [1, 1], cores_per_device=0.5)]
    threads = [threading.Thread(target=pool.start, args=(100,)) for pool in pools]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    stores = set()
    for pool in pools:
        nodes = [place.node for place in pool.places]
        assert [nodes.count(nodes[0]), len(nodes) - nodes.count(nodes[0])] == list(pool.devices), nodes
        assert set(nodes) == {head, second}
        group = group_on(pool, "echo")
        assert group.sum_of_ranks() == [sum(range(1, pool.size + 1))] * pool.size
        facts = group.facts()
        stores |= {fact["store"] for fact in facts}
        assert facts[0]["store"][0] == nodes[0]
        environments = [fact["environment"] for fact in facts]
        assert [int(e["LOCAL_WORLD_SIZE"]) for e in environments] == [n for n in pool.devices for _ in range(n)]
        assert [int(e["LOCAL_RANK"]) for e in environments] == [i for n in pool.devices for i in range(n)]
    assert len(stores) == 2 and len({port for _, port in stores}) == 2, stores

    # Six cores are left for pools, and no host has more than four: what does not fit one host is not spread over two.
    try:
        ResourcePool("large", [3], cores_per_device=1).start()
        raise SystemExit("three devices of one host were placed where each has room for two at most")
    except PlacementError as error:
        assert "pools.large.devices=[3] asked for 1 node x 3 devices of 1 CPU each" in str(error), error
        assert "the cluster has 2 node(s)" in str(error) and head in str(error) and second in str(error), error

    [pool] = [pool for pool in pools if pool.name == "even"]
    rank = [place.node for place in pool.places].index(second)
    future = group_on(pool, "napper").nap(600.0, blocking=False)
    time.sleep(1.0)
    print("cut", flush=True)
    sys.stdin.readline()
    begin = time.monotonic()
    try:
        future.result()
    except WorkerDiedError as error:
        assert error.rank == rank and f"on node {second}" in str(error) and "its node has died" in str(error), error
        print("named after", time.monotonic() - begin, "s")
"""


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """Two hosts that see each other; what runs on them ends with the test."""
    if os.geteuid() or not all(map(shutil.which, ("ip", "unshare", "mount"))):
        pytest.skip("needs root, ip, unshare and mount for hosts of its own")
    names = (f"hf{os.getpid()}a", f"hf{os.getpid()}b")
    bridge = f"hfbr{os.getpid()}"
    for folder in (Path("/tmp/ray"), Path.home() / ".ray"):
        folder.mkdir(exist_ok=True)
    try:
        run("ip", "link", "add", bridge, "type", "bridge")
        run("ip", "link", "set", bridge, "up")
        for name, address in zip(names, (HEAD, SECOND), strict=True):
            (tmp_path / name).mkdir()
            (tmp_path / f"{name}.token").mkdir()
            run("ip", "netns", "add", name)
            run("ip", "link", "add", f"v{name}", "type", "veth", "peer", "name", "eth0", "netns", name)
            run("ip", "link", "set", f"v{name}", "master", bridge, "up")
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                run("ip", "-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout
            for pid in found.split():
                os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True)


@pytest.mark.ray
def test_hosts_with_addresses_of_their_own_hold_worlds_and_a_lost_one_is_named_in_seconds(
    hosts: tuple[str, str], tmp_path: Path
) -> None:
    on = tmp_path / "on"
    on.write_text(ON.format(folder=tmp_path))
    on.chmod(0o755)
    size = "--num-cpus=4 --num-gpus=0 --object-store-memory=83886080"
    environment = {
        **os.environ,
        **RAY_ENVIRONMENT,
        "ON": str(on),
        "RAY": str(Path(sys.executable).parent / "ray"),
        "HEAD_ARGS": f"{size} --include-dashboard=false",
        "NODE_ARGS": size,
        "PYTHONPATH": str(ROOT),
        "FORWARD": " ".join(["PYTHONPATH", *RAY_ENVIRONMENT]),
    }
    script = [str(ROOT / "scripts" / "ray_hosts.sh"), "start", *hosts]
    started = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=200)
    assert started.returncode == 0, started.stderr[-4000:]
    assert f"RAY_AUTH_MODE=token and ray.address={HEAD}:6379" in started.stdout

    driver = tmp_path / "driver.py"
    driver.write_text(textwrap.dedent(DRIVER))
    command = f"cd {ROOT} && RAY_AUTH_MODE=token exec {sys.executable} {driver} {HEAD} {SECOND}"
    with subprocess.Popen(
        [str(on), hosts[0], command],
        env=environment,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        assert process.stdin and process.stdout
        said = []
        for line in process.stdout:
            said.append(line)
            if line == "cut\n":
                run("ip", "link", "set", f"v{hosts[1]}", "down")
                process.stdin.write("\n")
                process.stdin.flush()
    found = re.search(r"named after ([\d.]+) s", "".join(said))
    assert found, "".join(said)[-4000:]
    assert float(found[1]) < 10
