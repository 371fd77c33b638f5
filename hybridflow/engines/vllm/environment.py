"""What vLLM reads from the process's environment, on every platform. Import this before ``vllm``.

Invariant: after :func:`prepare` the engine runs inside the calling process, sends no usage statistics, and takes its
settings from ``rollout`` alone. The few variables that only the construction of an engine needs are set around it by
:func:`launched` and are gone afterwards.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator

import torch.distributed as dist

from hybridflow import platform

_FIXED = {
    # The engine core lives in this process: our loop can change weights between two of its steps.
    "VLLM_ENABLE_V1_MULTIPROCESSING": ("0", "the engine runs inside the device process"),
    # Binding would move the trainer's threads, which share the process, too.
    "VLLM_CPU_OMP_THREADS_BIND": ("nobind", "threads belong to the device process"),
    "VLLM_CPU_KVCACHE_SPACE": (None, "the size of the KV cache is rollout.kv_cache_gb"),
}


def prepare() -> None:
    """Set the variables; an overridden one warns. ``VLLM_LOGGING_LEVEL`` stays what the user set."""
    for name, (value, why) in _FIXED.items():
        given = os.environ.pop(name, value)
        if given != value:
            warnings.warn(f"{name}={given!r} is ignored: {why}.", stacklevel=2)
        if value is not None:
            os.environ[name] = value
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("DO_NOT_TRACK", "1")


def ensure_world() -> None:
    """Make the world of one process where torch.distributed is not initialised (an engine alone, as in a notebook).

    The world stays: it belongs to the process, and :class:`torch.distributed.HashStore` needs no port.
    """
    if not dist.is_initialized():
        dist.init_process_group(platform.current().backend, store=dist.HashStore(), rank=0, world_size=1)


@contextlib.contextmanager
def launched() -> Iterator[None]:
    """Within the context the variables of a launcher describe the process's torch.distributed world.

    vLLM's ``external_launcher`` reads them; ``LOCAL_RANK`` (index of the GPU) is kept where a launcher has set it, and
    is 0 elsewhere, because Ray shows a process only its own GPU.
    """
    values = {
        "RANK": str(dist.get_rank()),
        "WORLD_SIZE": str(dist.get_world_size()),
        "LOCAL_RANK": os.environ.get("LOCAL_RANK", "0"),
    }
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
