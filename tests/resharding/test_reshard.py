"""Plans between whole worlds against a brute-force count: every element of every tensor has a number of its own.

The shards come from ``tests/models/oracle`` (cat and chunk, no boxes). A plan is carried out here by copying what each
round says from the sender's shard to the receiver's; ``test_transport`` does it with real processes.
"""

from collections import Counter
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.errors import ConfigError, ModelError
from hybridflow.models.tables import megatron_table, padded_vocab_size, vllm_table
from hybridflow.resharding.boxes import Box, ParameterBoxes
from hybridflow.resharding.layout import GenerationLayout, ParallelLayout
from hybridflow.resharding.plan import Copy, coinciding, cut, plan_rank, plan_transfers, smallest_groups
from tests.models.oracle import make_spec, megatron_shard, random_checkpoint, vllm_shard

BUCKET = 97  # elements: no divisor of anything, and much smaller than the model


def numbered(spec):
    """The checkpoint's shapes, filled with 1, 2, 3, ...; 0 stays free for padding."""
    numbers, first = {}, 1
    for name, tensor in random_checkpoint(spec).items():
        numbers[name] = torch.arange(first, first + tensor.numel()).view(tensor.shape)
        first += tensor.numel()
    return numbers


class World:
    """Tables by rank, and the shards of the numbered checkpoint that the oracle says they are."""

    def __init__(self, spec, layout):
        hf = numbered(spec)
        self.tables, self.shards = {}, {}
        known = {}
        for rank in range(layout.world_size):
            at = layout.coordinates(rank)
            key = (at.pp, at.tp, at.ep, at.etp)
            if key not in known and isinstance(layout, GenerationLayout):
                args = (layout.tp, at.tp, layout.ep)
                known[key] = vllm_table(spec, *args), vllm_shard(hf, spec, *args)
            elif key not in known:
                table = megatron_table(spec, layout, at, padded_vocab_size(spec, layout.tp))
                experts = (layout.ep, at.ep), (layout.etp, at.etp)
                known[key] = table, megatron_shard(hf, spec, layout.tp, layout.pp, at.tp, at.pp, *experts)
            self.tables[rank], self.shards[rank] = known[key]

    def shifted(self, by):
        """The same world with other rank numbers: one of two pools."""
        world = World.__new__(World)
        world.tables = {rank + by: table for rank, table in self.tables.items()}
        world.shards = {rank + by: shard for rank, shard in self.shards.items()}
        return world


def elements(shard):
    """Numbers in a shard, padding aside."""
    return {n for tensor in shard.values() for n in tensor.flatten().tolist()} - {0}


def carry_out(plans, source, target):
    """Fill all ranks' targets; returns them with what each rank received, as lists of numbers."""
    filled = {r: {n: torch.zeros_like(t) for n, t in shard.items()} for r, shard in target.shards.items()}
    received = {rank: [] for rank in plans}

    def copy(sender, receiver, copies):
        for c in copies:
            slice_ = source.shards[sender][c.source_name][c.source_slices]
            filled[receiver][c.target_name][c.target_slices] = slice_
            if sender != receiver:
                received[receiver] += slice_.flatten().tolist()

    for rank, plan in plans.items():
        copy(rank, rank, plan.copies)
        for k, step in enumerate(plan.rounds):
            assert sum(c.num_elements for side in (step.sends, step.receives) for _, cs in side for c in cs) <= BUCKET
            for sender, copies in step.receives:
                # The sender plans the same, on its own.
                assert dict(plans[sender].rounds[k].sends)[rank] == copies
                copy(sender, rank, copies)
            for receiver, copies in step.sends:
                assert dict(plans[receiver].rounds[k].receives)[rank] == copies
    return filled, received


def check(plans, source, target):
    """Targets are the oracle's, and exactly the missing elements were received, each once."""
    filled, received = carry_out(plans, source, target)
    for rank, shard in target.shards.items():
        for name, expected in shard.items():
            assert torch.equal(filled[rank][name], expected), (rank, name)
        missing = elements(shard) - elements(source.shards.get(rank, {}))
        assert Counter(received[rank]) == Counter(missing)
        assert plans[rank].num_received == len(missing)


def plans_of(groups, source, target):
    plans = {}
    for group in groups:
        sources = {rank: source.tables[rank] for rank in group if rank in source.tables}
        targets = {rank: target.tables[rank] for rank in group if rank in target.tables}
        plans |= {rank: plan_rank(rank, sources, targets, BUCKET) for rank in group}
        assert all(plans[rank].group == tuple(group) for rank in group)
    return plans


