"""The one place that knows which devices exist.

Everything else asks here for the device type, the collective backend and the memory in use; nothing else tests for
CUDA.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import re
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
        """Bytes in use by this process: ``rss`` always, ``allocated`` and ``reserved`` on a GPU."""
        with open("/proc/self/statm") as f:
            used = {"rss": int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")}
        if self.is_cuda:
            used["allocated"] = torch.cuda.memory_allocated()
            used["reserved"] = torch.cuda.memory_reserved()
        return used

    def used(self) -> int:
        """Bytes that a phase is weighed by: of a GPU all that is taken on it, of a CPU what this process holds."""
        if self.is_cuda:
            free, total = torch.cuda.mem_get_info()
            return total - free
        return self.memory()["rss"]

    def forget_peak(self) -> None:
        """Let :meth:`peak` begin anew, from what is in use now."""
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            # Where /proc is read-only the peak is that of the whole process.
            with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as f:
                f.write("5")

    def peak(self) -> int:
        """Most bytes in use since :meth:`forget_peak`: of a GPU what tensors took, of a CPU what this process held."""
        if self.is_cuda:
            return torch.cuda.max_memory_allocated()
        with open("/proc/self/status") as f:
            found = re.search(r"VmHWM:\s+(\d+) kB", f.read())
        return int(found[1]) * 1024 if found else self.memory()["rss"]

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def release_cache(self) -> None:
        """Give freed memory back to the device (GPU) or to the system (CPU)."""
        gc.collect()
        if self.is_cuda:
            torch.cuda.empty_cache()
        else:
            _c_library().malloc_trim(0)

    def keep_freed_memory(self) -> None:
        """On a CPU: what is freed stays with this process until :meth:`release_cache`, in blocks of up to 32 MiB.

        The C library would give the memory of a layer's activations back and ask for it again several times in an
        update, and each of its pages costs a fault then. Larger blocks it maps one by one, as ever.
        """
        if not self.is_cuda:
            _c_library().mallopt(_MMAP_THRESHOLD, 32 * 2**20)
            _c_library().mallopt(_TRIM_THRESHOLD, 2**31 - 1)


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt(3): free bytes at which memory is given back, bytes at which a block is mapped by itself."""


@functools.cache
def _c_library() -> ctypes.CDLL:
    return ctypes.CDLL("libc.so.6")


CUDA = Platform("cuda", "nccl", "GPU")
CPU = Platform("cpu", "gloo", "CPU")


def current() -> Platform:
    """The platform of this process: CUDA where torch sees a GPU, else CPU."""
    return CUDA if torch.cuda.is_available() else CPU
