"""Rank arithmetic against the paper's worked examples, the closed form, and megatron-core's own rank generator."""

import itertools
from collections.abc import Iterator
from fractions import Fraction

import pytest

from hybridflow.errors import ConfigError
from hybridflow.resharding.layout import Coordinates, GenerationLayout, ParallelLayout


def degrees(most: int, axes: int) -> Iterator[tuple[int, ...]]:
    """Every tuple of degrees whose product is at most this."""
    for sizes in itertools.product(range(1, most + 1), repeat=axes):
        product = 1
        for size in sizes:
            product *= size
        if product <= most:
            yield sizes


def layouts(most: int) -> Iterator[ParallelLayout]:
    for tp, pp, cp, dp in degrees(most, axes=4):
        yield ParallelLayout(tp=tp, pp=pp, cp=cp, dp=dp)


def generations(most: int) -> Iterator[GenerationLayout]:
    """Every generation layout of every training layout of at most this many ranks."""
    for layout in layouts(most):
        for tp, pp in degrees(layout.world_size, axes=2):
            if layout.world_size % (tp * pp) == 0:
                yield layout.generation(tp=tp, pp=pp)


def interval(index: int, count: int) -> tuple[Fraction, Fraction]:
    return Fraction(index, count), Fraction(index + 1, count)


def inside(inner: tuple[Fraction, Fraction], outer: tuple[Fraction, Fraction]) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


# ------------------------------------------------------------------------------------------------ training


def test_tensor_ranks_are_neighbours_then_context_then_stages_then_replicas():
    layout = ParallelLayout(tp=2, pp=2, cp=2, dp=2)
    assert layout.coordinates(11) == Coordinates(dp=1, pp=0, cp=1, tp=1, edp=3, ep=0, etp=1)
    assert layout.tp_groups()[:3] == [[0, 1], [2, 3], [4, 5]]
    assert layout.cp_groups()[:4] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert layout.pp_groups()[:4] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert layout.dp_groups()[:2] == [[0, 8], [1, 9]]
    assert [rank for rank in range(16) if layout.is_collector(rank)] == [4, 12]


def test_rank_is_the_inverse_of_coordinates():
    for layout in [*layouts(16), *generations(8)]:
        assert [layout.rank(layout.coordinates(rank)) for rank in range(layout.world_size)] == list(
            range(layout.world_size)
        )


def test_groups_are_those_of_megatron_core():
    from megatron.core.parallel_state import RankGenerator

    order = "tp-cp-ep-pp-dp"
    tried = 0
    for tp, pp, cp, dp in degrees(16, axes=4):
        dense = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=order)
        for ep, etp in degrees(tp * cp * dp, axes=2):
            try:
                layout = ParallelLayout(tp=tp, pp=pp, cp=cp, dp=dp, ep=ep, etp=etp)
            except ConfigError:
                # Refused exactly where megatron-core has no such groups.
                assert tp * cp * dp % (ep * etp) or (pp > 1 and ep * etp != tp * cp)
                continue
            assert layout.tp_groups() == dense.get_ranks("tp")
            assert layout.pp_groups() == dense.get_ranks("pp")
            assert layout.cp_groups() == dense.get_ranks("cp")
            assert layout.dp_groups() == dense.get_ranks("dp")
            if pp > 1 and ep * etp != tp * cp:
                continue  # context-parallel pipelines without experts: megatron-core forms no groups of experts
            edp = tp * cp * dp // (ep * etp)
            experts = RankGenerator(tp=etp, ep=ep, dp=edp, pp=pp, cp=1, order=order)
            assert experts.get_ranks("pp") == layout.pp_groups()
            assert layout.ep_groups() == experts.get_ranks("ep")
            assert layout.etp_groups() == experts.get_ranks("tp")
            assert layout.edp_groups() == experts.get_ranks("dp")
            tried += 1
    assert tried > 500


