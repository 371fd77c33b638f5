"""The one place that knows which devices exist.

Everything else asks here for the device type, the collective backend and the memory in use; nothing else tests for
CUDA.
"""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Platform:
    """What one device of this machine is.

    Attributes:
        device_type: ``"cuda"`` or ``"cpu"``.
        backend: name of the torch.distributed backend.
        ray_resource: the Ray resource that stands for one device.
    """

    device_type: str
    backend: str
    ray_resource: str

    @property
    def is_cuda(self) -> bool:
        return self.device_type == "cuda"

    def device(self, local_rank: int = 0) -> torch.device:
        """The torch device of this process. Ray shows a process only its own GPU, so the index is 0 there."""
        return torch.device("cuda", local_rank) if self.is_cuda else torch.device("cpu")

    def memory(self) -> dict[str, int]:
        """Bytes in use by this process: ``rss`` always, ``allocated``, ``reserved`` and ``peak`` on a GPU."""
        with open("/proc/self/statm") as f:
            used = {"rss": int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")}
        if self.is_cuda:
            used["allocated"] = torch.cuda.memory_allocated()
            used["reserved"] = torch.cuda.memory_reserved()
            used["peak"] = torch.cuda.max_memory_allocated()
        return used

    def used(self) -> int:
        """Bytes that a phase is weighed by: of a GPU all that is taken on it, of a CPU what this process holds."""
        if self.is_cuda:
            free, total = torch.cuda.mem_get_info()
            return total - free
        return self.memory()["rss"]

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def release_cache(self) -> None:
        """Give freed memory back to the device (GPU) or to the system (CPU)."""
        gc.collect()
        if self.is_cuda:
            torch.cuda.empty_cache()
        else:
            import ctypes

            ctypes.CDLL("libc.so.6").malloc_trim(0)


CUDA = Platform("cuda", "nccl", "GPU")
CPU = Platform("cpu", "gloo", "CPU")


def current() -> Platform:
    """The platform of this process: CUDA where torch sees a GPU, else CPU."""
    return CUDA if torch.cuda.is_available() else CPU
