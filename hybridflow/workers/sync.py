"""The weights of the actor as the rollout, or a reference that follows it, holds them: one rank's part of a sync.

Where it stands: actor and receiver share the processes of a pool, or have pools of their own. Either way every process
with weights to give or to take makes one :class:`WeightSync` and runs it at each sync. What goes where is planned by
``models/transition``, carried by ``resharding/transport``, and compared after it has arrived by ``resharding/guard``.
"""

from __future__ import annotations

import time
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from hybridflow.config import RunConfig
from hybridflow.engines.megatron.offload import Offload, parameters
from hybridflow.errors import ModelError
from hybridflow.models.transition import Transition, between_pools, to_generation, to_training
from hybridflow.platform import current
from hybridflow.protocol.meta import Max, Sum
from hybridflow.resharding.boxes import slices, uncovered, whole
from hybridflow.resharding.guard import Guard
from hybridflow.resharding.layout import GenerationLayout, Layout, ParallelLayout
from hybridflow.resharding.plan import Table, plan_transfers
from hybridflow.resharding.transport import copy_local, join_worlds, make_group, reshard

if TYPE_CHECKING:
    from hybridflow.engines.megatron.engine import MegatronEngine
    from hybridflow.engines.vllm.engine import RolloutEngine

STORE_TIMEOUT = timedelta(minutes=5)
"""How long a process looks for the store at which the two pools meet."""


