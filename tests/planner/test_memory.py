"""The memory estimate against sums by hand, and against its own parts."""

from collections.abc import Callable
from pathlib import Path

import pytest

from hybridflow import compose
from hybridflow.config import GRPOConfig, PPOConfig, RoleConfig, RunConfig
from hybridflow.models.spec import ModelSpec
from hybridflow.planner.memory import (
    GIB,
    SITUATIONS,
    DeviceMemory,
    Part,
    activation_bytes,
    estimate,
    gradient_bytes,
    logit_bytes,
    optimizer_bytes,
    table,
)
from hybridflow.resharding.layout import Layout, ParallelLayout
from tests.assets import CONFIG, overrides_for, write_model

# Of tests.assets.CONFIG: h 128, f 384, 2 layers, q 4*32, k 2*32, vocabulary 262 padded to 320, qk norms, not tied.
LAYER = 128 * (128 + 2 * 64) + 128 * 128 + 3 * 128 * 384 + 2 * 128 + 2 * 32
EMBEDDING = 320 * 128
MODEL = 2 * LAYER + 2 * EMBEDDING + 128


def spec(**changes: object) -> ModelSpec:
    return ModelSpec.from_config({**CONFIG, **changes})


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    assets = overrides_for(tmp_path_factory.mktemp("assets"))
    return [*assets, "rollout.kv_cache_gb=0.25", "memory={offload: [gradients, parameters], keep_rollout: false}"]


@pytest.fixture
def estimated(given: list[str]) -> Callable[..., DeviceMemory]:
    def run(training: ParallelLayout, *overrides: str, reference: bool = False) -> DeviceMemory:
        roles = ["roles.reference.pool=train"] if reference else []
        config: RunConfig = compose.load("grpo", GRPOConfig, [*given, *roles, *overrides])
        layouts: dict[str, Layout] = {"actor": training, "rollout": training.generation(tp=1)}
        layouts |= {"reference": training} if reference else {}
        (found,) = estimate(config, dict.fromkeys(layouts, spec()), layouts, process_bytes=1000)
        return found

    return run


def bytes_of(device: DeviceMemory) -> dict[str, tuple[int, int, int]]:
    return {part.name: (part.update, part.sync, part.generate) for part in device.parts}


