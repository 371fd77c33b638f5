"""Tables against whole tensors, cat and chunk: which element sits where, for every layout and architecture."""

from dataclasses import replace

import pytest
import torch

from hybridflow.errors import ConfigError, ModelError
from hybridflow.models.spec import ModelSpec
from hybridflow.models.tables import hf_table, megatron_table, padded_vocab_size, vllm_table
from hybridflow.resharding.boxes import extents, slices
from hybridflow.resharding.layout import ParallelLayout
from tests.models.oracle import make_spec, megatron_shard, random_checkpoint, vllm_shard
from tests.tiny_models import save_tiny_model

SPECS = {
    "llama": make_spec("llama"),
    "llama tied": make_spec("llama", tie_word_embeddings=True),
    "llama with every bias": make_spec("llama", attention_bias=True, mlp_bias=True),
    "qwen2": make_spec("qwen2"),
    "qwen2 tied": make_spec("qwen2", tie_word_embeddings=True),
    "qwen3": make_spec("qwen3"),
    "qwen3 tied": make_spec("qwen3", tie_word_embeddings=True, vocab_size=64),
    "qwen3, no grouped queries": make_spec("qwen3", num_key_value_heads=8),
    "qwen3 moe": make_spec("qwen3_moe"),
    "qwen3 moe tied": make_spec("qwen3_moe", tie_word_embeddings=True),
    "llama, one head": make_spec("llama", num_attention_heads=4, num_key_value_heads=4, head_dim=2),
}
LAYOUTS = [(1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (2, 2), (4, 2), (2, 4)]

each_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def fill(table, hf):
    """Parameters as a table says, from whole tensors; padding stays zero."""
    filled = {}
    for name, parameter in table.items():
        filled[name] = torch.zeros(parameter.shape)
        for box in parameter.boxes:
            # One expert of a stack has a dimension more.
            leading = len(box.target) - len(box.source)
            assert extents(box.target) == ((1,) * leading + extents(box.source))
            filled[name][slices(box.target)] = hf[box.tensor][slices(box.source)]
    return filled


def assert_same(found, expected):
    assert set(found) == set(expected)
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


def tables_of(spec, tp, pp):
    layout = ParallelLayout(tp=tp, pp=pp)
    return {
        rank: megatron_table(spec, layout, layout.coordinates(rank), padded_vocab_size(spec, tp))
        for rank in range(layout.world_size)
    }


@each_spec
def test_hf_table_names_every_tensor_of_a_checkpoint(spec):
    assert hf_table(spec) == {name: tuple(tensor.shape) for name, tensor in random_checkpoint(spec).items()}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_hf_table_is_what_transformers_saves(tmp_path, architecture, tied):
    from safetensors.torch import load_file

    changes = {"attention_bias": True, "mlp_bias": True} if architecture == "llama" else {}
    folder = save_tiny_model(tmp_path, architecture, tie_word_embeddings=tied, **changes)
    saved = load_file(tmp_path / "model.safetensors")
    assert hf_table(ModelSpec.from_folder(folder)) == {name: tuple(tensor.shape) for name, tensor in saved.items()}


@pytest.mark.parametrize(("tp", "pp"), LAYOUTS)
@each_spec
def test_megatron_shards_are_those_of_cat_and_chunk(spec, tp, pp):
    hf = random_checkpoint(spec)
    for rank, table in tables_of(spec, tp, pp).items():
        at = ParallelLayout(tp=tp, pp=pp).coordinates(rank)
        assert_same(fill(table, hf), megatron_shard(hf, spec, tp, pp, at.tp, at.pp))


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@each_spec
def test_vllm_shards_are_those_of_cat_and_chunk(spec, tp):
    hf = random_checkpoint(spec)
    if spec.num_heads % tp:
        with pytest.raises(ConfigError, match="rollout layout.tp=8 does not divide the model's num_heads=4"):
            vllm_table(spec, tp, 0)
        return
    for rank in range(tp):
        assert_same(fill(vllm_table(spec, tp, rank), hf), vllm_shard(hf, spec, tp, rank))


@pytest.mark.parametrize(("tp", "pp"), LAYOUTS)
@each_spec
def test_a_replica_holds_every_element_exactly_once(spec, tp, pp):
    seen = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in hf_table(spec).items()}
    for table in tables_of(spec, tp, pp).values():
        for parameter in table.values():
            times = torch.zeros(parameter.shape, dtype=torch.int64)
            for box in parameter.boxes:
                seen[box.tensor][slices(box.source)] += 1
                times[slices(box.target)] += 1
            assert int(times.max()) <= 1, parameter.name
    for name, times in seen.items():
        whole_on_each_rank = "norm" in name or name.endswith(("o_proj.bias", "down_proj.bias", "mlp.gate.weight"))
        tied_copy = spec.tied and pp > 1 and name == "model.embed_tokens.weight"
        expected = tp if whole_on_each_rank else 2 if tied_copy else 1
        assert torch.equal(times, torch.full_like(times, expected)), name


