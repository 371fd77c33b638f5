"""Jagged columns: every row operation, rows of length 0, batches without rows, dtypes, trailing dims.

Known fault 9: jagged tensors that cannot be indexed.
"""

import math
import pickle
import re

import pytest
import torch

from hybridflow.errors import DataError
from hybridflow.protocol import jagged as jag
from hybridflow.protocol.data import DataProto

ROWS = [[1, 0], [], [1], [0, 0, 1]]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool]


def data_of(rows: list[list], dtype: torch.dtype = torch.int64) -> DataProto:
    return DataProto.from_dict({"x": DataProto.jagged(rows, dtype=dtype)})


def rows_of(data: DataProto, key: str = "x") -> list:
    column = data[key]
    assert column.offsets().dtype == torch.int64 and int(column.offsets()[0]) == 0
    assert int(column.offsets()[-1]) == column.values().shape[0], "packed: nothing outside of the rows"
    kind = torch.float64 if column.dtype.is_floating_point else torch.int64
    return [row.tolist() for row in column.values().to(kind).split(column.offsets().diff().tolist())]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_jagged_column_is_indexed_by_int(dtype):
    data = data_of(ROWS, dtype)
    assert data[3]["x"].long().tolist() == [0, 0, 1] and data[3]["x"].dtype == dtype
    assert data[1]["x"].tolist() == [] and data[-2]["x"].long().tolist() == [1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_jagged_column_survives_every_row_operation_with_its_dtype(dtype, tmp_path):
    data = data_of(ROWS, dtype)
    path = tmp_path / "data"
    data.save_to_disk(path)
    a, b, c, d = ROWS
    results = {
        "slice": (data[1:3], [b, c]),
        "empty slice": (data[2:2], []),
        "step": (data[::2], [a, c]),
        "list": (data[[3, 3, 1]], [d, d, b]),
        "tensor": (data[torch.tensor([0, -1])], [a, d]),
        "mask": (data[torch.tensor([True, True, False, False])], [a, b]),
        "empty mask": (data[torch.zeros(4, dtype=torch.bool)], []),
        "repeat": (data.repeat(2), [a, a, b, b, c, c, d, d]),
        "repeat blocks": (data.repeat(2, interleave=False), [a, b, c, d, a, b, c, d]),
        "chunk 0": (data.chunk(3)[0], [a, b]),
        "chunk 2": (data.chunk(3)[2], [d]),
        "split": (data.split(3)[1], [d]),
        "concat": (DataProto.concat([data[2:], data[:0], data[:1]]), [c, d, a]),
        "reorder": (data.reorder([3, 2, 1, 0]), [d, c, b, a]),
        "union": (data.union(data_of(ROWS, dtype)), ROWS),
        "pad": (data[:3].pad_to_divisor(2)[0], [a, b, c, a]),
        "iterator": (next(data.make_iterator(2, 1)), [a, b]),
        "select": (data.select(deepcopy=True), ROWS),
        "rename": (data.rename("x", "y").rename("y", "x"), ROWS),
        "to": (data.to("cpu"), ROWS),
        "file": (DataProto.load_from_disk(path), ROWS),
        "pickle": (pickle.loads(pickle.dumps(data)), ROWS),
        "slice of a slice": (data[1:][1:][[1]], [d]),
    }
    for name, (result, expected) in results.items():
        assert rows_of(result) == expected, name
        assert result["x"].dtype == dtype, name
    assert rows_of(data) == ROWS


def test_batches_without_rows_survive_every_row_operation():
    data = data_of(ROWS)[:0]
    for result in (data[[]], data.repeat(3), data.chunk(2)[1], DataProto.concat([data, data]), data.reorder([])):
        assert len(result) == 0 and rows_of(result) == [] and result["x"].dtype == torch.int64
    assert data.union(data_of([])).lengths("x").tolist() == []
    assert rows_of(pickle.loads(pickle.dumps(data))) == []
    assert data.flat("x").tolist() == [] and data.to_padded("x").tolist() == []


def test_rows_of_length_zero_alone_survive():
    data = data_of([[], []])
    assert rows_of(data.repeat(2)) == [[], [], [], []]
    assert rows_of(DataProto.concat([data, data_of([[7]])])) == [[], [], [7]]
    assert data.to_padded("x").shape == (2, 0)
    assert rows_of(data.union(data_of([[], []]))) == [[], []]


def test_trailing_dims_follow_their_rows():
    rows = [torch.tensor([[1.0, 2.0]]), torch.zeros(0, 2), torch.tensor([[3.0, 4.0], [5.0, 6.0]])]
    data = DataProto.from_dict({"x": DataProto.jagged(rows)})
    assert rows_of(data[[2, 1, 0]]) == [[[3.0, 4.0], [5.0, 6.0]], [], [[1.0, 2.0]]]
    assert data.to_padded("x", value=9).tolist()[0] == [[1.0, 2.0], [9.0, 9.0]]
    assert data.to_padded("x", side="left").tolist()[0] == [[0.0, 0.0], [1.0, 2.0]]
    assert rows_of(DataProto.concat(data.chunk(2))) == rows_of(data)
    dense = data.to_padded("x")
    again = jag.jagged_from_padded(dense, torch.tensor([1, 0, 2]))
    assert jag.jagged_difference(again, jag.Jagged.of(data["x"])) is None


def test_columns_with_holes_or_a_window_are_packed_when_rows_move():
    values = torch.arange(8)
    holes = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 3, 8]), lengths=torch.tensor([1, 4]))
    window = torch.nested.nested_tensor_from_jagged(values, torch.tensor([2, 3, 5], dtype=torch.int32))
    data = DataProto.from_dict({"holes": holes, "window": window})
    assert data.flat("holes").tolist() == [0, 3, 4, 5, 6] and data.flat("window").tolist() == [2, 3, 4]
    assert data.lengths("holes").tolist() == [1, 4] and data.lengths("window").tolist() == [1, 2]
    assert rows_of(data[[1, 0]], "holes") == [[3, 4, 5, 6], [0]]
    assert rows_of(data[:], "window") == [[2], [3, 4]]
    assert data[1]["window"].tolist() == [3, 4]
    assert rows_of(pickle.loads(pickle.dumps(data)), "window") == [[2], [3, 4]]