@st.composite
def specs(draw):
    return make_spec(
        draw(st.sampled_from(["llama", "qwen2", "qwen3"])),
        tie_word_embeddings=draw(st.booleans()),
        vocab_size=draw(st.sampled_from([61, 64, 100, 130])),
        hidden_size=8,
        head_dim=1,
        intermediate_size=8,
    )


@st.composite
def transitions(draw, most=16):
    """Training degrees and generation tp on one world of at most 16 ranks, also those that do not divide."""
    tp, pp = draw(st.sampled_from([(1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (2, 2), (4, 2), (2, 4)]))
    cp, dp = draw(st.sampled_from([(1, 1), (1, 2), (2, 1)]))
    training = ParallelLayout(tp=tp, pp=pp, cp=cp, dp=dp)
    fitting = [g for g in (1, 2, 4, 8) if training.world_size % g == 0]
    return training.generation(tp=draw(st.sampled_from(fitting)))


@st.composite
def transitions_with_experts(draw):
    """Experts over ranks of one replica or of several, or cut like the rest; in generation whole or cut."""
    degrees = {"tp": draw(st.sampled_from([1, 2, 4])), "cp": draw(st.sampled_from([1, 2]))}
    dp = draw(st.sampled_from([1, 2, 4] if degrees["tp"] * degrees["cp"] < 4 else [1, 2]))
    stage = degrees["tp"] * degrees["cp"]
    ep, etp = draw(
        st.sampled_from([(1, degrees["tp"])] + [(e, t) for e in (2, 4) for t in (1, 2) if stage * dp % (e * t) == 0])
    )
    pp = draw(st.sampled_from([1, 2])) if ep * etp == stage else 1
    training = ParallelLayout(**degrees, dp=dp, pp=pp, ep=ep, etp=etp)
    tp = draw(st.sampled_from([g for g in (1, 2, 4) if training.world_size % g == 0]))
    return training.generation(tp=tp, ep=draw(st.sampled_from([1, tp])))


@settings(max_examples=30)
@given(transitions_with_experts(), st.booleans())
def test_experts_travel_as_everything_else_does(generation, back):
    spec = make_spec("qwen3_moe", hidden_size=8, head_dim=1, moe_intermediate_size=4, num_hidden_layers=2)
    source, target = World(spec, generation.training), World(spec, generation)
    if back:
        source, target = target, source
    groups = smallest_groups([generation.transition_groups(), world_of(generation)], source.tables, target.tables)
    check(plans_of(groups, source, target), source, target)


def world_of(layout):
    return [list(range(layout.world_size))]


@settings(max_examples=40)
@given(specs(), transitions())
def test_every_rank_receives_exactly_the_elements_it_lacks(spec, generation):
    training, rollout = World(spec, generation.training), World(spec, generation)
    partitions = [generation.transition_groups(), world_of(generation)]
    groups = smallest_groups(partitions, training.tables, rollout.tables)
    check(plans_of(groups, training, rollout), training, rollout)


@settings(max_examples=20)
@given(specs(), transitions())
def test_the_way_back_needs_only_what_a_trainer_lacks_of_its_generation_shard(spec, generation):
    training, rollout = World(spec, generation.training), World(spec, generation)
    partitions = [[[rank] for rank in range(generation.world_size)], world_of(generation)]
    groups = smallest_groups(partitions, rollout.tables, training.tables)
    check(plans_of(groups, rollout, training), rollout, training)
    # A training shard lies inside its own generation shard, so nothing has to travel back.
    assert not generation.nested or groups == partitions[0]


@settings(max_examples=20)
@given(specs(), transitions(), st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 4]))
def test_two_pools_are_planned_as_one_space_of_ranks(spec, generation, replicas, tp):
    training = World(spec, generation.training)
    pool = ParallelLayout(tp=1, dp=tp * replicas).generation(tp=tp)
    first = generation.world_size
    rollout = World(spec, pool).shifted(first)
    check(plans_of([list(range(first + pool.world_size))], training, rollout), training, rollout)


EVEN = make_spec("llama", num_key_value_heads=8, head_dim=4, hidden_size=32, vocab_size=128)


def is_norm(parameter):
    return "norm" in parameter


def received(plan, wanted):
    """Elements that arrive for the target parameters whose names are wanted."""
    return sum(
        copy.num_elements
        for step in plan.rounds
        for _, copies in step.receives
        for copy in copies
        if wanted(copy.target_name)
    )


