"""The device process: one Ray actor per device of a pool, which hosts every role placed on that pool (fused).

It joins the pool's torch.distributed world once, creates workers by role, and runs one method at a time. The
invariants: whatever a worker raises leaves this process as a WorkerError made of text, so that it arrives even where
the original exception does not pickle; and behind a call that failed here nothing runs that was queued before the
driver knew, so that ranks never pair the collectives of different calls. Only ``pool.py`` starts these processes and
only ``group.py`` calls them.
"""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import psutil
import torch

from hybridflow.controller.call import Answer, ArgumentFailed, Request, arguments
from hybridflow.controller.line import Address, Served
from hybridflow.controller.message import Message, batches_in, message, opened, packed, sendable
from hybridflow.controller.store import Borrowed
from hybridflow.errors import PlacementError, WorkerError
from hybridflow.platform import Platform
from hybridflow.resharding.hybrid import Phases
from hybridflow.timing import now
from hybridflow.workers.base import Worker, WorkerContext

if TYPE_CHECKING:
    from torch.distributed import TCPStore


COLLECTIVE_TIMEOUT = timedelta(hours=1)
"""A rank may wait this long for its peers in a collective: longer than any rollout, shorter than a night."""

MOST_OF_CAUSE, MOST_OF_TRACEBACK = 4_000, 20_000
"""Characters of an exception that are sent to the driver."""

MEASURED = 0.02
"""Seconds of a call whose memory is measured; asking the system would add up to a tenth to a shorter one."""

INTERRUPT = signal.SIGUSR1
"""What the driver sends a process that is still inside a call which has failed elsewhere."""


class CallCancelled(BaseException):
    """Raised inside a running method by :data:`INTERRUPT`; no ``except Exception`` of a worker takes it."""


