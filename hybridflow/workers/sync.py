"""The weights of the actor as the rollout holds them: one rank's part of a sync.

Where it stands: :class:`hybridflow.workers.rollout.RolloutWorker` makes one :class:`WeightSync` at its first sync and
runs it at each. What goes where is planned by ``resharding/plan`` from the tables of both engines, and carried by
``resharding/transport`` inside the smallest groups that hold all they need (the micro-DP groups where the generation
layout divides the training layout).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from hybridflow.models.spec import ModelSpec
from hybridflow.models.tables import megatron_table, padded_vocab_size, vllm_table
from hybridflow.resharding.boxes import ParameterBoxes
from hybridflow.resharding.layout import Coordinates, GenerationLayout, Layout, ParallelLayout
from hybridflow.resharding.plan import plan_rank, smallest_groups
from hybridflow.resharding.transport import Traffic, make_group, reshard

if TYPE_CHECKING:
    from hybridflow.engines.megatron.engine import MegatronEngine
    from hybridflow.engines.vllm.engine import RolloutEngine

Tables = Mapping[int, Mapping[str, ParameterBoxes]]


class WeightSync:
    """From the actor's shards to the rollout's, both engines in this process. Making one is collective over the pool.

    Args:
        rank: of this process in the pool.
        layout: how the pool generates; its ``training`` is the actor's layout.
        bucket_bytes: most memory of a rank for slices on their way.
    """

    def __init__(
        self, actor: MegatronEngine, rollout: RolloutEngine, rank: int, layout: GenerationLayout, bucket_bytes: float
    ) -> None:
        self.actor, self.rollout = actor, rollout
        sources, targets = tables(actor.spec, layout.training), tables(actor.spec, layout)
        groups = smallest_groups([layout.transition_groups(), [list(range(layout.world_size))]], sources, targets)
        [mine] = [group for group in groups if rank in group]
        self.group = make_group(groups)
        self.plan = plan_rank(
            rank,
            {member: sources[member] for member in mine},
            {member: targets[member] for member in mine},
            bucket_elements=int(bucket_bytes // rollout.dtype.itemsize),
        )

    def run(self) -> Traffic:
        """Fill the rollout's parameters. Collective over the ranks of the transition's group."""
        return reshard(
            self.plan, self.actor.parameters(), self.rollout.parameters(), dtype=self.rollout.dtype, group=self.group
        )


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
