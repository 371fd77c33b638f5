"""DataProto: building, reading, columns, copies. Values are worked out by hand."""

import copy
import math
import threading

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from hybridflow.errors import DataError, MissingColumn
from hybridflow.protocol.data import DataProto
from hybridflow.protocol.item import DataProtoItem
from tests.protocol.table import TOKENS, A, B, C, rows, table, tokens

# ------------------------------------------------------------------------------------------------- building


def test_a_table_knows_its_rows_names_and_columns():
    data = table()
    assert len(data) == 3
    assert data.keys() == ["rewards", "tokens", "answer"]
    assert "answer" in data and "tokens" in data and "values" not in data
    assert rows(data) == [A, B, C]
    assert data.batch["rewards"].tolist() == [0.5, 1.5, 2.5]
    assert data.non_tensor_batch["answer"].tolist() == ["a", "b", "c"]
    assert repr(data).startswith("DataProto(3 rows; rewards: dense [rows] float32 on cpu, tokens: jagged [rows, j]")


def test_a_table_without_columns_has_no_rows():
    assert len(DataProto()) == 0
    assert DataProto().keys() == [] and DataProto(meta_info={"step": 1}).meta_info == {"step": 1}
    assert dict(DataProto().batch) == {} and DataProto().batch.batch_size == (0,)


def test_the_constructor_takes_a_tensordict_and_lists():
    data = DataProto(TensorDict({"x": torch.tensor([1, 2])}, batch_size=[2]), {"y": ["p", "q"]}, {"z": 3})
    assert (data["x"].tolist(), data["y"].tolist(), data.meta_info) == ([1, 2], ["p", "q"], {"z": 3})


def test_from_single_dict_sorts_columns_by_kind():
    data = DataProto.from_single_dict({"x": torch.tensor([1, 2]), "y": ["p", "q"], "z": np.array([3, 4])}, {"m": 1})
    assert list(data.batch.keys()) == ["x"]
    assert list(data.non_tensor_batch) == ["y", "z"]
    assert data["z"].dtype == object and data["z"].tolist() == [3, 4]
    assert data.meta_info == {"m": 1}


def test_equal_length_lists_stay_one_dimensional_cells():  # known fault 8
    data = DataProto.from_dict(non_tensors={"messages": [[1, 2], [3, 4]]})
    assert data["messages"].shape == (2,)
    assert data["messages"][1] == [3, 4]
    joined = DataProto.concat([data, data.repeat(2)])
    assert joined["messages"].shape == (6,)
    assert joined["messages"].tolist() == [[1, 2], [3, 4], [1, 2], [1, 2], [3, 4], [3, 4]]
    assert data[[1, 0]]["messages"].tolist() == [[3, 4], [1, 2]]
    assert data[[1]]["messages"].shape == (1,)


def test_cells_may_be_arrays_of_equal_shape():
    data = DataProto.from_dict(non_tensors={"x": [np.array([1, 2]), np.array([3, 4])], "y": np.array([[5], [6]])})
    assert data["x"].shape == (2,) and data["x"][1].tolist() == [3, 4]
    assert data["y"].shape == (2,) and data["y"][1].tolist() == [6]


def test_a_column_of_another_size_is_refused_with_both_names_and_sizes():
    with pytest.raises(DataError, match="column 'b' has 3 rows, column 'a' has 2"):
        DataProto.from_dict(tensors={"a": torch.zeros(2), "b": torch.zeros(3)})
    with pytest.raises(DataError, match="column 'b' has 1 rows, column 'a' has 2"):
        DataProto.from_dict(tensors={"a": torch.zeros(2)}, non_tensors={"b": ["x"]})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_columns_that_no_operation_could_treat_are_refused_by_name():
    strided = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.strided)
    for bad in (torch.tensor(1.0), torch.eye(2).to_sparse(), strided, "text", [1, 2]):
        with pytest.raises(DataError, match="'bad'"):
            DataProto.from_dict(tensors={"bad": bad})
        with pytest.raises(DataError, match="'bad'"):
            DataProto().batch["bad"] = bad
    for bad in ("text", 3, {"a": 1}, np.array(3), torch.zeros(2)):
        with pytest.raises(DataError, match="'bad'"):
            DataProto.from_dict(non_tensors={"bad": bad})
    transposed = torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(4, 3)], layout=torch.jagged).transpose(1, 2)
    with pytest.raises(DataError, match="'bad' is jagged in a dim other than 1"):
        DataProto.from_dict(tensors={"bad": transposed})


