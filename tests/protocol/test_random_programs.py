"""Random programs of DataProto operations against a plain list of rows, the oracle.

Every program runs on rows of this process, on rows of several others, and on rows of both.
"""

import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.protocol.data import DataProto
from tests.protocol.shelf import always_away, away_if_large, in_pieces, sent

Row = tuple[float, list[int], Any]

ROW = st.tuples(
    st.sampled_from([0.0, 0.5, -1.25, 3.0]),
    st.lists(st.integers(-9, 9), max_size=4),
    st.one_of(st.none(), st.text("ab", max_size=2), st.lists(st.integers(0, 1), max_size=2)),
)
SEEDS = st.integers(0, 2**31)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            (
                *("slice", "step", "list", "mask", "repeat", "blocks", "chunk", "split"),
                *("concat", "reorder", "union", "pad", "pickle", "send", "rename", "shuffle", "pop"),
            )
        ),
        SEEDS,
    ),
    max_size=6,
)


def build(rows: list[Row]) -> DataProto:
    return DataProto.from_dict(
        tensors={
            "dense": torch.tensor([row[0] for row in rows], dtype=torch.bfloat16),
            "jagged": DataProto.jagged([row[1] for row in rows], dtype=torch.int64),
        },
        non_tensors={"cell": [row[2] for row in rows]},
        meta_info={"origin": ["built"]},
    )


def read(data: DataProto) -> list[Row]:
    assert data["dense"].dtype == torch.bfloat16 and data["jagged"].dtype == torch.int64
    assert data["cell"].ndim == 1 and data.meta_info == {"origin": ["built"]}
    flat, lengths = data.flat("jagged"), data.lengths("jagged").tolist()
    assert sum(lengths) == len(flat)
    jagged = [row.tolist() for row in flat.split(lengths)]
    rows = list(zip(data["dense"].tolist(), jagged, data["cell"].tolist(), strict=True))
    assert rows == [(row["dense"].item(), row["jagged"].tolist(), row["cell"]) for row in data]
    return rows


def apply(name: str, seed: int, data: DataProto, rows: list[Row]) -> tuple[DataProto, list[Row]]:
    """One operation on both; ``seed`` decides its arguments."""
    size = len(rows)
    random = torch.Generator().manual_seed(seed)
    numbers = torch.randint(-size, size, (seed % 5,), generator=random).tolist() if size else []
    mask = (torch.rand(size, generator=random) < 0.5).tolist()
    order = torch.randperm(size, generator=random).tolist()
    start, stop, count = seed % 7 - 3, seed // 7 % 9 - 3, seed // 11 % 3 + 1
    match name:
        case "slice":
            return data[start:stop], rows[start:stop]
        case "step":
            return data[::-count], rows[::-count]
        case "list":
            return data[numbers], [rows[i] for i in numbers]
        case "mask":
            return data[mask], [row for row, keep in zip(rows, mask, strict=True) if keep]
        case "repeat":
            return data.repeat(count), [row for row in rows for _ in range(count)]
        case "blocks":
            return data.repeat(count, interleave=False), rows * count
        case "chunk":
            parts = data.chunk(count)
            assert max(map(len, parts)) - min(map(len, parts)) <= 1
            assert [row for part in parts for row in read(part)] == rows
            return DataProto.concat(parts), rows
        case "split":
            parts = data.split(count)
            return parts[-1], rows[(len(parts) - 1) * count :]
        case "concat":
            return DataProto.concat([data[numbers], data]), [rows[i] for i in numbers] + rows
        case "reorder":
            return data.reorder(order), [rows[i] for i in order]
        case "union":
            return data.select(["jagged"], []).union(build(rows)), rows
        case "pad":
            padded, pad_size = data.pad_to_divisor(count)
            assert len(padded) % count == 0 and read(padded.unpad(pad_size)) == rows
            return padded, rows + [rows[i % size] for i in range(pad_size)]
        case "pickle":
            return pickle.loads(pickle.dumps(data, protocol=5)), rows
        case "send":
            return sent(data), rows
        case "rename":
            return data.rename(["dense", "cell"], ["d", "c"]).rename(["c", "d"], ["cell", "dense"]), rows
        case "shuffle":
            shuffled = list(data.make_iterator(max(size, 1), 1, seed=seed))
            drawn = read(shuffled[0]) if size else []
            assert sorted(map(repr, drawn)) == sorted(map(repr, rows))
            return (shuffled[0], drawn) if size else (data, rows)
        case _:
            rest = data.select()
            popped = rest.pop(["jagged"], ["cell"])
            assert rest.keys() == ["dense"]
            return rest.union(popped), rows


HOMES = {
    "here": lambda rows, cuts: build(rows),
    "in other processes": lambda rows, cuts: in_pieces(build(rows), cuts, always_away),
    "along with the message": lambda rows, cuts: in_pieces(build(rows), cuts, away_if_large),
    "here and elsewhere": lambda rows, cuts: DataProto.concat([build(rows[:1]), in_pieces(build(rows[1:]), cuts)]),
}


@pytest.mark.parametrize("home", HOMES)
@settings(max_examples=100, deadline=None, derandomize=True)
@given(rows=st.lists(ROW, max_size=6), cuts=st.lists(st.integers(0, 9), max_size=3), steps=STEPS, reads=st.booleans())
def test_programs_of_operations_agree_with_a_list_of_rows(home, rows, cuts, steps, reads):
    data = HOMES[home](rows, cuts)
    if reads:  # what a column keeps after it was read must not change what follows
        assert read(data) == rows
    for name, seed in steps:
        after, expected = apply(name, seed, data, rows)
        assert read(data) == rows, f"{name} changed its caller"
        assert read(after) == expected, name
        data, rows = after, expected
        if len(rows) > 40:
            data, rows = data[:40], rows[:40]
