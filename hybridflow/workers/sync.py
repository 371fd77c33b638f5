"""The weights of the actor as the rollout holds them: one rank's part of a sync.

Where it stands: :class:`hybridflow.workers.rollout.RolloutWorker` makes one :class:`WeightSync` at its first sync and
runs it at each. What goes where is planned by ``models/transition``, carried by ``resharding/transport``, and compared
after it has arrived by ``resharding/guard``.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from hybridflow.config import RolloutConfig
from hybridflow.engines.megatron.offload import Offload, parameters
from hybridflow.errors import ModelError
from hybridflow.models.transition import to_generation
from hybridflow.protocol.meta import Max, Sum
from hybridflow.resharding.boxes import slices, uncovered, whole
from hybridflow.resharding.guard import Guard
from hybridflow.resharding.layout import GenerationLayout
from hybridflow.resharding.plan import Table, plan_transfers
from hybridflow.resharding.transport import copy_local, make_group, reshard

if TYPE_CHECKING:
    from hybridflow.engines.megatron.engine import MegatronEngine
    from hybridflow.engines.vllm.engine import RolloutEngine


class WeightSync:
    """From the actor's shards to the rollout's, both engines in this process. Making one is collective over the pool.

    Args:
        rank: of this process in the pool.
        layout: how the pool generates; its ``training`` is the actor's layout.
        settings: size of the buckets, and what to compare.
    """

    def __init__(
        self,
        actor: MegatronEngine,
        rollout: RolloutEngine,
        rank: int,
        layout: GenerationLayout,
        settings: RolloutConfig,
    ) -> None:
        self.actor, self.rollout = actor, rollout
        transition = to_generation(actor.spec, layout, rank)
        self.group = make_group(transition.groups)
        self.plan = transition.plan(rank, int(settings.sync_bucket_mb * 2**20) // rollout.dtype.itemsize)
        self.guard = Guard(rank, transition.sources, transition.targets, settings.check_sync)
        self._table = transition.targets[rank]

    def run(self, version: int) -> dict[str, float]:
        """Fill the rollout's parameters and call them ``version``. Collective over the ranks of the transition's group.

        Returns:
            Metrics of this rank: in bytes ``sync/bytes``, what was written into the rollout's parameters, of which
            ``sync/bytes_received`` came from other ranks, and ``sync/bytes_staged``, the buffers in between;
            ``sync/slices_checked``.

        Raises:
            ModelError: the rollout does not hold the trainer's weights.
        """
        sides, dtype = (self.actor.parameters(), self.rollout.parameters()), self.rollout.dtype
        traffic = reshard(self.plan, *sides, dtype=dtype, group=self.group)
        checked = self.guard.check(version, *sides, dtype, self.group)
        self.rollout.weights_changed(version)
        return {
            "sync/bytes": Sum(traffic.copied + traffic.received),
            "sync/bytes_received": Sum(traffic.received),
            "sync/bytes_staged": Max(traffic.staged),
            "sync/slices_checked": Sum(checked),
        }

    def offload_parameters(self, folder: str) -> Handover | Offload:
        """How the actor's parameters leave the memory while the rollout generates.

        Args:
            folder: for files, where they have to be kept beside the rollout's weights on a CPU.
        """
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
