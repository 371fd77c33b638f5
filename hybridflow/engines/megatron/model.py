"""The policy as a megatron-core GPT model whose forward ends in log-probabilities.

Built from a :class:`ModelSpec`; weights come in by ``models/hf_io``. The last stage never returns logits: it selects
the positions that predict a wanted token and turns their hidden states into log-probabilities in chunks, so float32
logits of a whole micro-batch never exist.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from hybridflow.engines.megatron import cpu
from hybridflow.engines.megatron.attention import CausalAttention
from hybridflow.engines.megatron.log_probs import IMPOSSIBLE, vocab_parallel_log_probs
from hybridflow.engines.megatron.parallel import ModelParallel
from hybridflow.models.spec import ModelSpec
from hybridflow.models.tables import padded_vocab_size
from hybridflow.platform import current

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # isort: skip
from megatron.core.models.gpt.gpt_model import GPTModel  # isort: skip
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules  # isort: skip
from megatron.core.transformer.transformer_config import TransformerConfig  # isort: skip

LOGIT_CHUNK_BYTES = 256 * 2**20


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with the constructor that megatron-core's layer spec calls."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class PolicyModel(GPTModel):
    """A GPT model that answers with log-probabilities of given tokens.

    ``forward(input_ids [b, s], position_ids [b, s], targets [b, s])`` returns, on the last pipeline stage,
    ``[2, N]`` float32: log-probability and entropy (zeros unless asked) of the N positions with ``targets >= 0``, row
    by row. On earlier stages it returns hidden states [s, b, h].
    """

    temperature: float = 1.0
    with_entropy: bool = False
    valid_vocab: int

    def _postprocess(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden_states

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = super().forward(input_ids, position_ids, attention_mask=None)  # type: ignore[arg-type]
        if not self.post_process:
            return hidden
        keep = targets >= 0
        chosen_hidden, chosen = hidden.transpose(0, 1)[keep], targets[keep]
        chunk = max(1, LOGIT_CHUNK_BYTES // (4 * self.vocab_size // self.pg_collection.tp.size()))
        if len(chosen) <= chunk:
            return self._head(chosen_hidden, chosen)
        # Recomputed in backward: otherwise autograd would keep the logits of every chunk.
        parts = [
            checkpoint(self._head, h, t, use_reentrant=False) if torch.is_grad_enabled() else self._head(h, t)
            for h, t in zip(chosen_hidden.split(chunk), chosen.split(chunk), strict=True)
        ]
        return torch.cat(parts, dim=1)

    def _head(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """[N, h], [N] -> [2, N]."""
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits = self.output_layer(hidden.unsqueeze(1), weight=weight)[0].squeeze(1).float()
        if self.temperature != 1.0:
            logits = logits / self.temperature
        first_id = self.pg_collection.tp.rank() * logits.shape[-1]
        if first_id + logits.shape[-1] > self.valid_vocab:
            ids = torch.arange(first_id, first_id + logits.shape[-1], device=logits.device)
            logits = logits.masked_fill(ids >= self.valid_vocab, IMPOSSIBLE)
        log_probs, entropy = vocab_parallel_log_probs(
            logits, targets, self.pg_collection.tp, first_id, self.with_entropy
        )
        return torch.stack([log_probs, torch.zeros_like(log_probs) if entropy is None else entropy])


def transformer_config(spec: ModelSpec, parallel: ModelParallel, dtype: torch.dtype) -> TransformerConfig:
    """megatron-core's configuration of a model; fusions that need CUDA extensions are off on a CPU."""
    layout = parallel.layout
    return TransformerConfig(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        ffn_hidden_size=spec.ffn_size,
        num_attention_heads=spec.num_heads,
        num_query_groups=spec.num_kv_heads,
        kv_channels=spec.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=spec.rms_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=spec.qkv_bias,
        qk_layernorm=spec.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        perform_initialization=False,
        use_cpu_initialization=not current().is_cuda,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        attention_softmax_in_fp32=True,
        # Losses arrive divided by their global count: neither the schedule nor DDP may average again.
        calculate_per_token_loss=True,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
    )


def build_model(spec: ModelSpec, parallel: ModelParallel, dtype: torch.dtype, valid_vocab: int) -> PolicyModel:
    """This rank's part of the model, on the process's device, weights uninitialised. Call inside ``parallel``."""
    parallel.check()
    config = transformer_config(spec, parallel, dtype)
    layer = get_gpt_layer_local_spec(qk_layernorm=spec.qk_norm, normalization="RMSNorm")
    parts: Any = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = CausalAttention
    if spec.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    cpu.install()  # modules imported lazily by the specs
    at, layout = parallel.coordinates, parallel.layout
    model = PolicyModel(
        config,
        TransformerBlockSubmodules(
            layer_specs=[layer] * (spec.num_layers // layout.pp),
            layer_norm=RMSNorm,  # type: ignore[arg-type]
        ),
        vocab_size=padded_vocab_size(spec, layout.tp),
        max_sequence_length=spec.max_positions,
        pre_process=at.pp == 0,
        post_process=at.pp == layout.pp - 1,
        share_embeddings_and_output_weights=spec.tied,
        position_embedding_type="rope",
        rotary_base=spec.rope_theta,  # type: ignore[arg-type]
        rope_scaling=spec.rope_scaling is not None,
        rope_scaling_factor=(spec.rope_scaling or {}).get("factor", 1.0),
    )
    model.valid_vocab = valid_vocab
    return model.to(current().device())
