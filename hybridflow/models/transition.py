"""From two layouts of one model to the plan of its weights' way between them.

Where it stands: above the tables of both engines (``models/tables``) and the plan (``resharding/plan``), below the
workers that carry plans out. Invariant: what is made here depends on the arguments alone, so every rank makes its part
of the same plan without asking the others.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass

from hybridflow.errors import ConfigError
from hybridflow.models.spec import ModelSpec
from hybridflow.models.tables import megatron_table, padded_vocab_size, vllm_table
from hybridflow.resharding.layout import Coordinates, GenerationLayout, Groups, Layout, ParallelLayout
from hybridflow.resharding.plan import RankPlan, Table, plan_rank, smallest_groups

log = logging.getLogger(__name__)


def training_tables(spec: ModelSpec, layout: ParallelLayout) -> dict[int, Table]:
    """Megatron's table of every rank; ranks that hold the same share one object."""
    padded = padded_vocab_size(spec, layout.tp)
    return _tables(
        layout, lambda at: (at.pp, at.tp, at.ep, at.etp), lambda at: megatron_table(spec, layout, at, padded)
    )


def generation_tables(spec: ModelSpec, layout: GenerationLayout) -> dict[int, Table]:
    """vLLM's table of every rank; ranks that hold the same share one object."""
    if layout.pp > 1:
        raise ConfigError(f"layout.pp={layout.pp} of a generation layout: vLLM runs in one stage here; set pp to 1.")
    return _tables(layout, lambda at: at.tp, lambda at: vllm_table(spec, layout.tp, at.tp, layout.ep))


def _tables(
    layout: ParallelLayout | GenerationLayout,
    key: Callable[[Coordinates], Hashable],
    make: Callable[[Coordinates], Table],
) -> dict[int, Table]:
    made: dict[Hashable, Table] = {}
    tables = {}
    for rank in range(layout.world_size):
        at = layout.coordinates(rank)
        if key(at) not in made:
            made[key(at)] = make(at)
        tables[rank] = made[key(at)]
    return tables


@dataclass(frozen=True)
class Transition:
    """The ranks that one rank exchanges slices with, and what each of them holds and needs.

    Attributes:
        groups: all groups of the world that exchange slices among themselves; process groups are made from them.
        sources, targets: tables of the ranks of one's own group.
    """

    groups: Groups
    sources: Mapping[int, Table]
    targets: Mapping[int, Table]

    def plan(self, rank: int, bucket_elements: int, nodes: Mapping[int, int] | None = None) -> RankPlan:
        """The rank's part; see :func:`hybridflow.resharding.plan.plan_rank`."""
        return plan_rank(rank, self.sources, self.targets, bucket_elements, nodes)


def to_generation(spec: ModelSpec, layout: GenerationLayout, rank: int) -> Transition:
    """From the trainer of a world to the rollout of the same ranks.

    Where the layouts nest, the groups are the micro-DP groups and a rank receives the least possible. Where they do
    not, rank 0 warns of what it costs.

    Args:
        layout: of generation; it knows the training layout.
    """
    sources, targets = training_tables(spec, layout.training), generation_tables(spec, layout)
    smallest = layout.transition_groups()
    blocks = _blocks(layout.world_size, math.lcm(layout.training.replica_size, layout.tp * layout.pp))
    groups = smallest_groups([smallest, *blocks], sources, targets)
    if rank == 0 and layout.warning():
        log.warning("%s", layout.warning())
    if rank == 0 and groups != smallest:
        log.warning(
            "weights move from training (%s) to generation (%s) within groups of %d ranks instead of %d: the two sides "
            "cut the vocabulary or the experts so that a smaller group does not hold all that its ranks generate with.",
            *(layout.training, layout, len(groups[0]), len(smallest[0])),
        )
    mine = next(group for group in groups if rank in group)
    return Transition(groups, {r: sources[r] for r in mine}, {r: targets[r] for r in mine})


def to_training(spec: ModelSpec, source: ParallelLayout, target: ParallelLayout, rank: int) -> Transition:
    """From one model of a world to another of the same ranks, such as from an actor to its reference.

    The groups are the smallest blocks of neighbours that hold all that their ranks need: each rank alone where the two
    layouts are the same.
    """
    sources, targets = training_tables(spec, source), training_tables(spec, target)
    alone = [[r] for r in range(source.world_size)]
    blocks = _blocks(source.world_size, math.lcm(source.replica_size, target.replica_size))
    groups = smallest_groups([alone, *blocks], sources, targets)
    mine = next(group for group in groups if rank in group)
    return Transition(groups, {r: sources[r] for r in mine}, {r: targets[r] for r in mine})


def _blocks(world: int, step: int) -> Iterator[Groups]:
    """Partitions into ever larger blocks of neighbours, each of whole replicas of both layouts; the last is the world.

    Experts of one layer may be spread over several data-parallel replicas of the rest, which are neighbours.

    Args:
        step: ranks of the smallest block.
    """
    for size in range(step, world + 1, step):
        if world % size == 0:
            yield [list(range(first, first + size)) for first in range(0, world, size)]


def between_pools(spec: ModelSpec, training: ParallelLayout, receiving: Layout) -> Transition:
    """From a trainer's pool to another, in the joint group: the trainer's ranks, then the others'."""
    first = training.world_size
    generates = isinstance(receiving, GenerationLayout)
    tables = generation_tables(spec, receiving) if generates else training_tables(spec, receiving)
    targets = {first + rank: table for rank, table in tables.items()}
    return Transition([list(range(first + len(targets)))], training_tables(spec, training), targets)