@pytest.mark.parametrize(
    "layout",
    [
        ParallelLayout(dp=4, ep=2),
        ParallelLayout(dp=4, ep=2, etp=2),
        ParallelLayout(tp=2, dp=2, ep=2),
        ParallelLayout(tp=2, dp=2, ep=4, etp=1),
        ParallelLayout(tp=2, pp=2, ep=2, etp=1),
        ParallelLayout(cp=2, pp=2, ep=2),
    ],
    ids=str,
)
def test_experts_are_spread_and_cut_by_degrees_of_their_own(layout):
    spec = make_spec("qwen3_moe")
    hf, seen = random_checkpoint(spec), {}
    for rank in range(layout.world_size):
        at = layout.coordinates(rank)
        table = megatron_table(spec, layout, at, padded_vocab_size(spec, layout.tp))
        experts, parts = (layout.ep, at.ep), (layout.etp, at.etp)
        shard = megatron_shard(hf, spec, layout.tp, layout.pp, at.tp, at.pp, experts, parts)
        assert_same(fill(table, hf), shard)
        for parameter in table.values():
            for box in parameter.boxes:
                if ".experts." in box.tensor and at.edp == 0:
                    times = seen.setdefault(box.tensor, torch.zeros(hf[box.tensor].shape))
                    times[slices(box.source)] += 1
    assert len(seen) == 3 * spec.num_experts * spec.num_layers
    assert all(torch.equal(times, torch.ones_like(times)) for times in seen.values())


