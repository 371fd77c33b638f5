"""Messages: bytes, and large ones in the store, each put there once."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from hybridflow.controller.message import message, opened, packed, sendable
from hybridflow.controller.pool import ResourcePool
from hybridflow.controller.store import address_of
from hybridflow.errors import DataError
from hybridflow.protocol.data import DataProto
from tests.controller.conftest import group_on
from tests.controller.rows import RowWorker


def test_a_small_value_is_bytes_and_comes_back():
    value = {"x": torch.arange(3), "names": ["a", None], "scale": 0.5, "class": type("Made", (), {"here": 1})}
    sent = message(packed(value, "test"))
    assert isinstance(sent, bytes)
    back = opened(sent)
    assert back["x"].tolist() == [0, 1, 2] and back["names"] == ["a", None] and back["scale"] == 0.5
    assert back["class"].here == 1, "a class that no module has, as those of a driver's own script"


def test_large_buffers_stand_beside_the_pickle_and_are_not_copied():
    tensor, array = torch.arange(100_000), np.arange(50_000)
    sent = message(packed([tensor, array, torch.ones(3)], "test"))
    assert isinstance(sent, list)
    data, buffers = sent
    assert len(data) < 2000 and [memoryview(buffer).nbytes for buffer in buffers] == [800_000, 400_000]
    first, second, third = opened(sent)
    assert torch.equal(first, tensor) and (second == array).all() and third.tolist() == [1, 1, 1]
    assert first.data_ptr() == tensor.data_ptr() and second.ctypes.data == array.ctypes.data


def test_a_value_that_no_pickle_can_carry_is_the_senders_error():
    with pytest.raises((TypeError, pickle.PicklingError), match="generator"):
        message(packed([(row for row in range(3))], "test"))


@pytest.mark.ray
def test_large_arguments_are_put_once_for_all_the_ranks_that_share_them(pool: ResourcePool):
    large = [torch.ones(1_000_000)]
    ready, small = message(packed(large, "test")), message([1, "x"])
    (first, second, third), put = sendable([ready, ready, small])
    assert first is second and first == address_of(put[0]) and torch.equal(opened(first)[0], large[0])
    assert third is small and len(put) == 1
    assert group_on(pool, "maker", RowWorker).total(large) == [1_000_000.0, 1_000_000.0]


def test_cells_of_a_class_of_the_drivers_script_arrive_elsewhere(tmp_path: Path) -> None:
    script = tmp_path / "drive.py"
    script.write_text(
        "import sys\n"
        "from hybridflow.controller.message import message, packed\n"
        "from hybridflow.protocol.data import DataProto\n"
        "class Found:\n"
        "    def __init__(self, value): self.value = value\n"
        "cells = DataProto(non_tensor_batch={'found': [Found(1), Found(2)], 'twice': [lambda x: 2 * x] * 2})\n"
        "sys.stdout.buffer.write(message(packed([cells], 'the arguments of a call')))\n"
    )
    sent = subprocess.run([sys.executable, str(script)], capture_output=True, check=True).stdout
    (batch,) = opened(sent)
    assert [cell.value for cell in batch["found"]] == [1, 2]
    assert [cell(3) for cell in batch["twice"]] == [6, 6]


class Stubborn:
    def __reduce__(self) -> str:
        raise RuntimeError("not me")


@pytest.mark.parametrize("cell", [threading.Lock(), Stubborn()])
def test_a_cell_that_cannot_be_sent_is_named_with_its_column(cell: object) -> None:
    batch = DataProto(non_tensor_batch={"lock": [cell]})
    with pytest.raises(DataError, match="^column 'lock' of the arguments of actor.update has a cell that"):
        packed([batch], "the arguments of actor.update")
