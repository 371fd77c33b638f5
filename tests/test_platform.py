"""Memory of a process as the platform measures it."""

import pytest
import torch

from hybridflow.platform import CPU
from tests.ranks import run_ranks


def peaks(rank: int) -> tuple[int, int]:
    """How far the peak rises while 64 MiB are held, and where it is once that is forgotten; above where it began."""
    CPU.forget_peak()
    before = CPU.peak()
    block = torch.ones(64 * 2**20, dtype=torch.uint8)
    del block
    held = CPU.peak() - before
    CPU.forget_peak()
    return held, CPU.peak() - before


@pytest.mark.distributed
def test_a_peak_is_that_since_it_was_forgotten() -> None:
    [(held, after)] = run_ranks(peaks, 1)  # a process whose memory nothing else changes
    assert 64 * 2**20 <= held < 128 * 2**20
    assert after < 32 * 2**20


def held_when_freed(rank: int, keep: bool) -> tuple[int, int]:
    """Bytes that the process holds once four blocks of 8 MiB are freed, and after giving back; above where it began."""
    if keep:
        CPU.keep_freed_memory()
    before = CPU.memory()["rss"]
    blocks = [torch.ones(8 * 2**20, dtype=torch.uint8) for _ in range(4)]
    del blocks
    held = CPU.memory()["rss"] - before
    CPU.release_cache()
    return held, CPU.memory()["rss"] - before


@pytest.mark.distributed
def test_freed_memory_is_kept_until_it_is_released() -> None:
    [(held, after)] = run_ranks(held_when_freed, 1, True)
    assert held >= 32 * 2**20 and after < 8 * 2**20
    [(held, _)] = run_ranks(held_when_freed, 1, False)
    assert held < 8 * 2**20  # the C library's own way
