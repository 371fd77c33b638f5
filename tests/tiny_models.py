"""Tiny Hugging Face folders with random weights, made by transformers: the oracle's own models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCAB = 61
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}


def save_tiny_model(folder: Path, architecture: str, seed: int = 0, dtype: str = "float32", **changes: Any) -> str:
    """Write a random model of 2 layers and width 32 below ``folder``; returns its path.

    Args:
        architecture: ``llama``, ``qwen2``, ``qwen3`` or ``qwen3_moe`` (four experts, two for each token).
        changes: fields of the transformers config, such as ``tie_word_embeddings``.
    """
    from transformers import AutoModelForCausalLM

    return _save(folder, AutoModelForCausalLM, architecture, seed, dtype, changes)


def save_tiny_classifier(folder: Path, architecture: str, kind: str, **changes: Any) -> str:
    """The same with a head of one label; ``kind`` is ``ForTokenClassification`` or ``ForSequenceClassification``."""
    import transformers

    auto: Any = getattr(transformers, f"AutoModel{kind}")
    return _save(folder, auto, architecture, 0, "float32", {**changes, "num_labels": 1})


def _save(folder: Path, auto: Any, architecture: str, seed: int, dtype: str, changes: dict[str, Any]) -> str:
    import torch
    from transformers import AutoConfig

    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": None,
        "initializer_range": 0.2,
        **({"head_dim": 8} if architecture != "qwen2" else {}),
        **(EXPERTS if architecture == "qwen3_moe" else {}),
        **changes,
    }
    torch.manual_seed(seed)
    model = auto.from_config(AutoConfig.for_model(architecture, **settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return str(folder)


def save_tokenizer(folder: Path, ids: int) -> str:
    """Write a tokenizer that knows the ids below ``ids``, one word each; returns the folder's path."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(ids)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)
    return str(folder)