def test_expert_groups_may_span_data_parallel_ranks_of_one_stage():
    layout = ParallelLayout.on(8, tp=2, ep=4, etp=1)
    assert layout.ep_groups() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert layout.edp_groups() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert str(layout) == "tp2 pp1 cp1 dp4 ep4 etp1"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tp": 0}, r"layout\.tp=0: a degree is an integer of at least 1"),
        ({"dp": 1.5}, r"layout\.dp=1\.5: a degree is an integer"),
        ({"vpp": 2}, r"layout\.vpp=2 .* but layout\.pp=1\. Set vpp to 1, or pp to 2 or more"),
        ({"tp": 2, "dp": 3, "ep": 4}, r"ep\*etp = 4\*2 = 8 does not divide the tp\*cp\*dp = 2\*1\*3 = 6 ranks"),
        ({"pp": 2, "dp": 2, "ep": 2}, r"with pp=2, ep\*etp = 2\*1 = 2 has to be tp\*cp = 1\*1 = 1"),
    ],
)
def test_degrees_that_do_not_fit_are_refused_with_all_factors(arguments: dict[str, int], message: str):
    with pytest.raises(ConfigError, match=message):
        ParallelLayout(**arguments)


def test_degrees_that_do_not_fill_the_devices_are_refused_with_all_factors():
    with pytest.raises(ConfigError, match=r"here: tp\*pp\*cp = 2\*3\*1 = 6 does not divide the pool's 8 devices"):
        ParallelLayout.on(8, tp=2, pp=3, where="here")
    with pytest.raises(ConfigError, match=r"rank 4 is outside the layout's world of 4 \(tp2 pp2 cp1 dp1\)"):
        ParallelLayout(tp=2, pp=2).coordinates(4)
    with pytest.raises(ConfigError, match=r"rank -1 is outside the layout's world of 4 \(tp2 pp1 cp1 dp2\)"):
        ParallelLayout(tp=2, pp=2).generation(tp=2).coordinates(-1)


# ---------------------------------------------------------------------------------------------- generation

# Training p-t-d, generation p_g-t_g, tensor-parallel groups, micro-DP groups (HybridFlow, section 5, 0-based).
WORKED = [
    (
        (1, 4, 2),
        (1, 2),
        [[0, 2], [1, 3], [4, 6], [5, 7]],
        [[0, 1], [2, 3], [4, 5], [6, 7]],
    ),
    (
        (1, 8, 2),
        (1, 2),
        [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]],
        [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]],
    ),
    (
        (2, 2, 2),
        (1, 2),
        [[0, 1], [2, 3], [4, 5], [6, 7]],
        [[0, 2], [1, 3], [4, 6], [5, 7]],
    ),
    (
        (2, 4, 1),
        (1, 2),
        [[0, 2], [1, 3], [4, 6], [5, 7]],
        [[0, 1, 4, 5], [2, 3, 6, 7]],
    ),
]


@pytest.mark.parametrize(("training", "generation", "tp_groups", "micro_dp_groups"), WORKED)
def test_worked_examples_of_the_paper(training, generation, tp_groups, micro_dp_groups):
    p, t, d = training
    layout = ParallelLayout(pp=p, tp=t, dp=d).generation(pp=generation[0], tp=generation[1])
    assert layout.tp_groups() == tp_groups
    assert layout.micro_dp_groups() == micro_dp_groups
    assert layout.pp_groups() == [[rank] for rank in range(p * t * d)]
    assert layout.transition_groups() == micro_dp_groups


def test_every_training_interval_lies_inside_its_generation_interval_where_degrees_divide():
    tried = 0
    for layout in generations(16):
        t = layout.training
        if t.tp % layout.tp or t.pp % layout.pp:
            continue
        assert layout.nested and layout.warning() == ""
        for rank in range(t.world_size):
            at, here = t.coordinates(rank), layout.coordinates(rank)
            assert inside(interval(at.tp, t.tp), interval(here.tp, layout.tp)), (layout, rank)
            assert inside(interval(at.pp, t.pp), interval(here.pp, layout.pp)), (layout, rank)
            shards = layout.tp * layout.pp
            assert layout.received_share(rank) == Fraction(t.tp * t.pp - shards, shards * t.tp * t.pp)
        tried += 1
    assert tried > 300


def test_replicas_of_any_generation_layout_cover_the_world_once_with_ascending_groups():
    """torch.distributed sorts the ranks of a group, so a group out of order would give vLLM other slices."""
    for layout in generations(12):
        places = [layout.coordinates(rank) for rank in range(layout.world_size)]
        assert len(set(places)) == layout.world_size
        assert {at.dp for at in places} == set(range(layout.dp))
        for groups, axis, size in ((layout.tp_groups(), "tp", layout.tp), (layout.pp_groups(), "pp", layout.pp)):
            assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
            for group in groups:
                assert group == sorted(group)
                assert [getattr(places[rank], axis) for rank in group] == list(range(size)), (layout, group)


