"""Memory that leaves and comes back, on a CPU: through a file."""

from pathlib import Path

import pytest
import torch

from hybridflow.engines.megatron.offload import Offload


def written() -> int:
    """Bytes that this process has given to the system to write."""
    return int(Path("/proc/self/io").read_text().split("wchar:")[1].split()[0])


@pytest.mark.parametrize("frozen", [True, False])
def test_what_is_frozen_is_written_once_for_each_version_and_what_changes_at_each_turn(
    tmp_path: Path, frozen: bool
) -> None:
    tensors = [torch.arange(100_000.0), torch.ones(50_000, dtype=torch.bfloat16)]
    size, expected = 500_000, [tensor.clone() for tensor in tensors]
    version = (lambda: turn // 3) if frozen else None
    part, written_at_turns = Offload(lambda: tensors, kept=True, version=version, folder=str(tmp_path)), []
    for turn in range(5):
        before = written()
        part.release()
        written_at_turns.append((written() - before) // size)
        assert not any(tensor.untyped_storage().nbytes() for tensor in tensors)
        part.restore()
        assert all(torch.equal(tensor, value) for tensor, value in zip(tensors, expected, strict=True))
        # What is frozen changes once, before the fourth turn.
        for values in () if frozen and turn != 2 else (tensors, expected):
            for tensor in values:
                tensor += 1
    assert written_at_turns == ([1, 0, 0, 1, 0] if frozen else [1, 1, 1, 1, 1])
    assert not list(tmp_path.iterdir()), "the file has no name"
