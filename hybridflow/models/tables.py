"""Tables: every local parameter of an engine as boxes of Hugging Face tensors. Pure arithmetic.

``megatron_table`` names parameters as ``GPTModel.named_parameters()`` does (local layer spec, separate RMSNorm
modules), ``vllm_table`` as vLLM's ``model.named_parameters()``, ``hf_table`` as the checkpoint does. Loading, exporting
and weight synchronisation all follow from these three.

Invariant: the tables of one replica's ranks cover every element of every Hugging Face tensor; each sharded element once
(norms, row-parallel biases, a tied embedding's copy on the last stage, and replicated kv heads stand more than once).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import copy
from itertools import product

from hybridflow.errors import ConfigError, ModelError
from hybridflow.models.spec import ModelSpec
from hybridflow.resharding.boxes import Box, ParameterBoxes, Piece, Ranges, merge, whole
from hybridflow.resharding.layout import Coordinates, ParallelLayout

VLLM_VOCAB_MULTIPLE = 64
EMBEDDING, FINAL_NORM, LM_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
SCORE, SCORE_BIAS = "score.weight", "score.bias"


def hf_table(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of the checkpoint, by Hugging Face name, in the model's order."""
    hidden, ffn = spec.hidden_size, spec.ffn_size
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    linear = {
        "self_attn.q_proj": (q_size, hidden, spec.qkv_bias),
        "self_attn.k_proj": (kv_size, hidden, spec.qkv_bias),
        "self_attn.v_proj": (kv_size, hidden, spec.qkv_bias),
        "self_attn.o_proj": (hidden, q_size, spec.o_bias),
    }
    if spec.num_experts:
        linear["mlp.gate"] = (spec.num_experts, hidden, False)
    for mlp in mlps(spec):
        linear |= {
            f"{mlp}gate_proj": (ffn, hidden, spec.mlp_bias),
            f"{mlp}up_proj": (ffn, hidden, spec.mlp_bias),
            f"{mlp}down_proj": (hidden, ffn, spec.mlp_bias),
        }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if spec.qk_norm:
        norms |= {"self_attn.q_norm": spec.head_dim, "self_attn.k_norm": spec.head_dim}
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (spec.vocab_size, hidden)}
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        for name, (rows, columns, bias) in linear.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        for name, size in norms.items():
            shapes[f"{prefix}{name}.weight"] = (size,)
    shapes[FINAL_NORM] = (hidden,)
    if spec.scores:
        shapes |= {SCORE: (1, hidden), **({SCORE_BIAS: (1,)} if spec.score_bias else {})}
    elif not spec.tied:
        shapes[LM_HEAD] = (spec.vocab_size, hidden)
    return shapes


