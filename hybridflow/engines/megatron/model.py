"""A megatron-core GPT model whose forward ends in numbers of wanted tokens: a policy's log-probabilities, or values.

Built from a :class:`ModelSpec`; weights come in by ``models/hf_io``. It takes packed streams, see ``packing.py``. The
last stage never returns logits: it selects the positions that predict a wanted token and turns their hidden states into
log-probabilities in chunks, so float32 logits of a whole micro-batch never exist.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from hybridflow.engines.megatron import cpu
from hybridflow.engines.megatron.attention import CausalAttention
from hybridflow.engines.megatron.log_probs import IMPOSSIBLE, vocab_parallel_log_probs
from hybridflow.engines.megatron.packing import Packing
from hybridflow.engines.megatron.parallel import ModelParallel
from hybridflow.models.spec import ModelSpec
from hybridflow.models.tables import padded_vocab_size
from hybridflow.platform import current
from hybridflow.resharding.layout import ParallelLayout

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # isort: skip
from megatron.core.models.gpt.gpt_model import GPTModel  # isort: skip
from megatron.core.tensor_parallel.layers import (  # isort: skip
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import (  # isort: skip
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules  # isort: skip
from megatron.core.transformer.transformer_config import TransformerConfig  # isort: skip

LOGIT_CHUNK_BYTES = 256 * 2**20
SHARDED = (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding)
# What backward computes again: nothing, the attention's inside, or each layer from its input.
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective"},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with the constructor that megatron-core's layer spec calls."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cpu.rms_norm(x, self.weight, cast(float, self.eps))


class OutputWithBias(RowParallelLinear):
    """The attention's output projection; megatron-core would give it a bias exactly where the MLP has one."""

    BIAS = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "bias": self.BIAS})


class OutputWithoutBias(OutputWithBias):
    BIAS = False


class PackedModel(GPTModel):
    """A GPT model, or a pipeline stage of one, that takes a packed stream; subclasses are its heads."""

    def _preprocess(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor | None, ...]:
        embedded = self.embedding(input_ids=input_ids, position_ids=position_ids) if self.pre_process else None
        # One angle for each token, by its position in its own sequence: [t, 1, 1, d].
        angles = torch.outer(position_ids[0].float(), self.rotary_pos_emb.inv_freq.to(position_ids.device))
        return embedded, torch.cat([angles, angles], dim=-1)[:, None, None, :], None, None, None, None

    def _postprocess(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden_states

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        targets: torch.Tensor,
        packing: Packing,
        temperature: float,
        with_entropy: bool,
    ) -> torch.Tensor:
        """Answer for the wanted tokens of a stream.

        Args:
            input_ids, position_ids, targets: [t] int64, the whole stream; -1 where nothing is wanted.
            packing: which tokens this rank holds.
            temperature, with_entropy: see :class:`PolicyModel`.

        Returns:
            On the last pipeline stage [k, N] float32: the k answers of the head for the N positions with
            ``targets >= 0`` in the order of the stream, the same on all tensor- and context-parallel ranks. On earlier
            stages hidden states [t / c, 1, h] of this rank's tokens, of which a sequence-parallel rank holds its part.
        """
        here = packing.tokens
        hidden = super().forward(
            input_ids[None, here],
            position_ids[None, here],
            attention_mask=None,  # type: ignore[arg-type]
            packed_seq_params=packing,  # type: ignore[arg-type]
        )
        if not self.post_process:
            return hidden
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        wanted = targets[here] >= 0
        answers = self._score(hidden[:, 0][wanted], targets[here][wanted], temperature, with_entropy)
        if self.pg_collection.cp.size() == 1:
            return answers
        # Each rank fills in its own; all see all, and a gradient goes back to whom it belongs.
        numbers = ((targets >= 0).cumsum(0) - 1)[here][wanted]
        everyones = answers.new_zeros(len(answers), int((targets >= 0).sum())).index_copy(1, numbers, answers)
        return reduce_from_tensor_model_parallel_region(everyones, group=self.pg_collection.cp)

    def _score(
        self, hidden: torch.Tensor, targets: torch.Tensor, temperature: float, with_entropy: bool
    ) -> torch.Tensor:
        """[N, h], [N] -> [k, N]."""
        raise NotImplementedError


