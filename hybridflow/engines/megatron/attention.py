"""Core attention on PyTorch's scaled_dot_product_attention, for megatron-core's layer spec.

It stands between the qkv projection and the output projection of every layer, on CPUs and GPUs alike, and reads where
sequences begin from a :class:`Packing`. With context parallelism, keys and values are gathered from the other ranks and
their gradients summed back; queries stay. Invariant: no token attends to another sequence, nor to a later position.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F

from hybridflow.engines.megatron import cpu  # noqa: F401  (before megatron)
from hybridflow.engines.megatron.packing import Group, Packing

from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region  # isort: skip
from megatron.core.transformer.module import MegatronModule  # isort: skip


class CausalAttention(MegatronModule):
    """Grouped-query causal attention within sequences.

    Query [t, 1, heads, d], key and value [t, 1, kv_heads, d] -> [t, 1, heads*d], for the t tokens of this
    context-parallel rank.
    """

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
        self.cp_group = pg_collection.cp

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Packing | None = None,
    ) -> torch.Tensor:
        if packed_seq_params is None or attention_mask is not None or attention_bias is not None:
            raise NotImplementedError("CausalAttention takes packed sequences, and no mask or bias of the caller's")
        if self.cp_group.size() > 1:
            # One message for both.
            both = gather_from_sequence_parallel_region(torch.cat([key, value], dim=-1), group=self.cp_group)
            key, value = both.split([key.shape[-1], value.shape[-1]], dim=-1)
        query, key, value = (x[:, 0] for x in (query, key, value))
        parts = (self._attend(query, key, value, group) for group in packed_seq_params.groups)
        return functools.reduce(torch.add, parts).flatten(1).unsqueeze(1)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: Group) -> torch.Tensor:
        """The group's rows of the answer [t, heads, d], zeros elsewhere."""
        q, k, v = group.queries.fill(query), group.keys.fill(key), group.keys.fill(value)
        out = F.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)),
            attn_mask=group.mask,
            is_causal=group.mask is None,
            scale=self.scale,
            enable_gqa=True,
        )
        return group.queries.take(out.transpose(1, 2), len(query))
