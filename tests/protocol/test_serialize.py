"""Bytes of a DataProto: out of band, exact, without the rest of the storage; files that are whole or refused."""

import math
import pickle
import warnings
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

import cloudpickle
import numpy as np
import pytest
import torch

from hybridflow.errors import DataError
from hybridflow.protocol import serialize
from hybridflow.protocol.columns import same_value
from hybridflow.protocol.data import DataProto

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.float8_e4m3fn),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
]


def out_of_band(data: object, dumps=pickle.dumps) -> tuple[bytes, list[memoryview]]:
    """The pickle, and the buffers as the read-only memory that Ray's object store hands out."""
    buffers: list[pickle.PickleBuffer] = []
    head = dumps(data, protocol=5, buffer_callback=buffers.append)
    return head, [memoryview(bytes(buffer.raw())) for buffer in buffers]


def through(data: DataProto, dumps=pickle.dumps) -> DataProto:
    head, buffers = out_of_band(data, dumps)
    return pickle.loads(head, buffers=buffers)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


ROUND_TRIPS = {
    "out of band": through,
    "cloudpickle out of band": lambda data: through(data, cloudpickle.dumps),
    "cloudpickle": lambda data: cloudpickle.loads(cloudpickle.dumps(data)),
    **{f"protocol {p}": lambda data, p=p: pickle.loads(pickle.dumps(data, protocol=p)) for p in range(2, 6)},
}