def test_a_name_of_two_kinds_is_refused():
    with pytest.raises(DataError, match="'x' is given as a tensor and as an object column"):
        DataProto.from_dict(tensors={"x": torch.zeros(1)}, non_tensors={"x": ["a"]})
    data = table()
    with pytest.raises(DataError, match="'answer' is in non_tensor_batch already"):
        data.batch["answer"] = torch.zeros(3)
    with pytest.raises(DataError, match="'rewards' is in batch already"):
        data.non_tensor_batch["rewards"] = ["a", "b", "c"]


def test_columns_are_assigned_and_deleted_through_the_two_mappings():
    data = table()
    data.batch["rewards"] = data.batch["rewards"] + 1
    data.batch["version"] = torch.tensor([7, 8, 9])
    data.non_tensor_batch["answer"] = ["x", ["y"], "z"]
    assert data["rewards"].tolist() == [1.5, 2.5, 3.5] and data["answer"].tolist() == ["x", ["y"], "z"]
    assert list(data.batch) == ["rewards", "tokens", "version"] and list(data.non_tensor_batch) == ["answer"]
    assert data.batch.batch_size == (3,) and len(data.batch) == 3 and "answer" not in data.batch
    del data.batch["version"], data.non_tensor_batch["answer"]
    assert data.keys() == ["rewards", "tokens"]
    assert data.batch.get("version") is None and data.batch.pop("version", 1) == 1
    assert repr(data.batch).startswith("batch(rewards: dense [rows] float32 on cpu, tokens: jagged")


def test_an_assignment_that_does_not_fit_changes_nothing():
    data = table()
    with pytest.raises(DataError, match="column 'version' has 2 rows, column 'rewards' has 3"):
        data.batch["version"] = torch.zeros(2)
    with pytest.raises(DataError, match="column 'answer' has 1 rows, column 'rewards' has 3"):
        data.non_tensor_batch["answer"] = ["a"]
    with pytest.raises(DataError, match="column 'x' is a ndarray: batch holds tensors"):
        data.batch["x"] = np.array(["a", "b", "c"], dtype=object)
    with pytest.raises(DataError, match="names are strings, not 3"):
        data.batch[3] = torch.zeros(3)
    with pytest.raises(MissingColumn, match="no 'reward' in batch. Did you mean 'rewards'"):
        data.batch["reward"]
    with pytest.raises(KeyError, match="no 'answers' in non_tensor_batch. Did you mean 'answer'"):
        del data.non_tensor_batch["answers"]
    assert rows(data) == [A, B, C]
    alone = DataProto({"x": torch.zeros(2)})
    alone.batch["x"] = torch.zeros(5)
    assert len(alone) == 5


def test_the_tensor_columns_come_out_as_a_tensordict():
    found = table().batch.to_tensordict()
    assert isinstance(found, TensorDict) and found.batch_size == (3,)
    assert found["rewards"].tolist() == [0.5, 1.5, 2.5] and found["tokens"].offsets().tolist() == [0, 2, 2, 5]


# -------------------------------------------------------------------------------------------------- reading


def test_an_int_gives_one_row_with_its_own_length():
    row = table()[2]
    assert isinstance(row, DataProtoItem)
    assert row.batch["rewards"].item() == 2.5
    assert row.batch["tokens"].tolist() == [3, 4, 5]
    assert row.non_tensor_batch == {"answer": "c"}
    assert row["answer"] == "c" and row["tokens"].tolist() == [3, 4, 5]
    assert row.meta_info["temperature"] == 0.7
    assert table()[-2]["tokens"].tolist() == []
    assert table()[torch.tensor(0)]["answer"] == table()[np.int64(-3)]["answer"] == "a"
    with pytest.raises(DataError, match="no column 'anser'.*'answer'"):
        row["anser"]