def mlps(spec: ModelSpec, ep: int = 1, ep_rank: int = 0) -> list[str]:
    """What stands before the names of a layer's MLP, or one by one of the experts that a rank holds."""
    names = [f"mlp.experts.{expert}." for expert in range(spec.num_experts)] or ["mlp."]
    return names[ep_rank * len(names) // ep : (ep_rank + 1) * len(names) // ep]


def padded_vocab_size(spec: ModelSpec, tp: int = 1) -> int:
    """Rows of the embedding over all tensor-parallel ranks: the vocabulary up to a multiple of tp and of 64.

    64 is vLLM's own padding. With the same in training, a rank's rows in training lie inside those it generates with.
    """
    step = math.lcm(tp, VLLM_VOCAB_MULTIPLE)
    return -(-spec.vocab_size // step) * step


def megatron_table(
    spec: ModelSpec, layout: ParallelLayout, at: Coordinates, padded_vocab: int
) -> dict[str, ParameterBoxes]:
    """Parameters of one rank of megatron-core's GPTModel.

    Layers are numbered from 0 in each pipeline stage, as in the model. A tied model on several stages holds the
    embedding twice: on the first stage, and as ``output_layer.weight`` on the last. With virtual stages a rank holds
    several models, numbered in the order of their layers, whose parameters are called as :func:`chunk_prefix` says.

    Args:
        at: the rank's coordinates; only ``tp``, ``pp``, ``ep`` and ``etp`` matter.
        padded_vocab: see :func:`padded_vocab_size`.

    Raises:
        ConfigError: a degree does not divide what it splits; names both.
    """
    check_megatron(spec, layout, padded_vocab)
    build = _Builder(spec, layout.tp, at.tp)
    layers = spec.num_layers // (layout.pp * layout.vpp)
    if at.pp == 0:
        build.vocabulary(f"{chunk_prefix(layout, 0)}embedding.word_embeddings.weight", EMBEDDING, padded_vocab)
    for chunk, local in product(range(layout.vpp), range(layers)):
        ours = f"{chunk_prefix(layout, chunk)}decoder.layers.{local}."
        hf = f"model.layers.{(chunk * layout.pp + at.pp) * layers + local}."
        build.copy(f"{ours}input_layernorm.weight", f"{hf}input_layernorm.weight")
        build.rows(f"{ours}self_attention.linear_proj", f"{hf}self_attn.o_proj", spec.o_bias)
        build.columns(f"{ours}self_attention.linear_qkv", list(build.grouped_qkv(hf)), spec.qkv_bias)
        if spec.qk_norm:
            build.copy(f"{ours}self_attention.q_layernorm.weight", f"{hf}self_attn.q_norm.weight")
            build.copy(f"{ours}self_attention.k_layernorm.weight", f"{hf}self_attn.k_norm.weight")
        build.copy(f"{ours}pre_mlp_layernorm.weight", f"{hf}post_attention_layernorm.weight")
        if spec.num_experts:
            build.copy(f"{ours}mlp.router.weight", f"{hf}mlp.gate.weight")
        split = build.over(layout.etp, at.etp) if spec.num_experts else build
        for number, mlp in enumerate(mlps(spec, layout.ep, at.ep)):
            name = f"{ours}mlp.experts.local_experts.{number}." if spec.num_experts else f"{ours}mlp."
            split.columns(f"{name}linear_fc1", list(split.gate_up(f"{hf}{mlp}")), spec.mlp_bias)
            split.rows(f"{name}linear_fc2", f"{hf}{mlp}down_proj", spec.mlp_bias)
    if at.pp == layout.pp - 1:
        last = chunk_prefix(layout, layout.vpp - 1)
        build.copy(f"{last}decoder.final_layernorm.weight", FINAL_NORM)
        for tensor in [SCORE] * spec.scores + [SCORE_BIAS] * spec.score_bias:
            build.copy(f"{last}{tensor}", tensor)
        if not (spec.scores or (spec.tied and layout.pp == 1)):
            build.vocabulary(f"{last}output_layer.weight", EMBEDDING if spec.tied else LM_HEAD, padded_vocab)
    return build.table


def chunk_prefix(layout: ParallelLayout, chunk: int) -> str:
    """What stands before the parameter names of a rank's chunk-th model; nothing where it has one."""
    return f"chunk{chunk}." if layout.vpp > 1 else ""


def vllm_table(spec: ModelSpec, tp: int, tp_rank: int, ep: int = 1) -> dict[str, ParameterBoxes]:
    """Parameters of one tensor-parallel rank of vLLM's model.

    The vocabulary is padded to a multiple of 64; with fewer kv heads than ranks, each kv head is held by tp / kv heads
    neighbouring ranks. The experts of a layer are stacked.

    Args:
        ep: 1 cuts every expert over the ranks, ``tp`` gives each rank whole experts.

    Raises:
        ConfigError: tp or ep does not divide what it splits; names both.
        ModelError: vLLM's model lacks a parameter that the checkpoint has.
    """
    check_vllm(spec, tp, ep)
    build = _Builder(spec, tp, tp_rank)
    padded_vocab = padded_vocab_size(spec)
    build.vocabulary(EMBEDDING, EMBEDDING, padded_vocab)
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        build.columns(f"{prefix}self_attn.qkv_proj", list(build.stacked_qkv(prefix)), spec.qkv_bias)
        build.rows(f"{prefix}self_attn.o_proj", f"{prefix}self_attn.o_proj", spec.o_bias)
        norms = ["input_layernorm", "post_attention_layernorm"]
        for norm in norms + ["self_attn.q_norm", "self_attn.k_norm"] * spec.qk_norm:
            build.copy(f"{prefix}{norm}.weight", f"{prefix}{norm}.weight")
        if spec.num_experts:
            build.copy(f"{prefix}mlp.gate.weight", f"{prefix}mlp.gate.weight")
            held = mlps(spec, ep, tp_rank if ep > 1 else 0)
            split = build.over(1, 0) if ep > 1 else build
            split.stack(f"{prefix}mlp.experts.routed_experts", [f"{prefix}{mlp}" for mlp in held])
        else:
            build.columns(f"{prefix}mlp.gate_up_proj", list(build.gate_up(f"{prefix}mlp.")), spec.mlp_bias)
            build.rows(f"{prefix}mlp.down_proj", f"{prefix}mlp.down_proj", spec.mlp_bias)
    build.copy(FINAL_NORM, FINAL_NORM)
    if not spec.tied:
        build.vocabulary(LM_HEAD, LM_HEAD, padded_vocab)
    return build.table


def check_megatron(spec: ModelSpec, layout: ParallelLayout, padded_vocab: int, where: str = "layout") -> None:
    """Refuse a training layout that does not divide the model; ConfigError names all numbers and the degrees that do.

    Args:
        where: the layout's setting, for messages.
    """
    stages = f"pp={layout.pp}" if layout.vpp == 1 else f"pp*vpp = {layout.pp}*{layout.vpp} = {layout.pp * layout.vpp}"
    _check_divides(layout.pp * layout.vpp, f"{where}.{stages}", num_layers=spec.num_layers)
    _check_divides(
        layout.tp,
        f"{where}.tp={layout.tp}",
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        **({} if spec.num_experts else {"ffn_size": spec.ffn_size}),
    )
    if spec.num_experts:
        _check_divides(layout.ep, f"{where}.ep={layout.ep}", num_experts=spec.num_experts)
        _check_divides(layout.etp, f"{where}.etp={layout.etp}", ffn_size=spec.ffn_size)
    _check_experts(spec, layout, where)
    if padded_vocab < spec.vocab_size:
        raise ConfigError(f"padded_vocab={padded_vocab} is smaller than the model's vocab_size={spec.vocab_size}.")
    _check_divides(layout.tp, f"{where}.tp={layout.tp}", padded_vocab=padded_vocab)


def _check_experts(spec: ModelSpec, layout: ParallelLayout, where: str) -> None:
    if not spec.num_experts:
        if layout.ep > 1 or layout.etp != layout.tp:
            raise ConfigError(
                f"{where}: ep={layout.ep}, etp={layout.etp} split experts, and a {spec.architecture} model has none. "
                f"Set ep to 1 and etp to 0."
            )
        return
    if layout.ep == 1 and layout.etp != layout.tp:
        # megatron-core then sums the experts' gradients over the wrong ranks, without an error (0.16.1).
        raise ConfigError(f"{where}.etp={layout.etp} differs from tp={layout.tp}: that needs ep above 1. Set etp to 0.")
    experts, stage = layout.ep * layout.etp, layout.tp * layout.cp
    if layout.pp > 1 and experts != stage:
        raise ConfigError(
            f"{where}: with pp={layout.pp}, ep*etp = {layout.ep}*{layout.etp} = {experts} has to be tp*cp = "
            f"{layout.tp}*{layout.cp} = {stage} for a model with experts. Change ep or etp, or set pp to 1."
        )


def check_vllm(spec: ModelSpec, tp: int, ep: int = 1, where: str = "rollout layout") -> None:
    """Refuse a rollout layout that does not divide the model (ConfigError), or a model vLLM lacks (ModelError)."""
    padded_vocab = padded_vocab_size(spec)
    named = f"{where}.tp={tp}"
    _check_divides(tp, named, num_heads=spec.num_heads, padded_vocab=padded_vocab)
    if ep > 1 and not spec.num_experts:
        raise ConfigError(f"{where}.ep={ep}: a {spec.architecture} model has no experts. Set it to 1.")
    if ep > 1:
        _check_divides(ep, f"{where}.ep={ep}", num_experts=spec.num_experts)
    else:
        _check_divides(tp, named, ffn_size=spec.ffn_size)
    if tp < spec.num_kv_heads:
        _check_divides(tp, named, num_kv_heads=spec.num_kv_heads)
    elif tp % spec.num_kv_heads:
        raise ConfigError(
            f"{named} is no multiple of the model's num_kv_heads={spec.num_kv_heads}: with more ranks than kv heads "
            f"each kv head is held by tp / num_kv_heads ranks. Choose a multiple or a divisor."
        )
    if spec.architecture in ("qwen3", "qwen3_moe") and spec.o_bias:
        raise ModelError(
            f"attention_bias=True: vLLM's {spec.architecture} has no bias on o_proj and would ignore the checkpoint's."
        )


def _check_divides(degree: int, named: str, **sizes: int) -> None:
    bad = [f"{name}={size}" for name, size in sizes.items() if size % degree]
    if bad:
        common = math.gcd(*sizes.values())
        fitting = [str(d) for d in range(1, common + 1) if common % d == 0]
        raise ConfigError(f"{named} does not divide the model's {', '.join(bad)}. Choose one of {', '.join(fitting)}.")


# Where rows of Hugging Face tensors go: (tensor without ".weight", first row, rows).
Rows = tuple[str, int, int]


class _Builder:
    """Collects the parameters of one tensor-parallel rank."""

    def __init__(self, spec: ModelSpec, tp: int, tp_rank: int) -> None:
        if not 0 <= tp_rank < tp:
            raise ConfigError(f"tp rank {tp_rank} is outside tp={tp}.")
        self.spec, self.tp, self.tp_rank = spec, tp, tp_rank
        self.shapes = hf_table(spec)
        self.table: dict[str, ParameterBoxes] = {}

    def over(self, tp: int, tp_rank: int) -> _Builder:
        """The same table, with what follows split over other ranks."""
        other = copy(self)
        other.tp, other.tp_rank = tp, tp_rank
        return other

    def copy(self, name: str, tensor: str) -> None:
        """A parameter that every rank holds whole."""
        shape = self.shapes[tensor]
        self._add(name, shape, [(tensor, whole(shape), whole(shape))])

    def vocabulary(self, name: str, tensor: str, padded_vocab: int) -> None:
        """Rows split over ranks after padding; rows past the vocabulary belong to no box."""
        vocab, hidden = self.shapes[tensor]
        rows = padded_vocab // self.tp
        start, stop = self.tp_rank * rows, min((self.tp_rank + 1) * rows, vocab)
        boxes = [(tensor, ((start, stop), (0, hidden)), ((0, stop - start), (0, hidden)))] if start < stop else []
        self._add(name, (rows, hidden), boxes)

    def rows(self, name: str, tensor: str, bias: bool) -> None:
        """A row-parallel linear layer: input columns split over ranks, its bias whole on each."""
        height, width = self.shapes[f"{tensor}.weight"]
        local = width // self.tp
        start = self.tp_rank * local
        source: Ranges = ((0, height), (start, start + local))
        self._add(f"{name}.weight", (height, local), [(f"{tensor}.weight", source, whole((height, local)))])
        if bias:
            self.copy(f"{name}.bias", f"{tensor}.bias")

    def columns(self, name: str, parts: list[Rows], bias: bool) -> None:
        """A column-parallel linear layer made of row blocks, one after the other; its bias follows the rows."""
        for kind in ("weight", "bias") if bias else ("weight",):
            offset = 0
            rest = self.shapes[f"{parts[0][0]}.{kind}"][1:]
            boxes: list[tuple[str, Ranges, Ranges]] = []
            for tensor, start, size in parts:
                source: Ranges = ((start, start + size), *whole(rest))
                boxes.append((f"{tensor}.{kind}", source, ((offset, offset + size), *whole(rest))))
                offset += size
            self._add(f"{name}.{kind}", (offset, *rest), boxes)

    def grouped_qkv(self, hf: str) -> Iterator[Rows]:
        """Megatron's order: for each kv head its queries, then its key, then its value."""
        spec, groups = self.spec, self.spec.num_kv_heads // self.tp
        queries = spec.num_heads // spec.num_kv_heads * spec.head_dim
        for group in range(self.tp_rank * groups, (self.tp_rank + 1) * groups):
            yield f"{hf}self_attn.q_proj", group * queries, queries
            yield f"{hf}self_attn.k_proj", group * spec.head_dim, spec.head_dim
            yield f"{hf}self_attn.v_proj", group * spec.head_dim, spec.head_dim

    def stacked_qkv(self, hf: str) -> Iterator[Rows]:
        """vLLM's order: all queries, all keys, all values of the rank."""
        spec = self.spec
        queries = spec.num_heads // self.tp * spec.head_dim
        heads = max(1, spec.num_kv_heads // self.tp)
        first = self.tp_rank * spec.num_kv_heads // self.tp
        yield f"{hf}self_attn.q_proj", self.tp_rank * queries, queries
        yield f"{hf}self_attn.k_proj", first * spec.head_dim, heads * spec.head_dim
        yield f"{hf}self_attn.v_proj", first * spec.head_dim, heads * spec.head_dim

    def gate_up(self, mlp: str) -> Iterator[Rows]:
        size = self.spec.ffn_size // self.tp
        yield f"{mlp}gate_proj", self.tp_rank * size, size
        yield f"{mlp}up_proj", self.tp_rank * size, size

    def stack(self, name: str, mlps: list[str]) -> None:
        """vLLM's experts: ``w13_weight`` [experts, gate and up, h] and ``w2_weight`` [experts, h, down]."""
        hidden, size = self.spec.hidden_size, self.spec.ffn_size // self.tp
        start = self.tp_rank * size
        rows: Ranges = ((start, start + size), (0, hidden))
        columns: Ranges = ((0, hidden), (start, start + size))
        gates_ups: list[tuple[str, Ranges, Ranges]] = []
        downs: list[tuple[str, Ranges, Ranges]] = []
        for number, mlp in enumerate(mlps):
            expert = (number, number + 1)
            gates_ups.append((f"{mlp}gate_proj.weight", rows, (expert, (0, size), (0, hidden))))
            gates_ups.append((f"{mlp}up_proj.weight", rows, (expert, (size, 2 * size), (0, hidden))))
            downs.append((f"{mlp}down_proj.weight", columns, (expert, (0, hidden), (0, size))))
        self._add(f"{name}.w13_weight", (len(mlps), 2 * size, hidden), gates_ups)
        self._add(f"{name}.w2_weight", (len(mlps), hidden, size), downs)

    def _add(self, name: str, shape: tuple[int, ...], boxes: list[tuple[str, Ranges, Ranges]]) -> None:
        merged = merge(Piece(*box) for box in boxes)
        self.table[name] = ParameterBoxes(name, shape, tuple(Box(str(p.key), p.source, p.target) for p in merged))
