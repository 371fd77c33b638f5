"""DataProto: operations on rows and their meta data. Values are worked out by hand."""

import copy
import math
from itertools import chain

import pytest
import torch

from hybridflow.errors import DataError
from hybridflow.protocol.data import DataProto
from tests.protocol.table import A, B, C, rows, table


def test_repeat_interleaves_or_repeats_blocks():
    assert rows(table().repeat(2)) == [A, A, B, B, C, C]
    assert rows(table().repeat(2, interleave=False)) == [A, B, C, A, B, C]
    assert rows(table().repeat(1)) == [A, B, C]
    with pytest.raises(DataError, match="times=0"):
        table().repeat(0)


def test_chunk_gives_exactly_that_many_parts_that_differ_by_one_row():
    assert [rows(part) for part in table().chunk(2)] == [[A, B], [C]]
    assert [rows(part) for part in table().chunk(4)] == [[A], [B], [C], []]
    seven = DataProto.from_dict({"x": torch.arange(7)})
    assert [part["x"].tolist() for part in seven.chunk(3)] == [[0, 1, 2], [3, 4], [5, 6]]
    with pytest.raises(DataError, match="chunks=0"):
        table().chunk(0)


def test_split_cuts_by_size():
    assert [rows(part) for part in table().split(2)] == [[A, B], [C]]
    assert [rows(part) for part in table().split(9)] == [[A, B, C]]
    assert [len(part) for part in table()[:0].split(2)] == [0]


def test_concat_of_chunk_and_split_is_the_identity():
    assert rows(DataProto.concat(table().chunk(4))) == [A, B, C]
    assert rows(DataProto.concat(table()[:0].split(2))) == []


def test_no_meta_info_is_shared():  # known fault 2
    data = table()
    first, second = data.chunk(2)
    first.meta_info["nested"]["steps"].append(2)
    first.meta_info["padded"] = True
    derived = [data.select(), data[:1], data[[0]], data.rename("tokens", "t"), data.repeat(2), data.to("cpu")]
    derived += [data.reorder([2, 1, 0]), data.union(DataProto()), DataProto.concat([data]), copy.copy(data)]
    derived += [*data.split(2), data.pad_to_divisor(2)[0], data.unpad(1), next(data.make_iterator(3, 1)), second]
    for one in derived:
        assert one.meta_info == {"temperature": 0.7, "nested": {"steps": [1]}}
        one.meta_info["nested"]["steps"].append(3)
    data[0].meta_info["nested"]["steps"].append(4)
    assert data.meta_info == {"temperature": 0.7, "nested": {"steps": [1]}}
    mine = {"a": [1]}
    DataProto(meta_info=mine).meta_info["a"].append(2)
    assert mine == {"a": [1]}


def test_padding_leaves_the_caller_as_long_as_it_was():  # known fault 1
    data = table()
    padded, pad_size = data.pad_to_divisor(2)
    assert (rows(padded), pad_size) == ([A, B, C, A], 1)
    assert rows(data) == [A, B, C] and data.batch.batch_size == (3,)
    assert rows(padded.unpad(pad_size)) == [A, B, C] and len(padded) == 4
    many, pad_size = data.pad_to_divisor(8)
    assert (rows(many), pad_size) == ([A, B, C, A, B, C, A, B], 5)
    assert data.pad_to_divisor(3)[1] == 0
    assert len(data[:0].pad_to_divisor(4)[0]) == 0
    with pytest.raises(DataError, match="pad_size=4 is outside of 0..3"):
        data.unpad(4)
    with pytest.raises(DataError, match="pad_size='1' is outside of 0..3"):
        data.unpad("1")
    with pytest.raises(DataError, match="pad_size=True"):
        data.unpad(True)


def test_reorder_returns_a_new_object_and_wants_a_permutation():
    data = table()
    assert rows(data.reorder(torch.tensor([2, 0, 1]))) == [C, A, B]
    assert rows(data) == [A, B, C]
    for bad in ([0, 1], [0, 0, 1], [0, 1, 2, 2]):
        with pytest.raises(DataError, match=f"reorder: {len(bad)} indices with .* for 3 rows"):
            data.reorder(bad)


def test_concat_puts_rows_one_after_another():
    data = table()
    assert rows(DataProto.concat([data, data[2:], data[:0]])) == [A, B, C, C]
    assert rows(DataProto.concat([data])) == [A, B, C]
    assert DataProto.concat([data, data]).meta_info == data.meta_info