def test_jagged_takes_tensors_and_lists_and_says_what_is_wrong():
    assert rows_of(DataProto.from_dict({"x": DataProto.jagged([[], [1, 2], torch.tensor([3])])})) == [[], [1, 2], [3]]
    assert DataProto.jagged([[]], dtype=torch.bool).dtype == torch.bool
    assert DataProto.jagged([[1]], dtype=torch.bfloat16).dtype == torch.bfloat16
    with pytest.raises(DataError, match="row 1 is torch.float32 .0. but row 0 is torch.int64 .1.*pass dtype="):
        DataProto.jagged([torch.tensor([1]), torch.tensor([])])
    with pytest.raises(DataError, match="row 1 is a single number"):
        DataProto.jagged([torch.tensor([1]), torch.tensor(2)])
    with pytest.raises(DataError, match="row 1 cannot be made a tensor: Could not infer dtype of NoneType"):
        DataProto.jagged([[1], None])
    with pytest.raises(DataError, match="row 0 is jagged itself; rows are dense"):
        DataProto.jagged([DataProto.jagged([[1], [2, 3]])])
    for rows in ([], [[]]):
        with pytest.raises(DataError, match="no row tells its dtype"):
            DataProto.jagged(rows)


def test_from_padded_keeps_what_the_mask_or_the_lengths_say():
    dense = torch.tensor([[1, 2, 3], [4, 5, 6]])
    for mask_or_lengths, expected in [
        (torch.tensor([2, 0]), [[1, 2], []]),
        (torch.tensor([3, 1], dtype=torch.int32), [[1, 2, 3], [4]]),
        (torch.tensor([[True, False, True], [False, True, True]]), [[1, 3], [5, 6]]),
        (torch.tensor([[0, 0, 1], [0, 0, 0]]), [[3], []]),
    ]:
        assert rows_of(DataProto.from_dict({"x": DataProto.from_padded(dense, mask_or_lengths)})) == expected
    with pytest.raises(DataError, match="row 1 has length 4, outside of 0..T with T=3"):
        DataProto.from_padded(dense, torch.tensor([0, 4]))
    with pytest.raises(DataError, match=r"\[2, 3\] does not fit a mask or lengths \[3\]"):
        DataProto.from_padded(dense, torch.tensor([1, 1, 1]))
    with pytest.raises(DataError, match="other than 0 and 1"):
        DataProto.from_padded(dense, torch.full((2, 3), 2))
    for bad in (torch.tensor([1.0, 2.0]), torch.tensor([True, False])):
        with pytest.raises(DataError, match="lengths are torch"):
            DataProto.from_padded(dense, bad)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("side", ["right", "left"])
