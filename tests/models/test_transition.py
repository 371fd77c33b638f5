"""Plans between layouts: the groups that exchange slices, and what is said where that costs more than it could."""

import pytest

from hybridflow.errors import ConfigError
from hybridflow.models.transition import between_pools, generation_tables, to_generation, to_training, training_tables
from hybridflow.resharding.layout import ParallelLayout
from hybridflow.resharding.plan import plan_rank
from tests.models.oracle import make_spec

SPEC = make_spec("llama")
BUCKET = 1000


def peers(plan):
    return {peer for step in plan.rounds for side in (step.sends, step.receives) for peer, _ in side}


def test_nested_layouts_exchange_slices_in_micro_dp_groups(caplog):
    layout = ParallelLayout(tp=4, dp=2).generation(tp=2)
    for rank, partner in enumerate([1, 0, 3, 2, 5, 4, 7, 6]):
        way = to_generation(SPEC, layout, rank)
        plan = way.plan(rank, BUCKET)
        assert way.groups == [[0, 1], [2, 3], [4, 5], [6, 7]]
        assert set(plan.group) == {rank, partner} and peers(plan) == {partner}
    assert not caplog.records


def test_every_part_of_a_plan_is_the_one_its_group_makes():
    layout = ParallelLayout(tp=2, pp=2).generation(tp=1)
    sources, targets = training_tables(SPEC, layout.training), generation_tables(SPEC, layout)
    for rank in range(4):
        assert to_generation(SPEC, layout, rank).plan(rank, BUCKET) == plan_rank(rank, sources, targets, BUCKET)


def test_ranks_that_hold_the_same_share_one_table():
    layout = ParallelLayout(tp=2, cp=2, dp=2)
    tables = training_tables(SPEC, layout)
    assert tables[0] is tables[2] is tables[4] is tables[6] and tables[0] is not tables[1]
    generated = generation_tables(SPEC, layout.generation(tp=2))
    assert [generated[rank] is generated[0] for rank in range(8)] == [True, False] * 4


def test_layouts_that_do_not_divide_are_planned_and_their_cost_is_told_once(caplog):
    layout = ParallelLayout(tp=1, dp=2).generation(tp=2)
    plans = [to_generation(SPEC, layout, rank).plan(rank, BUCKET) for rank in range(2)]
    # Each replica holds everything, so nothing has to travel, though the degrees do not divide.
    assert [plan.rounds for plan in plans] == [(), ()] and not caplog.records

    layout = ParallelLayout(tp=2, dp=2).generation(tp=4)
    plans = [to_generation(SPEC, layout, rank).plan(rank, BUCKET) for rank in range(4)]
    (record,) = caplog.records
    assert "generation tp=4 pp=1 does not divide training tp=2 pp=1" in record.getMessage()
    # Generation quarters 0, 1, 2, 3; ranks 0 and 3 have theirs in halves 0, 1, 0, 1.
    assert [bool(plan.num_received) for plan in plans] == [False, True, True, False]


def test_a_vocabulary_that_widens_the_groups_is_told(caplog):
    spec = make_spec("llama", num_attention_heads=6, num_key_value_heads=6, intermediate_size=12)
    layout = ParallelLayout(tp=6).generation(tp=2)
    way = to_generation(spec, layout, 0)
    assert way.groups == [[0, 1, 2, 3, 4, 5]] and way.plan(0, BUCKET).group == (0, 1, 2, 3, 4, 5)
    (record,) = caplog.records
    assert "within groups of 6 ranks instead of 3: the two sides cut the vocabulary" in record.getMessage()


def test_two_pools_are_one_space_of_ranks():
    training, generation = ParallelLayout(tp=2), ParallelLayout(dp=3).generation(tp=1)
    plans = [between_pools(SPEC, training, generation).plan(rank, BUCKET) for rank in range(5)]
    assert {plan.group for plan in plans} == {(0, 1, 2, 3, 4)}
    assert [peers(plan) for plan in plans] == [{2, 3, 4}, {2, 3, 4}, {0, 1}, {0, 1}, {0, 1}]
    assert not any(plan.copies or plan.coinciding for plan in plans)


def test_a_model_in_the_same_layout_is_filled_without_an_exchange_and_in_others_within_the_smallest_blocks():
    same, split, staged = ParallelLayout(tp=2, dp=4), ParallelLayout(tp=4, dp=2), ParallelLayout(pp=2, dp=4)
    assert to_training(SPEC, same, same, 3).groups == [[rank] for rank in range(8)]
    assert not to_training(SPEC, same, same, 3).plan(3, BUCKET).rounds
    for target in (split, ParallelLayout(tp=2, pp=2, dp=2)):
        # What the halves hold has to meet in a block of 4, whole replicas of both.
        found = to_training(SPEC, staged, target, 5)
        assert found.groups == [[0, 1, 2, 3], [4, 5, 6, 7]] and found.plan(5, BUCKET).group == (4, 5, 6, 7)
    # Every rank of the whole model fills any part of it alone.
    assert to_training(SPEC, ParallelLayout(dp=8), split, 0).groups == [[rank] for rank in range(8)]


def test_a_pool_may_train_what_another_pool_trains():
    plans = [between_pools(SPEC, ParallelLayout(tp=2), ParallelLayout(pp=2)).plan(rank, BUCKET) for rank in range(4)]
    assert [peers(plan) for plan in plans] == [{2, 3}, {2, 3}, {0, 1}, {0, 1}]


def test_several_generation_stages_are_refused():
    with pytest.raises(ConfigError, match=r"layout\.pp=2 of a generation layout: .* set pp to 1"):
        generation_tables(SPEC, ParallelLayout(pp=2).generation(tp=1, pp=2))
