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
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def make_spec(architecture: str = "qwen3", **changes: Any) -> ModelSpec:
    experts = EXPERTS if architecture == "qwen3_moe" else {}
    return ModelSpec.from_config({**BASE, "model_type": architecture, **experts, **changes})


def mlps(spec: ModelSpec) -> list[str]:
    return [f"mlp.experts.{e}." for e in range(spec.num_experts)] if spec.num_experts else ["mlp."]


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
        for mlp in mlps(spec):
            for name in ("gate", "up"):
                shapes[f"{at}{mlp}{name}_proj.weight"] = (f, h)
                if spec.mlp_bias:
                    shapes[f"{at}{mlp}{name}_proj.bias"] = (f,)
            shapes[f"{at}{mlp}down_proj.weight"] = (h, f)
            if spec.mlp_bias:
                shapes[f"{at}{mlp}down_proj.bias"] = (h,)
        if spec.num_experts:
            shapes[f"{at}mlp.gate.weight"] = (spec.num_experts, h)
        if spec.o_bias:
            shapes[f"{at}self_attn.o_proj.bias"] = (h,)
        shapes[f"{at}input_layernorm.weight"] = shapes[f"{at}post_attention_layernorm.weight"] = (h,)
        if spec.qk_norm:
            shapes[f"{at}self_attn.q_norm.weight"] = shapes[f"{at}self_attn.k_norm.weight"] = (spec.head_dim,)
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def padded(weight: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat([weight, weight.new_zeros(rows - len(weight), *weight.shape[1:])])


def megatron_experts(
    hf: Tensors, spec: ModelSpec, at: str, ours: str, experts: tuple[int, int], slices: tuple[int, int]
) -> Tensors:
    """Router and experts of one layer; see :func:`megatron_shard`."""
    (size, rank), shard = slices, {f"{ours}mlp.router.weight": hf[f"{at}mlp.gate.weight"]}
    for local, e in enumerate(torch.arange(spec.num_experts).chunk(experts[0])[experts[1]].tolist()):
        gate, up, down = (hf[f"{at}mlp.experts.{e}.{x}_proj.weight"] for x in ("gate", "up", "down"))
        expert = f"{ours}mlp.experts.local_experts.{local}.linear_fc"
        shard[f"{expert}1.weight"] = torch.cat([gate.chunk(size)[rank], up.chunk(size)[rank]])
        shard[f"{expert}2.weight"] = down.chunk(size, 1)[rank]
    return shard


def megatron_shard(
    hf: Tensors,
    spec: ModelSpec,
    tp: int,
    pp: int,
    tp_rank: int,
    pp_rank: int,
    experts: tuple[int, int] = (1, 0),
    slices: tuple[int, int] | None = None,
) -> Tensors:
    """One rank's parameters by megatron-core's names.

    Args:
        experts: expert-parallel size and rank.
        slices: tensor-parallel size and rank of an expert; as those of the rest if None.
    """
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
        if spec.num_experts:
            shard |= megatron_experts(hf, spec, at, ours, experts, slices or (tp, tp_rank))
            continue
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


def vllm_shard(hf: Tensors, spec: ModelSpec, tp: int, tp_rank: int, ep: int = 1) -> Tensors:
    """One rank's parameters by vLLM's names: whole heads a rank, kv heads repeated where there are fewer than ranks."""
    gate, up, down = (
        [
            torch.stack([hf[f"model.layers.{n}.{mlp}{x}_proj.weight"] for mlp in mlps(spec)])
            for n in range(spec.num_layers)
        ]
        for x in ("gate", "up", "down")
    )
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
        shard[f"{at}self_attn.o_proj.weight"] = mine(hf[f"{at}self_attn.o_proj.weight"], 1)
        if spec.num_experts:
            dims = (1, 1, 2) if ep == 1 else (0, 0, 0)
            g, u, d = (mine(x[n], dim) for x, dim in zip((gate, up, down), dims, strict=True))
            shard[f"{at}mlp.gate.weight"] = hf[f"{at}mlp.gate.weight"]
            shard[f"{at}mlp.experts.routed_experts.w13_weight"] = torch.cat([g, u], dim=1)
            shard[f"{at}mlp.experts.routed_experts.w2_weight"] = d
            continue
        for kind in ["weight"] + ["bias"] * spec.mlp_bias:
            parts = (hf[f"{at}mlp.{x}_proj.{kind}"] for x in ("gate", "up"))
            shard[f"{at}mlp.gate_up_proj.{kind}"] = torch.cat([mine(part) for part in parts])
        shard[f"{at}mlp.down_proj.weight"] = mine(hf[f"{at}mlp.down_proj.weight"], 1)
    return shard
