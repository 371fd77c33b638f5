"""Core attention on PyTorch's scaled_dot_product_attention, for megatron-core's layer spec.

It stands between the qkv projection and the output projection of every layer, on CPUs and GPUs alike. Causal order is
the only mask: sequences are padded on the right, so no real token ever attends to padding.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from hybridflow.engines.megatron import cpu  # noqa: F401  (before megatron)

from megatron.core.transformer.module import MegatronModule  # isort: skip


class CausalAttention(MegatronModule):
    """Grouped-query causal attention: query [s, b, heads, d], key and value [s, b, kv_heads, d] -> [s, b, heads*d]."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        if attention_mask is not None or attention_bias is not None or packed_seq_params is not None:
            raise NotImplementedError("CausalAttention takes right-padded rows and needs no mask, bias or packing")
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)
        return out.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)
