"""Reshards between real processes, against shards that cat and chunk make of a whole checkpoint."""

import pytest
import torch
import torch.distributed as dist

from hybridflow import platform
from hybridflow.errors import ModelError
from hybridflow.models.tables import megatron_table, padded_vocab_size, vllm_table
from hybridflow.resharding.boxes import Box, ParameterBoxes
from hybridflow.resharding.layout import ParallelLayout
from hybridflow.resharding.plan import plan_rank
from hybridflow.resharding.transport import Traffic, join_worlds, make_group, reshard
from tests.models.oracle import make_spec, megatron_shard, random_checkpoint, vllm_shard
from tests.ranks import run_ranks

SPEC = make_spec("qwen3", vocab_size=128)
TIED = make_spec("qwen2", tie_word_embeddings=True)
BUCKET = 1000  # elements


def training_side(spec, layout, rank, dtype=torch.float32, seed=0):
    at = layout.coordinates(rank)
    shard = megatron_shard(random_checkpoint(spec, seed), spec, layout.tp, layout.pp, at.tp, at.pp)
    table = megatron_table(spec, layout, at, padded_vocab_size(spec, layout.tp))
    return table, {name: torch.nn.Parameter(tensor.to(dtype, copy=True)) for name, tensor in shard.items()}


def generation_side(spec, layout, rank, dtype=torch.float32, seed=0):
    """The table, the shard as it should become, and parameters to fill (padding is zero, as after loading)."""
    tp_rank = layout.coordinates(rank).tp
    shard = vllm_shard(random_checkpoint(spec, seed), spec, layout.tp, tp_rank)
    blank = {name: torch.nn.Parameter(torch.zeros(t.shape, dtype=dtype)) for name, t in shard.items()}
    return vllm_table(spec, layout.tp, tp_rank), shard, blank


def assert_filled(parameters, expected, dtype):
    for name, tensor in expected.items():
        assert torch.equal(parameters[name], tensor.to(dtype)), name


def transition(rank, spec, p, t, d, t_g, dtype, share):
    """One rank: reshard, check every parameter, and give back what was counted."""
    generation = ParallelLayout(tp=t, pp=p, dp=d).generation(tp=t_g)
    training = generation.training
    groups = generation.transition_groups()
    (mine,) = [group for group in groups if rank in group]
    tables = (
        {r: training_side(spec, training, r)[0] for r in mine},
        {r: generation_side(spec, generation, r)[0] for r in mine},
    )
    plan = plan_rank(rank, *tables, BUCKET)
    _, sources = training_side(spec, training, rank, dtype)
    _, expected, targets = generation_side(spec, generation, rank, dtype)
    traffic = reshard(plan, sources, targets, dtype=dtype, group=make_group(groups), share=share)
    assert_filled(targets, expected, dtype)
    assert traffic.received == plan.num_received * dtype.itemsize and traffic.rounds == len(plan.rounds)
    assert traffic.staged <= BUCKET * dtype.itemsize
    real = sum(copy.num_elements for copy in plan.copies) * dtype.itemsize
    padding = sum(tensor.numel() for tensor in expected.values()) * dtype.itemsize - real - traffic.received
    assert traffic.copied + traffic.shared in (real, real + padding)
    return traffic


FOUR = [(1, 4, 1, 2), (1, 4, 1, 1), (2, 2, 1, 2), (2, 2, 1, 1), (1, 2, 2, 1), (1, 1, 4, 1), (4, 1, 1, 1), (1, 2, 2, 4)]


def four_ranks(rank):
    found = {}
    for case in FOUR:
        for dtype, share in ((torch.float32, False), (torch.bfloat16, True)):
            found[case, dtype] = transition(rank, SPEC, *case, dtype, share)
    found["tied"] = transition(rank, TIED, 4, 1, 1, 1, torch.float32, True)
    found["tied, wider"] = transition(rank, TIED, 2, 2, 1, 4, torch.float32, True)
    return found