class WeightSync:
    """One process's part in every sync; made by :meth:`within`, :meth:`to_reference` or :meth:`between`.

    Args:
        role: of the receiver, for messages.
        transition: what the process and those it exchanges slices with hold and need.
        rank: of this process in the transition.
        group: of those processes; None where it is alone.
        config: the run's.
        actor, receiver: engines of this process, at least one of them.

    Attributes:
        shares: whether parameters of the rollout use the actor's memory; see :class:`hybridflow.config.MemoryConfig`.
    """

    def __init__(
        self,
        role: str,
        transition: Transition,
        rank: int,
        group: dist.ProcessGroup | None,
        config: RunConfig,
        actor: MegatronEngine | None,
        receiver: RolloutEngine | MegatronEngine | None,
    ) -> None:
        self.actor, self.receiver, self.group = actor, receiver, group
        self.shares, self._share = False, config.memory.share_weights and role == "rollout"
        self.dtype: torch.dtype = getattr(torch, config.model.dtype)
        self.plan = transition.plan(rank, int(config.rollout.sync_bucket_mb * 2**20) // self.dtype.itemsize)
        self.guard = Guard(rank, transition.sources, transition.targets, config.rollout.check_sync, role)
        self._table = transition.targets.get(rank, {})

    @classmethod
    def within(
        cls, layout: GenerationLayout, rank: int, config: RunConfig, actor: MegatronEngine, rollout: RolloutEngine
    ) -> WeightSync:
        """Of a pool whose processes hold both engines. Collective over the pool.

        Args:
            layout: how the pool generates; its ``training`` is the actor's layout.
            rank: of this process in the pool.
        """
        transition = to_generation(actor.spec, layout, rank)
        return cls("rollout", transition, rank, make_group(transition.groups), config, actor, rollout)

    @classmethod
    def to_reference(cls, rank: int, config: RunConfig, actor: MegatronEngine, reference: MegatronEngine) -> WeightSync:
        """Of a pool whose processes hold both models, each in its own layout. Collective over the pool."""
        transition = to_training(actor.spec, actor.layout, reference.layout, rank)
        return cls("reference", transition, rank, make_group(transition.groups), config, actor, reference)

    @classmethod
    def between(
        cls,
        role: str,
        training: ParallelLayout,
        receiving: Layout,
        rank: int,
        address: tuple[str, int],
        config: RunConfig,
        *,
        actor: MegatronEngine | None = None,
        receiver: RolloutEngine | MegatronEngine | None = None,
    ) -> WeightSync:
        """Of two pools, one with each engine. Collective over the processes of both.

        Args:
            role: of the receiver.
            training, receiving: layouts of the two.
            rank: of this process among the actor's and, after them, the receiver's.
            address: of a TCPStore that one of the processes serves.
            actor, receiver: the engine of this process, one of them.
        """
        engine = actor or receiver
        assert engine is not None
        store = dist.TCPStore(*address, is_master=False, timeout=STORE_TIMEOUT)
        size = training.world_size + receiving.world_size
        group = join_worlds(dist.PrefixStore(f"weights/{role}", store), rank, size, current())
        return cls(role, between_pools(engine.spec, training, receiving), rank, group, config, actor, receiver)

    def run(self, version: int) -> dict[str, float]:
        """Fill the receiver's parameters and call them ``version``. Collective over the ranks of the transition.

        Returns:
            Metrics of this process: in bytes ``sync/bytes``, what was written into the receiver's parameters, of which
            ``sync/bytes_received`` came from other ranks, ``sync/bytes_staged``, the buffers in between, and
            ``sync/bytes_shared`` of parameters that use the actor's memory; ``sync/most_sent`` and
            ``sync/most_received``, the bytes of the rank that has most of them; ``sync/slices_checked``;
            ``sync/seconds``.

        Raises:
            ModelError: the receiver does not hold the trainer's weights.
        """
        started = time.perf_counter()
        sources = {} if self.actor is None else self.actor.parameters()
        targets = {} if self.receiver is None else self.receiver.parameters()
        traffic = reshard(self.plan, sources, targets, dtype=self.dtype, group=self.group, share=self._share)
        self.shares = traffic.shared > 0
        checked = self.guard.check(version, sources, targets, self.dtype, self.group)
        if self.receiver is not None:
            self.receiver.weights_changed(version)
        return {
            "sync/bytes": Sum(traffic.copied + traffic.received),
            "sync/bytes_received": Sum(traffic.received),
            "sync/bytes_staged": Max(traffic.staged),
            "sync/bytes_shared": Sum(traffic.shared),
            "sync/most_sent": Max(traffic.sent),
            "sync/most_received": Max(traffic.received),
            "sync/slices_checked": Sum(checked),
            "sync/seconds": Max(time.perf_counter() - started),
        }

    def offload_parameters(self, rollout: RolloutEngine, folder: str) -> Handover | Offload:
        """How the actor's parameters leave the memory while the rollout generates.

        Args:
            rollout: the receiver.
            folder: for files, where they have to be kept beside the rollout's weights on a CPU.
        """
        assert self.actor is not None and self.receiver is rollout
        try:
            return Handover(self.actor, rollout, self._table)
        except ModelError:
            return Offload(partial(parameters, self.actor), kept=True, folder=folder)


class Handover:
    """The actor's parameters while the rollout generates: not in memory, but among the rollout's weights.

    Where the layouts nest, every rank generates with all that it trains with, so that its parameters can go once the
    rollout has them, and come back by copies inside the process.

    Args:
        table: of the rollout's parameters on this rank.

    Raises:
        ModelError: the rollout does not hold all of them on this rank.
    """

    def __init__(self, actor: MegatronEngine, rollout: RolloutEngine, table: Table) -> None:
        self.actor, self.rollout = actor, rollout
        self._back = [transfer.copy for transfer in plan_transfers({0: table}, {0: actor.table})]
        self._memory = Offload(partial(parameters, actor), kept=False)
        self._padding = [
            (parameter.name, slices(part))
            for parameter in actor.table.values()
            for part in uncovered(whole(parameter.shape), [box.target for box in parameter.boxes])
        ]
        self._kept: list[torch.Tensor] | None = None

    def release(self) -> None:
        """Drop the parameters, after a sync. What only pads them is kept."""
        if self._kept is None:
            current = self.actor.parameters()
            self._kept = [current[name][part].clone() for name, part in self._padding]
        self._memory.release()

    def restore(self) -> None:
        """Take them back from the rollout, whose weights have not changed since."""
        if self._kept is None:
            return
        self._memory.restore()
        current = self.actor.parameters()
        copy_local(self._back, self.rollout.parameters(), current)
        for (name, part), kept in zip(self._padding, self._kept, strict=True):
            current[name][part] = kept
        self._kept = None
