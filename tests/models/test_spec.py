"""What a config.json says, in the keys of transformers 4 and 5, and what is refused."""

import json
import math
import pickle
from dataclasses import replace

import pytest

from hybridflow.errors import ModelError
from hybridflow.models.spec import ModelSpec
from hybridflow.models.tables import hf_table
from tests.models.oracle import BASE, EXPERTS, make_spec
from tests.tiny_models import save_tiny_model

MOE = {"model_type": "qwen3_moe", **EXPERTS}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("architecture", "qkv_bias", "qk_norm"), [("llama", False, False), ("qwen2", True, False), ("qwen3", False, True)]
)
def test_a_folder_written_by_transformers_is_read(tmp_path, architecture, qkv_bias, qk_norm):
    folder = save_tiny_model(
        tmp_path, architecture, eos_token_id=[1, 7], pad_token_id=3, tie_word_embeddings=True, rms_norm_eps=1e-5
    )
    spec = ModelSpec.from_folder(folder)
    assert (spec.architecture, spec.num_layers, spec.hidden_size, spec.ffn_size) == (architecture, 2, 32, 48)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.vocab_size) == (4, 2, 8, 61)
    assert (spec.max_positions, spec.rms_eps, spec.rope_theta, spec.rope_scaling) == (128, 1e-5, 10000.0, None)
    assert (spec.tied, spec.qkv_bias, spec.qk_norm, spec.o_bias, spec.mlp_bias) == (
        True,
        qkv_bias,
        qk_norm,
        False,
        False,
    )
    assert (spec.eos_token_ids, spec.pad_token_id) == ((1, 7), 3)
    assert spec.raw == json.loads((tmp_path / "config.json").read_text())


def test_a_mixture_of_experts_is_read_in_the_keys_of_transformers_4_and_5(tmp_path):
    spec = ModelSpec.from_folder(save_tiny_model(tmp_path, "qwen3_moe"))
    assert (spec.ffn_size, spec.num_experts, spec.experts_per_token, spec.norm_topk_prob) == (24, 4, 2, True)
    assert "num_local_experts" in spec.raw
    older = {k: v for k, v in spec.raw.items() if k not in ("num_local_experts", "norm_topk_prob")}
    assert ModelSpec.from_config({**older, "num_experts": 4}) == replace(spec, norm_topk_prob=False)
    assert make_spec("qwen3").num_experts == 0


def test_old_and_new_rope_keys_mean_the_same():
    base = {k: v for k, v in BASE.items() if k != "rope_theta"}
    old = ModelSpec.from_config({**base, "model_type": "llama", "rope_theta": 5e5, "rope_scaling": LLAMA3})
    new = ModelSpec.from_config({**base, "model_type": "llama", "rope_parameters": {"rope_theta": 5e5, **LLAMA3}})
    legacy = {"type": "llama3", **{k: v for k, v in LLAMA3.items() if k != "rope_type"}}
    older = ModelSpec.from_config({**base, "model_type": "llama", "rope_theta": 5e5, "rope_scaling": legacy})
    assert old == new == older
    assert (new.rope_theta, new.rope_scaling) == (5e5, LLAMA3)
    # transformers 5 keeps rope_parameters; a stale top-level theta does not win over it.
    both = {
        **base,
        "model_type": "llama",
        "rope_theta": 1.0,
        "rope_parameters": {"rope_theta": 7.0, "rope_type": "default"},
    }
    assert ModelSpec.from_config(both).rope_theta == 7.0


def test_defaults_are_those_of_the_architecture():
    def without(architecture, *keys):
        return ModelSpec.from_config({k: v for k, v in BASE.items() if k not in keys} | {"model_type": architecture})

    assert without("llama", "head_dim").head_dim == 3
    assert without("qwen3", "head_dim").head_dim == 128
    assert without("llama", "num_key_value_heads").num_kv_heads == 8
    assert without("llama", "rope_theta").rope_theta == 10000.0
    assert without("llama", "tie_word_embeddings").tied is False
    with pytest.raises(ModelError, match="rope_theta is missing"):
        without("qwen2", "rope_theta")


def test_biases_come_from_the_architecture_or_from_its_key():
    llama = make_spec("llama", attention_bias=True, mlp_bias=True)
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias) == (True, True, True)
    qwen2 = make_spec("qwen2", attention_bias=False, mlp_bias=True)
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.mlp_bias) == (True, False, False)


