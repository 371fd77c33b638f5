"""The weights of the actor as the rollout holds them: one rank's part of a sync.

Where it stands: :class:`hybridflow.workers.rollout.RolloutWorker` makes one :class:`WeightSync` at its first sync and
runs it at each. What goes where is planned by ``resharding/plan`` from the tables of both engines, and carried by
``resharding/transport`` inside the smallest groups that hold all they need (the micro-DP groups where the generation
layout divides the training layout), and what has arrived is compared by ``resharding/guard``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from hybridflow.config import RolloutConfig
from hybridflow.models.spec import ModelSpec
from hybridflow.models.tables import megatron_table, padded_vocab_size, vllm_table
from hybridflow.protocol.meta import Max, Sum
from hybridflow.resharding.boxes import ParameterBoxes
from hybridflow.resharding.guard import Guard
from hybridflow.resharding.layout import Coordinates, GenerationLayout, Layout, ParallelLayout
from hybridflow.resharding.plan import plan_rank, smallest_groups
from hybridflow.resharding.transport import make_group, reshard

if TYPE_CHECKING:
    from hybridflow.engines.megatron.engine import MegatronEngine
    from hybridflow.engines.vllm.engine import RolloutEngine

Tables = Mapping[int, Mapping[str, ParameterBoxes]]


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
        sources, targets = tables(actor.spec, layout.training), tables(actor.spec, layout)
        groups = smallest_groups([layout.transition_groups(), [list(range(layout.world_size))]], sources, targets)
        [mine] = [group for group in groups if rank in group]
        self.group = make_group(groups)
        sides = ({member: sources[member] for member in mine}, {member: targets[member] for member in mine})
        bucket = int(settings.sync_bucket_mb * 2**20) // rollout.dtype.itemsize
        self.plan = plan_rank(rank, *sides, bucket_elements=bucket)
        self.guard = Guard(rank, *sides, settings.check_sync)

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


def tables(spec: ModelSpec, layout: Layout) -> Tables:
    """The table of every rank: megatron-core's of a training layout, vLLM's of a generation layout.

    Ranks that hold the same slices share one object.
    """
    known: dict[Coordinates, Mapping[str, ParameterBoxes]] = {}
    found: dict[int, Mapping[str, ParameterBoxes]] = {}
    for rank in range(layout.world_size):
        at = replace(layout.coordinates(rank), dp=0, cp=0, edp=0)
        if at not in known:
            known[at] = _table(spec, layout, at)
        found[rank] = known[at]
    return found


def _table(spec: ModelSpec, layout: Layout, at: Coordinates) -> Mapping[str, ParameterBoxes]:
    if isinstance(layout, ParallelLayout):
        return megatron_table(spec, layout, at, padded_vocab_size(spec, layout.tp))
    return vllm_table(spec, layout.tp, at.tp)