@pytest.mark.distributed
def test_four_ranks_hold_the_right_shards_and_count_their_bytes():
    by_rank = run_ranks(four_ranks, 4)
    for case in by_rank[0]:
        total = [traffic[case] for traffic in by_rank]
        assert sum(t.sent for t in total) == sum(t.received for t in total)
    for dtype in (torch.float32, torch.bfloat16):
        for rank, traffic in enumerate(by_rank):
            # 1-4-1 -> 1-2: a rank has a quarter of each matrix and needs the half that it shares with its neighbour.
            matrices = sum(t.numel() for n, t in random_checkpoint(SPEC).items() if "norm" not in n)
            assert traffic[(1, 4, 1, 2), dtype].received == matrices // 4 * dtype.itemsize, rank
            # 1-1-4 -> 1-1: nothing travels. In this model only q, k, v stand in another order.
            whole = traffic[(1, 1, 4, 1), dtype]
            assert (whole.sent, whole.received, whole.staged, whole.rounds) == (0, 0, 0, 0)
            qkv = sum(
                t.numel()
                for n, t in random_checkpoint(SPEC).items()
                if n.split(".")[-2][1:] == "_proj" and n.split(".")[-2][0] in "qkv"
            )
            everything = sum(t.numel() for t in random_checkpoint(SPEC).values())
            expected = (qkv, everything - qkv) if dtype == torch.bfloat16 else (everything, 0)
            assert (whole.copied, whole.shared) == tuple(n * dtype.itemsize for n in expected)


def two_ranks(rank):
    """TP 2 on both sides, shared: an optimizer's step in place, a trainer that moves, another transition."""
    layout = ParallelLayout(tp=2)
    generation = layout.generation(tp=2)
    table, sources = training_side(SPEC, layout, rank)
    target_table, expected, targets = generation_side(SPEC, generation, rank)
    plan = plan_rank(rank, {rank: table}, {rank: target_table}, BUCKET)
    first = reshard(plan, sources, targets, dtype=torch.float32, share=True)
    assert_filled(targets, expected, torch.float32)
    shared = [name for name in targets if targets[name].data_ptr() in {s.data_ptr() for s in sources.values()}]
    assert sorted(shared) == sorted(plan.coinciding)
    assert first.shared == sum(4 * targets[name].numel() for name in shared) and not first.received

    with torch.no_grad():
        for source in sources.values():
            source.mul_(2)
    for name, tensor in expected.items():
        # What is shared follows at once, the rest with the next transition.
        assert torch.equal(targets[name], tensor * 2 if name in shared else tensor), name
    assert reshard(plan, sources, targets, dtype=torch.float32, share=True) == first
    assert_filled(targets, {name: 2 * tensor for name, tensor in expected.items()}, torch.float32)

    for source in sources.values():  # as a trainer does that was offloaded and came back
        source.data = source.data * 2
    reshard(plan, sources, targets, dtype=torch.float32, share=True)
    assert_filled(targets, {name: 4 * tensor for name, tensor in expected.items()}, torch.float32)

    # Other dtypes are cast and copied, never shared; bfloat16 travels where the targets are bfloat16.
    half = layout.generation(tp=1)
    tables = (
        {r: training_side(SPEC, layout, r)[0] for r in (0, 1)},
        {r: generation_side(SPEC, half, r)[0] for r in (0, 1)},
    )
    gathering = plan_rank(rank, *tables, BUCKET)
    _, expected, targets = generation_side(SPEC, half, rank, torch.bfloat16)
    traffic = reshard(
        gathering,
        training_side(SPEC, layout, rank)[1],
        targets,
        dtype=torch.bfloat16,
        group=dist.group.WORLD,
        share=True,
    )
    assert_filled(targets, expected, torch.bfloat16)
    assert traffic.received == 2 * gathering.num_received and not traffic.shared
    return shared


@pytest.mark.distributed
def test_shared_parameters_follow_the_trainer_and_the_rest_is_copied():
    shared, others = run_ranks(two_ranks, 2)
    assert shared == others and "model.embed_tokens.weight" in shared and "model.norm.weight" in shared
    assert not any("qkv" in name for name in shared)