def test_concat_of_nothing_says_so():  # known fault 3
    with pytest.raises(DataError, match=r"concat\(\[\]\): there is no part"):
        DataProto.concat([])
    with pytest.raises(DataError, match="concat: part 0 is a DataProtoItem; give a list of DataProtos"):
        DataProto.concat(table())


def test_concat_of_other_columns_names_the_missing_ones():
    with pytest.raises(DataError, match=r"part 1 of 2 lacks the columns \['rewards', 'answer'\]; it has \['tokens'\]"):
        DataProto.concat([table(), table().select(["tokens"], [])])
    with pytest.raises(DataError, match=r"part 0 of 2 lacks the columns \['x'\]"):
        DataProto.concat([DataProto(), DataProto.from_dict({"x": torch.zeros(1)})])


def test_a_metric_missing_on_one_worker_keeps_its_place():  # known fault 4
    def worker(**meta) -> DataProto:
        return DataProto.from_dict({"x": torch.zeros(1)}, meta_info=meta)

    merged = DataProto.concat([worker(metrics={"loss": 1.0, "kl": 3.0}), worker(metrics={"loss": 2.0}), worker()])
    metrics = merged.meta_info["metrics"]
    assert [m["loss"] for m in metrics[:2]] == [1.0, 2.0] and math.isnan(metrics[2]["loss"])
    assert metrics[0]["kl"] == 3.0 and math.isnan(metrics[1]["kl"]) and math.isnan(metrics[2]["kl"])
    assert len(metrics) == 3


def test_lists_of_metrics_are_collected_in_order():
    def worker(metrics) -> DataProto:
        return DataProto.from_dict({"x": torch.zeros(1)}, meta_info={"metrics": metrics})

    merged = DataProto.concat([worker([{"a": 1}, {"a": 2}]), worker({"a": 3})])
    assert merged.meta_info["metrics"] == [{"a": 1}, {"a": 2}, {"a": 3}]
    again = DataProto.concat([merged, worker({"a": 4})])
    assert again.meta_info["metrics"] == [{"a": 1}, {"a": 2}, {"a": 3}, {"a": 4}]
    with pytest.raises(DataError, match=r"meta_info\['metrics'\] is 5 in part 1"):
        DataProto.concat([worker({"a": 1}), worker(5)])


def test_concat_keeps_equal_meta_info_and_refuses_other_with_both_values():
    def worker(**meta) -> DataProto:
        return DataProto.from_dict({"x": torch.zeros(1)}, meta_info=meta)

    merged = DataProto.concat([worker(step=1, nan=math.nan), worker(step=1, nan=math.nan, only_here="x")])
    assert merged.meta_info["step"] == 1 and merged.meta_info["only_here"] == "x"
    with pytest.raises(DataError, match=r"meta_info\['step'\] is 1 in part 0 but 2 in part 2"):
        DataProto.concat([worker(step=1), worker(), worker(step=2)])


def test_make_iterator_shuffles_with_a_seed_and_covers_every_row_once_an_epoch():  # known fault 6
    data = DataProto.from_dict({"x": torch.arange(12)})

    def orders(**kwargs) -> list[list[int]]:
        batches = [batch["x"].tolist() for batch in data.make_iterator(4, 2, **kwargs)]
        assert [len(batch) for batch in batches] == [4] * 6
        return [[*chain(*batches[:3])], [*chain(*batches[3:])]]

    first, second = orders(seed=1)
    assert first != list(range(12)) and second != list(range(12)) and first != second
    assert sorted(first) == sorted(second) == list(range(12))
    assert orders(seed=1) == [first, second] and orders(seed=2) != [first, second]
    assert orders() == orders(shuffle=False) == [list(range(12))] * 2
    torch.manual_seed(0)
    unseeded = orders(shuffle=True)
    assert unseeded[0] != list(range(12)) and sorted(unseeded[0]) == list(range(12))


def test_make_iterator_refuses_at_the_call():
    data = DataProto.from_dict({"x": torch.arange(10)})
    with pytest.raises(DataError, match=r"10 rows do not divide into mini-batches of 4: 10 = 2 \* 4 \+ 2"):
        data.make_iterator(4, 1)
    with pytest.raises(DataError, match="seed=1 has no effect with shuffle=False"):
        data.make_iterator(5, 1, seed=1, shuffle=False)
    with pytest.raises(DataError, match="epochs=0"):
        data.make_iterator(5, 0)
    for seed in (1.5, True, "1", 2**64):
        with pytest.raises(DataError, match=f"seed={seed!r}; give an integer of 64 bits"):
            data.make_iterator(5, 1, seed=seed)
    assert list(data[:0].make_iterator(4, 3, seed=1)) == []
