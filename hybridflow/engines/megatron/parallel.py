"""One Megatron layout among several in a process.

megatron-core keeps its process groups in module globals of ``parallel_state``. Roles that share a process each have
their own layout, so a :class:`ModelParallel` holds one set of globals and puts them in place around every use:

    with model_parallel:
        ...                       # megatron-core sees this layout's groups

Invariants: outside of such a context megatron-core is uninitialised, so forgetting the context is loud; contexts nest;
:meth:`ModelParallel.check` refuses work in another layout's context.
"""

from __future__ import annotations

import re
from typing import Any

import torch.distributed as dist

from hybridflow.engines.megatron import cpu
from hybridflow.resharding.layout import Coordinates, ParallelLayout

from megatron.core import parallel_state, tensor_parallel  # isort: skip  (after cpu)
from megatron.core.tensor_parallel import random as rng  # isort: skip

_GLOBALS = [name for name in vars(parallel_state) if re.fullmatch(r"_[A-Z][A-Z0-9_]*", name)]
_TRACKER = ("_CUDA_RNG_STATE_TRACKER", "_CUDA_RNG_STATE_TRACKER_INITIALIZED")


def _read() -> tuple[dict[str, Any], dict[str, Any]]:
    return {k: getattr(parallel_state, k) for k in _GLOBALS}, {k: getattr(rng, k) for k in _TRACKER}


def _write(values: tuple[dict[str, Any], dict[str, Any]]) -> None:
    for module, saved in zip((parallel_state, rng), values, strict=True):
        for name, value in saved.items():
            setattr(module, name, value)


class ModelParallel:
    """megatron-core's process groups and RNG tracker for one layout on the process's torch.distributed world.

    Building one is collective: every rank of the world does it in the same order.

    Args:
        layout: degrees; their product is the world size.
        seed: of the model-parallel RNG tracker (dropout, initialisation).
    """

    def __init__(self, layout: ParallelLayout, seed: int = 0) -> None:
        if layout.world_size != dist.get_world_size():
            raise ValueError(f"layout {layout} fills {layout.world_size} ranks, the world has {dist.get_world_size()}")
        # With a pipeline megatron-core wants as many replicas of experts as of the rest, also of models without any.
        ep = layout.cp if layout.pp > 1 and layout.ep == 1 else layout.ep
        self.layout = layout
        self.coordinates: Coordinates = layout.coordinates(dist.get_rank())
        cpu.install()
        outside = _read()
        parallel_state.destroy_model_parallel()  # only forgets the globals: the groups of other layouts live on
        try:
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=layout.tp,
                pipeline_model_parallel_size=layout.pp,
                virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
                context_parallel_size=layout.cp,
                expert_model_parallel_size=ep,
                expert_tensor_parallel_size=layout.etp,
                order="tp-cp-ep-pp-dp",
            )
            rng._CUDA_RNG_STATE_TRACKER, rng._CUDA_RNG_STATE_TRACKER_INITIALIZED = None, False
            tensor_parallel.model_parallel_cuda_manual_seed(seed)
            self._inside = _read()
        finally:
            _write(outside)
        self._outside: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def __enter__(self) -> ModelParallel:
        self._outside.append(_read())
        _write(self._inside)
        return self

    def __exit__(self, *_: object) -> None:
        self._inside = _read()
        _write(self._outside.pop())

    @property
    def tp_group(self) -> dist.ProcessGroup:
        return self._inside[0]["_TENSOR_MODEL_PARALLEL_GROUP"]

    @property
    def dp_group(self) -> dist.ProcessGroup:
        """Ranks that hold the same weights and see different rows."""
        return self._inside[0]["_DATA_PARALLEL_GROUP"]

    def check(self) -> None:
        """Refuse to compute in another layout's context: its collectives would silently mix other ranks."""
        if parallel_state._TENSOR_MODEL_PARALLEL_GROUP is not self.tp_group:
            raise RuntimeError(f"a model of layout {self.layout} was called outside of its own context")
