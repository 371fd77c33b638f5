"""From two layouts of one model to the plan of its weights' way between them.

Where it stands: above the tables of both engines (``models/tables``) and the plan (``resharding/plan``), below the
workers that carry plans out. Invariant: what is made here depends on the arguments alone, so every rank makes its part
of the same plan without asking the others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping

from hybridflow.errors import ConfigError
from hybridflow.models.spec import ModelSpec
from hybridflow.models.tables import megatron_table, padded_vocab_size, vllm_table
from hybridflow.resharding.layout import Coordinates, GenerationLayout, Groups, ParallelLayout
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
    return _tables(layout, lambda at: at.tp, lambda at: vllm_table(spec, layout.tp, at.tp))


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


def plan_to_generation(
    spec: ModelSpec,
    layout: GenerationLayout,
    rank: int,
    bucket_elements: int,
    nodes: Mapping[int, int] | None = None,
) -> tuple[RankPlan, Groups]:
    """A rank's part in filling its world's rollout from its world's trainer, and the groups that exchange slices.

    Where the layouts nest, the groups are the micro-DP groups and a rank receives the least possible. Where they do
    not, rank 0 warns of what it costs.

    Args:
        layout: of generation; it knows the training layout.
        bucket_elements, nodes: see :func:`hybridflow.resharding.plan.plan_rank`.
    """
    sources, targets = training_tables(spec, layout.training), generation_tables(spec, layout)
    smallest, world = layout.transition_groups(), [list(range(layout.world_size))]
    groups = smallest_groups([smallest, world], sources, targets)
    if rank == 0 and layout.warning():
        log.warning("%s", layout.warning())
    if rank == 0 and groups != smallest:
        log.warning(
            "weights move from training (%s) to generation (%s) within groups of %d ranks instead of %d: the two sides "
            "cut the vocabulary or the experts so that a smaller group does not hold all that its ranks generate with.",
            *(layout.training, layout, len(groups[0]), len(smallest[0])),
        )
    mine = next(group for group in groups if rank in group)
    plan = plan_rank(rank, {r: sources[r] for r in mine}, {r: targets[r] for r in mine}, bucket_elements, nodes)
    return plan, groups


def plan_between_pools(
    spec: ModelSpec,
    training: ParallelLayout,
    generation: GenerationLayout,
    rank: int,
    bucket_elements: int,
    nodes: Mapping[int, int] | None = None,
) -> RankPlan:
    """A rank's part in filling a rollout's pool from a trainer's pool.

    Args:
        rank: in the joint group: the trainer's ranks, then the rollout's.
        bucket_elements, nodes: see :func:`hybridflow.resharding.plan.plan_rank`; nodes by joint rank.
    """
    targets = {training.world_size + r: table for r, table in generation_tables(spec, generation).items()}
    return plan_rank(rank, training_tables(spec, training), targets, bucket_elements, nodes)
