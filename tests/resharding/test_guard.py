"""Checksums of a sync, on shards that the oracle cuts: one process plays all ranks and adds their sums."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.errors import ModelError
from hybridflow.models.tables import megatron_table, padded_vocab_size, vllm_table
from hybridflow.resharding import guard as module
from hybridflow.resharding.guard import MODES, Guard, checksum
from hybridflow.resharding.layout import ParallelLayout
from tests.models.oracle import make_spec, megatron_shard, random_checkpoint, vllm_shard


class Ranks:
    """Both sides of a transition, equal; ``sums`` is what an all_reduce would give."""

    def __init__(self, spec, generation, dtype=torch.float32):
        self.dtype, hf, training = dtype, random_checkpoint(spec), generation.training
        self.sources, self.targets, self.trained, self.rollout = {}, {}, {}, {}
        for rank in range(training.world_size):
            at, to = training.coordinates(rank), generation.coordinates(rank)
            self.sources[rank] = megatron_table(spec, training, at, padded_vocab_size(spec, training.tp))
            self.targets[rank] = vllm_table(spec, generation.tp, to.tp)
            self.trained[rank] = megatron_shard(hf, spec, training.tp, training.pp, at.tp, at.pp)
            self.rollout[rank] = {
                name: t.to(dtype, copy=True) for name, t in vllm_shard(hf, spec, generation.tp, to.tp).items()
            }

    def differing(self, mode, version=0):
        """(rank, parameter) of every slice that differs, and how many were compared."""
        guards = {rank: Guard(rank, self.sources, self.targets, mode) for rank in self.sources}
        chosen = guards[0].choose(version)
        assert all(guard.choose(version) == chosen for guard in guards.values())
        expected = sum(
            guard.sums(guard.held_by_sources(chosen), len(chosen), self.trained[rank], self.dtype)
            for rank, guard in guards.items()
        )
        found, compared = set(), 0
        for rank, guard in guards.items():
            mine = guard.held_by_targets(chosen)
            sums = guard.sums(mine, len(chosen), self.rollout[rank], self.dtype)
            found |= {(rank, held.parameter) for held in mine if sums[held.k] != expected[held.k]}
            compared += len(mine)
        return found, compared


LAYOUTS = [
    ParallelLayout(tp=4).generation(tp=2),
    ParallelLayout(tp=2, pp=2, dp=2).generation(tp=1),
    ParallelLayout(dp=2).generation(tp=2),
]


@settings(max_examples=25)
@given(
    st.sampled_from(["llama", "qwen2", "qwen3"]),
    st.booleans(),
    st.sampled_from(LAYOUTS),
    st.sampled_from(["sample", "full"]),
    st.integers(0, 3),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_equal_weights_have_equal_sums(architecture, tied, generation, mode, version, dtype):
    ranks = Ranks(make_spec(architecture, tie_word_embeddings=tied), generation, dtype)
    differing, compared = ranks.differing(mode, version)
    boxes = sum(len(parameter.boxes) for table in ranks.targets.values() for parameter in table.values())
    assert differing == set() and compared >= boxes


@pytest.mark.parametrize("generation", LAYOUTS)
def test_a_full_check_finds_any_changed_element(generation):
    ranks = Ranks(make_spec("qwen3"), generation)
    for name, box in [(name, table.boxes[-1]) for name, table in ranks.targets[1].items()]:
        last = tuple(stop - 1 for _, stop in box.target)
        before = ranks.rollout[1][name][last].clone()
        ranks.rollout[1][name][last] = before.nextafter(torch.tensor(9.0))
        assert ranks.differing("full")[0] == {(1, name)}
        ranks.rollout[1][name][last] = before


def test_a_full_check_finds_slices_in_a_wrong_place():
    ranks = Ranks(make_spec("qwen3"), LAYOUTS[0])
    qkv = ranks.rollout[2]["model.layers.1.self_attn.qkv_proj.weight"]
    qkv[:24] = qkv[:24].view(4, 6, 24).flip(0).reshape(24, 24).clone()
    down = ranks.rollout[0]["model.layers.0.mlp.down_proj.weight"]
    down[:] = down.flip(1)
    assert ranks.differing("full")[0] == {
        (2, "model.layers.1.self_attn.qkv_proj.weight"),
        (0, "model.layers.0.mlp.down_proj.weight"),
    }


def test_a_sample_takes_a_row_of_each_matrix_and_other_rows_later():
    ranks = Ranks(make_spec("qwen3"), LAYOUTS[0])
    guard = Guard(0, ranks.sources, ranks.targets, "sample")
    chosen = [guard.choose(version) for version in range(30)]
    assert all(len(ranges) == 1 or ranges[0][1] - ranges[0][0] == 1 for _, ranges in chosen[0])
    assert ("model.norm.weight", ((0, 24),)) in chosen[0], "vectors are small: whole"
    rows = {ranges[0][0] for part in chosen for tensor, ranges in part if tensor == "model.layers.0.mlp.up_proj.weight"}
    assert len(rows) > 25, "40 rows, two taken at each version"
    # Weights of an older version are found at once: a sync that wrote nothing differs everywhere.
    for tensor in ranks.rollout[3].values():
        tensor *= 1.5
    assert {name for rank, name in ranks.differing("sample")[0]} == set(ranks.targets[3])


def test_a_difference_is_an_error_that_names_parameter_and_slice():
    ranks = Ranks(make_spec("qwen3"), ParallelLayout().generation(tp=1))
    guard = Guard(0, ranks.sources, ranks.targets, "full")
    sides = ranks.trained[0], ranks.rollout[0], torch.float32, None
    assert guard.check(7, *sides) == len(guard.choose(7))
    ranks.rollout[0]["model.layers.2.mlp.gate_up_proj.weight"][45, 3] = 0.0
    with pytest.raises(ModelError) as caught:
        guard.check(7, *sides)
    assert str(caught.value).startswith(
        "weights of version 7: the rollout's model.layers.2.mlp.gate_up_proj.weight does not hold the trainer's "
        "model.layers.2.mlp.up_proj.weight[0:40, 0:24] after the sync (1 of 47 slices differ on rank 0)."
    )


class Parameters(dict):
    """By name; remembers those that were read."""

    def __init__(self, tensors):
        super().__init__(tensors)
        self.read = set()

    def __getitem__(self, name):
        self.read.add(name)
        return super().__getitem__(name)


@pytest.mark.parametrize("mode", MODES)
def test_off_reads_and_asks_nothing_while_sample_and_full_sum_as_much_as_they_say(monkeypatch, mode):
    ranks = Ranks(make_spec("qwen3"), ParallelLayout().generation(tp=1))
    sources, targets = Parameters(ranks.trained[0]), Parameters(ranks.rollout[0])
    summed, asked, group = [], [], object()
    monkeypatch.setattr(module, "checksum", lambda values, at: summed.append(values.numel()) or checksum(values, at))
    monkeypatch.setattr(module.dist, "all_reduce", lambda sums, group: asked.append(group))  # of one rank: the same
    ranks.rollout[0]["model.norm.weight"][0] += 1
    check = Guard(0, ranks.sources, ranks.targets, mode).check
    if mode == "off":
        assert check(7, sources, targets, torch.float32, group) == 0
        assert sources.read == targets.read == set() and summed == asked == []
        return
    with pytest.raises(ModelError, match=r"model\.norm\.weight"):
        check(7, sources, targets, torch.float32, group)
    assert sources.read == set(sources) and targets.read == set(targets) and asked == [group]
    shapes = [torch.Size(stop - start for start, stop in b.source) for p in ranks.targets[0].values() for b in p.boxes]
    counted = shapes if mode == "full" else [shape[-1:] for shape in shapes]
    assert sum(summed) == 2 * sum(shape.numel() for shape in counted)


def test_a_checksum_is_a_sum_over_parts_and_the_one_of_the_formula():
    values = torch.tensor([[1.0, -2.0, 3.0], [0.5, 0.0, -0.0]])
    k0, k1 = 0x9E3779B97F4A7C15, 0x27D4EB2F165667C5
    bits = values.view(torch.int32).tolist()
    by_hand = sum(bits[i][j] * ((i + 11) * k0 + (j + 5) * k1) for i in range(2) for j in range(3)) % 2**64
    assert int(checksum(values, ((10, 12), (4, 7)))) % 2**64 == by_hand
    parts = [checksum(values[:, :1], ((10, 12), (4, 5))), checksum(values[:, 1:], ((10, 12), (5, 7)))]
    assert int(parts[0] + parts[1]) % 2**64 == by_hand