def test_iterating_gives_the_rows_in_order():
    assert [(row["rewards"].item(), row["tokens"].tolist(), row["answer"]) for row in table()] == [A, B, C]


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (slice(1, 3), [B, C]),
        (slice(None), [A, B, C]),
        (slice(2, 1), []),
        (slice(None, None, -2), [C, A]),
        (slice(-1, 99), [C]),
        ([2, 0, 0, -1], [C, A, A, C]),
        ([], []),
        (range(1, 3), [B, C]),
        ([True, False, True], [A, C]),
        (np.array([1, 1]), [B, B]),
        (np.array([False, True, False]), [B]),
        (torch.tensor([2, 1], dtype=torch.int32), [C, B]),
        (torch.tensor([True, True, False]), [A, B]),
        (torch.tensor([]), []),
    ],
)
def test_rows_are_taken_by_slice_list_array_tensor_and_mask(index, expected):
    taken = table()[index]
    assert rows(taken) == expected
    assert taken["tokens"].dtype == torch.int64
    assert taken.meta_info == table().meta_info


def test_a_wrong_index_says_what_fits():
    data = table()
    with pytest.raises(DataError, match="row 3 is out of range: there are 3 rows"):
        data[3]
    with pytest.raises(DataError, match="row -4 is out of range: there are 3 rows"):
        data[[0, -4]]
    with pytest.raises(DataError, match="a mask of 2 does not fit 3 rows"):
        data[[True, False]]
    with pytest.raises(DataError, match="float64"):
        data[[0.5]]
    with pytest.raises(DataError, match="one dimension"):
        data[torch.zeros(1, 1, dtype=torch.int64)]
    with pytest.raises(DataError, match="row 18446744073709551615 is out of range"):
        data[np.array([2**64 - 1], dtype=np.uint64)]
    with pytest.raises(DataError, match=r"cannot take the rows slice\(None, None, 0\): slice step cannot be zero"):
        data[::0]
    for bad in (slice("a"), None, {"a": 1}, [[0], [1, 2]], ["a"], True, 1.0):
        with pytest.raises(DataError):
            data[bad]


def test_a_missing_column_is_named_with_the_nearest_one():
    with pytest.raises(DataError, match="no column 'reward'. Did you mean 'rewards'"):
        table()["reward"]


def test_a_slice_is_a_view_of_its_tensors():
    data = table()
    part = data[1:]
    assert part["rewards"].data_ptr() == data["rewards"][1:].data_ptr()
    assert part["tokens"].values().data_ptr() == data["tokens"].values()[2:].data_ptr()


def test_flat_lengths_and_padded_read_a_jagged_column():
    data = table()
    assert data.flat("tokens").tolist() == [1, 2, 3, 4, 5]
    assert data.lengths("tokens").tolist() == [2, 0, 3] and data.lengths("tokens").dtype == torch.int64
    assert data.to_padded("tokens").tolist() == [[1, 2, 0], [0, 0, 0], [3, 4, 5]]
    assert data.to_padded("tokens", value=-1, side="left").tolist() == [[-1, 1, 2], [-1, -1, -1], [3, 4, 5]]
    assert data[1:].flat("tokens").tolist() == [3, 4, 5]
    assert data[:0].to_padded("tokens").shape == (0, 0)


def test_reading_a_dense_column_as_jagged_names_the_column():
    for method in ("flat", "lengths", "to_padded"):
        with pytest.raises(DataError, match=f"{method}: column 'rewards' is dense"):
            getattr(table(), method)("rewards")
        with pytest.raises(DataError, match=f"{method}: column 'answer' is object"):
            getattr(table(), method)("answer")
        with pytest.raises(DataError, match="no column 'x'"):
            getattr(table(), method)("x")


# -------------------------------------------------------------------------------------------------- columns


