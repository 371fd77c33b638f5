"""Resource pools: named sets of devices on the Ray cluster, and the device processes that run on them.

A pool is one Ray placement group with one bundle per device, pinned to nodes that the pool chooses itself, so that
``devices=[4, 4]`` is two nodes of four and never one node of eight. It owns one DeviceProcess per device and, for
``kind="device"``, one torch.distributed world over them. The invariants: pools do not overlap, and a pool the cluster
cannot hold is refused at once with the arithmetic instead of waiting for resources.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hybridflow.checks.cluster import LEAST_CORES, nodes_text
from hybridflow.config import PoolConfig
from hybridflow.controller import outside
from hybridflow.controller.line import Asked, Line
from hybridflow.controller.process import DeviceProcess, Place
from hybridflow.controller.store import this_node
from hybridflow.errors import ConfigError, PlacementError, WorkerError
from hybridflow.platform import CPU, CUDA, Platform

if TYPE_CHECKING:
    from hybridflow.controller.group import DataFuture
    from hybridflow.trace import Span

log = logging.getLogger(__name__)

KINDS = ("device", "cpu")
_PREFIX = "hybridflow:"


@dataclass(frozen=True)
class Node:
    """One machine of the cluster as a pool sees it.

    Attributes:
        total: resources of the node.
        taken: resources that pools on the node hold, by pool.
    """

    node_id: str
    address: str
    total: Mapping[str, float]
    taken: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def free(self, resource: str) -> float:
        return self.total.get(resource, 0.0) - sum(held.get(resource, 0.0) for held in self.taken.values())

    def room(self, bundle: Mapping[str, float]) -> int:
        """How many devices, each needing ``bundle``, still fit."""
        return int(min(math.floor(self.free(name) / need + 1e-6) for name, need in bundle.items()))

    def describe(self, bundle: Mapping[str, float]) -> str:
        held = [f"{pool!r} holds {_amounts(used)}" for pool, used in self.taken.items()]
        free = ", ".join(f"{self.free(name):g} of {self.total.get(name, 0.0):g} {name}" for name in bundle)
        return f"node {self.address}: free {free}" + "".join(f"; {h}" for h in held) + f"; room for {self.room(bundle)}"


def choose_nodes(pool: str, devices: Sequence[int], bundle: Mapping[str, float], nodes: Sequence[Node]) -> list[str]:
    """The node id for each entry of ``devices``, all distinct.

    The largest entry is placed first, on the fullest node that still holds it. Pure.

    Raises:
        PlacementError: where the pool does not fit, with what it needs, what each node has and who holds the rest.
    """
    chosen: dict[int, str] = {}
    for entry in sorted(range(len(devices)), key=lambda i: -devices[i]):
        fitting = [n for n in nodes if n.node_id not in chosen.values() and n.room(bundle) >= devices[entry]]
        if not fitting:
            lines = "\n".join(f"  {node.describe(bundle)}" for node in nodes) or "  (no node is alive)"
            raise PlacementError(
                f"pool {pool!r} does not fit: pools.{pool}.devices={list(devices)} asked for {nodes_text(devices)} of "
                f"{_amounts(bundle)} each, {_amounts(bundle, sum(devices))} in all; the cluster has {len(nodes)} "
                f"node(s):\n{lines}\nLower pools.{pool}.devices or pools.{pool}.cores_per_device, free another pool, "
                f"or add nodes to the Ray cluster."
            )
        chosen[entry] = min(fitting, key=lambda node: node.room(bundle)).node_id
    return [chosen[entry] for entry in range(len(devices))]


def cluster_nodes() -> list[Node]:
    """The living nodes of the cluster with what placement groups already hold on them."""
    taken: dict[str, dict[str, dict[str, float]]] = {}
    for group in placement_group_table().values():
        if group["state"] != "CREATED":
            continue
        name = group["name"].removeprefix(_PREFIX) or group["placement_group_id"][:8]
        for index, bundle in group["bundles"].items():
            held = taken.setdefault(group["bundles_to_node_id"][index], {}).setdefault(name, {})
            for resource, amount in bundle.items():
                held[resource] = held.get(resource, 0.0) + amount
    return [
        Node(node["NodeID"], node["NodeManagerAddress"], node["Resources"], taken.get(node["NodeID"], {}))
        for node in ray.nodes()
        if node["Alive"]
    ]


def build_pools(configs: Mapping[str, PoolConfig]) -> dict[str, ResourcePool]:
    """Pools (not started) from the run's configuration; needs Ray where a pool leaves its cores to us.

    ``cores_per_device: 0`` shares evenly what the other pools leave of the smallest node, as if all pools stood on
    it, so that the share fits wherever they land.
    """
    shares = [max(config.devices) for config in configs.values() if not config.cores_per_device]
    share = 1.0
    if shares:
        _require_ray("pools")
        fixed = sum(max(c.devices) * c.cores_per_device for c in configs.values() if c.cores_per_device)
        cores = min(node.total.get("CPU", 0.0) for node in _device_nodes(cluster_nodes()))
        share = math.floor(100 * (cores - fixed) / sum(shares)) / 100
        if share < LEAST_CORES:
            asked = " + ".join(f"{max(c.devices)} ({n})" for n, c in configs.items() if not c.cores_per_device)
            raise PlacementError(
                f"asked for {asked} devices that share a node's cores; the smallest node of the cluster has {cores:g}, "
                f"of which pools with a cores_per_device hold {fixed:g}: ({cores:g} - {fixed:g}) / {sum(shares)} = "
                f"{(cores - fixed) / sum(shares):.3g} cores each, and a device process needs at least {LEAST_CORES}. "
                f"Lower pools.*.devices or pools.*.cores_per_device, or add cores to the Ray cluster."
            )
        share = math.floor(share) if share >= 1 else share
    return {
        name: ResourcePool(name, list(config.devices), config.kind, config.cores_per_device or share)
        for name, config in configs.items()
    }


@dataclass
class Failure:
    """A call that failed, as a pool remembers it.

    Attributes:
        role: whose call it was.
        error: what the driver was told, or is to be told.
        left_out: the call, where it did not run because one whose value it takes had failed.
        because: that failure.
        ended: ranks that did not leave the call, so that their processes were ended.
        cancelled: ranks that were interrupted inside of it.
        dead: whether processes of the pool are gone.
        apart: whether its ranks no longer agree on what has happened: it went on here, and failed or stopped there.
        told: whether the driver has been told.
    """

    role: str
    error: WorkerError
    left_out: str = ""
    because: Failure | None = None
    ended: Sequence[int] = ()
    cancelled: Sequence[int] = ()
    dead: bool = False
    apart: bool = False
    told: bool = False

    def tell(self) -> None:
        """The driver is being told, of what it came from too."""
        self.told = True
        if self.because is not None:
            self.because.tell()

    @property
    def consequence(self) -> str:
        """What it has done to its role or pool; empty where every rank refused alike (a wrong argument, say)."""
        if self.ended:
            return f"the processes of ranks {self.ended}, which did not leave it, were ended"
        if self.dead:
            return "its process is gone"
        if self.cancelled:
            return f"it was cancelled on ranks {self.cancelled}"
        return "it succeeded on some ranks and not on others" if self.apart else ""


class ResourcePool:
    """A named set of devices.

    Args:
        name: name in the placement.
        devices: devices per node.
        kind: ``device`` (GPUs where the cluster has them, else shares of cores; one torch.distributed world) or
            ``cpu`` (processes that never take a GPU and have no such world).
        cores_per_device: CPU cores that Ray reserves for each process; its thread count is this, rounded.
    """

    def __init__(self, name: str, devices: Sequence[int], kind: str = "device", cores_per_device: float = 1.0) -> None:
        if not devices or any(not isinstance(n, int) or n < 1 for n in devices):
            raise ConfigError(
                f"pools.{name}.devices={devices!r}: give the devices of each node, such as [4] or [4, 4]."
            )
        if kind not in KINDS:
            raise ConfigError(f"pools.{name}.kind={kind!r}: choose one of {', '.join(KINDS)}.")
        if not cores_per_device > 0:
            raise ConfigError(f"pools.{name}.cores_per_device={cores_per_device!r}: a process needs a share of a core.")
        self.name, self.devices, self.kind = name, tuple(devices), kind
        self.cores_per_device = float(cores_per_device)
        self.platform: Platform = CPU
        self.processes: list[Any] = []
        self.places: list[Place] = []
        self.lines: list[Line] = []
        self.failures: list[Failure] = []
        self.num_failures = 0
        # In the order in which they were queued.
        self.open_calls: dict[DataFuture, None] = {}
        # The newest ones: a driver without a Run has nobody who takes them away.
        self.spans: deque[Span] = deque(maxlen=100_000)
        # Two threads of a driver must not interleave the calls they queue on the ranks: collectives would cross.
        self.lock = threading.Lock()
        self._group: Any = None
        self._serving: list[Any] = []  # Ray's references to what the processes do

    @property
    def size(self) -> int:
        return sum(self.devices)

    @property
    def started(self) -> bool:
        return bool(self.places)

    def start(self, timeout: float = 300.0) -> ResourcePool:
        """Reserve the devices, start one process on each and join them in their world.

        Args:
            timeout: seconds that processes may take to come up, and again to join their world.

        Raises:
            PlacementError: where Ray is not running, the pool does not fit, or a process does not come up.
        """
        if self.started:
            raise PlacementError(f"pool {self.name!r} runs already.")
        _require_ray(f"pool {self.name!r}")
        nodes = cluster_nodes()
        self.platform = self._choose_platform(nodes)
        bundle = self._bundle()
        chosen = choose_nodes(self.name, self.devices, bundle, nodes)
        node_of = [node for node, count in zip(chosen, self.devices, strict=True) for _ in range(count)]
        local_rank = [i for count in self.devices for i in range(count)]
        try:
            self._reserve(bundle, node_of, nodes)
            self._start_processes(bundle, node_of, nodes, timeout)
            if self.kind == "device":
                self._join_world(node_of, local_rank, nodes, timeout)
            self._connect(node_of, nodes, timeout)
        except BaseException:
            self.kill()
            raise
        return self

    def stop(self, timeout: float = 10.0) -> None:
        """Cancel what runs, let workers close what they hold (at most ``timeout`` seconds), then free everything."""
        dead = any(failure.dead for failure in self.failures)
        if self.started and not dead and ray.is_initialized():
            if self.open_calls:
                outside.interrupt(self.places)
            for line in self.lines:
                line.close()
            ray.wait(self._serving, num_returns=len(self._serving), timeout=timeout)
        self.kill()

    def kill(self) -> None:
        """End every process now and give the devices back."""
        if ray.is_initialized():
            for process in self.processes:
                ray.kill(process)
            # Their sockets and memory are free only once they are gone.
            gone = [process.place.remote("", "") for process in self.processes]
            ray.wait(gone, num_returns=len(gone), timeout=10.0) if gone else None
            if self._group is not None:
                remove_placement_group(self._group)
        self.processes, self.places, self.failures, self._group = [], [], [], None
        self.lines, self._serving = [], []
        self.num_failures = 0  # the next processes know of none
        self.open_calls.clear()

    def finish(self) -> None:
        """Wait for the calls whose futures nobody has read.

        Raises:
            WorkerError: of the first one that failed without the driver being told.
        """
        for call in list(self.open_calls):
            if not call.done():
                log.info("pool %r: waiting for %r, which nobody has read", self.name, call)
            call.wait()
        for failure in self.failures:
            if not failure.told:
                failure.error.add_note("It was an asynchronous call, and nobody has read its future.")
                raise failure.error

    def __enter__(self) -> ResourcePool:
        return self if self.started else self.start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self.stop()

    def __repr__(self) -> str:
        state = f"{self.platform.device_type}, running" if self.started else "not started"
        return f"ResourcePool({self.name!r}, devices={list(self.devices)}, kind={self.kind!r}, {state})"

    def ask(
        self, method: str, arguments: Sequence[tuple[Any, ...]], needs: Sequence[Asked] = ()
    ) -> tuple[list[Asked], SimpleQueue[Asked]]:
        """Queue a call on every rank; see :meth:`Line.call`.

        Args:
            arguments: by rank.

        Returns:
            What was asked, by rank; and where each of it will be once it is answered.
        """
        arrived: SimpleQueue[Asked] = SimpleQueue()
        asked = [Asked(rank, arrived) for rank in range(self.size)]
        for line, one, given in zip(self.lines, asked, arguments, strict=True):
            line.call(one, method, *given, needs=needs)
        return asked, arrived

    def remember(self, failure: Failure) -> None:
        """Keep a failure until it has been told and no longer matters; calls queued from now on know of it."""
        with self.lock:
            self.num_failures += 1
            self.failures.append(failure)

    def failure_for(self, role: str) -> Failure | None:
        """The failure that a call of a role has to tell of: one that breaks the role, or was not told yet."""
        for call in list(self.open_calls):
            call.done()  # where it has failed, that is remembered now
        with self.lock:
            self.failures = [f for f in self.failures if f.consequence or not f.told]
            return next((f for f in self.failures if f.dead or f.role == role), None)

    def end(self, ranks: Sequence[int]) -> None:
        """End the processes of some ranks; the pool has to be started again."""
        for rank in ranks:
            ray.kill(self.processes[rank])

    # ------------------------------------------------------------------------------------------------ start

    def _choose_platform(self, nodes: Sequence[Node]) -> Platform:
        gpus = any(node.total.get(CUDA.ray_resource, 0) for node in nodes)
        return CUDA if gpus and self.kind == "device" else CPU

    def _bundle(self) -> dict[str, float]:
        bundle = {CPU.ray_resource: self.cores_per_device}
        if self.platform.is_cuda:
            bundle[self.platform.ray_resource] = 1
        return bundle

    def _reserve(self, bundle: dict[str, float], node_of: list[str], nodes: Sequence[Node]) -> None:
        """The placement group. It has room by our own count, so a wait means that something outside pools holds it."""
        self._group = placement_group(
            [dict(bundle) for _ in node_of],
            strategy="PACK",
            name=_PREFIX + self.name,
            bundle_label_selector=[{"ray.io/node-id": node} for node in node_of],
        )
        if not self._group.wait(30):
            lines = "\n".join(f"  {node.describe(bundle)}" for node in nodes)
            raise PlacementError(
                f"pool {self.name!r}: no room within 30 s for {self.size} devices of {_amounts(bundle)} each, although "
                f"pools leave it:\n{lines}\nAvailable by Ray's count: {_amounts(ray.available_resources())}. Something "
                f"other than a pool (an actor or a task on this cluster) holds the rest; stop it or lower "
                f"pools.{self.name}.devices."
            )

    def _start_processes(
        self, bundle: dict[str, float], node_of: list[str], nodes: Sequence[Node], timeout: float
    ) -> None:
        address = {node.node_id: node.address for node in nodes}
        actor = ray.remote(DeviceProcess)
        for rank in range(self.size):
            options = actor.options(
                num_cpus=bundle[CPU.ray_resource],
                num_gpus=bundle.get(CUDA.ray_resource, 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank),
                max_restarts=0,
                max_concurrency=1,
            )
            threads = max(1, round(self.cores_per_device))
            self.processes.append(options.remote(self.name, rank, self.platform, threads))
        up = [
            process.place.remote(address[node], node, len(nodes) == 1)
            for process, node in zip(self.processes, node_of, strict=True)
        ]
        self.places = self._wait(up, timeout, "start")

    def _join_world(self, node_of: list[str], local_rank: list[int], nodes: Sequence[Node], timeout: float) -> None:
        address = {node.node_id: node.address for node in nodes}
        host = "127.0.0.1" if len(nodes) == 1 else address[node_of[0]]
        store = self._wait([self.processes[0].open_store.remote(host)], timeout, "open the world's store")[0]
        joined = [
            process.join_world.remote(store, self.size, local, node_of.count(node))
            for process, local, node in zip(self.processes, local_rank, node_of, strict=True)
        ]
        self._wait(joined, timeout, "join the torch.distributed world")

    def _connect(self, node_of: list[str], nodes: Sequence[Node], timeout: float) -> None:
        """From here on the processes do what comes over their lines."""
        address = {node.node_id: node.address for node in nodes}
        hosts = ["" if node == this_node() else address[node] for node in node_of]
        listening = [process.listen.remote(host) for process, host in zip(self.processes, hosts, strict=True)]
        addresses = self._wait(listening, timeout, "listen for the driver")
        self._serving = [process.serve.remote() for process in self.processes]
        for rank, (at, serving) in enumerate(zip(addresses, self._serving, strict=True)):
            try:
                self.lines.append(Line(at, serving))
            except (OSError, EOFError) as error:
                raise PlacementError(
                    f"pool {self.name!r}: the driver cannot reach the process of rank {rank} at {at} "
                    f"({type(error).__name__}: {error}). Let the nodes connect to one another on all ports."
                ) from error

    def _wait(self, refs: list[Any], timeout: float, what: str) -> list[Any]:
        """Values of all references; the first that fails is reported at once."""
        pending = {ref: rank for rank, ref in enumerate(refs)}
        deadline = time.monotonic() + timeout
        while pending:
            ready, _ = ray.wait(list(pending), num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise PlacementError(
                    f"pool {self.name!r}: the processes of ranks {sorted(pending.values())} did not {what} within "
                    f"{timeout:g} s. Give start() a longer timeout if the machine is busy."
                )
            rank = pending.pop(ready[0])
            try:
                ray.get(ready[0])
            except RayError as error:
                raise PlacementError(
                    f"pool {self.name!r}: the process of rank {rank} did not {what}: {error}"
                ) from None
        return ray.get(refs)


def _device_nodes(nodes: Sequence[Node]) -> list[Node]:
    """The nodes that can hold devices: those with GPUs where there are any, else those with cores."""
    with_gpu = [node for node in nodes if node.total.get(CUDA.ray_resource, 0)]
    return with_gpu or [node for node in nodes if node.total.get(CPU.ray_resource, 0)]


def _amounts(resources: Mapping[str, float], times: int = 1) -> str:
    """``"1 GPU + 2 CPU"``: devices and cores only, scaled."""
    names = [name for name in (CUDA.ray_resource, CPU.ray_resource) if name in resources]
    return " + ".join(f"{resources[name] * times:g} {name}" for name in names) or "nothing"


def _require_ray(what: str) -> None:
    if not ray.is_initialized():
        raise PlacementError(f"{what}: Ray is not running in this process. Call hybridflow.launch or ray.init first.")