class ValueModel(PackedModel):
    """Answers [1, N] with ``score`` of the state in which each wanted token was chosen: the token itself is not seen.

    Whole on every rank of the last stage, in place of the output layer. Temperature and entropy mean nothing to it.
    """

    def replace_head(self, bias: bool) -> None:
        """Put ``score`` where the output layer is."""
        del self.output_layer
        self.score = torch.nn.Linear(self.config.hidden_size, 1, bias=bias, dtype=self.config.params_dtype)

    def _score(self, hidden: torch.Tensor, *_: Any) -> torch.Tensor:
        bias = None if self.score.bias is None else self.score.bias.float()
        return F.linear(hidden.float(), self.score.weight.float(), bias).T


class PolicyModel(PackedModel):
    """Answers [2, N] with log-probability and entropy of each wanted token.

    Logits are divided by ``temperature``; without ``with_entropy`` zeros stand in place of the entropy.
    """

    valid_vocab: int

    def _score(
        self, hidden: torch.Tensor, targets: torch.Tensor, temperature: float, with_entropy: bool
    ) -> torch.Tensor:
        """In chunks."""
        chunk = max(1, LOGIT_CHUNK_BYTES // (4 * self.vocab_size // self.pg_collection.tp.size()))
        if len(targets) <= chunk:
            return self._head(hidden, targets, temperature, with_entropy)
        # Recomputed in backward: otherwise autograd would keep the logits of every chunk.
        parts = [
            checkpoint(self._head, h, t, temperature, with_entropy, use_reentrant=False)
            if torch.is_grad_enabled()
            else self._head(h, t, temperature, with_entropy)
            for h, t in zip(hidden.split(chunk), targets.split(chunk), strict=True)
        ]
        return torch.cat(parts, dim=1)

    def _head(
        self, hidden: torch.Tensor, targets: torch.Tensor, temperature: float, with_entropy: bool
    ) -> torch.Tensor:
        """[N, h], [N] -> [2, N]."""
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits = self.output_layer(hidden.unsqueeze(1), weight=weight)[0].squeeze(1).float()
        if temperature != 1.0:
            logits = logits / temperature
        first_id = self.pg_collection.tp.rank() * logits.shape[-1]
        drawn = self.valid_vocab - first_id
        if drawn < 1:
            logits = logits[:, :1].masked_fill(logits.new_ones((), dtype=torch.bool), IMPOSSIBLE)
        elif drawn < logits.shape[-1]:
            logits = logits[:, :drawn]
        log_probs, entropy = vocab_parallel_log_probs(logits, targets, self.pg_collection.tp, first_id, with_entropy)
        log_probs = log_probs.masked_fill(targets >= self.valid_vocab, IMPOSSIBLE)
        return torch.stack([log_probs, torch.zeros_like(log_probs) if entropy is None else entropy])


def transformer_config(
    spec: ModelSpec, layout: ParallelLayout, dtype: torch.dtype, sequence_parallel: bool, recompute: str
) -> TransformerConfig:
    """megatron-core's configuration of a model; fusions that need CUDA extensions are off on a CPU."""
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
        add_bias_linear=spec.mlp_bias,
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
        # On a GPU torch.compile would fuse it: not tried with micro-batches of many shapes.
        bias_activation_fusion=not current().is_cuda,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        attention_softmax_in_fp32=True,
        # Losses arrive divided by their global count: neither the schedule nor DDP may average again.
        calculate_per_token_loss=True,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        sequence_parallel=sequence_parallel and layout.tp > 1,
        # Micro-batches of one update differ in tokens.
        variable_seq_lengths=layout.pp > 1,
        moe_token_dispatcher_type="alltoall",
        **(_experts(spec, layout) if spec.num_experts else {}),
        # With the batched messages an interleaved schedule computes wrong gradients without an error (0.16.1, gloo).
        overlap_p2p_comm=layout.vpp > 1,
        batch_p2p_comm=layout.vpp == 1,
        **RECOMPUTE[recompute],
    )