def test_select_keeps_what_is_named():
    data = table()
    assert data.select().keys() == ["rewards", "tokens", "answer"]
    assert data.select(["tokens"]).keys() == ["tokens", "answer"]
    assert data.select(["tokens"], []).keys() == ["tokens"]
    assert data.select([], "answer").keys() == ["answer"]
    assert data.select("rewards", []).batch["rewards"].tolist() == [0.5, 1.5, 2.5]
    assert data.select(meta_info_keys=["temperature"]).meta_info == {"temperature": 0.7}
    assert len(data.select([], [])) == 0


def test_select_shares_columns_unless_asked_for_copies():
    data = DataProto.from_dict({"x": torch.tensor([1.0])}, {"y": [[1]]})
    shared, copied = data.select(), data.select(deepcopy=True)
    data["x"][0] = 2.0
    data["y"][0].append(2)
    assert shared["x"].tolist() == [2.0] and shared["y"].tolist() == [[1, 2]]
    assert copied["x"].tolist() == [1.0] and copied["y"].tolist() == [[1]]


def test_an_unknown_key_in_select_and_pop_is_an_error():  # known fault 7
    data = table()
    for method in (data.select, data.pop):
        with pytest.raises(DataError, match="no 'answers' in non_tensor_batch.*Did you mean 'answer'"):
            method(non_tensor_batch_keys=["answers"])
        with pytest.raises(DataError, match="no 'reward' in batch.*Did you mean 'rewards'"):
            method(batch_keys=["reward"])
        with pytest.raises(DataError, match="no 'temp' in meta_info.*temperature"):
            method(meta_info_keys=["temp"])
        with pytest.raises(DataError, match="no 'answer' in batch. It is a column of the other kind"):
            method(batch_keys=["answer"])
    assert rows(data) == [A, B, C], "a pop that raises takes nothing"


def test_pop_moves_columns_out_of_its_object():
    data = table()
    given = TensorDict(dict(data.batch), batch_size=[3])
    data = DataProto(given, {"answer": data["answer"]}, data.meta_info)
    popped = data.pop(["tokens"], ["answer"], ["temperature"])
    assert popped.keys() == ["tokens", "answer"] and popped.meta_info == {"temperature": 0.7}
    assert tokens(popped) == TOKENS
    assert data.keys() == ["rewards"] and data.meta_info == {"nested": {"steps": [1]}}
    assert sorted(given.keys()) == ["rewards", "tokens"], "a TensorDict that others hold stays as it is"
    view = data.batch
    data.pop(["rewards"])
    assert len(data) == 0 and list(view) == []


def test_rename_keeps_order_and_rows_and_leaves_the_caller():
    data = table()
    renamed = data.rename("tokens", "responses")
    assert renamed.keys() == ["rewards", "responses", "answer"] and tokens(renamed, "responses") == TOKENS
    assert data.keys() == ["rewards", "tokens", "answer"]
    swapped = data.rename(["rewards", "answer"], ["r", "a"])
    assert swapped.keys() == ["r", "tokens", "a"]
    with pytest.raises(DataError, match="two columns would be called 'answer'"):
        data.rename("tokens", "answer")
    with pytest.raises(DataError, match="no 'token' in the columns.*'tokens'"):
        data.rename("token", "x")
    with pytest.raises(DataError, match="2 old names .* but 1 new names"):
        data.rename(["rewards", "tokens"], ["x"])
    with pytest.raises(DataError, match="1 old names .* but 2 new names"):
        data.rename(["rewards", "rewards"], ["x", "y"])
    with pytest.raises(DataError, match=r"rename: column names are strings, not 1 \(int\)"):
        data.rename("tokens", [1])  # type: ignore[list-item]


def test_union_has_the_columns_of_both():
    joined = table().union(DataProto.from_dict({"values": torch.tensor([1, 2, 3])}, {"id": [7, 8, 9]}, {"step": 4}))
    assert joined.keys() == ["rewards", "tokens", "values", "answer", "id"]
    assert joined["values"].tolist() == [1, 2, 3] and rows(joined) == [A, B, C]
    assert joined.meta_info == {"temperature": 0.7, "nested": {"steps": [1]}, "step": 4}
    assert rows(table().union(table())) == [A, B, C]
    assert rows(DataProto().union(table())) == rows(table().union(DataProto())) == [A, B, C]


