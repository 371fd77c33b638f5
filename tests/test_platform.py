"""Memory of this process as the platform measures it."""

import torch

from hybridflow.platform import CPU


def test_a_peak_is_that_since_it_was_forgotten() -> None:
    size = 64 * 2**20
    CPU.forget_peak()
    before = CPU.peak()
    block = torch.ones(size, dtype=torch.uint8)
    del block
    assert size <= CPU.peak() - before < 2 * size
    CPU.forget_peak()
    assert CPU.peak() - before < size // 2