@pytest.mark.parametrize(
    ("p", "t", "d", "t_g"),
    [(1, 4, 1, 2), (1, 4, 1, 1), (2, 2, 1, 2), (2, 2, 1, 1), (1, 2, 2, 1), (1, 1, 4, 1), (4, 1, 1, 1), (2, 4, 2, 2)],
)
def test_received_elements_are_those_of_the_papers_formula(p, t, d, t_g):
    """(tp - t_g) / (t_g tp) of all matrices on average over the ranks, and of the layers' matrices on each of them."""
    generation = ParallelLayout(tp=t, pp=p, dp=d).generation(tp=t_g)
    training, rollout = World(EVEN, generation.training), World(EVEN, generation)
    plans = plans_of(generation.transition_groups(), training, rollout)
    hf = random_checkpoint(EVEN)
    matrices = sum(tensor.numel() for name, tensor in hf.items() if not is_norm(name))
    layers = sum(tensor.numel() for name, tensor in hf.items() if "layers" in name and not is_norm(name))
    share = Fraction(t * p - t_g, t_g * t * p)
    by_rank = [received(plan, lambda name: not is_norm(name)) for plan in plans.values()]
    assert Fraction(sum(by_rank), len(by_rank)) == share * matrices
    for plan in plans.values():
        assert received(plan, lambda name: "layers" in name and not is_norm(name)) == share * layers
    # First and last stage hold the vocabulary's matrices, so they lack less of them than the stages between.
    assert p > 2 or set(by_rank) == {share * matrices}


