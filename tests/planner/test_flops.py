"""Model FLOPs against sums by hand."""

from hybridflow.models.spec import ModelSpec
from hybridflow.planner.flops import active_parameters, forward_flops, step_flops
from tests.assets import CONFIG

ATTENTION = 128 * (128 + 2 * 64) + 128 * 128  # q, k, v and output of tests.assets.CONFIG
MLP = 3 * 128 * 384
VOCABULARY = 262 * 128


def spec(**changes: object) -> ModelSpec:
    return ModelSpec.from_config({**CONFIG, **changes})


def test_the_output_layer_counts_and_the_embedding_does_not() -> None:
    assert active_parameters(spec()) == 2 * (ATTENTION + MLP) + VOCABULARY
    assert active_parameters(spec(tie_word_embeddings=True)) == 2 * (ATTENTION + MLP) + VOCABULARY


def test_of_experts_those_count_that_compute_a_token() -> None:
    experts = {"model_type": "qwen3_moe", "moe_intermediate_size": 96, "num_experts": 8, "num_experts_per_tok": 2}
    router = 8 * 128
    assert active_parameters(spec(**experts)) == 2 * (ATTENTION + router + 2 * 3 * 128 * 96) + VOCABULARY


def test_a_forward_grows_with_the_length_of_its_rows_and_a_backward_is_two() -> None:
    weights = 2 * active_parameters(spec())
    assert forward_flops(spec(), 1000, 0) == 1000 * weights
    assert forward_flops(spec(), 1000, 50) == 1000 * (weights + 2 * 2 * 50 * 128)
    assert step_flops(1.0, epochs=2, num_scored=2, generates=True) == 9.0
    assert step_flops(1.0, epochs=1, num_scored=0, generates=False) == 3.0