@dataclass(frozen=True)
class Place:
    """Where a device process runs.

    Attributes:
        rank: rank in the pool.
        node: address of the node.
        pid: process id on the node.
        node_id: Ray's id of the node.
        device: ``GPU 3``, by the node's own count, or ``CPU``.
        log: file on the node that has what the process writes to standard error.
    """

    rank: int
    node: str
    pid: int
    node_id: str = ""
    device: str = "CPU"
    log: str = ""

    def __str__(self) -> str:
        return f"pid {self.pid} on node {self.node}"


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
        platform.keep_freed_memory()
        self.roles = Roles(pool)
        self.phases = Phases(platform.used, platform.release_cache)
        self.peers = MappingProxyType(self.roles)
        self._store: TCPStore | None = None
        self._served: Served
        self._borrowed: list[Borrowed] = []
        self._inside_method = False
        # Calls that were queued when the driver knew of so many failures of the pool, or fewer, do not run; and why.
        self._refused: tuple[int, str] = (-1, "")
        self._known_failures = 0
        # By role and method, the columns that it read the last time.
        self._reads: dict[tuple[str, str], set[str]] = {}
        signal.signal(INTERRUPT, self._cancel)

    def place(self, node: str, node_id: str, alone: bool = True) -> Place:
        """Answers once the process is up.

        Args:
            node, node_id: address and Ray's id of its node.
            alone: whether the cluster has no other nodes.
        """
        if not alone and (interface := interface_of(node)):
            # Gloo takes the address that the host's name stands for, which on many machines only they know.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        device = f"GPU {os.environ['CUDA_VISIBLE_DEVICES']}" if self.platform.is_cuda else "CPU"
        log = os.readlink("/proc/self/fd/2")
        return Place(self.rank, node, os.getpid(), node_id, device, log)

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

    def listen(self, host: str) -> Address:
        """Open the process's end of its line; see :class:`Served`."""
        self._served = Served(host)
        return self._served.address

    def serve(self) -> None:
        """Answer the calls of the driver, until it closes the line; then let the workers close what they hold."""
        for number, *call in self._served.calls():
            self._served.answer(number, *self.answer(*call))
            self._borrowed.clear()  # to let go of what was read takes as long as to read it, and nobody waits for it
        for role in reversed(list(self.roles)):
            self._answer(role, "close", None, self.roles[role].close)

    def answer(self, method: str, *given: Any) -> tuple[Message, list[Any]]:
        """Message of the :class:`Answer` to a call, and references to what was put in the store for it."""
        made: list[Any] = []
        return (self.create(*given) if method == "create" else self.call(made, *given)), made

    def create(self, role: str, given: Message) -> Message:
        """Construct the worker of a role.

        Args:
            given: the worker, a class or ``"package.module:Class"``; the role's layout and the run's configuration.
        """

        def construct() -> None:
            worker, layout, config = opened(given)
            context = WorkerContext(role, self.rank, layout, config, self.peers, self.pool, self.platform, self.phases)
            self.roles[role] = load_class(worker)(context)

        return _said(self._answer(role, "create", None, construct))

    def call(self, made: list[Any], request: tuple[Any, ...], *answers: Message) -> Message:
        """Run one method.

        Args:
            made: references to what is put in the store for the answer are added to it.
            request: a :class:`Request`.
            answers: of the calls whose values it takes.

        Returns:
            Message of an :class:`Answer`.
        """
        role, method, step, wanted, failures, share = Request(*request)
        self._known_failures = failures
        refused, why = self._refused
        if failures <= refused:
            return _said(Answer(error=WorkerError(role, self.rank, method, step, f"not run, because {why}")))
        borrowed = self._borrowed

        def run() -> Any:
            args, kwargs = arguments(None if share is None else opened(share), self.rank, answers)
            batches = list(batches_in((args, kwargs)))
            borrowed.append(Borrowed(batches, self._reads.get((role, method))))
            value = getattr(self.roles[role], method)(*args, **kwargs)
            self._reads[role, method] = borrowed[0].read()
            for batch in batches:
                batch.refuse_written(f"{role}.{method}")
            return packed(value, f"{role}.{method} on rank {self.rank}", made) if wanted else None

        try:
            answer = self._answer(role, method, step, run)
            (ready,), put = sendable([message(tuple(answer))])
            made += put
        except ArgumentFailed as failed:
            return _said(Answer(error=failed.error))
        except Exception as error:  # a value that cannot be sent
            answer = Answer(error=WorkerError(role, self.rank, method, step, *describe_exception(error)))
            ready = _said(answer)
        if answer.error is not None:
            self._refused = failures, f"{role}.{method}, queued before it, failed on this rank"
            made.clear()
        del answer
        for objects in borrowed:
            objects.give_back()
        return ready

    def _answer(self, role: str, method: str, step: int | None, run: Callable[[], Any]) -> Answer:
        begin = now()
        try:
            try:
                self._inside_method = True
                value = run()
            finally:
                self._inside_method = False
            end = now()
            return Answer(value=value, measured=(begin, end, self._peak() if end - begin > MEASURED else 0))
        except ArgumentFailed:
            raise
        # All that can be raised: sys.exit would end the process without a word to the driver, and Ray would not tell us
        # of a KeyboardInterrupt or a CancelledError, so that what is queued behind this call would run.
        except BaseException as error:
            cause, text = describe_exception(error)
            return Answer(error=WorkerError(role, self.rank, method, step, cause, text))

    def _peak(self) -> int:
        """Most bytes in use since the last call that was asked."""
        peak = self.platform.peak()
        self.platform.forget_peak()
        return peak

    def _cancel(self, *_: object) -> None:
        if self._inside_method:
            raise CallCancelled("the call has failed on another rank, or its time is over")
        # The call that this is meant for has not begun here yet.
        self._refused = (
            self._known_failures,
            "it had failed on another rank, or its time was over, before it began here",
        )


def _said(answer: Answer) -> bytes:
    """The message of an answer without a value."""
    return pickle.dumps(tuple(answer), protocol=5)


def interface_of(address: str) -> str:
    """Name of the network interface of this machine that has an IP address; empty where none has."""
    found = psutil.net_if_addrs().items()
    return next((name for name, own in found if any(at.address.partition("%")[0] == address for at in own)), "")


def describe_exception(error: BaseException) -> tuple[str, str]:
    """``TypeName: message`` and the traceback, as text of bounded length; also where its ``__str__`` fails."""
    try:
        cause = f"{type(error).__name__}: {error}".removesuffix(": ")
    except Exception:
        cause = f"{type(error).__name__} (its message cannot be printed)"
    try:
        text = "".join(traceback.format_exception(error))
    except Exception:
        text = "".join(traceback.format_tb(error.__traceback__)) + cause
    return shortened(cause, MOST_OF_CAUSE), shortened(text, MOST_OF_TRACEBACK)


def shortened(text: str, most: int) -> str:
    """The text, or its two ends where it is longer: a message may hold a whole batch."""
    half = most // 2
    return text if len(text) <= most else f"{text[:half]}\n... {len(text) - 2 * half} characters ...\n{text[-half:]}"


def load_class(worker: type[Worker] | str) -> type[Worker]:
    """The class itself, or the one at ``"package.module:Class"``."""
    if not isinstance(worker, str):
        return worker
    module, _, name = worker.partition(":")
    found = getattr(importlib.import_module(module), name, None) if name else None
    if not (isinstance(found, type) and issubclass(found, Worker)):
        raise PlacementError(f"{worker!r} is not a worker: give 'package.module:Class' of a subclass of Worker.")
    return found