def test_what_takes_turns_is_counted_where_it_is_in_memory(estimated: Callable[..., DeviceMemory]) -> None:
    device = estimated(ParallelLayout(), "memory.offload=[gradients,optimizer,parameters]")
    found = bytes_of(device)
    assert found["process"] == (1000,) * 3
    assert found["actor.parameters"] == (4 * MODEL, 4 * MODEL, 0)
    assert found["actor.gradients"] == (4 * MODEL, 0, 0)
    assert found["actor.optimizer"] == (8 * MODEL, 0, 0)
    assert found["actor.workspace"] == (3 * 4 * 2 * 384 * 128, 0, 0)  # gate and up, the largest one
    assert found["rollout.weights"] == (0, 4 * MODEL, 4 * MODEL)
    assert found["rollout.kv_cache"] == (0, 0, GIB // 4)
    assert "rollout.sync_buckets" not in found  # every rank has all that it generates with


def test_what_is_not_offloaded_stays(estimated: Callable[..., DeviceMemory]) -> None:
    device = estimated(ParallelLayout(), "memory.offload=[]", "memory.keep_rollout=true", reference=True)
    found = bytes_of(device)
    assert found["actor.optimizer"] == (8 * MODEL,) * 3
    assert found["reference.parameters"] == (4 * MODEL,) * 3
    assert found["rollout.kv_cache"] == (GIB // 4,) * 3


def test_weights_that_actor_and_rollout_share_are_counted_once(estimated: Callable[..., DeviceMemory]) -> None:
    given = ("memory.offload=[]", "memory.keep_rollout=true", "memory.share_weights=true")
    found = bytes_of(estimated(ParallelLayout(), *given))
    qkv, norms = 2 * 128 * (128 + 2 * 64), 128 + 2 * (2 * 128 + 2 * 32)
    assert found["actor.parameters"] == (4 * MODEL,) * 3
    assert found["rollout.weights"] == (4 * qkv,) * 3  # what vLLM orders otherwise
    # Of halves of the matrices nothing is a rollout's whole one.
    assert bytes_of(estimated(ParallelLayout(tp=2), *given))["rollout.weights"] == (4 * (MODEL - norms),) * 3
    assert bytes_of(estimated(ParallelLayout(), *given[:2]))["rollout.weights"] == (4 * MODEL,) * 3


def test_an_engine_on_a_cpu_packs_its_matrices_once_more(given: list[str]) -> None:
    def packed(*overrides: str, **shape: bool) -> tuple[int, int, int]:
        config: RunConfig = compose.load("grpo", GRPOConfig, [*given, *overrides])
        layouts: dict[str, Layout] = {"actor": ParallelLayout(), "rollout": ParallelLayout().generation(tp=1)}
        specs = dict.fromkeys(layouts, spec(**shape))
        (device,) = estimate(config, specs, layouts, process_bytes=0, packs=True)
        return bytes_of(device)["rollout.packed"]

    norms = 128 + 2 * (2 * 128 + 2 * 32)
    matrices = 4 * (MODEL - norms - EMBEDDING)  # the head, and not the embedding, which is only looked up
    assert packed() == (0, 0, matrices)
    assert packed("memory.keep_rollout=true") == (matrices,) * 3
    assert packed(tie_word_embeddings=True) == (0, 0, matrices)


def test_a_critic_has_a_head_of_its_own_and_is_away_while_weights_travel(given: list[str]) -> None:
    config: RunConfig = compose.load("ppo", PPOConfig, [*given, "memory.offload=[gradients,parameters,others]"])
    one = ParallelLayout()
    layouts: dict[str, Layout] = {"actor": one, "critic": one, "rollout": one.generation(tp=1), "reward": one}
    specs = {"actor": spec(), "critic": spec().scoring("ForTokenClassification"), "rollout": spec()}
    config.roles["reward"] = RoleConfig(pool="train")
    (device,) = estimate(config, specs, layouts, process_bytes=0)
    found, size = bytes_of(device), MODEL - EMBEDDING + 128 + 1
    assert found["critic.parameters"] == (4 * size, 0, 0)
    assert found["critic.optimizer"] == (8 * size,) * 3
    assert "critic.activations" in found and "critic.logits" not in found
    assert not any(name.startswith("reward.") for name in found), "functions have no model"
    (device,) = estimate(config, {**specs, "reward": specs["critic"]}, layouts, process_bytes=0)
    assert bytes_of(device)["reward.parameters"] == (4 * size, 0, 0)
    config.memory.offload.remove("others")
    (device,) = estimate(config, specs, layouts, process_bytes=0)
    assert bytes_of(device)["critic.parameters"] == (4 * size,) * 3


def test_the_total_is_the_sum_of_the_parts_with_or_without_bounds() -> None:
    device = DeviceMemory("train", 0, (Part("a", 1, 2, 3), Part("b", 100, 0, 0, bound=True)))
    assert [device.total(s) for s in SITUATIONS] == [101, 2, 3]
    assert device.most() == ("update", 101)
    assert device.most(bounds=False) == ("generate", 3)


def test_the_fullest_stage_of_a_pipeline_is_shown(estimated: Callable[..., DeviceMemory]) -> None:
    # The last stage has the output layer, the final norm and the logits; the first has the embedding and one more
    # micro-batch in flight, which is more.
    device = estimated(ParallelLayout(pp=2), "rollout.kv_cache_gb=0.001", "rollout.max_sequences=1")
    assert device.rank == 0
    assert bytes_of(device)["actor.parameters"][0] == 4 * (LAYER + EMBEDDING)


def test_the_optimizer_is_shared_by_replicas_and_experts_by_their_own() -> None:
    layout = ParallelLayout(tp=2, dp=4, ep=4, etp=1)
    assert optimizer_bytes(1000, 0, ParallelLayout(dp=4), 4, distributed=True) == 8 * 1000 // 4
    assert optimizer_bytes(1000, 0, ParallelLayout(dp=4), 4, distributed=False) == 8 * 1000
    assert optimizer_bytes(1000, 0, ParallelLayout(dp=2, cp=2), 2, distributed=True) == 12 * 1000 // 4
    # 8 ranks hold 4 groups of experts: each group is on two ranks.
    assert optimizer_bytes(1000, 600, layout, 2, distributed=True) == 12 * 1000 // 4 + 12 * 600 // 2
    assert gradient_bytes(1000) == 4000


def test_activations_by_hand() -> None:
    # 4h + 3q + 2k + (q + k) of the norms + 4f, in float32.
    layer = 4 * 128 + 3 * 128 + 2 * 64 + (128 + 64) + 4 * 384
    assert activation_bytes(spec(), ParallelLayout(), 0, 10, 4) == 2 * layer * 4 * 10
    assert activation_bytes(spec(), ParallelLayout(), 0, 10, 2) == 2 * layer * 2 * 10
    full = 2 * 128 + layer
    assert activation_bytes(spec(), ParallelLayout(), 0, 10, 4, recompute="full") == full * 4 * 10
    assert activation_bytes(spec(), ParallelLayout(), 0, 10, 4, recompute="selective") == 2 * (layer - 128) * 4 * 10
    whole = 2 * (4 * 128 + (layer - 4 * 128) / 2)
    assert activation_bytes(spec(), ParallelLayout(tp=2), 0, 10, 4, sequence_parallel=False) == whole * 4 * 10
    assert activation_bytes(spec(), ParallelLayout(tp=2), 0, 10, 4) == layer * 4 * 10
    assert activation_bytes(spec(), ParallelLayout(cp=2), 0, 10, 4) == 2 * layer * 4 * 5
    # One layer a stage; the first of two stages keeps two micro-batches.
    assert [activation_bytes(spec(), ParallelLayout(pp=2), s, 10, 4) for s in (0, 1)] == [
        2 * layer * 4 * 10,
        layer * 4 * 10,
    ]


def test_logits_are_counted_up_to_a_chunk() -> None:
    assert logit_bytes(spec(), 1, 10) == 6 * 4 * 10 * 320
    assert logit_bytes(spec(), 2, 10) == 6 * 4 * 10 * 160
    assert logit_bytes(spec(vocab_size=128 * 1024), 1, 10**6) == 6 * 256 * 2**20


def test_the_table_ends_each_pool_with_what_its_parts_come_to() -> None:
    device = DeviceMemory("train", 0, (Part("a", GIB, 0, GIB // 2), Part("b", GIB, 0, 0, bound=True)))
    assert table([device]) == [
        ("pool", "memory of a device, GiB", "update", "sync", "generate"),
        ("train", "a", "1.000", "-", "0.500"),
        ("train", "b (at most)", "1.000", "-", "-"),
        ("train", "together (at most)", "2.000", "-", "0.500"),
    ]


def test_a_model_of_billions_is_estimated_in_no_time(tmp_path: Path, given: list[str]) -> None:
    # Qwen3-8B: 8.19 B parameters by its model card.
    shape = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32}
    heads = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960}
    path = write_model(tmp_path / "qwen3-8b", **shape, **heads)
    training = ParallelLayout(tp=4, dp=2)
    config = compose.load("grpo", GRPOConfig, [*given, f"model.path={path}", "model.dtype=bfloat16"])
    layouts: dict[str, Layout] = {"actor": training, "rollout": training.generation(tp=2)}
    (device,) = estimate(config, dict.fromkeys(layouts, ModelSpec.from_folder(path)), layouts, process_bytes=0)
    found = bytes_of(device)
    assert found["actor.parameters"][0] * 4 / 2 == pytest.approx(8.19e9, rel=0.001)
    assert found["actor.optimizer"][0] == pytest.approx(12 * 8.19e9 / 4 / 2, rel=0.001)
    # Half of the model generates on each rank, a quarter is there: a quarter comes, through two buckets at most.
    assert found["rollout.sync_buckets"] == (0, 2 * 256 * 2**20, 0)