def test_equal_nans_are_equal_in_union():  # known fault 5
    def with_nans() -> DataProto:
        return DataProto.from_dict(
            {
                "dense": torch.tensor([[math.nan, 1.0], [2.0, math.nan]]),
                "jagged": DataProto.jagged([torch.tensor([math.nan]), torch.tensor([1.0, math.nan])]),
            },
            {"cell": [math.nan, {"a": [np.array([math.nan]), torch.tensor(math.nan)]}]},
            {"loss": math.nan},
        )

    joined = with_nans().union(with_nans())
    assert joined["cell"].shape == (2,) and math.isnan(joined.meta_info["loss"])
    assert joined["dense"].isnan().tolist() == [[True, False], [False, True]]


def test_union_names_the_column_the_row_and_both_values_that_differ():
    def one(**changed) -> DataProto:
        columns = {"x": [1.0, 2.0, 3.0], "j": [[1], [2, 3], []], "o": ["a", ["b"], None]} | changed
        jagged = DataProto.jagged([torch.tensor(row, dtype=torch.int64) for row in columns["j"]])
        return DataProto.from_dict({"x": torch.tensor(columns["x"]), "j": jagged}, {"o": columns["o"]})

    with pytest.raises(DataError, match=r"column 'x' differs, first in row 1 of 3: tensor\(2.\).*tensor\(nan\)"):
        one().union(one(x=[1.0, math.nan, 4.0]))
    with pytest.raises(DataError, match=r"column 'j' differs, first in row 1 of 3: tensor\(\[2, 3\]\)"):
        one().union(one(j=[[1], [2, 4], [5]]))
    with pytest.raises(DataError, match="column 'j' differs, first in row 0 of 3"):
        one().union(one(j=[[1, 2], [2, 3], []]))
    with pytest.raises(DataError, match="column 'j' differs, first in row 2 of 3"):
        one().union(one(j=[[1], [2, 3], [0]]))
    with pytest.raises(DataError, match=r"column 'o' differs, first in row 1 of 3: \['b'\] on the left, \['c'\]"):
        one().union(one(o=["a", ["c"], None]))


def test_union_refuses_other_row_numbers_kinds_dtypes_and_meta_info():
    data = table()
    with pytest.raises(DataError, match=r"union: 3 rows with columns .*'rewards'.* but 2 rows with columns \['v'\]"):
        data.union(DataProto.from_dict({"v": torch.zeros(2)}))
    with pytest.raises(DataError, match="column 'rewards' is dense .* float32 .* but dense .* float64"):
        data.union(DataProto.from_dict({"rewards": torch.tensor([0.5, 1.5, 2.5], dtype=torch.float64)}))
    with pytest.raises(DataError, match="column 'answer' is object"):
        data.union(DataProto.from_dict({"answer": torch.zeros(3)}))
    with pytest.raises(DataError, match=r"meta_info\['temperature'\] is 0.7 in part 0 but 1.0 in part 1"):
        data.union(DataProto(meta_info={"temperature": 1.0}))


@pytest.mark.parametrize("other", [None, {"x": torch.zeros(3)}])
def test_union_with_what_is_no_batch_says_so(other):
    with pytest.raises(DataError, match=rf"union: a {type(other).__name__} is no DataProto; .*\.result\(\)"):
        table().union(other)


def test_what_a_table_cannot_hold_is_refused_with_what_to_give():
    with pytest.raises(DataError, match=r"meta_info is a list: give a dict\."):
        DataProto(meta_info=[("step", 1)])  # type: ignore[arg-type]
    for bad in (np.zeros(2), [1, 2], 3):
        with pytest.raises(
            DataError, match=rf"column 'a' is a {type(bad).__name__}: give a torch\.Tensor \[B, \.\.\.\]"
        ):
            DataProto({"a": bad})  # type: ignore[dict-item]


