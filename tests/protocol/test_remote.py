"""Columns whose rows other processes made: what is fetched when, what travels, and that nobody may write to them."""

import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from operator import is_

import numpy as np
import pytest
import torch

from hybridflow.errors import DataError
from hybridflow.protocol.data import DataProto
from hybridflow.protocol.remote import Entry, Inline, Local, Piece
from tests.protocol.shelf import LOADED, OBJECTS, OnShelf, always_away, away_if_large, in_pieces, same, sent
from tests.protocol.table import A, B, C, rows, table


@pytest.fixture(autouse=True)
def nothing_loaded():
    LOADED.clear()


def wide(num_rows: int) -> DataProto:
    return DataProto(
        {
            "dense": torch.arange(num_rows * 2, dtype=torch.float16).reshape(num_rows, 2),
            "jagged": DataProto.jagged([torch.arange(i % 4) for i in range(num_rows)], dtype=torch.int32),
        },
        {"cell": [[i] for i in range(num_rows)]},
        {"step": 1},
    )


def handles(data: DataProto, key: str) -> list:
    return data._columns[key].handles


def test_operations_on_rows_and_names_fetch_nothing():
    data = in_pieces(wide(12), [4, 8])
    more = in_pieces(wide(12), [6]).rename(["dense", "jagged", "cell"], ["d", "j", "c"])
    done = data.union(more).select(["dense", "jagged", "d"], ["c"]).repeat(3).reorder(torch.arange(35, -1, -1))
    parts = [*done.chunk(5), *done.split(7), *done.make_iterator(9, 2, seed=1), done[::2], done[done_mask(36)]]
    joined = DataProto.concat([part.rename("d", "e") for part in parts])
    padded, pad_size = joined.pad_to_divisor(8)
    final = padded.unpad(pad_size)[3:-3]
    assert len(final) == 36 + 36 + 72 + 18 + 12 - 6 and final.keys() == ["dense", "jagged", "e", "c"]
    assert final.batch.batch_size == (len(final),) and "jagged" in final
    assert str(final.signature("dense")) == "dense [rows, 2] float16 on cpu"
    assert str(final.signature("jagged")) == "jagged [rows, j] int32 on cpu"
    assert final.select(["dense"], []).nbytes == len(final) * 4
    assert "jagged [rows, j] int32" in repr(final) and LOADED == []
    local = wide(12).union(wide(12).rename(["dense", "jagged", "cell"], ["d", "j", "c"]))
    local = local.select(["dense", "jagged", "d"], ["c"]).repeat(3).reorder(torch.arange(35, -1, -1))
    assert same(done["jagged"], local["jagged"]) and same(done["c"], local["c"])


def done_mask(size: int) -> torch.Tensor:
    return torch.arange(size) % 3 == 0


def test_a_column_is_fetched_once_when_it_is_read_and_only_the_pieces_it_has_rows_of():
    data = in_pieces(wide(12), [4, 8])
    part = data[5:7]
    assert part["dense"].tolist() == [[10.0, 11.0], [12.0, 13.0]] and len(LOADED) == 1
    assert part["dense"] is part["dense"] and data[5:6]["dense"].tolist() == [[10.0, 11.0]] and len(LOADED) == 1
    assert data["dense"].shape == (12, 2) and len(LOADED) == 3
    assert data["cell"].tolist() == [[i] for i in range(12)] and len(LOADED) == 6


def test_a_column_that_has_come_stays_pickled_until_it_is_touched_and_goes_on_as_it_came():
    data = sent(wide(12))
    touched: list[str] = []
    for key, column in data.columns.items():
        column.on_touch = lambda handles, key=key: touched.extend([key] * len(handles))
    assert len(data) == 12 and data.keys() == ["dense", "jagged", "cell"] and data.signature("dense").shape == (2,)
    assert len(data.select(["dense"], []).rename("dense", "d")) == 12 and touched == []
    data.refuse_written("test")
    assert touched == [], "who has touched none of its rows has written to none"
    entries = data.columns["jagged"].entries
    assert data["jagged"].unbind()[3].tolist() == [0, 1, 2] and data[1:3]["jagged"].unbind()[1].tolist() == [0, 1]
    assert touched == ["jagged", "jagged", "dense", "cell"], "each once; rows of a batch are rows of all its columns"
    again = sent(data)
    assert again.columns["jagged"].entries == entries is not None
    assert same(again["jagged"], wide(12)["jagged"]) and same(again["cell"], wide(12)["cell"])


