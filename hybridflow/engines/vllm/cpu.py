"""The one place that adapts vLLM to a CPU. On a CUDA machine every function here does nothing.

vLLM's CPU backend is made for a server that owns its process. Here it shares the process with a trainer, so that

- linear layers keep ``weight`` as an ordinary tensor (:func:`install`). The backend would pack it into a private format
  and leave an empty parameter behind, and new weights would never be seen;
- nothing is compiled (:func:`install`): one small function of the sampler would cost 30 s of C++ compilation;
- the process's memory policy and ``torch.set_num_threads`` are left alone (:func:`constructing`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator

import torch

from hybridflow import platform
from hybridflow.engines.vllm import environment
from hybridflow.errors import ModelError


def _plain_linear(layer: torch.nn.Module, remove_weight: bool) -> None:
    """Stands for vLLM's choice of a matrix product: always ``F.linear`` on the live ``layer.weight``."""
    layer.cpu_linear = torch.nn.functional.linear


def _ranks(log_probs: torch.Tensor, of_token: torch.Tensor) -> torch.Tensor:
    """Rank of a token in its row, [rows, vocabulary] and [rows, 1] -> [rows]; 1 is the most likely."""
    return (log_probs >= of_token).sum(-1)


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
        import vllm.v1.sample.sampler as sampler
    layers.dispatch_cpu_unquantized_gemm = _plain_linear
    sampler.batched_count_greater_than = _ranks


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
def constructing() -> Iterator[None]:
    """Around the construction of an engine: keep what vLLM would change in the whole process."""
    if platform.current().is_cuda:
        yield
        return
    import vllm._custom_ops  # noqa: F401  (loads the operators)

    set_num_threads, bind_memory = torch.set_num_threads, torch.ops._C.init_cpu_memory_env
    # Would bind all memory of the process, the trainer's too, strictly to one NUMA node.
    torch.ops._C.init_cpu_memory_env = lambda nodes: None
    try:
        with _quiet():
            yield
    finally:
        torch.ops._C.init_cpu_memory_env = bind_memory
        torch.set_num_threads = set_num_threads
