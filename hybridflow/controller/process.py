"""The device process: one Ray actor per device of a pool, which hosts every role placed on that pool (fused).

It joins the pool's torch.distributed world once, creates workers by role, and runs one method at a time. The
invariant: whatever a worker raises leaves this process as a WorkerError made of text, so that it arrives even where
the original exception does not pickle. Only ``pool.py`` starts these processes and only ``group.py`` calls them.
"""

from __future__ import annotations

import importlib
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from hybridflow.errors import PlacementError, WorkerError
from hybridflow.platform import Platform
from hybridflow.protocol.transfer import Payload
from hybridflow.resharding.layout import Layout
from hybridflow.workers.base import Worker, WorkerContext

if TYPE_CHECKING:
    from torch.distributed import TCPStore

    from hybridflow.config import RunConfig

COLLECTIVE_TIMEOUT = timedelta(hours=1)
"""A rank may wait this long for its peers in a collective: longer than any rollout, shorter than a night."""


@dataclass(frozen=True)
class Place:
    """Where a device process runs."""

    rank: int
    node: str
    pid: int


@dataclass(frozen=True)
class Answer:
    """What one rank says to one call: a value, or the error."""

    value: Any = None
    error: WorkerError | None = None


class Roles(dict[str, Worker]):
    """The workers of this process by role; a miss says who lives here."""

    def __init__(self, pool: str) -> None:
        super().__init__()
        self.pool = pool

    def __missing__(self, role: str) -> Worker:
        raise PlacementError(
            f"role {role!r} has no worker in this process of pool {self.pool!r}; here are: "
            f"{', '.join(self) or '(none)'}. Put both roles on one pool (roles.{role}.pool={self.pool})."
        )


class DeviceProcess:
    """One device of a pool.

    Args:
        pool: name of the pool.
        rank: rank in the pool.
        platform: what the pool computes on, as decided by the driver from the cluster's resources.
        num_threads: threads of CPU kernels.
    """

    def __init__(self, pool: str, rank: int, platform: Platform, num_threads: int) -> None:
        self.pool, self.rank, self.platform = pool, rank, platform
        if not platform.is_cuda:
            # Ray leaves GPUs visible to a process that asked for none.
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        elif not torch.cuda.is_available():
            raise PlacementError(
                f"pool {pool!r}: Ray counts GPUs on this node, but torch {torch.__version__} sees none. Install a "
                f"CUDA build of torch, or start Ray with num_gpus=0 to run on the CPU."
            )
        os.environ["OMP_NUM_THREADS"] = str(num_threads)
        torch.set_num_threads(num_threads)
        self.roles = Roles(pool)
        self.peers = MappingProxyType(self.roles)
        self._store: TCPStore | None = None

    def place(self, node: str) -> Place:
        """Answers once the process is up."""
        return Place(rank=self.rank, node=node, pid=os.getpid())

    def open_store(self, host: str) -> tuple[str, int]:
        """Rank 0 serves the world's store on a port that the system chooses, so that no other process can take it."""
        from torch.distributed import TCPStore

        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(minutes=5))
        return host, self._store.port

    def join_world(self, address: tuple[str, int], world_size: int, local_rank: int, local_world_size: int) -> None:
        """Join the pool's torch.distributed world. Collective: all ranks at once."""
        import torch.distributed as dist

        host, port = address
        # Ray shows a process its own GPU only, so its index is 0 whatever the rank on the node. Libraries that host
        # themselves in a launcher's world (vLLM's external_launcher) take their device from LOCAL_RANK.
        device_index = 0 if self.platform.is_cuda else local_rank
        os.environ.update(
            RANK=str(self.rank),
            WORLD_SIZE=str(world_size),
            LOCAL_RANK=str(device_index),
            LOCAL_WORLD_SIZE=str(local_world_size),
            MASTER_ADDR=host,
            MASTER_PORT=str(port),
        )
        store = self._store or dist.TCPStore(host, port, is_master=False, timeout=timedelta(minutes=5))
        device = self.platform.device()
        if self.platform.is_cuda:
            torch.cuda.set_device(device)
        dist.init_process_group(
            self.platform.backend,
            store=store,
            rank=self.rank,
            world_size=world_size,
            timeout=COLLECTIVE_TIMEOUT,
            device_id=device if self.platform.is_cuda else None,
        )

    def create(self, role: str, worker: type[Worker] | str, layout: Layout, config: RunConfig) -> Answer:
        """Construct the worker of a role; ``worker`` is a class or ``"package.module:Class"``."""

        def construct() -> None:
            context = WorkerContext(role, self.rank, layout, config, self.peers, self.pool, self.platform)
            self.roles[role] = load_class(worker)(context)

        return self._answer(role, "create", None, construct)

    def call(self, role: str, method: str, step: int | None, payload: Payload, wanted: bool) -> Answer:
        """Run one method. Where its output is not ``wanted`` (a rank that does not answer), it stays here."""

        def run() -> Any:
            args, kwargs = payload
            value = getattr(self.roles[role], method)(*args, **kwargs)
            return value if wanted else None

        return self._answer(role, method, step, run)

    def close(self) -> None:
        """Let every worker release what outlives the process, last created first."""
        for role in reversed(list(self.roles)):
            self._answer(role, "close", None, self.roles[role].close)

    def _answer(self, role: str, method: str, step: int | None, run: Callable[[], Any]) -> Answer:
        try:
            return Answer(value=run())
        # sys.exit in a worker would end the process without a word to the driver.
        except (Exception, SystemExit) as error:
            cause, text = describe_exception(error)
            return Answer(error=WorkerError(role, self.rank, method, step, cause, text))


def describe_exception(error: BaseException) -> tuple[str, str]:
    """``TypeName: message`` and the traceback, as text; also for an exception whose ``__str__`` fails."""
    try:
        cause = f"{type(error).__name__}: {error}"
    except Exception:
        cause = f"{type(error).__name__} (its message cannot be printed)"
    try:
        text = "".join(traceback.format_exception(error))
    except Exception:
        text = "".join(traceback.format_tb(error.__traceback__)) + cause
    return cause, text


def load_class(worker: type[Worker] | str) -> type[Worker]:
    """The class itself, or the one at ``"package.module:Class"``."""
    if not isinstance(worker, str):
        return worker
    module, _, name = worker.partition(":")
    found = getattr(importlib.import_module(module), name, None) if name else None
    if not (isinstance(found, type) and issubclass(found, Worker)):
        raise PlacementError(f"{worker!r} is not a worker: give 'package.module:Class' of a subclass of Worker.")
    return found
