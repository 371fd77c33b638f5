"""The one place that adapts vLLM to a CPU. On a CUDA machine every function here does nothing.

vLLM's CPU backend is made for a server that owns its process. Here it shares the process with a trainer, so that

- linear layers keep ``weight`` as an ordinary tensor (:func:`install`). The backend would leave an empty parameter
  behind, and what oneDNN has arranged for itself in its place, and new weights would never be seen. Here that is a
  second copy, made when a layer is first used and dropped when its weights change (:func:`forget_packed`);
- the weights of experts are not packed at all (:func:`install`);
- RMSNorm and attention are called directly (:func:`install`, :func:`constructing`): of a step of a small model most of
  the time is operators that start, not numbers that are multiplied;
- the process's memory policy and ``torch.set_num_threads`` are left alone (:func:`constructing`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any, cast

import torch

from hybridflow import platform
from hybridflow.engines.vllm import environment
from hybridflow.errors import ModelError

_KERNELS = 32
"""Numbers of rows for which a layer keeps its kernel, as vLLM has it."""


class _PackedLinear:
    """The matrix product of a linear layer, by vLLM's own oneDNN operators: of the few rows that decoding has, 1.1 to 4
    times as fast as ``F.linear``.

    Args:
        operators: vLLM's ``_custom_ops``.
    """

    def __init__(self, operators: Any) -> None:
        self._operators, self._packed = operators, None

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self._packed is None:
            self._packed = self._operators.create_onednn_mm(weight.t(), _KERNELS)
        return self._operators.onednn_mm(self._packed, x, bias)

    def forget(self) -> None:
        self._packed = None


_compiled = False
"""Whether the model that is built now gets compiled: torch cannot look into the packed product."""


def _choose_linear(layer: Any, remove_weight: bool) -> None:
    """Stands for vLLM's choice of a matrix product, and leaves ``layer.weight`` alone."""
    from vllm import _custom_ops as operators

    packs = layer.weight.ndim == 2 and not layer.weight.is_meta and operators._supports_onednn and not _compiled
    layer.cpu_linear = cast(Any, _PackedLinear(operators) if packs else torch.nn.functional.linear)


def forget_packed(model: torch.nn.Module) -> None:
    """After the weights have changed or gone: what was packed of them is dropped."""
    for layer in model.modules():
        product = getattr(layer, "cpu_linear", None)
        if isinstance(product, _PackedLinear):
            product.forget()


def _plain_experts(
    self: Any,
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    **_: Any,
) -> None:
    """Stands for vLLM's packed experts: SwiGLU of one expert after another on the live weights.

    ``w1`` [experts, 2 f, h] is gate over up, ``w2`` [experts, h, f]; ``output`` and ``hidden_states`` [tokens, h],
    ``topk_weights`` and ``topk_ids`` [tokens, k]. ``expert_map`` gives the number here of each expert, or -1.
    """
    if expert_map is not None:
        topk_ids = expert_map[topk_ids]
    output.zero_()
    for expert in range(len(w1)):
        tokens, slots = (topk_ids == expert).nonzero(as_tuple=True)
        if len(tokens):
            gate, up = torch.nn.functional.linear(hidden_states[tokens], w1[expert]).chunk(2, dim=-1)
            answer = torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, w2[expert])
            output.index_add_(0, tokens, (answer * topk_weights[tokens, slots, None]).to(output.dtype))


BLOCK_TOKENS = 32
"""Tokens of a block of the KV cache: as few as the CPU's attention takes, so that short prompts are shared too."""