@pytest.mark.parametrize("tp", [2, 4])
def test_vllm_ranks_hold_whole_experts_with_expert_parallelism(tp):
    spec = make_spec("qwen3_moe")
    hf = random_checkpoint(spec)
    for rank in range(tp):
        table = vllm_table(spec, tp, rank, ep=tp)
        assert table["model.layers.0.mlp.experts.routed_experts.w13_weight"].shape == (4 // tp, 32, 24)
        assert_same(fill(table, hf), vllm_shard(hf, spec, tp, rank, ep=tp))


@pytest.mark.parametrize(
    ("changes", "layout", "message"),
    [
        ({"num_experts": 6}, ParallelLayout(dp=4, ep=4), "layout.ep=4 does not divide the model's num_experts=6"),
        (
            {"moe_intermediate_size": 15},
            ParallelLayout(dp=2, ep=1, tp=2),
            "layout.etp=2 does not divide .* ffn_size=15",
        ),
        ({}, ParallelLayout(tp=2, etp=1), "layout.etp=1 differs from tp=2: that needs ep above 1"),
        ({}, ParallelLayout(cp=2, pp=2), r"with pp=2, ep\*etp = 1\*1 = 1 has to be tp\*cp = 1\*2 = 2"),
        ({"model_type": "qwen3"}, ParallelLayout(dp=2, ep=2), "ep=2, etp=1 split experts, and a qwen3 model has none"),
    ],
)
def test_a_layout_that_does_not_fit_the_experts_is_refused(changes, layout, message):
    spec = make_spec(**{"architecture": "qwen3_moe", **changes})
    with pytest.raises(ConfigError, match=message):
        megatron_table(spec, layout, layout.coordinates(0), padded_vocab_size(spec, layout.tp))


def test_vllm_experts_that_do_not_divide_are_refused():
    with pytest.raises(ConfigError, match="rollout layout.ep=4 does not divide the model's num_experts=6"):
        vllm_table(make_spec("qwen3_moe", num_experts=6), 4, 0, ep=4)


@each_spec
def test_virtual_stages_are_those_of_a_longer_pipeline(spec):
    vocab = padded_vocab_size(spec, 2)
    layout, longer = ParallelLayout(tp=2, pp=2, vpp=2), ParallelLayout(tp=2, pp=4)
    for rank in range(layout.world_size):
        at = layout.coordinates(rank)
        expected = {
            f"chunk{chunk}.{name}": (boxes.shape, boxes.boxes)
            for chunk in range(2)
            for name, boxes in megatron_table(spec, longer, replace(at, pp=chunk * 2 + at.pp), vocab).items()
        }
        found = megatron_table(spec, layout, at, vocab)
        assert {name: (boxes.shape, boxes.boxes) for name, boxes in found.items()} == expected


def test_neighbouring_rows_are_one_box():
    spec = make_spec("llama")
    (table,) = tables_of(spec, 1, 1).values()
    assert len(table["decoder.layers.0.self_attention.linear_qkv.weight"].boxes) == 3 * spec.num_kv_heads
    assert len(table["decoder.layers.0.mlp.linear_fc1.weight"].boxes) == 2
    assert len(vllm_table(spec, 1, 0)["model.layers.0.self_attn.qkv_proj.weight"].boxes) == 3


def test_a_vocabulary_is_padded_to_a_multiple():
    spec = make_spec(vocab_size=61)
    assert [padded_vocab_size(spec, tp) for tp in (1, 2, 4, 6)] == [64, 64, 64, 192]
    assert padded_vocab_size(make_spec(vocab_size=65), 4) == 128
    # Two ranks of 64 rows: the second holds nothing of the 61.
    layout = ParallelLayout(tp=2)
    table = megatron_table(spec, layout, layout.coordinates(1), 128)["embedding.word_embeddings.weight"]
    assert (table.shape, table.boxes) == ((64, 24), ())


@pytest.mark.parametrize(
    ("changes", "layout", "message"),
    [
        ({}, {"pp": 3}, "layout.pp=3 does not divide the model's num_layers=4"),
        ({}, {"pp": 2, "vpp": 4}, r"layout\.pp\*vpp = 2\*4 = 8 does not divide the model's num_layers=4"),
        ({}, {"tp": 8}, "layout.tp=8 does not divide the model's num_kv_heads=4. Choose one of 1, 2, 4"),
        (
            {},
            {"tp": 3},
            "layout.tp=3 does not divide the model's num_heads=8, num_kv_heads=4, ffn_size=40. Choose one of 1, 2, 4",
        ),
        ({"num_attention_heads": 18, "num_key_value_heads": 9}, {"tp": 2}, "layout.tp=2 .* num_kv_heads=9"),
        ({"intermediate_size": 41}, {"tp": 2}, "layout.tp=2 does not divide the model's ffn_size=41"),
    ],
)
def test_a_layout_that_does_not_divide_the_model_is_refused_with_both_numbers(changes, layout, message):
    spec, layout = make_spec(**changes), ParallelLayout(**layout)
    with pytest.raises(ConfigError, match=message):
        megatron_table(spec, layout, layout.coordinates(0), padded_vocab_size(spec, layout.tp))


def test_a_wrong_padding_is_refused():
    layout = ParallelLayout(tp=2)
    with pytest.raises(ConfigError, match=r"layout\.tp=2 does not divide the model's padded_vocab=61"):
        megatron_table(make_spec(), layout, layout.coordinates(0), 61)
    with pytest.raises(ConfigError, match="padded_vocab=60 is smaller than the model's vocab_size=61"):
        megatron_table(make_spec(), layout, layout.coordinates(0), 60)


@pytest.mark.parametrize(
    ("changes", "tp", "message"),
    [
        ({}, 3, "rollout layout.tp=3 does not divide the model's num_heads=8"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 6},
            4,
            r"layout\.tp=4 does not divide the model's num_kv_heads=6",
        ),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 3},
            4,
            r"layout\.tp=4 is no multiple of the model's num_kv_heads=3",
        ),
        ({"intermediate_size": 42}, 4, "rollout layout.tp=4 does not divide the model's ffn_size=42"),
    ],
)
def test_a_rollout_layout_that_does_not_divide_the_model_is_refused_with_both_numbers(changes, tp, message):
    with pytest.raises(ConfigError, match=message):
        vllm_table(make_spec(**changes), tp, 0)


def test_a_bias_that_vllm_would_ignore_is_refused():
    with pytest.raises(ModelError, match="vLLM's qwen3 has no bias on o_proj"):
        vllm_table(make_spec("qwen3", attention_bias=True), 1, 0)


def test_a_rank_outside_its_layout_is_refused():
    with pytest.raises(ConfigError, match="tp rank 2 is outside tp=2"):
        vllm_table(make_spec(), 2, 2)