def two_pools(rank, folder):
    """Ranks 0 and 1 train (TP 2), ranks 2 and 3 generate (TP 1), each pool in a world of its own."""
    dist.destroy_process_group()
    pool, local = divmod(rank, 2)
    dist.init_process_group("gloo", init_method=f"file://{folder}/pool{pool}", rank=local, world_size=2)
    joint = join_worlds(dist.FileStore(f"{folder}/joint", 4), rank, 4, platform.CPU)
    training, generation = ParallelLayout(tp=2), ParallelLayout(dp=2).generation(tp=1)
    sources = {r: training_side(TIED, training, r)[0] for r in (0, 1)}
    targets = {2 + r: generation_side(TIED, generation, r)[0] for r in (0, 1)}
    plan = plan_rank(rank, sources, targets, BUCKET)
    own = training_side(TIED, training, local)[1] if pool == 0 else {}
    _, expected, filled = generation_side(TIED, generation, local) if pool == 1 else ({}, {}, {})
    traffic = reshard(plan, own, filled, dtype=torch.float32, group=joint, share=True)
    assert_filled(filled, expected, torch.float32)
    # Both worlds are as they were.
    total = torch.tensor([rank])
    dist.all_reduce(total)
    assert total.item() == (1, 5)[pool]
    return traffic


@pytest.mark.distributed
def test_two_worlds_exchange_through_a_group_of_both(tmp_path):
    traffic = run_ranks(two_pools, 4, str(tmp_path))
    model = 4 * sum(tensor.numel() for tensor in random_checkpoint(TIED).values())
    assert [t.received for t in traffic] == [0, 0, model, model]
    assert sum(t.sent for t in traffic[:2]) == 2 * model and [t.sent for t in traffic[2:]] == [0, 0]
    # A side that only sends, or only receives, has the whole bucket for it.
    assert all(0.9 * 4 * BUCKET < t.staged <= 4 * BUCKET for t in traffic)


def plan_of_halves(rank):
    """Two ranks hold half of a vector each, and both want all of it."""
    whole = ((0, 8),)
    halves = [((0, 4),), ((4, 8),)]
    sources = {r: {"s": ParameterBoxes("s", (4,), (Box("t", halves[r], ((0, 4),)),))} for r in (0, 1)}
    targets = {r: {"w": ParameterBoxes("w", (8,), (Box("t", whole, whole),))} for r in (0, 1)}
    return plan_rank(rank, sources, targets, BUCKET)


def test_what_does_not_fit_the_plan_is_refused_before_anything_travels():
    plan, source = plan_of_halves(0), {"s": torch.ones(4)}
    with pytest.raises(
        ModelError, match=r"rank 0 exchanges slices with ranks \[0, 1\], but was given no process group"
    ):
        reshard(plan, source, {"w": torch.zeros(8)}, dtype=torch.float32)
    group = dist.ProcessGroup(dist.HashStore(), 0, 3)
    with pytest.raises(ModelError, match="a process group of 3"):
        reshard(plan, source, {"w": torch.zeros(8)}, dtype=torch.float32, group=group)
    group = dist.ProcessGroup(dist.HashStore(), 0, 2)
    with pytest.raises(ModelError, match="w: slices travel as torch.float32, the target parameter is torch.float64"):
        reshard(plan, source, {"w": torch.zeros(8, dtype=torch.float64)}, dtype=torch.float32, group=group)
    with pytest.raises(ModelError, match=r"w: the plan needs \[4:8\], the target parameter is \[6\]"):
        reshard(plan, source, {"w": torch.zeros(6)}, dtype=torch.float32, group=group)
    with pytest.raises(ModelError, match="s: planned as a source, but the source model has no such parameter"):
        reshard(plan, {}, {"w": torch.zeros(8)}, dtype=torch.float32, group=group)


def test_a_stack_of_experts_is_filled_from_matrices_and_back():
    rectangle = ((0, 2), (0, 3))
    matrices = {f"m{e}": ParameterBoxes(f"m{e}", (2, 3), (Box(f"expert {e}", rectangle, rectangle),)) for e in (0, 1)}
    boxes = tuple(Box(f"expert {e}", rectangle, ((e, e + 1), *rectangle)) for e in (0, 1))
    stack = {"w": ParameterBoxes("w", (2, 2, 3), boxes)}
    values = {"m0": torch.randn(2, 3), "m1": torch.randn(2, 3)}
    filled, back = {"w": torch.zeros(2, 2, 3)}, {name: torch.zeros(2, 3) for name in values}
    there = reshard(plan_rank(0, {0: matrices}, {0: stack}, BUCKET), values, filled, dtype=torch.float32)
    assert torch.equal(filled["w"], torch.stack([values["m0"], values["m1"]]))
    assert there == Traffic(copied=48)
    assert reshard(plan_rank(0, {0: stack}, {0: matrices}, BUCKET), filled, back, dtype=torch.float32) == there
    assert all(torch.equal(back[name], values[name]) for name in values)