def _rms_norm(
    self: Any, x: torch.Tensor, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Stands for ``RMSNorm.forward``: the kernel that the CPU build has but uses on GPUs only.

    The norm of ``x`` [..., h]; with ``residual`` that of their sum, and the sum, both in the place of the arguments.
    """
    if self.variance_size_override is not None or not self.pass_weight or self.weight.dtype != x.dtype:
        return self.forward_native(x, residual)
    kernels, x = torch.ops._C, x.contiguous()  # the kernels ignore strides, and q and k are views of one tensor
    if residual is None:
        out = torch.empty_like(x)
        kernels.rms_norm(out, x, self.weight.data, self.variance_epsilon)
        return out
    residual = residual.contiguous()
    kernels.fused_add_rms_norm(x, residual, self.weight.data, self.variance_epsilon)
    return x, residual


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence start-up advice for servers (tcmalloc, Triton, compilation), unless the user asked vLLM to talk."""
    before = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if os.environ.get("VLLM_LOGGING_LEVEL", "WARNING") == "WARNING":
            # On the "vllm" logger a level would not last: vLLM configures it again on the way.
            logging.disable(max(before, logging.WARNING))
        try:
            yield
        finally:
            logging.disable(before)


def install() -> None:
    """Import vLLM and adapt it. Before the first engine is built; again does no harm."""
    if platform.current().is_cuda:
        return
    environment.prepare()
    with _quiet():
        import vllm.model_executor.layers.utils as layers
        from vllm.model_executor.layers.fused_moe.experts import cpu_moe as experts
        from vllm.model_executor.layers.layernorm import RMSNorm
    layers.dispatch_cpu_unquantized_gemm = _choose_linear
    cast(Any, RMSNorm).forward_cpu = _rms_norm
    kind: Any = experts.CPUUnquantizedExperts
    kind.process_weights_after_loading = lambda self, layer: None
    kind.apply = _plain_experts
    kind.output_alignment = 1
    # The one for AMX packs too; without it vLLM takes the other.
    experts.X86CPUUnquantizedExperts._supports_current_device = staticmethod(lambda: False)


def engine_options() -> dict[str, Any]:
    """``EngineArgs`` that differ on a CPU."""
    if platform.current().is_cuda:
        return {}
    return {
        # vLLM 0.32 raises where the prefill of a seeded request is cut in pieces ("CPU Generator does not use offset").
        "enable_chunked_prefill": False,
        "block_size": BLOCK_TOKENS,
    }


def tp_group_name() -> str:
    """Name of vLLM's tensor-parallel group, from which its CPU backend decides how ranks talk.

    In a group named ``tp`` they would wait in busy loops: with more ranks than free cores a step takes three times as
    long as over gloo, or stands still (4 ranks on 2 cores). Their shared memory has a name that two runs on one machine
    have in common.
    """
    return "tp" if platform.current().is_cuda else "generation"


def check_head_dim(head_dim: int) -> None:
    """Refuse a width of attention heads that vLLM's CPU kernels lack; vLLM itself fails at the first step only.

    Raises:
        ModelError: names the width and the known ones.
    """
    if platform.current().is_cuda:
        return
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    known = CPUAttentionBackend.get_supported_head_sizes()
    if head_dim not in known:
        raise ModelError(f"head_dim={head_dim}: on a CPU vLLM's attention knows {', '.join(map(str, known))} only.")


@contextlib.contextmanager
def constructing(compiled: bool) -> Iterator[None]:
    """Around the construction of an engine, whose model gets compiled or not: keep what vLLM would change in the whole
    process."""
    global _compiled
    if platform.current().is_cuda:
        yield
        return
    import vllm._custom_ops  # noqa: F401  (loads the operators)
    from vllm.platforms import current_platform

    operators: Any = torch.ops._C
    set_num_threads, bind_memory = torch.set_num_threads, operators.init_cpu_memory_env
    # Would bind all memory of the process, the trainer's too, strictly to one NUMA node.
    operators.init_cpu_memory_env = lambda nodes: None
    _compiled = compiled
    kind: Any = type(current_platform)
    is_operator = kind.__dict__["opaque_attention_op"]
    # Attention is called as it is, not as an operator of torch's, unless a compiler has to see one.
    kind.opaque_attention_op = classmethod(lambda cls: compiled)
    try:
        with _quiet():
            yield
    finally:
        _compiled, kind.opaque_attention_op = False, is_operator
        operators.init_cpu_memory_env = bind_memory
        torch.set_num_threads = set_num_threads
