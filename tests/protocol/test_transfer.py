"""Transfer protocols are pure: everything here runs without Ray. A rank's method is played by a Python function."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.errors import ConfigError, DataError
from hybridflow.protocol.data import DataProto
from hybridflow.protocol.transfer import (
    PROTOCOLS,
    Call,
    Dispatch,
    PerRank,
    Protocol,
    chunk_rows,
    collect_list,
    register_protocol,
    transfer_protocol,
)
from hybridflow.resharding.layout import GenerationLayout, Layout, ParallelLayout, generation_of, training_of


def layouts(most: int) -> Iterator[ParallelLayout]:
    """Every layout of at most this many ranks."""
    sizes = range(1, most + 1)
    for tp, pp, cp, dp in itertools.product(sizes, repeat=4):
        if tp * pp * cp * dp <= most:
            yield ParallelLayout(tp=tp, pp=pp, cp=cp, dp=dp)


def generations(most: int) -> Iterator[GenerationLayout]:
    """Every generation layout of every layout of at most this many ranks, without pipelines in generation."""
    for layout in layouts(most):
        for tp in range(1, layout.world_size + 1):
            if layout.world_size % tp == 0:
                yield layout.generation(tp=tp)


def shuffled(batch: DataProto, num_chunks: int) -> list[list[int]]:
    """A spread that deals out shuffled rows, in runs of unequal lengths."""
    rows = list(range(len(batch)))
    random.Random(len(rows)).shuffle(rows)
    bounds = sorted(random.Random(num_chunks).choices(range(len(rows) + 1), k=num_chunks - 1))
    return [rows[start:stop] for start, stop in itertools.pairwise([0, *bounds, len(rows)])]


def batch_of(num_rows: int) -> DataProto:
    """Numbered rows in a dense, a jagged and an object column."""
    return DataProto.from_dict(
        {
            "x": torch.arange(num_rows),
            "tokens": DataProto.jagged([torch.arange(i % 3 + 1) + i for i in range(num_rows)]),
        },
        {"text": np.array([f"row {i}" for i in range(num_rows)], dtype=object)},
        meta_info={"step": 7},
    )


def run(protocol: Protocol | str, layout: ParallelLayout, call: Call, method: Callable[..., Any]) -> Any:
    """What the driver does, with every rank in this process. ``method(rank, *args, **kwargs)``."""
    functions = transfer_protocol(protocol)
    dispatch = functions.distribute(layout, call)
    assert len(dispatch.payloads) == layout.world_size
    outputs = [method(rank, *args, **kwargs) for rank, (args, kwargs) in enumerate(dispatch.payloads)]
    answers = [value if functions.answers(layout, rank) else None for rank, value in enumerate(outputs)]
    return functions.collect(layout, call, dispatch, answers)


def identity(rank: int, batch: DataProto) -> DataProto:
    return batch


def replicas_of(protocol: Protocol, layout: Layout) -> list[int]:
    """By rank, the number of the chunk that it should take."""
    if protocol is Protocol.DP:
        return list(range(layout.world_size))
    of = training_of(layout) if protocol is Protocol.THREE_D else generation_of(layout)
    return [of.coordinates(rank).dp for rank in range(of.world_size)]


def test_identity_comes_back_in_order_for_every_layout_up_to_16_ranks():
    """Each layout meets every way of spreading rows; each number of rows one of them."""
    ways = itertools.cycle(itertools.product(("pad", "balance"), (None, shuffled)))
    tried = 0
    for protocol in (Protocol.DP, Protocol.THREE_D, Protocol.THREE_D_ALL_MICRO_DP):
        for layout in generations(16) if protocol is Protocol.THREE_D_ALL_MICRO_DP else layouts(16):
            replicas = replicas_of(protocol, layout)
            chunks = max(replicas) + 1
            for num_rows in {1, chunks - 1, chunks, chunks + 1, 2 * chunks + 1} - {0}:
                batch = DataProto.from_dict({"x": torch.arange(num_rows)}, meta_info={"step": 7})
                uneven, spread = next(ways)
                got: dict[int, list[list[int]]] = {}

                def keep(rank: int, rows: DataProto, got: Any = got, replicas: Any = replicas) -> DataProto:
                    got.setdefault(replicas[rank], []).append(rows["x"].tolist())
                    return rows

                back = run(protocol, layout, Call((batch,), uneven=uneven, spread=spread), keep)
                assert back["x"].tolist() == list(range(num_rows)), (layout, protocol, num_rows)
                assert back.meta_info == {"step": 7}
                assert len(batch) == num_rows and batch.meta_info == {"step": 7}
                assert len(got) == chunks, "every replica works"
                for chunk in got.values():
                    assert chunk == [chunk[0]] * len(chunk), "every rank of a replica gets the same rows"
                sizes = [len(chunk[0]) for chunk in got.values()]
                if uneven == "pad" or spread is None:
                    assert max(sizes) - min(sizes) <= (uneven == "balance")
                if uneven == "balance":
                    assert sum(sizes) - num_rows <= sizes.count(1), "only a replica without rows gets padding"
                tried += 1
    assert tried > 4000


def test_random_rows_in_random_layouts_keep_their_order_where_a_method_returns_several_rows_for_each():
    @given(st.sampled_from(list(generations(12))), st.integers(1, 40), st.integers(1, 3), st.sampled_from(Protocol))
    @settings(max_examples=60, deadline=None)
    def check(layout: GenerationLayout, num_rows: int, times: int, protocol: Protocol) -> None:
        batch = DataProto.from_dict({"x": torch.arange(num_rows)})
        for uneven, spread in itertools.product(("pad", "balance"), (None, shuffled)):
            call = Call((batch,), uneven=uneven, spread=spread)
            back = run(protocol, layout, call, lambda rank, rows: rows.repeat(times))
            if isinstance(back, DataProto):
                assert back["x"].tolist() == [row for row in range(num_rows) for _ in range(times)]
            else:  # the protocols that split nothing
                assert [rows["x"].tolist() for rows in back] == [batch.repeat(times)["x"].tolist()] * len(back)

    check()


@pytest.mark.parametrize("num_rows", [1, 3, 4, 5, 8, 11])
@pytest.mark.parametrize("protocol", [Protocol.DP, Protocol.THREE_D])
def test_identity_keeps_jagged_and_object_columns(protocol: Protocol, num_rows: int):
    batch = batch_of(num_rows)
    back = run(protocol, ParallelLayout(tp=2, pp=1, cp=1, dp=4), Call((batch,)), identity)
    assert back["x"].tolist() == list(range(num_rows))
    assert [row.tolist() for row in back["tokens"].unbind()] == [row.tolist() for row in batch["tokens"].unbind()]
    assert back.non_tensor_batch["text"].tolist() == [f"row {i}" for i in range(num_rows)]


def test_one_to_all_gives_every_rank_the_same_objects_and_lists_the_answers():
    layout, batch = ParallelLayout(tp=2, dp=2), batch_of(3)
    dispatch = transfer_protocol(Protocol.ONE_TO_ALL).distribute(layout, Call((batch,), {"k": 1}))
    assert all(args[0] is batch and kwargs == {"k": 1} for args, kwargs in dispatch.payloads)
    assert run(Protocol.ONE_TO_ALL, layout, Call((10,)), lambda rank, n: n + rank) == [10, 11, 12, 13]


def test_three_d_gives_chunk_d_to_replica_d_and_asks_only_its_collector():
    # Hand arithmetic: tp 2, pp 2, dp 2; rank = 4 D + 2 P + T, so the collectors (T=0, P=1) are ranks 2 and 6.
    layout = ParallelLayout(tp=2, pp=2, dp=2)
    functions = transfer_protocol(Protocol.THREE_D)
    dispatch = functions.distribute(layout, Call((batch_of(4),)))
    rows = [args[0]["x"].tolist() for args, _ in dispatch.payloads]
    assert rows == [[0, 1]] * 4 + [[2, 3]] * 4
    assert len({id(payload) for payload in dispatch.payloads}) == 2, "ranks of a replica share one payload"
    assert [rank for rank in range(8) if functions.answers(layout, rank)] == [2, 6]


def test_three_d_all_micro_dp_gives_each_generation_replica_its_chunk():
    # The paper's 1-4-2 -> 1-2-2-2: generation replicas are ranks [0, 2], [1, 3], [4, 6], [5, 7].
    layout = ParallelLayout(tp=4, dp=2).generation(tp=2)
    functions = transfer_protocol(Protocol.THREE_D_ALL_MICRO_DP)
    dispatch = functions.distribute(layout, Call((batch_of(4),)))
    assert [args[0]["x"].tolist() for args, _ in dispatch.payloads] == [[0], [1], [0], [1], [2], [3], [2], [3]]
    assert [rank for rank in range(8) if functions.answers(layout, rank)] == [0, 1, 4, 5]
    # The same group's THREE_D goes by the training layout: two replicas of four ranks.
    dispatch = transfer_protocol(Protocol.THREE_D).distribute(layout, Call((batch_of(4),)))
    assert [args[0]["x"].tolist() for args, _ in dispatch.payloads] == [[0, 1]] * 4 + [[2, 3]] * 4


def test_three_d_all_micro_dp_without_a_generation_layout_goes_by_the_training_layout():
    # tp 2, cp 2: context-parallel ranks hold the same weights, so each pair generates for itself.
    dispatch = transfer_protocol(Protocol.THREE_D_ALL_MICRO_DP).distribute(
        ParallelLayout(tp=2, cp=2), Call((batch_of(2),))
    )
    assert [args[0]["x"].tolist() for args, _ in dispatch.payloads] == [[0], [0], [1], [1]]


def test_three_d_pp_only_asks_one_rank_of_each_stage():
    # rank = 8 D + 4 P + 2 C + T
    layout = ParallelLayout(tp=2, pp=2, cp=2, dp=2)
    back = run(Protocol.THREE_D_PP_ONLY, layout, Call((10,)), lambda rank, n: n + rank)
    assert back == [10, 14]
    answers = transfer_protocol(Protocol.THREE_D_PP_ONLY).answers
    assert [rank for rank in range(16) if answers(layout, rank)] == [0, 4]


def test_all_to_all_splits_per_rank_values_and_nothing_else():
    layout, batch = ParallelLayout(tp=2, dp=2), batch_of(4)
    call = Call((PerRank(["a", "b", "c", "d"]), [1, 2, 3, 4]), {"seed": PerRank((9, 8, 7, 6)), "batch": batch})
    dispatch = transfer_protocol(Protocol.ALL_TO_ALL).distribute(layout, call)
    assert [args for args, _ in dispatch.payloads] == [(letter, [1, 2, 3, 4]) for letter in "abcd"]
    assert [kwargs["seed"] for _, kwargs in dispatch.payloads] == [9, 8, 7, 6]
    assert all(kwargs["batch"] is batch for _, kwargs in dispatch.payloads)
    back = run(Protocol.ALL_TO_ALL, layout, Call((PerRank([1, 2, 3, 4]),)), lambda rank, n: n * 10)
    assert back == [10, 20, 30, 40]


@pytest.mark.parametrize("protocol", [p for p in Protocol if p is not Protocol.ALL_TO_ALL])
def test_a_list_as_long_as_the_ranks_is_one_argument(protocol: Protocol):
    layout = ParallelLayout(dp=2)
    given = run(protocol, layout, Call(([1, 2],)), lambda rank, values: list(values))
    assert given in ([[1, 2], [1, 2]], [[1, 2]])


def test_per_rank_values_that_do_not_fit_are_refused():
    layout = ParallelLayout(tp=2, dp=2)
    with pytest.raises(
        DataError, match=r"actor\.put: PerRank has 3 values, but the role has 4 ranks \(tp2 pp1 cp1 dp2\)"
    ):
        transfer_protocol(Protocol.ALL_TO_ALL).distribute(layout, Call((PerRank([1, 2, 3]),), where="actor.put"))
    for protocol in (Protocol.ONE_TO_ALL, Protocol.DP, Protocol.THREE_D, Protocol.THREE_D_ALL_MICRO_DP):
        for arguments in ((PerRank([1, 2, 3, 4]),), (PerRank([1, 2, 3, 4]), batch_of(4))):
            with pytest.raises(DataError, match="PerRank is for methods registered with ALL_TO_ALL"):
                transfer_protocol(protocol).distribute(layout, Call(arguments))
    for value in ("abcd", b"abcd", {0: 1}, {1, 2}, iter([1, 2]), torch.tensor(3), np.array(3), 4):
        with pytest.raises(DataError, match=f"PerRank of a {type(value).__name__}: give a list with one value for eac"):
            PerRank(value)  # type: ignore[arg-type]


def test_dp_gives_each_rank_its_own_rows_whatever_the_layout():
    dispatch = transfer_protocol(Protocol.DP).distribute(ParallelLayout(tp=2, dp=2), Call((batch_of(4),)))
    assert [args[0]["x"].tolist() for args, _ in dispatch.payloads] == [[0], [1], [2], [3]]


def test_keyword_batches_are_split_and_other_arguments_are_passed_to_all():
    batch, other = batch_of(4), batch_of(4)
    call = Call((batch, "greedy"), {"other": other, "scale": 3})
    dispatch = transfer_protocol(Protocol.THREE_D).distribute(ParallelLayout(dp=2), call)
    (args, kwargs) = dispatch.payloads[1]
    assert args[0]["x"].tolist() == [2, 3] and args[1] == "greedy"
    assert kwargs["other"]["x"].tolist() == [2, 3] and kwargs["scale"] == 3


def test_padding_repeats_rows_from_the_front_and_is_marked():
    assert [list(rows) for rows in chunk_rows(5, 4)] == [[0, 1], [2], [3], [4]]
    assert [list(rows) for rows in chunk_rows(2, 4)] == [[0], [1], [], []]
    assert [list(rows) for rows in chunk_rows(6, 3)] == [[0, 1], [2, 3], [4, 5]]
    batch = batch_of(5)
    dispatch = transfer_protocol(Protocol.DP).distribute(ParallelLayout(dp=4), Call((batch,)))
    chunks = [args[0] for args, _ in dispatch.payloads]
    assert [chunk["x"].tolist() for chunk in chunks] == [[0, 1], [2, 0], [3, 0], [4, 0]]
    assert [chunk.meta_info["padded_rows"] for chunk in chunks] == [0, 1, 1, 1]
    assert [list(rows) for rows in dispatch.rows] == [[0, 1], [2, 0], [3, 0], [4, 0]]
    assert dispatch.padded == (0, 1, 1, 1)
    uneven = Call((batch,), spread=lambda rows, num_chunks: [[0, 1, 2, 4], [3]])
    chunks = [
        args[0]["x"].tolist()
        for args, _ in transfer_protocol(Protocol.DP).distribute(ParallelLayout(dp=2), uneven).payloads
    ]
    assert chunks == [[0, 1, 2, 4], [3, 0, 1, 2]], "one row of the front after another"
    assert len(batch) == 5 and "padded_rows" not in batch.meta_info


def test_balanced_rows_are_padded_only_where_a_replica_has_none():
    distribute = transfer_protocol(Protocol.DP).distribute
    for num_rows, rows, padded in ((5, [[0, 1], [2], [3], [4]], (0,) * 4), (2, [[0], [1], [0], [0]], (0, 0, 1, 1))):
        dispatch = distribute(ParallelLayout(dp=4), Call((batch_of(num_rows),), uneven="balance"))
        assert [args[0]["x"].tolist() for args, _ in dispatch.payloads] == rows
        assert dispatch.padded == padded


def test_a_spread_chooses_the_rows_of_every_batch_of_the_call():
    def by_parity(batch: DataProto, num_chunks: int) -> list[list[int]]:
        return [[row for row in range(len(batch)) if row % num_chunks == chunk] for chunk in range(num_chunks)]

    call = Call((batch_of(5),), {"other": batch_of(5)}, uneven="balance", spread=by_parity)
    (args, kwargs) = transfer_protocol(Protocol.THREE_D).distribute(ParallelLayout(dp=2), call).payloads[1]
    assert args[0]["x"].tolist() == [1, 3] == kwargs["other"]["x"].tolist()
    assert args[0]["tokens"].unbind()[1].tolist() == [3]
    back = run(Protocol.THREE_D, ParallelLayout(dp=2), call, lambda rank, batch, other: batch.union(other))
    assert back["text"].tolist() == [f"row {i}" for i in range(5)]


@pytest.mark.parametrize("kind", [range, np.arange, torch.arange])
def test_the_rows_of_a_spread_may_be_ranges_with_a_step_arrays_or_tensors(kind: Callable[..., Any]):
    dealt = Call((batch_of(5),), uneven="balance", spread=lambda batch, n: [kind(i, 5, n) for i in range(n)])
    shares = transfer_protocol(Protocol.DP).distribute(ParallelLayout(dp=2), dealt).payloads
    assert [args[0]["x"].tolist() for args, _ in shares] == [[0, 2, 4], [1, 3]]
    assert run(Protocol.DP, ParallelLayout(dp=2), dealt, identity)["x"].tolist() == [0, 1, 2, 3, 4]


def test_a_spread_that_loses_rows_or_cannot_be_undone_is_refused():
    def lost(batch: DataProto, num_chunks: int) -> list[list[int]]:
        return [[0], [2]]

    layout = ParallelLayout(dp=2)
    with pytest.raises(DataError, match=r"a\.b: its spread gave 2 chunks with 2 rows for 2 replicas and 3 rows"):
        run(Protocol.DP, layout, Call((batch_of(3),), where="a.b", spread=lost), identity)
    for chosen, reason in ((None, "'NoneType'"), ([[0.0, 1.0], [2.0]], "dtype float64"), ([[0, 1], [9]], "row 9")):
        call = Call((batch_of(3),), where="a.b", spread=lambda batch, n, chosen=chosen: chosen)
        with pytest.raises(DataError, match=rf"a\.b: its spread gave .* which are no rows \(.*{reason}.*\)\. Return"):
            run(Protocol.DP, layout, call, identity)
    call = Call((batch_of(3),), where="a.b", uneven="balance", spread=lambda batch, n: [[2, 0], [1]])
    with pytest.raises(DataError, match=r"a\.b: rank 0 returned 1 rows for 2, so the rows.*without spread"):
        run(Protocol.DP, layout, call, lambda rank, batch: batch[:1])
    uneven = Call((batch_of(4),), where="a.b", uneven="refuse", spread=lambda batch, n: [[0, 1, 2], [3]])
    with pytest.raises(DataError, match=r"a\.b: 4 rows do not divide among 2 replicas .*: chunks of 3 and 1 rows"):
        run(Protocol.DP, layout, uneven, identity)


def test_padding_is_undone_where_a_method_returns_several_rows_for_each():
    def twice(rank: int, batch: DataProto) -> DataProto:
        return batch.repeat(2)

    back = run(Protocol.DP, ParallelLayout(dp=4), Call((batch_of(5),)), twice)
    assert back["x"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


def test_padding_that_cannot_be_told_apart_is_an_error_with_the_fix():
    def drop_one(rank: int, batch: DataProto) -> DataProto:
        return batch[:-1]

    with pytest.raises(DataError, match=r'reward\.score: rank 1 returned 1 rows for a chunk of 2.*uneven="balance"'):
        run(Protocol.DP, ParallelLayout(dp=2), Call((batch_of(3),), where="reward.score"), drop_one)


def test_uneven_rows_are_refused_with_the_arithmetic_where_the_method_says_so():
    call = Call((batch_of(5),), where="actor.update", uneven="refuse")
    with pytest.raises(DataError, match=r"actor\.update: 5 rows .* 2 replicas .*chunks of 3 and 2 rows.*multiple of 2"):
        transfer_protocol(Protocol.THREE_D).distribute(ParallelLayout(tp=2, dp=2), call)
    even = Call((batch_of(4),), uneven="refuse")
    assert run(Protocol.THREE_D, ParallelLayout(tp=2, dp=2), even, identity)["x"].tolist() == [0, 1, 2, 3]


def test_empty_and_unequal_batches_are_refused():
    layout = ParallelLayout(dp=2)
    with pytest.raises(DataError, match="has no rows"):
        transfer_protocol(Protocol.DP).distribute(layout, Call((batch_of(2)[:0],)))
    with pytest.raises(DataError, match=r"\[2, 4\] rows"):
        transfer_protocol(Protocol.DP).distribute(layout, Call((batch_of(2), batch_of(4))))


def test_metrics_are_averaged_by_real_rows_and_equal_ones_stay():
    # 3 rows over 2 ranks: rank 0 has 2 real rows, rank 1 has 1 and a repeated one. (2 * 1.0 + 1 * 4.0) / 3 = 2.0
    def metrics(rank: int, batch: DataProto) -> dict[str, float]:
        return {"loss": (1.0, 4.0)[rank], "lr": 0.1}

    assert run(Protocol.DP, ParallelLayout(dp=2), Call((batch_of(3),)), metrics) == {"loss": 2.0, "lr": 0.1}
    with pytest.raises(DataError, match="same names on every rank"):
        run(Protocol.DP, ParallelLayout(dp=2), Call((batch_of(2),)), lambda rank, batch: {f"loss_{rank}": 1.0})


def test_other_outputs_are_listed_and_nothing_stays_nothing():
    layout = ParallelLayout(tp=2, dp=2)
    assert run(Protocol.THREE_D, layout, Call((batch_of(2),)), lambda rank, batch: f"r{rank}") == ["r0", "r2"]
    assert run(Protocol.THREE_D, layout, Call((batch_of(2),)), lambda rank, batch: None) is None
    assert run(Protocol.THREE_D, layout, Call((batch_of(2),)), lambda rank, batch: {"z": 1j}) == [{"z": 1j}] * 2
    with pytest.raises(DataError, match="rank 2 returned str where others returned a DataProto"):
        run(Protocol.THREE_D, layout, Call((batch_of(2),)), lambda rank, b: b if rank < 2 else "r2")


def test_a_call_without_batches_reaches_every_rank():
    back = run(Protocol.DP, ParallelLayout(dp=3), Call((2,)), lambda rank, n: batch_of(n))
    assert back["x"].tolist() == [0, 1] * 3


def test_a_protocol_of_ones_own_is_used_by_name():
    def last_only(layout: ParallelLayout, call: Call) -> Dispatch:
        empty: tuple[tuple[Any, ...], dict[str, Any]] = ((None,), {})
        return Dispatch([empty] * (layout.world_size - 1) + [(call.args, dict(call.kwargs))])

    def last(layout: ParallelLayout, call: Call, dispatch: Dispatch, outputs: Any) -> Any:
        return outputs[-1]

    register_protocol("LAST", last_only, last)
    try:
        register_protocol("LAST", last_only, last)  # a module may be imported twice
        assert run("LAST", ParallelLayout(dp=3), Call((5,)), lambda rank, n: (rank, n)) == (2, 5)
        with pytest.raises(ConfigError, match="'last' exists already"):
            register_protocol("last", last_only, collect_list)
        with pytest.raises(ConfigError, match="'THREE_D' exists already"):
            register_protocol("THREE_D", last_only, last)
    finally:
        del PROTOCOLS["LAST"]
    with pytest.raises(ConfigError, match=r"'THREED'.*Did you mean 'THREE_D'.*ALL_TO_ALL.* DP.* ONE_TO_ALL, T"):
        transfer_protocol("THREED")