def test_what_a_process_has_sent_goes_on_as_it_came_where_a_cut_leaves_it_whole():
    data = in_pieces(wide(12), [4, 8])
    shards = list(data._shards)
    assert [shard.size for shard in shards] == [4, 4, 4] and len(data) == 12
    parts = data.chunk(3)
    again = DataProto.concat([parts[2], sent(parts[0])])
    assert [part._shards for part in parts] == [[shard] for shard in shards] and len(again) == 8
    assert not any(shard.is_open for shard in (*shards, *again._shards)), "nothing was unpickled for all that"
    assert again["dense"][:, 0].tolist() == [16, 18, 20, 22, 0, 2, 4, 6] and again["cell"].tolist()[-1] == [3]
    assert data[2:6]["dense"][:, 0].tolist() == [4, 6, 8, 10], "another cut takes rows of the columns"
    assert [shard.is_open for shard in shards] == [True] * 3
    assert parts[1]["dense"].tolist() == data["dense"][4:8].tolist()


def test_parts_that_differ_in_their_columns_are_told_as_those_of_this_process_are():
    part, other = sent(wide(4)), DataProto({"dense": torch.zeros(3, 2)}, {"cell": [[0]] * 3}, {"step": 1})
    with pytest.raises(DataError, match=r"concat: part 1 of 2 lacks the columns \['jagged'\]"):
        DataProto.concat([part, sent(other)])
    with pytest.raises(
        DataError, match=r"concat: column 'dense' is dense \[rows, 2\] float16 on cpu in part 0 but dense"
    ):
        DataProto.concat([sent(wide(4)).select(["dense"], []), sent(other.select(["dense"], []))])


def test_a_write_is_told_by_every_batch_that_has_what_was_written_to():
    data = in_pieces(wide(8), [4])
    first, second = data.chunk(2)
    first["dense"].add_(1)
    with pytest.raises(DataError, match="test: column 'dense' was written to in place"):
        data.parcel(always_away, "test")
    with pytest.raises(DataError, match="concat: column 'dense' was written to in place"):
        DataProto.concat([first, second])
    assert sent(second)["dense"][:, 0].tolist() == [8, 10, 12, 14]


def test_lengths_of_a_jagged_column_are_fetched_without_its_values():
    data = in_pieces(wide(12), [4])
    before = [handle.number for handle in handles(data, "jagged")]
    assert data[2:6].lengths("jagged").tolist() == [2, 3, 0, 1]
    assert [before[1], before[3]] == LOADED, "the second handle of each of the two pieces"
    assert data[2:6].flat("jagged").tolist() == [0, 1, 0, 1, 2, 0]
    assert data[[5, 2]].lengths("jagged").tolist() == [1, 2]


def test_consecutive_rows_of_one_piece_are_views_of_the_fetched_memory():
    data = sent(wide(12))
    base = data["dense"].data_ptr()
    assert data[3:5]["dense"].data_ptr() == base + 3 * 2 * 2
    assert data.reorder(range(12))["dense"].data_ptr() == base
    before = int(data.lengths("jagged")[:5].sum())
    assert data[5:9].flat("jagged").data_ptr() == data.flat("jagged").data_ptr() + before * 4
    back = DataProto.concat(data.chunk(3))
    assert back["dense"].data_ptr() == base, "chunks of one batch, joined again, are the batch"


def test_what_is_elsewhere_stays_there_when_it_is_sent_on():
    data = in_pieces(wide(12), [4])
    count = len(OBJECTS)
    again = sent(data[6:].repeat(2))
    assert len(OBJECTS) == count and LOADED == []
    assert again["cell"].tolist() == [[i] for i in range(6, 12) for _ in range(2)]
    assert [handle.key for handle in handles(again, "cell")] == [handle.key for handle in handles(data, "cell")[1:]]


