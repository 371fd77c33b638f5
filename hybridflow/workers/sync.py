"""The weights of the actor as the rollout holds them: one rank's part of a sync.

Where it stands: :class:`hybridflow.workers.rollout.RolloutWorker` makes one :class:`WeightSync` at its first sync and
runs it at each. What goes where is planned by ``models/transition``, carried by ``resharding/transport``, and compared
after it has arrived by ``resharding/guard``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridflow.config import RolloutConfig
from hybridflow.models.transition import to_generation
from hybridflow.protocol.meta import Max, Sum
from hybridflow.resharding.guard import Guard
from hybridflow.resharding.layout import GenerationLayout
from hybridflow.resharding.transport import make_group, reshard

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