def _experts(spec: ModelSpec, layout: ParallelLayout) -> dict[str, Any]:
    """The part of the configuration that a mixture of experts needs. Routing drops no token."""
    return {
        "num_moe_experts": spec.num_experts,
        "moe_ffn_hidden_size": spec.ffn_size,
        "moe_router_topk": spec.experts_per_token,
        "moe_router_pre_softmax": not spec.norm_topk_prob,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
    }


def build_model(
    spec: ModelSpec,
    parallel: ModelParallel,
    dtype: torch.dtype,
    valid_vocab: int,
    sequence_parallel: bool = True,
    recompute: str = "none",
) -> list[PackedModel]:
    """This rank's part of the model, one module a virtual stage, weights uninitialised. Call inside ``parallel``.

    Args:
        valid_vocab: ids from here on are never drawn: their logits are masked before the softmax.
        sequence_parallel: tensor-parallel ranks share the tokens between their linear layers.
        recompute: key of ``RECOMPUTE``: what backward computes again instead of keeping.
    """
    parallel.check()
    layout, stage = parallel.layout, parallel.coordinates.pp
    config = transformer_config(spec, layout, dtype, sequence_parallel, recompute)
    layer = get_gpt_layer_local_spec(
        num_experts=spec.num_experts or None, qk_layernorm=spec.qk_norm, normalization="RMSNorm"
    )
    parts: Any = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = CausalAttention
    attention.linear_proj = OutputWithBias if spec.o_bias else OutputWithoutBias
    if spec.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    cpu.install()  # modules imported lazily by the specs
    chunks = []
    for chunk in range(layout.vpp):
        model = (ValueModel if spec.scores else PolicyModel)(
            config,
            TransformerBlockSubmodules(
                layer_specs=[layer] * (spec.num_layers // (layout.pp * layout.vpp)),
                layer_norm=RMSNorm,  # type: ignore[arg-type]
            ),
            vocab_size=padded_vocab_size(spec, layout.tp),
            max_sequence_length=spec.max_positions,
            pre_process=stage == 0 and chunk == 0,
            post_process=stage == layout.pp - 1 and chunk == layout.vpp - 1,
            share_embeddings_and_output_weights=spec.tied,
            position_embedding_type="rope",
            rotary_base=spec.rope_theta,  # type: ignore[arg-type]
            rope_scaling=spec.rope_scaling is not None,
            rope_scaling_factor=(spec.rope_scaling or {}).get("factor", 1.0),
            vp_stage=chunk if layout.vpp > 1 else None,
        )
        if isinstance(model, PolicyModel):
            model.valid_vocab = valid_vocab
        elif model.post_process:
            model.replace_head(spec.score_bias)
        _mark_shards(model)
        if model.post_process and config.sequence_parallel and not spec.scores:
            # Its input is gathered already, and each rank's gradient of it is a part of a sum.
            model.output_layer.sequence_parallel, model.output_layer.allreduce_dgrad = False, True
        chunks.append(model.to(current().device()))
    return chunks


def _mark_shards(model: torch.nn.Module) -> None:
    """Say which weights are cut over tensor-parallel ranks: the gradient's norm counts all others once.

    megatron-core says so while it initialises weights, which ours are not.
    """
    for name, module in model.named_modules():
        # A tied output layer on the embedding's own stage has no weight.
        if isinstance(module, SHARDED) and module.weight is not None:
            dim = 1 if isinstance(module, RowParallelLinear) else 0
            stride = 2 if name.endswith("linear_fc1") else 1  # gate and up, each cut by itself
            set_tensor_model_parallel_attributes(module.weight, is_parallel=True, dim=dim, stride=stride)
