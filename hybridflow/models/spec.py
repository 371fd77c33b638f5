"""What a Hugging Face folder's config.json says about a decoder, as one frozen value.

Every table, engine and planner starts from a :class:`ModelSpec`, so a model is described once. Pure: reads JSON,
imports neither torch nor transformers.

Invariant: a spec that exists describes a model that trainer and rollout compute alike. What one of them would
ignore (a sliding window in use, an unknown rope type, quantised weights) is a ModelError here, not a silent difference.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hybridflow.errors import ModelError, nearest


@dataclass(frozen=True)
class Architecture:
    """Where one architecture differs from plain Llama.

    Attributes:
        qkv_bias, o_bias, mlp_bias: True or False where the architecture fixes it, else the config key that says so.
        qk_norm: RMSNorm over each head of q and k.
        head_dim: width of a head where the config has no ``head_dim``; None means hidden_size / num_heads.
        own_head_dim: whether ``head_dim`` may differ from hidden_size / num_heads.
        rope_theta: base where the config names none; None makes it required, because engines disagree on the default.
        experts: whether each layer's MLP is a mixture of experts.
        class_name: what the names of its transformers classes begin with.
    """

    qkv_bias: bool | str
    o_bias: bool | str
    mlp_bias: bool | str
    qk_norm: bool
    head_dim: int | None
    own_head_dim: bool
    rope_theta: float | None
    class_name: str
    experts: bool = False


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("attention_bias", "attention_bias", "mlp_bias", False, None, True, 10000.0, "Llama"),
    "qwen2": Architecture(True, False, False, False, None, False, None, "Qwen2"),
    "qwen3": Architecture("attention_bias", "attention_bias", False, True, 128, True, None, "Qwen3"),
    "qwen3_moe": Architecture(
        "attention_bias", "attention_bias", False, True, None, True, None, "Qwen3Moe", experts=True
    ),
}

NO_EXPERTS: dict[str, Any] = {"num_experts": 0, "experts_per_token": 0, "norm_topk_prob": False}
# Classes whose head gives scores instead of logits of tokens, and whether the head has a bias.
SCORING: dict[str, bool] = {"ForTokenClassification": True, "ForSequenceClassification": False}
JSON_KINDS: dict[str, type] = {
    "model_type": str,
    **dict.fromkeys(("architectures", "layer_types", "mlp_only_layers"), list),
    **dict.fromkeys(("rope_parameters", "rope_scaling", "id2label"), dict),
}
_SAID = {str: "a text", list: "a list", dict: "an object"}
# The constants of "llama3" scaling that megatron-core builds in; the factor is free.
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU or experts of SwiGLU.

    Attributes:
        architecture: key of ``ARCHITECTURES``.
        ffn_size: hidden width of the MLP, or of each expert.
        num_experts: experts of each layer; 0 for a dense model.
        experts_per_token: how many of them compute a token: those with the largest router logits.
        norm_topk_prob: the chosen experts' weights are the softmax over them, else their part of that over all.
        rope_scaling: None, or ``{"rope_type": "llama3", "factor": ..., ...}``.
        tied: the output layer is the embedding; the checkpoint then has no ``lm_head.weight``.
        scores: in place of the output layer stands ``score``, which gives one number a token: a critic's value, a
            reward model's score.
        score_bias: whether it has a bias.
        qkv_bias, o_bias, mlp_bias: which linear layers carry a bias.
        eos_token_ids: ids that end a text, from generation_config.json where it names any, else from config.json.
        raw: config.json as read.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    rms_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None = field(hash=False)
    tied: bool
    scores: bool
    score_bias: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    num_experts: int
    experts_per_token: int
    norm_topk_prob: bool
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    raw: dict[str, Any] = field(hash=False, compare=False, repr=False)

    @classmethod
    def from_folder(cls, path: str | Path) -> ModelSpec:
        """Read ``config.json`` (and the end-of-text ids of ``generation_config.json``) of a Hugging Face folder.

        Raises:
            ModelError: the folder or a key is missing, or the model uses something unsupported; names file, key, value.
        """
        folder = Path(path)
        if not (folder / "config.json").is_file():
            raise ModelError(f"{folder}: no config.json there. Give a local Hugging Face model folder.")
        config = read_json(folder / "config.json")
        generation = folder / "generation_config.json"
        return cls.from_config(
            config, read_json(generation) if generation.is_file() else None, where=str(folder / "config.json")
        )

    @classmethod
    def from_config(
        cls, config: dict[str, Any], generation: dict[str, Any] | None = None, where: str = "config"
    ) -> ModelSpec:
        """The spec of a config as a dict, in the keys of transformers 4 or 5; see :meth:`from_folder`."""
        read = _Reader(config, where)
        read.refuse_other_kinds()
        name, architecture = read.architecture()
        read.refuse_unsupported()
        hidden_size, num_heads = read.size("hidden_size"), read.size("num_attention_heads")
        num_kv_heads = read.size("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            heads = f"num_attention_heads={num_heads}"
            raise ModelError(f"{where}: {heads} is no multiple of num_key_value_heads={num_kv_heads}.")
        rope_theta, rope_scaling = read.rope(architecture)
        scoring = read.scoring()
        return cls(
            architecture=name,
            num_layers=read.size("num_hidden_layers"),
            hidden_size=hidden_size,
            ffn_size=read.size("moe_intermediate_size" if architecture.experts else "intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=read.head_dim(architecture, hidden_size, num_heads),
            vocab_size=read.size("vocab_size"),
            max_positions=read.size("max_position_embeddings"),
            rms_eps=read.number("rms_norm_eps"),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            tied=bool(config.get("tie_word_embeddings", False)) and not scoring,
            scores=bool(scoring),
            score_bias=bool(config.get("token_classification_bias", True)) and SCORING.get(scoring, False),
            qkv_bias=read.flag(architecture.qkv_bias),
            o_bias=read.flag(architecture.o_bias),
            mlp_bias=read.flag(architecture.mlp_bias),
            qk_norm=architecture.qk_norm,
            **(read.experts() if architecture.experts else NO_EXPERTS),
            eos_token_ids=read.ids((generation or {}).get("eos_token_id")) or read.ids(config.get("eos_token_id")),
            pad_token_id=config.get("pad_token_id"),
            raw=config,
        )

    def scoring(self, kind: str) -> ModelSpec:
        """The same model with a ``score`` head, as a config.json says it; itself where it has one already.

        Args:
            kind: key of ``SCORING``.
        """
        if self.scores:
            return self
        labels = {"id2label": {"0": "score"}, "label2id": {"score": 0}}
        raw = {**self.raw, "architectures": [ARCHITECTURES[self.architecture].class_name + kind], **labels}
        return replace(self, tied=False, scores=True, score_bias=SCORING[kind], raw=raw)


class _Reader:
    """Typed access to a config whose errors name the file, the key and the value."""

    def __init__(self, config: dict[str, Any], where: str) -> None:
        self.config, self.where = config, where

    def architecture(self) -> tuple[str, Architecture]:
        name = self.config.get("model_type")
        if name not in ARCHITECTURES:
            raise ModelError(f"{self.where}: model_type={name!r} is not supported.{nearest(str(name), ARCHITECTURES)}")
        return name, ARCHITECTURES[name]

    def number(self, key: str, default: float | None = None) -> float:
        value = self.config.get(key)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"{self.where}: {key} is missing.{nearest(key, self.config)}")
        return self.positive(key, value)

    def positive(self, key: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ModelError(f"{self.where}: {key}={value!r} has to be a number above 0.")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        value = self.number(key, default)
        if not isinstance(value, int):
            raise ModelError(f"{self.where}: {key}={value!r} has to be an integer above 0.")
        return value

    def ids(self, value: Any) -> tuple[int, ...]:
        """What ``eos_token_id`` says, there or in generation_config.json: one id, a list of them, or none."""
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and i >= 0 for i in ids):
            raise ModelError(f"{self.where} or generation_config.json: eos_token_id={value!r} has to be an id or ids.")
        return tuple(ids)

    def flag(self, key: bool | str) -> bool:
        return key if isinstance(key, bool) else bool(self.config.get(key, False))

    def head_dim(self, architecture: Architecture, hidden_size: int, num_heads: int) -> int:
        if self.config.get("head_dim") is not None:
            self.size("head_dim")
        even = hidden_size / num_heads
        value = self.config.get("head_dim") or architecture.head_dim or even
        if value != int(value) or (value != even and not architecture.own_head_dim):
            raise ModelError(
                f"{self.where}: head_dim={value} with hidden_size={hidden_size} and num_attention_heads={num_heads}: "
                f"{self.config['model_type']} needs head_dim = hidden_size / num_attention_heads, an integer."
            )
        return self.size("head_dim", int(value))

    def experts(self) -> dict[str, Any]:
        """Numbers of experts, in the keys of transformers 4 (``num_experts``) or 5 (``num_local_experts``)."""
        dense, step = self.config.get("mlp_only_layers"), self.config.get("decoder_sparse_step", 1)
        if dense or step != 1:
            raise ModelError(
                f"{self.where}: mlp_only_layers={dense or []}, decoder_sparse_step={step}: only models with experts in "
                f"every layer are supported."
            )
        total = self.size("num_local_experts" if "num_local_experts" in self.config else "num_experts")
        chosen = self.size("num_experts_per_tok")
        if chosen > total:
            raise ModelError(f"{self.where}: num_experts_per_tok={chosen} is more than the {total} experts.")
        return {
            "num_experts": total,
            "experts_per_token": chosen,
            "norm_topk_prob": bool(self.config.get("norm_topk_prob", False)),
        }

    def scoring(self) -> str:
        """Which kind of ``SCORING`` the class is, "" for a language model."""
        named = str((self.config.get("architectures") or [""])[0])
        kind = next((kind for kind in SCORING if named.endswith(kind)), "")
        labels = len(self.config.get("id2label") or (0, 1))  # transformers' default is two
        if kind and labels != 1:
            raise ModelError(f"{self.where}: {named} has {labels} labels (id2label): only one is supported, a score.")
        return kind

    def rope(self, architecture: Architecture) -> tuple[float, dict[str, Any] | None]:
        """Base and scaling from ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (4)."""
        key = "rope_parameters" if self.config.get("rope_parameters") else "rope_scaling"
        rope = dict(self.config.get(key) or {})
        theta = rope.pop("rope_theta", None) or self.config.get("rope_theta") or architecture.rope_theta
        if theta is None:
            raise ModelError(f"{self.where}: rope_theta is missing, at the top or inside rope_parameters; add it.")
        theta = float(self.positive("rope_theta", theta))
        kind = rope.pop("rope_type", None) or rope.pop("type", "default")
        rope.pop("type", None)
        share = rope.pop("partial_rotary_factor", self.config.get("partial_rotary_factor", 1.0))
        if share != 1.0:
            raise ModelError(f"{self.where}: partial_rotary_factor={share} is not supported: only 1.0 is.")
        if kind == "default":
            if rope:
                raise ModelError(f"{self.where}: {key}={rope} has keys that rope type 'default' does not know.")
            return theta, None
        if kind != "llama3":
            raise ModelError(f"{self.where}: {key}.rope_type={kind!r} is not supported: 'default' and 'llama3' are.")
        for name, supported in LLAMA3_ROPE.items():
            if rope.get(name) != supported:
                found = f"{key}.{name}={rope.get(name)!r}"
                raise ModelError(f"{self.where}: {found} is not supported: only {supported} is.")
        if not isinstance(rope.get("factor"), (int, float)) or rope["factor"] < 1:
            raise ModelError(f"{self.where}: {key}.factor={rope.get('factor')!r} has to be a number of at least 1.")
        return theta, {"rope_type": kind, **rope}

    def refuse_other_kinds(self) -> None:
        for key, kind in JSON_KINDS.items():
            value = self.config.get(key)
            if value is not None and not isinstance(value, kind):
                raise ModelError(
                    f"{self.where}: {key}={value!r} is a {type(value).__name__}; it has to be {_SAID[kind]}."
                )

    def refuse_unsupported(self) -> None:
        """Refuse what one engine or the other would ignore."""
        activation = self.config.get("hidden_act", "silu")
        if activation != "silu":
            raise ModelError(f"{self.where}: hidden_act={activation!r} is not supported: only 'silu' is.")
        if self.config.get("quantization_config"):
            raise ModelError(f"{self.where}: quantization_config is set: dequantise the weights to train them.")
        if self.config.get("is_causal") is False:
            raise ModelError(f"{self.where}: is_causal=False is not supported: attention is causal.")
        kinds = set(self.config.get("layer_types") or ()) - {"full_attention"}
        if kinds:
            raise ModelError(f"{self.where}: layer_types holds {sorted(kinds)}: only 'full_attention' is supported.")
        windowed = self.config.get("use_sliding_window") and self.config.get("sliding_window") is not None
        first = self.config.get("max_window_layers", 0)
        if windowed and not self.config.get("layer_types") and first < self.size("num_hidden_layers"):
            raise ModelError(
                f"{self.where}: use_sliding_window=True with sliding_window={self.config['sliding_window']} from layer "
                f"{first} on: only full attention is supported."
            )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ModelError names the path and the reason."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: holds a {type(value).__name__}, not a JSON object.")
    return value