def test_only_the_rows_of_a_part_are_sent():
    big = DataProto({"x": torch.zeros(100_000, 4)})
    count = len(OBJECTS)
    sent(big[5:7])
    sent(big[[7, 9, 5]])
    mixed = DataProto.concat([sent(big[:2]), big[10:13]])
    sent(mixed)
    repeated = sent(big[:3].repeat(8)[[23, 0, 1]])
    sizes = [sum(map(len, buffers)) for _, buffers in OBJECTS[count:]]
    assert sizes == [2 * 16, 3 * 16, 2 * 16, 3 * 16, 2 * 16]
    assert repeated["x"].shape == (3, 4)


def test_small_parts_travel_in_the_message_unread_and_large_ones_do_not():
    tensors = {"small": torch.arange(10), "large": torch.zeros(10, 10_000)}
    cells = {"o": ["x"] * 10, "p": ["x" * 10_000 + str(i) for i in range(10)]}
    data = sent(DataProto(tensors, cells), away_if_large)
    assert [type(handles(data, key)[0]) for key in tensors | cells] == [Inline, OnShelf, Inline, OnShelf]
    assert not handles(data, "small")[0].fetched and LOADED == []
    assert data["small"].tolist() == list(range(10)) and data["p"][9] == "x" * 10_000 + "9"


def test_union_with_the_same_rows_of_the_same_pieces_fetches_nothing():
    data = in_pieces(wide(12), [4])
    assert data.union(data.select()).keys() == data.keys() and data[2:9].union(data[2:9]).keys() == data.keys()
    assert LOADED == []
    with pytest.raises(DataError, match=r"column 'dense' differs, first in row 0 of 3"):
        data[2:5].union(data[3:6])
    data.union(in_pieces(wide(12), []))
    assert LOADED != []


def test_a_pickle_of_a_batch_has_its_rows_with_it(tmp_path):
    data = in_pieces(wide(12), [4])
    back = pickle.loads(pickle.dumps(data[:5]))
    assert all(isinstance(handle, Local) for key in ("dense", "jagged", "cell") for handle in handles(back, key))
    data.save(tmp_path / "batch")
    LOADED.clear()
    assert same(DataProto.load(tmp_path / "batch")["jagged"], wide(12)["jagged"]) and LOADED == []


def test_writing_in_place_to_rows_of_another_process_is_found_out():
    def written(write) -> DataProto:
        data = sent(table())
        write(data)
        return data

    def through_a_part(data: DataProto) -> None:
        data[1:]["rewards"][0] = 7.0

    for write, key in [
        (lambda data: data["rewards"].zero_(), "rewards"),
        (lambda data: data.batch["rewards"].mul_(2), "rewards"),
        (lambda data: data["tokens"].mul_(2), "tokens"),
        (lambda data: data.flat("tokens").zero_(), "tokens"),
        (lambda data: data[2]["tokens"].zero_(), "tokens"),
        (through_a_part, "rewards"),
    ]:
        data = written(write)
        uses = (lambda b: b.refuse_written("actor.update"), sent, lambda b: b[:1], lambda b: DataProto.concat([b]))
        for use in uses:
            with pytest.raises(
                DataError, match=rf"column '{key}' was written to in place.*batch\['{key}'\]\.clone\(\)"
            ):
                use(data)
    data = sent(table())
    with pytest.raises(DataError, match=r"batch\['rewards'\] = ...: column 'rewards' was written to in place"):
        data.batch["rewards"] += 1
    with pytest.raises(ValueError, match="read-only"):
        data["answer"][0] = "changed"


def test_writing_to_a_copy_or_to_rows_of_ones_own_is_allowed():
    data = sent(table())
    changed = data["rewards"].clone()
    changed[0] = 9.0
    data.batch["rewards"] = changed
    data[[2, 0]]["tokens"].mul_(2)  # rows out of order are copies
    data.refuse_written("here")
    assert sent(data)["rewards"].tolist() == [9.0, 1.5, 2.5] and rows(table()) == [A, B, C]
    own = table()
    own["rewards"][0] = 3.0
    own.batch["rewards"] += 1
    assert sent(own)["rewards"].tolist() == [4.0, 2.5, 3.5]


