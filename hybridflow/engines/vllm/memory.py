"""Weights and KV cache of an engine, given back and taken anew.

On a GPU this is vLLM's sleep mode, by its tags. On a CPU, where vLLM has none, memory is dropped and allocated by hand.

Invariant: an engine without one of the two is not stepped; :meth:`EngineMemory.require` says so.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.v1.engine.llm_engine import LLMEngine

from hybridflow import platform

WEIGHTS, KV_CACHE = "weights", "kv_cache"


class EngineMemory:
    """What one engine holds. Every method may be called again, also after it raised.

    Args:
        engine: with ``enable_sleep_mode`` on a GPU, if anything is to be released.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self._core: Any = engine.engine_core.engine_core  # type: ignore[attr-defined]
        self._runner: Any = engine.model_executor.driver_worker.worker.model_runner  # type: ignore[union-attr]
        self._config = engine.vllm_config
        self._shapes = {name: p.shape for name, p in self._runner.model.named_parameters()}
        self._held = {WEIGHTS, KV_CACHE}

    def require(self) -> None:
        """Raises RuntimeError where something is missing."""
        missing = {WEIGHTS, KV_CACHE} - self._held
        if missing:
            raise RuntimeError(f"the engine has released its {' and '.join(sorted(missing))}: restore them first.")

    def release_kv_cache(self) -> None:
        """Drop keys and values; no request may be unfinished."""
        if KV_CACHE not in self._held:
            return
        if platform.current().is_cuda:
            self._core.pause_scheduler(mode="abort", clear_cache=True)
            self._core.release_kv_cache_memory()
        else:
            for layer in self._config.compilation_config.static_forward_context.values():
                if hasattr(layer, KV_CACHE):
                    layer.kv_cache = torch.empty(0)
            self._runner.kv_caches.clear()
        self._held.discard(KV_CACHE)

    def restore_kv_cache(self) -> None:
        """Allocate it again, empty."""
        if KV_CACHE in self._held:
            return
        if platform.current().is_cuda:
            self._core.wake_up([KV_CACHE])
        else:
            self._runner.kv_caches.clear()  # of an attempt that failed
            with set_current_vllm_config(self._config):
                self._runner.initialize_kv_cache_tensors(self._runner.kv_cache_config, self._runner._kernel_block_sizes)
        self._held.add(KV_CACHE)

    def release_weights(self) -> None:
        """Drop the parameters, after the KV cache. Buffers (rotary tables) stay."""
        if WEIGHTS not in self._held:
            return
        if platform.current().is_cuda:
            self._core.sleep(level=2)
        else:
            for parameter in self._runner.model.parameters():
                parameter.data = torch.empty(0, dtype=parameter.dtype)
        self._held.discard(WEIGHTS)

    def restore_weights(self) -> None:
        """Allocate the parameters again, contents undefined, before the KV cache."""
        if WEIGHTS in self._held:
            return
        if platform.current().is_cuda:
            self._core.wake_up([WEIGHTS])
        else:
            for name, parameter in self._runner.model.named_parameters():
                if parameter.shape != self._shapes[name]:
                    parameter.data = torch.empty(self._shapes[name], dtype=parameter.dtype)
        self._held.add(WEIGHTS)
