"""The weights of the actor as the rollout holds them: one rank's part of a sync.

Where it stands: actor and rollout share the processes of a pool, or have pools of their own. Either way every process
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
from hybridflow.models.transition import Transition, between_pools, to_generation
from hybridflow.platform import current
from hybridflow.protocol.meta import Max, Sum
from hybridflow.resharding.boxes import slices, uncovered, whole
from hybridflow.resharding.guard import Guard
from hybridflow.resharding.layout import GenerationLayout, ParallelLayout
from hybridflow.resharding.plan import Table, plan_transfers
from hybridflow.resharding.transport import copy_local, join_worlds, make_group, reshard

if TYPE_CHECKING:
    from hybridflow.engines.megatron.engine import MegatronEngine
    from hybridflow.engines.vllm.engine import RolloutEngine

STORE_TIMEOUT = timedelta(minutes=5)
"""How long a process looks for the store at which the two pools meet."""


class WeightSync:
    """One process's part in every sync; made by :meth:`within` or :meth:`between`.

    Args:
        transition: what the process and those it exchanges slices with hold and need.
        rank: of this process in the transition.
        group: of those processes; None where it is alone.
        config: the run's.
        actor, rollout: engines of this process, at least one of them.

    Attributes:
        shares: whether parameters of the rollout use the actor's memory; see :class:`hybridflow.config.MemoryConfig`.
    """

    def __init__(
        self,
        transition: Transition,
        rank: int,
        group: dist.ProcessGroup | None,
        config: RunConfig,
        actor: MegatronEngine | None,
        rollout: RolloutEngine | None,
    ) -> None:
        self.actor, self.rollout, self.group = actor, rollout, group
        self.shares, self._share = False, config.memory.share_weights
        self.dtype: torch.dtype = getattr(torch, config.model.dtype)
        self.plan = transition.plan(rank, int(config.rollout.sync_bucket_mb * 2**20) // self.dtype.itemsize)
        self.guard = Guard(rank, transition.sources, transition.targets, config.rollout.check_sync)
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
        return cls(transition, rank, make_group(transition.groups), config, actor, rollout)

    @classmethod
    def between(
        cls,
        training: ParallelLayout,
        generation: GenerationLayout,
        rank: int,
        address: tuple[str, int],
        config: RunConfig,
        *,
        actor: MegatronEngine | None = None,
        rollout: RolloutEngine | None = None,
    ) -> WeightSync:
        """Of two pools, one with each engine. Collective over the processes of both.

        Args:
            rank: of this process among the actor's and, after them, the rollout's.
            address: of a TCPStore that one of the processes serves.
            actor, rollout: the engine of this process, one of them.
        """
        engine = actor or rollout
        assert engine is not None
        store = dist.TCPStore(*address, is_master=False, timeout=STORE_TIMEOUT)
        group = join_worlds(
            dist.PrefixStore("weights", store), rank, training.world_size + generation.world_size, current()
        )
        return cls(between_pools(engine.spec, training, generation), rank, group, config, actor, rollout)

    def run(self, version: int) -> dict[str, float]:
        """Fill the rollout's parameters and call them ``version``. Collective over the ranks of the transition.

        Returns:
            Metrics of this process: in bytes ``sync/bytes``, what was written into the rollout's parameters, of which
            ``sync/bytes_received`` came from other ranks, ``sync/bytes_staged``, the buffers in between, and
            ``sync/bytes_shared`` of parameters that use the actor's memory; ``sync/most_sent`` and
            ``sync/most_received``, the bytes of the rank that has most of them; ``sync/slices_checked``;
            ``sync/seconds``.

        Raises:
            ModelError: the rollout does not hold the trainer's weights.
        """
        started = time.perf_counter()
        sources = {} if self.actor is None else self.actor.parameters()
        targets = {} if self.rollout is None else self.rollout.parameters()
        traffic = reshard(self.plan, sources, targets, dtype=self.dtype, group=self.group, share=self._share)
        self.shares = traffic.shared > 0
        checked = self.guard.check(version, sources, targets, self.dtype, self.group)
        if self.rollout is not None:
            self.rollout.weights_changed(version)
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

    def offload_parameters(self, folder: str) -> Handover | Offload:
        """How the actor's parameters leave the memory while the rollout generates.

        Args:
            folder: for files, where they have to be kept beside the rollout's weights on a CPU.
        """
        assert self.actor is not None and self.rollout is not None
        try:
            return Handover(self.actor, self.rollout, self._table)
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