def test_every_error_about_a_column_names_it():  # known fault 10
    data = table()
    other = data.select([], [])
    for call, key in [
        (lambda: data["lost_key"], "lost_key"),
        (lambda: data.select(["lost_key"]), "lost_key"),
        (lambda: data.pop(non_tensor_batch_keys=["lost_key"]), "lost_key"),
        (lambda: data.rename("lost_key", "x"), "lost_key"),
        (lambda: data.flat("lost_key"), "lost_key"),
        (lambda: data.union(DataProto.from_dict({"rewards": torch.zeros(3)})), "rewards"),
        (lambda: data.union(DataProto(meta_info={"temperature": 2})), "temperature"),
        (lambda: DataProto.concat([data, other]), "tokens"),
        (
            lambda: DataProto.concat([data.select("rewards"), data.select("tokens").rename("tokens", "rewards")]),
            "rewards",
        ),
        (lambda: DataProto.from_dict({"a": torch.zeros(2), "long": torch.zeros(3)}), "long"),
        (lambda: DataProto.from_dict({"number": torch.tensor(1)}), "number"),
        (lambda: data[0]["lost_key"], "lost_key"),
        (lambda: DataProto(meta_info={"lock": threading.Lock()}), "lock"),
        (lambda: DataProto(meta_info={"graph": torch.ones(1, requires_grad=True) * 2}), "graph"),
    ]:
        with pytest.raises(DataError, match=f"'{key}'"):
            call()


def test_nothing_but_pop_changes_the_caller():
    data = table()
    before = (data["rewards"], data["tokens"], data["answer"])
    derived = [
        data[::-1],
        data[0:2],
        data.repeat(3),
        *data.chunk(2),
        data.union(DataProto.from_dict({"v": torch.ones(3)})),
    ]
    derived += [DataProto.concat([data, data]), data.to("cpu"), data.rename("rewards", "r"), data.select(["rewards"])]
    for one in derived:
        one.pop(non_tensor_batch_keys=["answer"])
        one.meta_info.clear()
    data[0:2]["answer"][0] = "changed"
    assert rows(data) == [A, B, C] and data.keys() == ["rewards", "tokens", "answer"]
    assert data["rewards"] is before[0] and data.batch["tokens"] is before[1]
    assert data.non_tensor_batch["answer"] is before[2]


def test_copies_are_copies():
    data = DataProto.from_dict({"x": torch.tensor([1.0]), "j": DataProto.jagged([[1, 2]])}, {"y": [[1]]}, {"m": [1]})
    shallow, deep = copy.copy(data), copy.deepcopy(data)
    data["x"][0] = 5.0
    data["j"].values()[0] = 7
    data["y"][0].append(2)
    assert shallow["x"].tolist() == [5.0] and shallow["y"].tolist() == [[1, 2]]
    assert deep["x"].tolist() == [1.0] and tokens(deep, "j") == [[1, 2]] and deep["y"].tolist() == [[1]]


def test_sizes_are_counted_by_rows(capsys):
    data = DataProto.from_dict(
        {"x": torch.zeros(4, 2, dtype=torch.bfloat16), "j": DataProto.jagged([[1], [2, 3], [], [4]])},
        {"o": [np.zeros(3), np.zeros(5), b"", None]},
    )
    assert data.select("x", []).nbytes == 4 * 2 * 2
    assert data[1:3].select("x", []).nbytes == 2 * 2 * 2
    assert data.select("j", []).nbytes == 4 * 8 + 5 * 8
    assert data.select([], "o")[:2].nbytes == 2 * 8 + 3 * 8 + 5 * 8
    data.print_size("batch ")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "batch x: dense [rows, 2] bfloat16 on cpu, 4 rows, 0.000 MiB" and len(lines) == 3


def test_to_moves_tensors_and_returns_a_new_object():
    data = table()
    moved = data.to(torch.device("cpu"))
    assert moved is not data and rows(moved) == [A, B, C]