@pytest.mark.parametrize("name", ROUND_TRIPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_shapes_and_bits_come_back(name, dtype):
    column = torch.tensor([[1.0, 0.0, 2.0], [0.0, -1.0 if dtype.is_signed else 1.0, 3.0]]).to(dtype)
    back = ROUND_TRIPS[name](DataProto.from_dict({"x": column, "row": column[:, 0]}))
    assert back["x"].dtype == dtype and back["x"].shape == (2, 3)
    assert raw(back["x"]) == raw(column) and raw(back["row"]) == raw(column[:, 0])


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_whole_tables_come_back(name):
    data = DataProto.from_dict(
        {
            "empty_rows": torch.zeros(2, 0, 3, dtype=torch.bfloat16),
            "transposed": torch.arange(6).reshape(3, 2).T,
            "expanded": torch.tensor([1.5]).expand(2, 3),
            "one_element": torch.arange(12.0).reshape(4, 3)[1:2, 1].expand(2),
            "conjugated": torch.tensor([1 + 2j, 3j]).conj(),
            "jagged": DataProto.jagged([[1.0, math.nan], []], dtype=torch.bfloat16),
        },
        {
            "nested": [{"a": [1, (torch.tensor([2]), np.array([3.0]))]}, None],
            "arrays": [np.array([[1, 2]]), np.array([None, [torch.tensor(True)]], dtype=object)],
            "jagged_cells": [DataProto.jagged([[1], [2, 3]]), "x"],
        },
        {"step": 3, "weights": torch.tensor([0.25]), "list": [torch.tensor([1])]},
    )
    back = ROUND_TRIPS[name](data)
    assert back.keys() == data.keys() and len(back) == 2
    assert back["empty_rows"].shape == (2, 0, 3) and back["empty_rows"].dtype == torch.bfloat16
    assert back["transposed"].tolist() == [[0, 2, 4], [1, 3, 5]]
    assert back["expanded"].tolist() == [[1.5] * 3] * 2
    assert back["one_element"].tolist() == [4.0, 4.0] and through(data[:1])["one_element"].tolist() == [4.0]
    strided = torch.arange(12).reshape(4, 3)[1:2, 1]
    assert ROUND_TRIPS[name](DataProto({"x": strided}))["x"].tolist() == [4], "contiguous with a stride of 3"
    assert back["conjugated"].tolist() == [1 - 2j, -3j]
    assert back.lengths("jagged").tolist() == [2, 0] and back["jagged"].dtype == torch.bfloat16
    assert back["arrays"].shape == (2,) and back["arrays"][1][1][0].item() is True
    assert back["jagged_cells"][0].values().tolist() == [1, 2, 3]
    assert back.meta_info["weights"].tolist() == [0.25] and back.meta_info["list"][0].tolist() == [1]
    back.union(data)
    assert len(through(data[:0])) == 0 and through(data[:0])["expanded"].shape == (0, 3)
    assert through(DataProto(meta_info={"a": 1})).meta_info == {"a": 1}


def test_bytes_of_contiguous_tensors_are_handed_over_without_a_copy():
    x = torch.arange(1000)
    data = DataProto.from_dict({"x": x, "j": DataProto.from_padded(x[:, None], torch.ones(1000, dtype=torch.int64))})
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    addresses = [np.frombuffer(buffer, dtype=np.uint8).ctypes.data for buffer in buffers]
    assert addresses[:2] == [x.data_ptr(), data["j"].values().data_ptr()] and len(addresses) == 3
    assert buffers[2].raw().nbytes == 1000 * 8, "the lengths of the jagged rows"
    assert len(head) < 1500
    received = [bytes(buffer.raw()) for buffer in buffers]
    back = pickle.loads(head, buffers=received)
    assert back["x"].data_ptr() == np.frombuffer(received[0], dtype=np.uint8).ctypes.data
    assert back["x"].tolist() == back.flat("j").tolist() == list(range(1000))


def test_a_view_never_drags_its_storage_along():
    data = DataProto.from_dict(
        {"x": torch.zeros(10_000, 4), "j": DataProto.jagged([[1.0] * 100] * 10_000)},
        {"cell": [torch.zeros(1000)[:2] for _ in range(10_000)], "array": [np.zeros(1000)[:2] for _ in range(10_000)]},
    )
    _, buffers = out_of_band(data[5:7])
    assert sorted(buffer.nbytes for buffer in buffers) == sorted([2 * 4 * 4, 200 * 4, 2 * 8, 8, 8, 16, 16])
    assert len(pickle.dumps(data[5:7])) < 4000


class Named(NamedTuple):
    tensor: torch.Tensor


@dataclass(frozen=True)
class Frozen:
    tensor: torch.Tensor
    unset: int = field(init=False)


@pytest.mark.parametrize(
    "around",
    [
        lambda tensor: (tensor,),
        Named,
        Frozen,
        lambda tensor: OrderedDict(tensor=tensor),
        lambda tensor: defaultdict(list, tensor=tensor),
        lambda tensor: [{"a": Frozen(tensor)}],
    ],
)
def test_a_view_does_not_drag_its_storage_along_inside_of_a_container_either(around):
    cell = around(torch.arange(10_000)[:2])
    sent = pickle.dumps(DataProto.from_dict({}, {"cell": [cell]}))
    assert len(sent) < 1000
    assert same_value(pickle.loads(sent)["cell"][0], cell)


def test_reading_read_only_buffers_does_not_warn_and_computes():
    head, buffers = out_of_band(
        DataProto.from_dict({"x": torch.tensor([1.0, 5.0]), "j": DataProto.jagged([[1], [2, 3]])})
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            back = pickle.loads(head, buffers=buffers)
            assert (back["x"] * 2).sum().item() == 12.0
            assert back[[1]].flat("j").tolist() == [2, 3] and back.to_padded("j").tolist() == [[1, 0], [2, 3]]
            assert DataProto.concat([back, back])["x"].tolist() == [1.0, 5.0] * 2


def test_one_tensor_in_two_places_travels_once():
    shared = torch.arange(100)
    data = DataProto.from_dict({"x": torch.zeros(2)}, {"cell": [[shared], {"again": shared}]})
    head, buffers = out_of_band(data)
    assert sorted(buffer.nbytes for buffer in buffers) == [8, 800]
    back = pickle.loads(head, buffers=buffers)
    assert back["cell"][0][0] is back["cell"][1]["again"]


def test_packing_leaves_containers_without_tensors_and_cycles_alone():
    plain = [1, {"a": (2, "x")}, np.array([None, 3], dtype=object)]
    assert serialize.pack(plain) is plain
    loop: list = [1]
    loop.append(loop)
    assert serialize.pack(loop) is loop


def test_autograd_history_stays_behind():
    back = through(DataProto.from_dict({"x": torch.ones(2, requires_grad=True) * 2}))
    assert back["x"].tolist() == [2.0, 2.0] and not back["x"].requires_grad


# ---------------------------------------------------------------------------------------------------- files


def saved(path) -> DataProto:
    data = DataProto.from_dict(
        {"x": torch.arange(300), "j": DataProto.jagged([[1.5]] * 300)}, {"o": [[i] for i in range(300)]}, {"step": 7}
    )
    data.save_to_disk(path)
    return data


def test_a_file_holds_everything_and_its_tensors_may_be_written_to(tmp_path):
    path = tmp_path / "below" / "batch.data"
    data = saved(path)
    back = DataProto.load_from_disk(path)
    assert len(back.union(data)) == 300 and back.meta_info == {"step": 7}
    back["x"][0] = 9
    assert DataProto.load(str(path))["x"][0].item() == 0
    assert [file.name for file in path.parent.iterdir()] == ["batch.data"], "no temporary file is left"
    data[:1].save(path)
    assert len(DataProto.load(path)) == 1, "an older file is replaced"


def test_a_write_that_fails_leaves_the_older_file(tmp_path):
    path = tmp_path / "batch.data"
    saved(path)
    with pytest.raises((AttributeError, pickle.PicklingError, TypeError)):
        DataProto.from_dict(non_tensors={"o": [lambda: 0]}).save_to_disk(path)
    assert len(DataProto.load_from_disk(path)) == 300
    assert len(list(tmp_path.iterdir())) == 1


def test_a_damaged_file_is_refused_by_name(tmp_path):
    path = tmp_path / "batch.data"
    saved(path)
    whole = path.read_bytes()
    cuts = [whole[:size] for size in (0, 5, 12, 40, 200, len(whole) // 2, len(whole) - 1)]
    flips = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in (0, 8, 15, 20, 50, 400, len(whole) - 1)]
    for damaged in (*cuts, *flips, whole + b"x", b"PK\3\4 something else"):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match="batch.data"):
            DataProto.load_from_disk(path)


def test_a_file_of_something_else_is_refused_by_name(tmp_path):
    serialize.write_file(tmp_path / "list.data", [1, 2])
    with pytest.raises(DataError, match="list.data holds a list, not a DataProto"):
        DataProto.load_from_disk(tmp_path / "list.data")
    with pytest.raises(FileNotFoundError, match=r"none\.data"):
        DataProto.load_from_disk(tmp_path / "none.data")