def test_what_several_ranks_hold_is_sent_by_each_in_turn():
    """Norms of a stage are on all four of its ranks, and twelve others want them."""
    generation = ParallelLayout(tp=4, pp=4).generation(tp=1)
    training, rollout = World(EVEN, generation.training), World(EVEN, generation)
    transfers = plan_transfers(training.tables, rollout.tables)
    sent = Counter[int]()
    for transfer in transfers:
        if transfer.sender != transfer.receiver and is_norm(transfer.copy.target_name):
            sent[transfer.sender] += transfer.copy.num_elements
    # Two norms of 32 elements a layer, one layer a stage, for 12 others, by 4 ranks; the last stage has one norm more.
    assert sent == {rank: 32 * 12 * (3 if rank >= 12 else 2) // 4 for rank in range(16)}


def test_replicas_of_another_pools_trainer_share_the_work():
    training = World(EVEN, ParallelLayout(tp=2, dp=2))
    rollout = World(EVEN, ParallelLayout(dp=4).generation(tp=1)).shifted(4)
    sent = Counter[int]()
    for transfer in plan_transfers(training.tables, rollout.tables):
        sent[transfer.sender] += transfer.copy.num_elements
    assert set(sent) == {0, 1, 2, 3}
    assert max(sent.values()) - min(sent.values()) <= max(t.numel() for t in random_checkpoint(EVEN).values())


def test_a_sender_on_the_same_node_comes_first():
    """Two nodes of four ranks: a trainer's replica and two rollout ranks on each. The same plan without nodes mixes."""
    training = World(EVEN, ParallelLayout(tp=2, dp=2))
    rollout = World(EVEN, ParallelLayout(dp=4).generation(tp=1)).shifted(4)
    nodes = {0: 0, 1: 0, 2: 1, 3: 1, 4: 0, 5: 0, 6: 1, 7: 1}
    transfers = plan_transfers(training.tables, rollout.tables, nodes)
    assert {(nodes[t.sender], nodes[t.receiver]) for t in transfers} == {(0, 0), (1, 1)}
    anywhere = plan_transfers(training.tables, rollout.tables)
    assert {(nodes[t.sender], nodes[t.receiver]) for t in anywhere} == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_groups_grow_where_the_sides_pad_a_vocabulary_differently():
    """61 rows. In training 192 / 6 = 32 a rank, of which ranks 0 and 1 have all; vLLM's halves are 64 / 2 = 32 rows."""
    spec = make_spec("llama", num_attention_heads=6, num_key_value_heads=6, intermediate_size=12)
    generation = ParallelLayout(tp=6).generation(tp=2)
    training, rollout = World(spec, generation.training), World(spec, generation)
    partitions = [generation.transition_groups(), world_of(generation)]
    assert partitions[0] == [[0, 1, 2], [3, 4, 5]]
    assert smallest_groups(partitions, training.tables, rollout.tables) == [[0, 1, 2, 3, 4, 5]]
    fitting = make_spec("llama", num_attention_heads=6, num_key_value_heads=6, intermediate_size=12, vocab_size=190)
    training, rollout = World(fitting, generation.training), World(fitting, generation)
    assert smallest_groups(partitions, training.tables, rollout.tables) == partitions[0]


def table_of(parameters):
    """{parameter: (shape, [(tensor, source ranges, target ranges)])} as a table."""
    return {
        name: ParameterBoxes(name, shape, tuple(Box(*b) for b in boxes)) for name, (shape, boxes) in parameters.items()
    }


def test_experts_need_no_rules_of_their_own():
    """Four experts over two data-parallel ranks in training; stacked, and cut by rows over two ranks in generation."""
    expert, half = ((0, 4), (0, 3)), [((0, 2), (0, 3)), ((2, 4), (0, 3))]
    training = {
        rank: table_of({f"experts.{k}": ((4, 3), [(f"expert {2 * rank + k}", expert, expert)]) for k in range(2)})
        for rank in range(2)
    }
    rollout = {
        rank: table_of({"w": ((4, 2, 3), [(f"expert {e}", half[rank], ((e, e + 1), *half[0])) for e in range(4)])})
        for rank in range(2)
    }
    assert smallest_groups([[[0], [1]], [[0, 1]]], training, rollout) == [[0, 1]]
    plan = plan_rank(1, training, rollout, bucket_elements=100)
    rows, whole_row = (slice(2, 4), slice(0, 3)), (slice(0, 2), slice(0, 3))
    assert plan.copies == (
        Copy("experts.0", rows, "w", (slice(2, 3), *whole_row)),
        Copy("experts.1", rows, "w", (slice(3, 4), *whole_row)),
    )
    (only,) = plan.rounds
    assert only.receives == (
        (
            0,
            (
                Copy("experts.0", rows, "w", (slice(0, 1), *whole_row)),
                Copy("experts.1", rows, "w", (slice(1, 2), *whole_row)),
            ),
        ),
    )
    assert only.sends == (
        (
            0,
            (
                Copy("experts.0", whole_row, "w", (slice(2, 3), *whole_row)),
                Copy("experts.1", whole_row, "w", (slice(3, 4), *whole_row)),
            ),
        ),
    )
    # Cut to three elements a round, an expert's slice [1, 2, 3] falls into its rows.
    small = plan_rank(1, training, rollout, bucket_elements=6)
    assert [step.receives for step in small.rounds] == [
        (
            (
                0,
                (
                    Copy(
                        f"experts.{e}",
                        (slice(2 + r, 3 + r), slice(0, 3)),
                        "w",
                        (slice(e, e + 1), slice(r, r + 1), slice(0, 3)),
                    ),
                ),
            ),
        )
        for e in range(2)
        for r in range(2)
    ]


def test_parts_of_a_stream_are_equal_and_in_order():
    first = Copy("a", (slice(1, 4), slice(0, 5)), "b", (slice(0, 3), slice(2, 7)))
    second = Copy("c", (slice(0, 2),), "d", (slice(3, 5),))
    parts = cut([first, second], 4)
    assert [sum(copy.num_elements for copy in part) for part in parts] == [4, 4, 4, 4, 1]
    a, c = torch.arange(20).view(4, 5), torch.tensor([20, 21])
    order = [
        n
        for part in parts
        for copy in part
        for n in {"a": a, "c": c}[copy.source_name][copy.source_slices].flatten().tolist()
    ]
    assert order == [*range(5, 20), 20, 21]
    # The largest rectangles: the rest of a row, then whole rows, then the start of one.
    assert parts[1] == (
        Copy("a", (slice(1, 2), slice(4, 5)), "b", (slice(0, 1), slice(6, 7))),
        Copy("a", (slice(2, 3), slice(0, 3)), "b", (slice(1, 2), slice(2, 5))),
    )


def test_parameters_coincide_where_shape_and_content_are_the_same():
    whole, half = ((0, 4),), ((0, 2),)
    source = table_of(
        {
            "s": ((4,), [("t", whole, whole)]),
            "padded": ((6,), [("t", whole, whole)]),
            "part": ((2,), [("t", half, half)]),
        }
    )
    target = table_of(
        {
            "same": ((4,), [("t", whole, whole)]),
            "other": ((4,), [("u", whole, whole)]),
            "larger": ((8,), [("t", whole, whole)]),
        }
    )
    assert coinciding(source, target) == {"same": "s"}
    training, rollout = World(EVEN, ParallelLayout(tp=2)), World(EVEN, ParallelLayout(tp=2).generation(tp=2))
    assert {n for n in rollout.tables[1] if n not in coinciding(training.tables[1], rollout.tables[1])} == {
        f"model.layers.{n}.self_attn.qkv_proj.weight" for n in range(EVEN.num_layers)
    }


def test_what_cannot_be_planned_is_refused():
    training, rollout = World(EVEN, ParallelLayout(tp=2)), World(EVEN, ParallelLayout(tp=2).generation(tp=1))
    with pytest.raises(
        ConfigError, match="a bucket of 1 elements is too small: a rank has 2 streams of slices at once"
    ):
        plan_rank(0, training.tables, rollout.tables, bucket_elements=1)
    with pytest.raises(ModelError, match=r"^model\.embed_tokens\.weight of rank 0: no source .*weight\[64:128, 0:32\]"):
        plan_rank(0, {0: training.tables[0]}, rollout.tables, BUCKET)
