"""Shards of Megatron and vLLM made the straightforward way: whole tensors, cat and chunk, no boxes."""

from __future__ import annotations

from typing import Any

import torch

from hybridflow.models.spec import ModelSpec

Tensors = dict[str, torch.Tensor]

BASE: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 3,
    "vocab_size": 61,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
}


def make_spec(architecture: str = "qwen3", **changes: Any) -> ModelSpec:
    return ModelSpec.from_config({**BASE, "model_type": architecture, **changes})


def random_checkpoint(spec: ModelSpec, seed: int = 0) -> Tensors:
    """Every Hugging Face tensor with distinct values; names and shapes written out here, not taken from a table."""
    q, kv, h, f = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.hidden_size, spec.ffn_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (spec.vocab_size, h), "model.norm.weight": (h,)}
    if not spec.tied:
        shapes["lm_head.weight"] = (spec.vocab_size, h)
    for n in range(spec.num_layers):
        at = f"model.layers.{n}."
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            shapes[f"{at}self_attn.{name}_proj.weight"] = (rows, h)
            if spec.qkv_bias:
                shapes[f"{at}self_attn.{name}_proj.bias"] = (rows,)
        shapes[f"{at}self_attn.o_proj.weight"] = (h, q)
        for name in ("gate", "up"):
            shapes[f"{at}mlp.{name}_proj.weight"] = (f, h)
            if spec.mlp_bias:
                shapes[f"{at}mlp.{name}_proj.bias"] = (f,)
        shapes[f"{at}mlp.down_proj.weight"] = (h, f)
        if spec.mlp_bias:
            shapes[f"{at}mlp.down_proj.bias"] = (h,)
        if spec.o_bias:
            shapes[f"{at}self_attn.o_proj.bias"] = (h,)
        shapes[f"{at}input_layernorm.weight"] = shapes[f"{at}post_attention_layernorm.weight"] = (h,)
        if spec.qk_norm:
            shapes[f"{at}self_attn.q_norm.weight"] = shapes[f"{at}self_attn.k_norm.weight"] = (spec.head_dim,)
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def padded(weight: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat([weight, weight.new_zeros(rows - len(weight), *weight.shape[1:])])


def megatron_shard(hf: Tensors, spec: ModelSpec, tp: int, pp: int, tp_rank: int, pp_rank: int) -> Tensors:
    """One rank's parameters by megatron-core's names."""
    vocab = -(-spec.vocab_size // 64) * 64  # enough for a tp that divides 64
    groups, per_group = spec.num_kv_heads, spec.num_heads // spec.num_kv_heads
    shard: Tensors = {}

    def mine(weight: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return weight.chunk(tp, dim)[tp_rank]

    def qkv(at: str, kind: str) -> torch.Tensor:
        q, k, v = (hf[f"{at}self_attn.{x}_proj.{kind}"] for x in "qkv")
        heads = [x.unflatten(0, (groups, -1, spec.head_dim)) for x in (q, k, v)]
        assert heads[0].shape[1] == per_group
        return torch.cat(heads, dim=1)[tp_rank * groups // tp : (tp_rank + 1) * groups // tp].flatten(0, 2)

    if pp_rank == 0:
        shard["embedding.word_embeddings.weight"] = mine(padded(hf["model.embed_tokens.weight"], vocab))
    for local, n in enumerate(torch.arange(spec.num_layers).chunk(pp)[pp_rank].tolist()):
        at, ours = f"model.layers.{n}.", f"decoder.layers.{local}."
        shard[f"{ours}input_layernorm.weight"] = hf[f"{at}input_layernorm.weight"]
        shard[f"{ours}pre_mlp_layernorm.weight"] = hf[f"{at}post_attention_layernorm.weight"]
        shard[f"{ours}self_attention.linear_proj.weight"] = mine(hf[f"{at}self_attn.o_proj.weight"], 1)
        if spec.o_bias:
            shard[f"{ours}self_attention.linear_proj.bias"] = hf[f"{at}self_attn.o_proj.bias"]
        for kind in ["weight"] + ["bias"] * spec.qkv_bias:
            shard[f"{ours}self_attention.linear_qkv.{kind}"] = qkv(at, kind)
        if spec.qk_norm:
            shard[f"{ours}self_attention.q_layernorm.weight"] = hf[f"{at}self_attn.q_norm.weight"]
            shard[f"{ours}self_attention.k_layernorm.weight"] = hf[f"{at}self_attn.k_norm.weight"]
        for kind in ["weight"] + ["bias"] * spec.mlp_bias:
            gate_up = [mine(hf[f"{at}mlp.{x}_proj.{kind}"]) for x in ("gate", "up")]
            shard[f"{ours}mlp.linear_fc1.{kind}"] = torch.cat(gate_up)
        shard[f"{ours}mlp.linear_fc2.weight"] = mine(hf[f"{at}mlp.down_proj.weight"], 1)
        if spec.mlp_bias:
            shard[f"{ours}mlp.linear_fc2.bias"] = hf[f"{at}mlp.down_proj.bias"]
    if pp_rank == pp - 1:
        shard["decoder.final_layernorm.weight"] = hf["model.norm.weight"]
        if not spec.tied:
            shard["output_layer.weight"] = mine(padded(hf["lm_head.weight"], vocab))
        elif pp > 1:
            shard["output_layer.weight"] = mine(padded(hf["model.embed_tokens.weight"], vocab))
    return shard


def vllm_shard(hf: Tensors, spec: ModelSpec, tp: int, tp_rank: int) -> Tensors:
    """One rank's parameters by vLLM's names: whole heads a rank, kv heads repeated where there are fewer than ranks."""
    shard = {
        name: tensor
        for name, tensor in hf.items()
        if "norm" in name or name.endswith(("o_proj.bias", "down_proj.bias"))
    }
    copies = max(1, tp // spec.num_kv_heads)

    def mine(weight: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return weight.chunk(tp, dim)[tp_rank]

    for name in ["model.embed_tokens.weight"] + ["lm_head.weight"] * (not spec.tied):
        shard[name] = mine(padded(hf[name], -(-spec.vocab_size // 64) * 64))
    for n in range(spec.num_layers):
        at = f"model.layers.{n}."
        for kind in ["weight"] + ["bias"] * spec.qkv_bias:
            q, k, v = (hf[f"{at}self_attn.{x}_proj.{kind}"] for x in "qkv")
            k, v = (x.unflatten(0, (spec.num_kv_heads, -1)).repeat_interleave(copies, 0).flatten(0, 1) for x in (k, v))
            shard[f"{at}self_attn.qkv_proj.{kind}"] = torch.cat([mine(q), mine(k), mine(v)])
        for kind in ["weight"] + ["bias"] * spec.mlp_bias:
            gate, up = (hf[f"{at}mlp.{x}_proj.{kind}"] for x in ("gate", "up"))
            shard[f"{at}mlp.gate_up_proj.{kind}"] = torch.cat([mine(gate), mine(up)])
        shard[f"{at}self_attn.o_proj.weight"] = mine(hf[f"{at}self_attn.o_proj.weight"], 1)
        shard[f"{at}mlp.down_proj.weight"] = mine(hf[f"{at}mlp.down_proj.weight"], 1)
    return shard
