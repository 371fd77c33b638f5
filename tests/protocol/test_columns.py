"""Row operations on single columns, for each kind and dtype. Values are worked out by hand."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from hybridflow.errors import DataError
from hybridflow.protocol import columns as col
from hybridflow.protocol import meta
from hybridflow.protocol.jagged import Jagged
from hybridflow.protocol.remote import Column
from hybridflow.protocol.rows import row_number, row_numbers

DENSE = torch.tensor([[1, 2], [3, 4], [5, 6]])
OBJECTS = col.as_objects("o", ["a", ["b"], None])


@dataclass(frozen=True)
class Named:
    tensor: torch.Tensor


class Incomparable:
    def __eq__(self, other: object) -> bool:
        raise ValueError("not like this")


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool]


UNUSUAL = [torch.uint16, torch.uint32, torch.float8_e4m3fn, torch.complex64]


@pytest.mark.parametrize("dtype", [*DTYPES, *UNUSUAL])
@pytest.mark.parametrize("shape", [(3,), (3, 2), (3, 0)])
def test_rows_of_every_dtype_are_taken_bit_for_bit(dtype, shape):
    raw = torch.arange(dtype.itemsize * math.prod(shape), dtype=torch.uint8)
    column = raw.bool().reshape(shape) if dtype == torch.bool else raw.view(dtype).reshape(shape)
    taken = col.take_rows(column, np.array([2, 0, 2]))
    assert taken.dtype == dtype
    for found, row in zip(taken, (2, 0, 2), strict=True):
        assert found.reshape(-1).view(torch.uint8).tolist() == column[row].reshape(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_operations_on_dense_columns_keep_the_dtype(dtype):
    column = torch.tensor([[1, 0], [0, 1], [1, 1]]).to(dtype)
    rows = {
        "take": (col.take_rows(column, np.array([2, 0])), [[1, 1], [1, 0]]),
        "slice": (col.take_rows(column, range(1, 2)), [[0, 1]]),
        "repeat": (col.take_rows(column[:2], np.array([0, 0, 1, 1])), [[1, 0], [1, 0], [0, 1], [0, 1]]),
        "concat": (col.concat_blocks([column[:1], column[2:]]), [[1, 0], [1, 1]]),
        "clone": (col.clone_block(column), [[1, 0], [0, 1], [1, 1]]),
        "none": (col.empty_block(col.signature(column)), []),
    }
    for result, expected in rows.values():
        assert result.dtype == dtype
        assert result.long().tolist() == expected


def test_operations_on_object_columns_keep_one_dimension_and_the_same_cells():
    cell = OBJECTS[1]
    assert col.take_rows(OBJECTS, np.array([1, 1, 0])).tolist() == [["b"], ["b"], "a"]
    assert col.take_rows(OBJECTS, np.array([1]))[0] is cell
    assert col.take_rows(OBJECTS, range(1, 3)).tolist() == [["b"], None]
    assert col.take_rows(OBJECTS, range(3)) is OBJECTS
    assert col.concat_blocks([OBJECTS, OBJECTS[:1]]).tolist() == ["a", ["b"], None, "a"]
    assert col.get_row(OBJECTS, 1) is cell


def test_a_sliced_object_column_has_its_own_array():
    part = col.take_rows(OBJECTS, range(1))
    part[0] = "changed"
    assert OBJECTS[0] == "a"


def test_signatures_tell_kind_dtype_trailing_shape_and_device():
    assert str(col.signature(DENSE)) == "dense [rows, 2] int64 on cpu"
    assert str(col.signature(OBJECTS)) == "object [rows]"
    jagged = Jagged(torch.zeros(3, 4, dtype=torch.bool), torch.tensor([1, 2]))
    assert str(col.signature(jagged)) == "jagged [rows, j, 4] bool on cpu"


def concat(*blocks) -> Column:
    return Column.concat("k", [Column.of(block) for block in blocks], {})


def test_concat_refuses_to_promote_or_mix_and_names_key_part_and_fix():
    with pytest.raises(DataError, match=r"column 'k' is dense \[rows, 2\] int64 .* part 0 but .* float32 .* part 1"):
        concat(DENSE, DENSE.float())
    with pytest.raises(
        DataError, match=r"'k' is dense \[rows, 2\] .* but dense \[rows, 1\] .*part 2.*DataProto.jagged"
    ):
        concat(DENSE, DENSE, DENSE[:, :1])
    with pytest.raises(DataError, match="'k' is object .* but dense"):
        concat(OBJECTS, DENSE)


def test_the_first_differing_row_is_found():
    other = DENSE.clone()
    assert col.first_difference(DENSE, other) is None
    other[1, 1], other[2, 0] = 9, 9
    assert col.first_difference(DENSE, other) == 1
    assert col.first_difference(torch.zeros(3, 0), torch.zeros(3, 0)) is None
    assert col.first_difference(torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.nan])) is None
    assert col.first_difference(torch.tensor([1.0, math.nan]), torch.tensor([1.0, 2.0])) == 1
    assert col.first_difference(OBJECTS, col.as_objects("o", ["a", ["c"], None])) == 1
    assert col.first_difference(OBJECTS, col.as_objects("o", ["a", ["b"], None])) is None


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        (math.nan, float("nan"), True),
        (np.float32("nan"), math.nan, True),
        (complex(1, math.nan), complex(1, math.nan), True),
        (1, 1.0, True),
        ([1, math.nan], [1, float("nan")], True),
        ([1], (1,), False),
        ([1], [1, 2], False),
        ({"a": [np.array([1, 2])]}, {"a": [np.array([1, 2])]}, True),
        ({"a": 1}, {"b": 1}, False),
        (np.array([1.0, math.nan]), np.array([1.0, math.nan]), True),
        (np.array([1]), np.array([1.0]), False),
        (np.array(["x"]), np.array(["x"]), True),
        (np.array([1]), [1], False),
        (np.array([[1], None], dtype=object), np.array([[1], None], dtype=object), True),
        (torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.nan]), True),
        (torch.tensor([1]), torch.tensor([2]), False),
        (torch.tensor([1]), torch.tensor([1, 1]), False),
        (torch.tensor(1), torch.tensor(1), True),
        (torch.tensor([]), torch.tensor([]), True),
        (torch.tensor([1]), 1, False),
        (None, 0, False),
        (Named(torch.ones(2)), Named(torch.ones(2)), True),
        (Named(torch.ones(2)), Named(torch.zeros(2)), False),
        (Incomparable(), Incomparable(), False),
        (np.array(["NaT"], dtype="M8[s]"), np.array(["NaT"], dtype="M8[s]"), True),
    ],
)
def test_values_are_compared_deeply_and_nan_equals_nan(a, b, equal):
    assert col.same_value(a, b) is equal
    assert col.same_value(b, a) is equal


def test_row_numbers_count_from_the_end_and_read_masks():
    assert row_numbers([-1, 0, 2], 3).tolist() == [2, 0, 2]
    assert row_numbers(np.array([True, False, True]), 3).tolist() == [0, 2]
    assert row_numbers([torch.tensor(1), torch.tensor(2)], 3).tolist() == [1, 2]
    assert row_numbers([], 0).dtype == np.int64
    with pytest.raises(DataError, match="row 3 is out of range: there are 3 rows, 0 to 2"):
        row_numbers(range(4), 3)
    with pytest.raises(DataError, match="with a str"):
        row_numbers("ab", 3)
    with pytest.raises(DataError, match=r"cannot index rows with \[\[0\], \[1, 2\]\]: use integers or a bool mask \("):
        row_numbers([[0], [1, 2]], 3)
    for one in (True, 1.0, torch.tensor(False)):
        with pytest.raises(DataError, match=r"cannot index one row with (True|False|1\.0): use an int, or a bool mask"):
            row_number(one, 3)


def test_merged_meta_info_is_a_copy_and_names_both_values():
    part = {"a": [1]}
    merged = meta.merge("concat", [part, {"a": [1], "b": 2}])
    merged["a"].append(9)
    assert part == {"a": [1]} and merged == {"a": [1, 9], "b": 2}
    with pytest.raises(DataError, match=r"concat: meta_info\['a'\] is \[1\] in part 0 but 'xxx+\.\.\. in part 1"):
        meta.merge("concat", [part, {"a": "x" * 999}])


def test_metrics_of_workers_line_up():
    merged = meta.merge_metrics([{"a": 1}, [], [{"b": 2}, {"a": 3, "b": 4}]])
    assert [list(entry) for entry in merged] == [["a", "b"]] * 4
    assert [entry["a"] for entry in merged if not math.isnan(entry["a"])] == [1, 3]
    assert [math.isnan(entry["b"]) for entry in merged] == [True, True, False, False]