@pytest.mark.parametrize("without_grad", [torch.no_grad, torch.inference_mode])
def test_rows_of_this_process_keep_their_history_whoever_reads_them_first(without_grad):
    weight = torch.tensor(3.0, requires_grad=True)
    data = DataProto({"x": torch.ones(2) * weight})
    joined, repeated = DataProto.concat([data, DataProto({"x": torch.ones(1) * weight})]), data.repeat(2)
    with without_grad():
        assert joined["x"].tolist() == [3.0] * 3 and repeated["x"].tolist() == [3.0] * 4
    (joined["x"].sum() + repeated["x"].sum()).backward()
    assert weight.grad == 7, "3 rows and 4"


def test_rows_read_in_inference_mode_can_be_used_and_checked_outside():
    data = in_pieces(wide(12), [4])
    with torch.inference_mode():
        read = data["dense"]
        data[2:3]["dense"].add_(1)
    assert not read.is_inference()
    with pytest.raises(DataError, match="'dense' was written to"):
        data.refuse_written("here")


def test_threads_that_read_one_batch_open_it_once(monkeypatch: pytest.MonkeyPatch):
    opened: list[object] = []

    def slowly(entry: Entry, of_entry=Piece.of_entry) -> Piece:
        opened.append(entry)
        time.sleep(0.02)
        return of_entry(entry)

    monkeypatch.setattr(Piece, "of_entry", slowly)
    data = in_pieces(wide(12), [4])
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: data.columns["dense"].handles, range(4)))
    assert len(opened) == len(set(opened)) == 6, "two pieces of three columns"
    assert all(map(is_, found[0], each) for each in found[1:]) and [len(each) for each in found] == [2] * 4


def test_a_write_to_a_column_of_one_byte_changes_nothing_else():
    data = sent(DataProto({"flag": torch.tensor([True])}), away_if_large)
    data["flag"].logical_not_()
    assert bytes([1]) == (1).to_bytes() and [*bytes([1])] == [1], "Python has one object for all of them"
    with pytest.raises(DataError, match="column 'flag' was written to in place"):
        data.refuse_written("test")


def test_small_pieces_of_several_processes_are_read_as_one_tensor_of_its_own():
    tensors = {
        "dense": torch.arange(24, dtype=torch.bfloat16).reshape(6, 2, 2),
        "flag": torch.tensor([True, False, True, True, False, False]),
        "jagged": DataProto.jagged([[1, 2], [], [3], [], [], [4, 5, 6]], torch.int16),
    }
    parts = [sent(DataProto(tensors)[rows], away_if_large) for rows in (slice(0, 1), slice(1, 5), slice(5, 6))]
    data = DataProto.concat(parts)
    assert parts[1]["dense"].shape == (4, 2, 2), "a part that somebody has read is part of the whole all the same"
    assert all(same(data[key], tensors[key]) for key in tensors) and LOADED == []
    assert data.lengths("jagged").tolist() == [2, 0, 1, 0, 0, 3]
    whole = data["dense"]
    assert whole is data["dense"]
    whole[0, 0, 0] = 9
    with pytest.raises(DataError, match="test: column 'dense' was written to in place"):
        data.refuse_written("test")
    assert parts[0]["dense"][0, 0, 0] == 0 and DataProto.concat(parts)["dense"][0, 0, 0] == 0


def test_cells_may_be_anything_that_the_store_can_pickle():
    data = DataProto({"x": torch.zeros(2)}, {"o": [{"t": torch.ones(2, dtype=torch.bfloat16)}, np.arange(3)]})
    back = sent(data, away_if_large)
    assert back["o"][0]["t"].dtype == torch.bfloat16 and back["o"][1].tolist() == [0, 1, 2]


def test_meta_info_travels_as_a_copy_and_a_batch_without_rows_keeps_its_columns():
    data = sent(wide(4)[:0])
    assert len(data) == 0 and data["dense"].shape == (0, 2) and data["dense"].dtype == torch.float16
    assert data.lengths("jagged").tolist() == [] and data["cell"].tolist() == [] and data.meta_info == {"step": 1}
    assert LOADED == []


def test_columns_that_share_row_numbers_still_do_where_they_arrive():
    # Otherwise cutting a batch of many columns would work out the same numbers once for each.
    data = DataProto({f"x{i}": torch.arange(6) for i in range(4)})
    for batch in (sent(data), sent(data.reorder([5, 4, 3, 2, 1, 0])[:3]), in_pieces(data, [2, 4])):
        assert len({id(column.rows) for column in batch._columns.values()}) == 1
