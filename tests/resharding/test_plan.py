"""Plans between a trainer's and a rollout's parameters, carried out and compared with whole tensors."""

import pickle
import subprocess
import sys

import pytest
import torch

from hybridflow.errors import ModelError
from hybridflow.models.tables import megatron_table, padded_vocab_size, vllm_table
from hybridflow.resharding.boxes import Box, ParameterBoxes
from hybridflow.resharding.layout import ParallelLayout
from hybridflow.resharding.plan import Copy, plan_transfers
from hybridflow.resharding.transport import copy_local
from tests.models.oracle import make_spec, megatron_shard, random_checkpoint, vllm_shard

SPECS = {
    f"{architecture}{' tied' if tied else ''}": make_spec(architecture, tie_word_embeddings=tied)
    for architecture in ("llama", "qwen2", "qwen3")
    for tied in (False, True)
}
each_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def trainer_table(spec, tp=1, pp=1, rank=0):
    layout = ParallelLayout(tp=tp, pp=pp)
    return megatron_table(spec, layout, layout.coordinates(rank), padded_vocab_size(spec, tp))


def plan_local(source, target):
    """Both sides in one process."""
    return [transfer.copy for transfer in plan_transfers({0: source}, {0: target})]


def blank(shard):
    """Parameters full of NaN, so that an element nobody writes shows; padding rows are zero, as after loading."""
    return {name: torch.full_like(tensor, torch.nan) for name, tensor in shard.items()}


def without_padding(name, tensor, spec):
    return tensor[: spec.vocab_size] if name in ("model.embed_tokens.weight", "lm_head.weight") else tensor


@each_spec
def test_a_whole_trainer_fills_a_whole_rollout(spec):
    hf = random_checkpoint(spec)
    source, expected = megatron_shard(hf, spec, 1, 1, 0, 0), vllm_shard(hf, spec, 1, 0)
    target = blank(expected)
    plan = plan_local(trainer_table(spec), vllm_table(spec, 1, 0))
    written = copy_local(plan, source, target)
    assert written == 4 * sum(tensor.numel() for tensor in hf.values())
    for name in expected:
        found = without_padding(name, target[name], spec)
        assert torch.equal(found, without_padding(name, expected[name], spec)), name
        # Padding is left as it was.
        assert target[name][len(found) :].isnan().all()


@each_spec
def test_each_trainer_rank_fills_exactly_its_own_slices_of_a_rollout(spec):
    """All ranks of a 2x2 trainer, one after the other, into one whole rollout: together every element once."""
    hf = random_checkpoint(spec)
    expected = vllm_shard(hf, spec, 1, 0)
    target = blank(expected)
    layout = ParallelLayout(tp=2, pp=2)
    source_table, source = {}, {}
    for rank in range(layout.world_size):
        at = layout.coordinates(rank)
        shard = megatron_shard(hf, spec, 2, 2, at.tp, at.pp)
        for name, boxes in trainer_table(spec, 2, 2, rank).items():
            source_table[f"{rank}/{name}"], source[f"{rank}/{name}"] = boxes, shard[name]
    written = copy_local(plan_local(source_table, vllm_table(spec, 1, 0)), source, target)
    assert written == 4 * sum(tensor.numel() for tensor in hf.values())
    for name in expected:
        assert torch.equal(without_padding(name, target[name], spec), without_padding(name, expected[name], spec)), name


@pytest.mark.parametrize(("tp", "rank"), [(2, 1), (4, 2), (8, 7)])
@each_spec
def test_a_whole_trainer_fills_a_sharded_rollout(spec, tp, rank):
    """tp=8 is more than the four kv heads, so they are replicated."""
    hf = random_checkpoint(spec)
    expected = vllm_shard(hf, spec, tp, rank)
    target = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    copy_local(
        plan_local(trainer_table(spec), vllm_table(spec, tp, rank)), megatron_shard(hf, spec, 1, 1, 0, 0), target
    )
    for name in expected:
        assert torch.equal(target[name], expected[name]), name