def test_a_transition_group_trains_all_that_its_members_generate_with():
    """On a grid of cells small enough that every shard is a set of whole cells."""
    for layout in generations(8):
        t = layout.training
        columns, rows = t.tp * layout.tp, t.pp * layout.pp

        def cells(pp: int, p: int, tp: int, parts: int, rows: int = rows, columns: int = columns) -> set:
            stages = range(pp * rows // p, (pp + 1) * rows // p)
            return set(itertools.product(stages, range(tp * columns // parts, (tp + 1) * columns // parts)))

        for group in layout.transition_groups():
            places = [(t.coordinates(rank), layout.coordinates(rank)) for rank in group]
            trained = set().union(*(cells(at.pp, t.pp, at.tp, t.tp) for at, _ in places))
            for rank, (at, here) in zip(group, places, strict=True):
                wanted = cells(here.pp, layout.pp, here.tp, layout.tp)
                assert wanted <= trained, (layout, group)
                missing = len(wanted - cells(at.pp, t.pp, at.tp, t.tp))
                assert layout.received_share(rank) == Fraction(missing, columns * rows)


def test_each_context_parallel_rank_generates_for_itself():
    layout = ParallelLayout(tp=2, cp=2).generation(tp=1)
    assert layout.dp == 4 and layout.micro_dp_groups() == [[0, 1], [2, 3]]
    assert [layout.coordinates(rank).dp for rank in range(4)] == [0, 1, 2, 3]


def test_a_larger_generation_degree_takes_neighbours_and_costs_nothing_from_whole_models():
    layout = ParallelLayout(dp=4).generation(tp=2)
    assert layout.tp_groups() == [[0, 1], [2, 3]]
    assert [layout.received_share(rank) for rank in range(4)] == [0, 0, 0, 0]
    assert layout.warning() == ""


def test_a_degree_that_does_not_divide_is_planned_and_its_cost_told():
    # Training halves are [0, 1/2] for ranks 0 and 2, [1/2, 1] for 1 and 3; generation quarters go by rank, so that
    # ranks 1 and 2 need a quarter that they do not train.
    layout = ParallelLayout(tp=2, dp=2).generation(tp=4)
    assert layout.tp_groups() == [[0, 1, 2, 3]]
    assert [layout.received_share(rank) for rank in range(4)] == [0, Fraction(1, 4), Fraction(1, 4), 0]
    text = layout.warning()
    assert text.startswith("generation tp=4 pp=1 does not divide training tp=2 pp=1, so ranks hold other slices")
    assert "a rank receives 1/8 of the model on average and 1/4 at most, within groups of 4 ranks" in text
    # Thirds to halves: rank 1 trains [1/3, 2/3] and generates with [1/2, 1].
    thirds = ParallelLayout(tp=3, dp=2).generation(tp=2)
    assert thirds.tp_groups() == [[0, 1], [2, 3], [4, 5]]
    assert thirds.received_share(1) == Fraction(1, 2) - Fraction(1, 6)


def test_whole_experts_or_slices_of_all_are_what_vllm_offers():
    spread = ParallelLayout(tp=4).generation(tp=2, ep=2)
    assert spread.ep_groups() == [[0, 2], [1, 3]] and spread.etp_groups() == [[0], [1], [2], [3]]
    sliced = ParallelLayout(tp=4).generation(tp=2)
    assert sliced.ep_groups() == [[0], [1], [2], [3]] and sliced.etp_groups() == [[0, 2], [1, 3]]
    with pytest.raises(ConfigError, match=r"layout\.ep=2 of a generation layout with tp=4.*Set ep to 1 or 4"):
        ParallelLayout(tp=4).generation(tp=4, ep=2)


def test_generation_degrees_that_do_not_fill_the_ranks_are_refused_with_all_factors():
    with pytest.raises(
        ConfigError, match=r"generation tp\*pp = 4\*1 = 4 does not divide the 6 ranks of tp\*pp\*cp\*dp = 2\*1\*1\*3"
    ):
        ParallelLayout(tp=2, dp=3).generation(tp=4)
    with pytest.raises(ConfigError, match=r"layout\.tp=0"):
        ParallelLayout().generation(tp=0)
