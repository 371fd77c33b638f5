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