@each_spec
def test_the_way_back_restores_the_trainer(spec):
    hf = random_checkpoint(spec)
    expected = megatron_shard(hf, spec, 1, 1, 0, 0)
    target = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    copy_local(plan_local(vllm_table(spec, 1, 0), trainer_table(spec)), vllm_shard(hf, spec, 1, 0), target)
    for name in expected:
        assert torch.equal(target[name], expected[name]), name


def test_copies_are_as_large_as_the_layouts_allow():
    spec = make_spec("llama")
    plan = plan_local(trainer_table(spec), vllm_table(spec, 1, 0))
    count = {name: sum(copy.target_name == name for copy in plan) for name in vllm_table(spec, 1, 0)}
    # Queries, keys and values of the four groups lie apart in the trainer; gate and up coincide on both sides.
    assert count.pop("model.layers.0.self_attn.qkv_proj.weight") == 12
    assert count["model.layers.0.mlp.gate_up_proj.weight"] == 1
    assert {n for name, n in count.items() if "qkv" not in name} == {1}
    fused = next(copy for copy in plan if copy.target_name == "model.layers.0.mlp.gate_up_proj.weight")
    whole = (slice(0, 80), slice(0, 24))
    assert fused == Copy("decoder.layers.0.mlp.linear_fc1.weight", whole, fused.target_name, whole)
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_dtype_is_the_targets():
    spec = make_spec(tie_word_embeddings=True)
    hf = random_checkpoint(spec)
    source, expected = megatron_shard(hf, spec, 1, 1, 0, 0), vllm_shard(hf, spec, 1, 0)
    target = {name: torch.zeros_like(tensor, dtype=torch.bfloat16) for name, tensor in expected.items()}
    plan = plan_local(trainer_table(spec), vllm_table(spec, 1, 0))
    assert copy_local(plan, source, target) == 2 * sum(tensor.numel() for tensor in hf.values())
    for name in expected:
        assert torch.equal(target[name], expected[name].bfloat16()), name


def test_writing_into_parameters_that_want_gradients_is_allowed():
    whole = ((0, 3),)
    table = {"w": ParameterBoxes("w", (3,), (Box("t", whole, whole),))}
    target = {"w": torch.nn.Parameter(torch.zeros(3))}
    assert copy_local(plan_local(table, table), {"w": torch.nn.Parameter(torch.ones(3))}, target) == 12
    assert torch.equal(target["w"].data, torch.ones(3)) and target["w"].grad_fn is None


def test_a_part_that_no_source_holds_is_named():
    spec = make_spec()
    with pytest.raises(
        ModelError,
        match=r"^model\.embed_tokens\.weight: no source parameter holds model\.embed_tokens\.weight\[32:61, 0:24\]",
    ):
        plan_local(trainer_table(spec, tp=2), vllm_table(spec, 1, 0))
    with pytest.raises(
        ModelError,
        match=r"^model\.layers\.2\.self_attn\.qkv_proj\.weight: .* model\.layers\.2\.self_attn\.q_proj\.weight\[0:24, ",
    ):
        plan_local(trainer_table(spec, pp=2), vllm_table(spec, 1, 0))


def test_parameters_that_are_not_what_the_plan_was_made_for_are_named():
    copy = Copy("a", (slice(0, 4),), "b", (slice(2, 6),))
    with pytest.raises(ModelError, match="a: planned as a source, but the source model has no such parameter"):
        copy_local([copy], {}, {"b": torch.zeros(6)})
    with pytest.raises(ModelError, match="b: planned as a target, but the target model has no such parameter"):
        copy_local([copy], {"a": torch.zeros(4)}, {})
    with pytest.raises(ModelError, match=r"b: the plan needs \[2:6\], the target parameter is \[5\]"):
        copy_local([copy], {"a": torch.zeros(4)}, {"b": torch.zeros(5)})
    with pytest.raises(ModelError, match=r"a: the plan needs \[0:4\], the source parameter is \[4, 1\]"):
        copy_local([copy], {"a": torch.zeros(4, 1)}, {"b": torch.zeros(6)})


def test_planning_needs_no_torch():
    program = (
        "import sys; import hybridflow.resharding.plan, hybridflow.models.tables; assert 'torch' not in sys.modules"
    )
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert child.returncode == 0, child.stderr