def test_the_end_of_text_is_the_generation_configs_where_it_names_one():
    config = {**BASE, "model_type": "qwen3", "eos_token_id": 5}
    assert ModelSpec.from_config(config, {"eos_token_id": [7, 5]}).eos_token_ids == (7, 5)
    assert ModelSpec.from_config(config, {"temperature": 0.6}).eos_token_ids == (5,)
    assert ModelSpec.from_config({**config, "eos_token_id": None}).eos_token_ids == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "qwen"}, "model_type='qwen' is not supported. Did you mean 'qwen[23]'"),
        ({"model_type": None}, "model_type=None is not supported.* Known: llama, qwen2, qwen3"),
        ({"model_type": ["qwen3"]}, r"model_type=\['qwen3'\] is a list; it has to be a text"),
        ({"architectures": "Qwen3ForCausalLM"}, "architectures='Qwen3ForCausalLM' is a str; it has to be a list"),
        ({"layer_types": 4}, "layer_types=4 is a int; it has to be a list"),
        ({"rope_scaling": "yarn"}, "rope_scaling='yarn' is a str; it has to be an object"),
        ({"rope_parameters": {"rope_theta": "1e6"}}, "rope_theta='1e6' has to be a number above 0"),
        ({"rope_theta": math.nan}, "rope_theta=nan has to be a number above 0"),
        ({"head_dim": "64"}, "head_dim='64' has to be a number above 0"),
        ({"rms_norm_eps": math.inf}, "rms_norm_eps=inf has to be a number above 0"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported: only 'silu' is"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is set"),
        ({"is_causal": False}, "is_causal=False"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, r"layer_types holds \['sliding_attention'\]"),
        (
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2},
            "sliding_window=64 from layer 2 on",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_scaling.rope_type='yarn' is not supported"),
        ({"rope_parameters": {"type": "linear", "factor": 2.0}}, "rope_parameters.rope_type='linear' is not supported"),
        (
            {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 64}},
            "embeddings=64 is not supported: only 8192",
        ),
        ({"rope_scaling": {**LLAMA3, "factor": None}}, "factor=None has to be a number"),
        (
            {"rope_scaling": {"mrope_section": [1, 2]}},
            "mrope_section.* has keys that rope type 'default' does not know",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}},
            "has keys that rope type 'default' does not know",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"num_key_value_heads": 3}, "num_attention_heads=8 is no multiple of num_key_value_heads=3"),
        ({"vocab_size": "61"}, "vocab_size='61' has to be a number"),
        ({"hidden_size": 0}, "hidden_size=0"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers=2.5 has to be an integer"),
        ({**MOE, "mlp_only_layers": [0]}, r"mlp_only_layers=\[0\], decoder_sparse_step=1"),
        ({**MOE, "decoder_sparse_step": 2}, r"mlp_only_layers=\[\], decoder_sparse_step=2"),
        ({**MOE, "num_experts_per_tok": 5}, "num_experts_per_tok=5 is more than the 4 experts"),
        ({"model_type": "qwen3_moe"}, "moe_intermediate_size is missing"),
        ({"model_type": "qwen2", "head_dim": 4}, "head_dim=4 with hidden_size=24 and num_attention_heads=8"),
        ({"model_type": "llama", "head_dim": None, "hidden_size": 25}, "head_dim=3.125"),
    ],
)
def test_what_is_not_supported_is_refused_by_key_and_value(changes, message):
    with pytest.raises(ModelError, match=message):
        ModelSpec.from_config({**BASE, "model_type": "qwen3", **changes})


def test_a_sliding_window_that_is_off_is_accepted():
    make_spec("qwen2", use_sliding_window=False, sliding_window=64, max_window_layers=0)
    make_spec("qwen2", use_sliding_window=True, sliding_window=64, max_window_layers=4)
    make_spec("qwen2", layer_types=["full_attention"] * 4, use_sliding_window=False)


def test_a_missing_folder_key_or_broken_file_is_named(tmp_path):
    with pytest.raises(ModelError, match=f"{tmp_path}: no config.json there"):
        ModelSpec.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json: cannot be read as JSON"):
        ModelSpec.from_folder(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps({k: v for k, v in BASE.items() if k != "vocab_size"} | {"model_type": "llama"})
    )
    with pytest.raises(ModelError, match=r"config\.json: vocab_size is missing"):
        ModelSpec.from_folder(tmp_path)


def test_a_spec_is_a_value():
    spec = make_spec()
    assert pickle.loads(pickle.dumps(spec)) == spec == make_spec()
    assert hash(spec) == hash(make_spec())


@pytest.mark.parametrize(
    ("kind", "more", "bias"),
    [
        ("ForTokenClassification", {}, True),
        ("ForTokenClassification", {"token_classification_bias": False}, False),
        ("ForSequenceClassification", {}, False),
    ],
)
def test_a_classifier_with_one_label_scores_tokens(kind, more, bias):
    labels = {"architectures": [f"Qwen3{kind}"], "id2label": {"0": "LABEL_0"}, "tie_word_embeddings": True}
    spec = make_spec("qwen3", **labels, **more)
    assert (spec.scores, spec.score_bias, spec.tied) == (True, bias, False)
    assert spec.scoring("ForTokenClassification") is spec
    shapes = hf_table(spec)
    assert shapes["score.weight"] == (1, 24) and shapes.get("score.bias") == ((1,) if bias else None)
    assert "lm_head.weight" not in shapes


def test_a_language_model_becomes_one_that_scores_and_its_config_says_so():
    policy = make_spec("qwen3_moe", tie_word_embeddings=True)
    assert not policy.scores and policy.tied
    critic = policy.scoring("ForTokenClassification")
    assert (critic.scores, critic.score_bias, critic.tied) == (True, True, False)
    assert critic.raw["architectures"] == ["Qwen3MoeForTokenClassification"]
    assert ModelSpec.from_config(critic.raw) == critic


def test_a_classifier_with_several_labels_is_refused():
    for labels, count in (({}, 2), ({"id2label": {"0": "a", "1": "b", "2": "c"}}, 3)):
        with pytest.raises(ModelError) as caught:
            make_spec("llama", architectures=["LlamaForSequenceClassification"], **labels)
        assert str(caught.value) == (
            f"config: LlamaForSequenceClassification has {count} labels (id2label): only one is supported, a score."
        )
