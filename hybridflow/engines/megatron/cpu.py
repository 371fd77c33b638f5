"""The one place that adapts megatron-core to a machine without CUDA.

megatron-core's parallelism, layers and optimizers are plain PyTorch, but a few modules name ``torch.cuda`` or
``device="cuda"`` outright. :func:`install` gives every loaded ``megatron.core`` module a thin stand-in for the *name*
``torch`` that answers those few calls for the CPU; torch itself is not changed, apart from ``Tensor.cuda``, which would
only raise. What it decorates with torch.compile runs as written, and its SwiGLU is one that needs no compiler to be
quick, as is :func:`rms_norm`. On a CUDA machine nothing is adapted.

Invariant: importing this module before any other ``megatron`` import, and calling :func:`install` after modules were
imported, is all a caller needs.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist

from hybridflow import platform

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core import jit

    # torch.compile would cost tens of seconds in the first steps on a CPU, and modules read the flag at import.
    if not platform.current().is_cuda:
        jit.disable_jit_fuser()
    # Imported before the stand-in is in place: it probes the real torch.cuda at import.
    import megatron.core.dist_checkpointing.strategies.filesystem_async  # noqa: F401


class _Stream:
    """A stream on a machine without streams: everything is already in order."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: Any) -> bool:
        return False

    def record_event(self, *_: Any) -> _Stream:
        return self

    def __getattr__(self, _: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


class _Nvtx:
    range_push = range_pop = staticmethod(lambda *args, **kwargs: None)


def _cuda_namespace() -> types.ModuleType:
    """``torch.cuda`` for a CPU: the calls megatron-core makes, everything else from the real module."""
    namespace = types.ModuleType("torch.cuda")
    answers: dict[str, Any] = {
        "Stream": _Stream,
        "Event": _Stream,
        "nvtx": _Nvtx,
        "current_device": lambda: torch.device("cpu"),
        "current_stream": lambda *args, **kwargs: _Stream(),
        "default_stream": lambda *args, **kwargs: _Stream(),
        "stream": lambda stream: contextlib.nullcontext(),
        "synchronize": lambda *args, **kwargs: None,
        "empty_cache": lambda: None,
        "manual_seed": torch.manual_seed,
        "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
        "set_rng_state": lambda state, *args, **kwargs: torch.set_rng_state(state),
        "is_current_stream_capturing": lambda: False,
        "__getattr__": functools.partial(getattr, torch.cuda),
    }
    for name, answer in answers.items():
        setattr(namespace, name, answer)
    return namespace


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


@functools.cache
def _stand_in() -> types.ModuleType:
    """A module that is ``torch`` but for ``cuda`` and the tensor factories."""
    module = types.ModuleType("torch")
    module.__getattr__ = functools.partial(getattr, torch)  # type: ignore[method-assign]
    module.cuda = _cuda_namespace()  # type: ignore[attr-defined]
    for name in ("tensor", "zeros", "ones", "empty", "full", "arange", "empty_like", "zeros_like"):
        setattr(module, name, _on_cpu(getattr(torch, name)))
    return module


def _on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """megatron-core's own leaves a tensor that is on the host already as it is, also where numbers are asked for."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _gather(own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """All-gather along the first dimension, also of parts of different sizes, which gloo's own refuses."""

    def gather(
        x: torch.Tensor, group: dist.ProcessGroup, output_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return own(x, group, output_split_sizes, use_global_buffer)
        sizes, size = [int(n) for n in output_split_sizes], group.size()
        found = x.new_empty(sum(sizes), *x.shape[1:])
        dist.all_to_all_single(found, torch.cat([x] * size), sizes, [len(x)] * size, group=group)
        return found

    return gather


def _reduce_scatter(own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Reduce-scatter along the first dimension, also in parts of different sizes, which gloo's own refuses."""

    def reduce_scatter(
        x: torch.Tensor, group: dist.ProcessGroup, input_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            return own(x, group, input_split_sizes, use_global_buffer)
        sizes, size = [int(n) for n in input_split_sizes], group.size()
        mine = sizes[group.rank()]
        parts = x.new_empty(size, mine, *x.shape[1:])
        dist.all_to_all_single(parts.flatten(0, 1), x.contiguous(), [mine] * size, sizes, group=group)
        return parts.sum(dim=0)

    return reduce_scatter


_CACHED = 200_000
"""Elements of a tensor of which a core's cache holds this and half as much again."""


def _swiglu(y: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of ``y`` [..., 2 f], gate before up; inside of autograd functions of megatron-core's."""
    gate, up = y.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up)


def _swiglu_back(g: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The gradient of :func:`_swiglu`, as many rows at a time as a core's cache holds: megatron-core's counts on a
    compiler that fuses it."""
    found = torch.empty_like(y, memory_format=torch.contiguous_format)
    rows = max(1, _CACHED // y.shape[-1])
    parts = (whole.flatten(0, -2).split(rows) for whole in (g, y, found))
    for of_answer, given, wanted in zip(*parts, strict=True):
        (gate, up), (of_gate, of_up) = given.chunk(2, dim=-1), wanted.chunk(2, dim=-1)
        torch.ops.aten.silu.out(gate, out=of_up).mul_(of_answer)
        torch.mul(of_answer, up, out=of_gate)
        torch.ops.aten.silu_backward.grad_input(of_gate, gate, grad_input=of_gate)
    return found


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        size = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = size.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        normed = wide * scale
        ctx.save_for_backward(normed, scale, weight)
        return (normed * weight).to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        normed, scale, weight = ctx.saved_tensors
        wide = weight.to(normed.dtype)
        along = (g * normed).flatten(0, -2)
        shrink = (along @ wide).view(scale.shape).div_(-len(weight))
        of_x = torch.addcmul(g * wide, normed, shrink).mul_(scale)
        return of_x.to(g.dtype), along.sum(dim=0).to(weight.dtype), None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension of ``x`` [..., h]; on a CPU its gradient takes half of the time of torch's, which
    is a dozen operators there."""
    if platform.current().is_cuda:
        return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)
    return cast(torch.Tensor, _RMSNorm.apply(x, weight, eps))


@functools.cache
def _allow_uneven_parts() -> None:
    """Once a process: each call wraps what it finds."""
    from megatron.core.tensor_parallel import mappings

    mappings._gather_along_first_dim = _gather(mappings._gather_along_first_dim)
    mappings._reduce_scatter_along_first_dim = _reduce_scatter(mappings._reduce_scatter_along_first_dim)


def install() -> None:
    """Adapt every ``megatron.core`` module loaded so far. Call again after importing more of them."""
    from megatron.core.fusions import fused_bias_swiglu
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    if not hasattr(moe_utils, "te_general_gemm"):
        # Named without a guard where Transformer Engine is missing, on GPUs too.
        moe_utils.te_general_gemm = None  # type: ignore[attr-defined]
    if platform.current().is_cuda:
        return
    token_dispatcher.maybe_move_tensor_to_cpu = _on_host
    _allow_uneven_parts()
    for name, module in list(sys.modules.items()):
        if not name.startswith("megatron.core"):
            continue
        for key, value in list(getattr(module, "__dict__", {}).items()):
            if value is torch:
                setattr(module, key, _stand_in())
            elif hasattr(value, "_torchdynamo_orig_callable"):
                # Decorated while megatron.core was imported, before the flag could be changed.
                setattr(module, key, value._torchdynamo_orig_callable)
    fused_bias_swiglu.swiglu, fused_bias_swiglu.swiglu_back = _swiglu, _swiglu_back
    from megatron.core.tensor_parallel import random as rng

    rng._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    rng._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]


@contextlib.contextmanager
def cuda_type_names() -> Iterator[None]:
    """Within the context ``tensor.type()`` says ``torch.cuda.*``, which megatron-core's optimizers compare with."""
    if platform.current().is_cuda:
        yield
        return
    original = torch.Tensor.type

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.", 1) if isinstance(found, str) else found

    torch.Tensor.type = type_name  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.type = original  # type: ignore[method-assign]