def test_padded_and_back_is_the_identity(dtype, side):
    data = data_of(ROWS, dtype)
    dense = data.to_padded("x", side=side)
    assert dense.dtype == dtype
    mask = torch.ones(len(data.flat("x")), dtype=torch.bool)
    mask = jag.pad_jagged(jag.Jagged(mask, data.lengths("x")), False, side)
    assert rows_of(DataProto.from_dict({"x": DataProto.from_padded(dense, mask)})) == ROWS
    with pytest.raises(DataError, match="side='middle'"):
        data.to_padded("x", side="middle")


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_wide_unsigned_rows_are_padded_too(dtype):
    data = DataProto.from_dict({"x": DataProto.jagged([torch.tensor(row, dtype=dtype) for row in ([1, 2], [], [3])])})
    assert data.to_padded("x", value=9).tolist() == [[1, 2], [9, 9], [3, 9]]
    assert data.to_padded("x", side="left").tolist() == [[1, 2], [0, 0], [0, 3]]


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.int64, 0.5),
        (torch.int64, math.nan),
        (torch.uint8, -1),
        (torch.int8, 300),
        (torch.bool, -1),
        (torch.float16, 1e6),
        (torch.float32, 1j),
        (torch.int64, None),
    ],
)
def test_a_padding_that_the_dtype_cannot_hold_is_refused_and_not_changed(dtype, value):
    data = data_of([[1], []], dtype)
    with pytest.raises(
        DataError, match=rf"to_padded: the column is {dtype}, which has no value {re.escape(repr(value))}"
    ):
        data.to_padded("x", value=value)


def test_a_padding_that_the_dtype_rounds_is_rounded():
    assert data_of([[1], []], torch.bfloat16).to_padded("x", value=0.1)[1].item() == torch.tensor(0.1).bfloat16().item()
    assert data_of([[1], []], torch.float16).to_padded("x", value=-math.inf)[1].item() == -math.inf
    assert data_of([[1], []], torch.bool).to_padded("x", value=1).tolist() == [[True], [True]]


def test_equal_nans_in_jagged_rows_are_equal_and_differences_are_found():
    nan = math.nan
    column = jag.jagged_from_rows([[nan], [1.0, nan], []], dtype=torch.float32)
    for rows, expected in [
        ([[nan], [1.0, nan], []], None),
        ([[nan], [1.0, 2.0], []], 1),
        ([[nan], [1.0, nan], [nan]], 2),
        ([[], [1.0, nan], []], 0),
        ([[1.0], [1.0], []], 0),
    ]:
        assert jag.jagged_difference(column, jag.jagged_from_rows(rows, dtype=torch.float32)) == expected


def test_gradients_flow_through_row_operations():
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    data = DataProto.from_dict({"x": jag.Jagged(values, torch.tensor([1, 2])).nested()})
    (data[[1, 1, 0]].to_padded("x") * torch.tensor([[1.0, 1.0], [1.0, 1.0], [5.0, 5.0]])).sum().backward()
    assert values.grad.tolist() == [5.0, 2.0, 2.0]
