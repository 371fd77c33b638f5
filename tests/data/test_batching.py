"""Micro-batches by rows and by tokens, and rows shared out by their work."""

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridflow.config import ActorConfig, ModelConfig, RunConfig
from hybridflow.data.batching import (
    by_work,
    by_work_of_updates,
    even_out,
    keep_groups,
    micro_batches,
    partition,
    row_work,
    update_rows,
)
from hybridflow.errors import ConfigError, DataError
from hybridflow.protocol.data import DataProto
from tests.tiny_models import save_tiny_model


def test_rows_of_similar_length_stand_together():
    assert micro_batches([3, 9, 4, 8, 1], rows=2) == [[1, 3], [2, 0], [4]]


def test_a_token_budget_is_the_sum_of_tokens():
    # 9 | 8 | 4+3+1 = 8; with 18: 9+8 = 17 | 4+3+1
    assert micro_batches([3, 9, 4, 8, 1], rows=1, tokens=10) == [[1], [3], [2, 0, 4]]
    assert micro_batches([3, 9, 4, 8, 1], rows=1, tokens=18) == [[1, 3], [2, 0, 4]]
    assert micro_batches([0, 0], rows=1, tokens=8) == [[0, 1]], "rows without tokens are rows too"


def test_every_row_stands_in_exactly_one_micro_batch():
    lengths = [(i * 7) % 13 + 1 for i in range(50)]
    for budget in (13, 20, 100, 10_000):
        found = micro_batches(lengths, rows=0, tokens=budget)
        assert sorted(i for rows in found for i in rows) == list(range(50))
        assert all(sum(lengths[i] for i in rows) <= budget for rows in found)


def test_a_row_over_the_budget_is_refused_with_both_numbers():
    with pytest.raises(ConfigError, match="micro_batch_tokens=8 is less than the 9 tokens"):
        micro_batches([3, 9], rows=1, tokens=8)


# ------------------------------------------------------------------------------------------- shares of replicas


def sums(work: list[float], parts: list[list[int]]) -> list[float]:
    return [sum(work[i] for i in part) for part in parts]


def best_largest_sum(work: list[float], num_parts: int, equal_counts: bool) -> float:
    """By trying every assignment."""
    best = float("inf")
    for assignment in itertools.product(range(num_parts), repeat=len(work)):
        counts = [assignment.count(part) for part in range(num_parts)]
        if not equal_counts or max(counts) - min(counts) <= 1:
            loads = [0.0] * num_parts
            for item, part in enumerate(assignment):
                loads[part] += work[item]
            best = min(best, max(loads))
    return best


def test_partitions_by_hand():
    # 8-7 = 1, 6-5 = 1, 4-1 = 3, 3-1 = 2: the sums differ by 2. The parts: {8, 6} and {7, 5, 4}.
    assert partition([8, 7, 6, 5, 4], 2) == [[1, 3, 4], [0, 2]]
    # 8 | 7, then 6 to the 7 and 5 to the 8: 13 each; the 4 may go to either.
    assert partition([8, 7, 6, 5, 4], 2, equal_counts=True) == [[0, 3, 4], [1, 2]]
    assert partition([5, 1, 1, 1], 2) == [[0], [1, 2, 3]]
    assert partition([5, 1, 1, 1], 2, equal_counts=True) == [[0, 3], [1, 2]]


@pytest.mark.parametrize("equal_counts", [False, True])
def test_parts_hold_every_item_once_and_are_near_the_optimum(equal_counts: bool):
    draw = random.Random(0)
    for num_items, num_parts in itertools.product((1, 3, 5, 8), (1, 2, 3)):
        work = [float(draw.randint(1, 50)) for _ in range(num_items)]
        parts = partition(work, num_parts, equal_counts)
        assert sorted(i for part in parts for i in part) == list(range(num_items))
        assert len(parts) == num_parts and sums(work, parts) == sorted(sums(work, parts), reverse=True)
        if equal_counts:
            assert max(map(len, parts)) - min(map(len, parts)) <= 1
        # Of the optimum: 7/6 for differencing into two parts (Fischetti and Martello 1987), 4/3 - 1/3m for largest
        # first (Graham 1969).
        bound = 4 / 3 - 1 / (3 * num_parts) if equal_counts else 7 / 6
        assert max(sums(work, parts)) <= bound * best_largest_sum(work, num_parts, equal_counts) + 1e-9


def test_long_tailed_lengths_are_shared_within_a_percent():
    draw = random.Random(1)
    work = [float(min(4096, int(draw.lognormvariate(6, 1)) + 1)) for _ in range(1024)]
    neighbours = [list(range(part * 64, part * 64 + 64)) for part in range(16)]
    mean = sum(work) / 16
    assert max(sums(work, neighbours)) > 1.15 * mean
    for equal_counts in (False, True):
        assert max(sums(work, partition(work, 16, equal_counts))) < 1.01 * mean


def test_a_few_very_long_rows_among_many_replicas_do_not_unbalance_equal_counts():
    draw = random.Random(1)
    work = [draw.lognormvariate(6, 1) for _ in range(2048)]
    parts = partition(work, 64, equal_counts=True)
    assert {len(part) for part in parts} == {32}
    assert max(sums(work, parts)) < 1.05 * sum(work) / 64


def test_no_items_make_empty_parts():
    assert partition([], 3) == [[], [], []]
    assert partition([1.0], 3, equal_counts=True) == [[0], [], []]


def test_groups_stay_whole_and_replicas_get_about_the_same_number_of_rows():
    # Groups of 3, 1, 2, 1, 1 rows over two replicas: 4 and 4.
    batch = DataProto.from_dict({"group_ids": torch.tensor([0, 0, 0, 1, 2, 2, 3, 4])})
    parts = keep_groups("group_ids")(batch, 2, RunConfig())
    assert sorted(map(len, parts)) == [4, 4]
    assert sorted(row for part in parts for row in part) == list(range(8))
    for group in ({0, 1, 2}, {4, 5}):
        assert any(group <= set(part) for part in parts)
    texts = DataProto.from_dict({}, {"prompt": ["a", "b", "a", "b"]})
    assert sorted(keep_groups("prompt")(texts, 2, RunConfig())) == [[0, 2], [1, 3]]


def test_cells_that_are_no_group_ids_are_refused():
    batch = DataProto.from_dict({}, {"messages": [{"role": "user"}, {"role": "user"}]})
    with pytest.raises(DataError, match=r"keep_groups\('messages'\): the column's cells cannot be compared"):
        keep_groups("messages")(batch, 2, RunConfig())
    tensors = DataProto.from_dict({}, {"ids": [torch.tensor(1), torch.tensor(1)]})
    with pytest.raises(DataError, match=r"keep_groups\('ids'\): the column's cells cannot be compared"):
        keep_groups("ids")(tensors, 2, RunConfig())
    jagged = DataProto.from_dict({"prompts": DataProto.jagged([[1], [1, 2]])})
    with pytest.raises(DataError, match=r"keep_groups\('prompts'\): the column's cells cannot be compared"):
        keep_groups("prompts")(jagged, 2, RunConfig())
    with pytest.raises(DataError, match=r"no column 'group'"):
        keep_groups("group")(batch, 2, RunConfig())


def test_long_rows_cost_more_than_their_tokens():
    # 120 + 120^2 / (12 * 10) = 120 + 120
    assert row_work([0, 120], hidden_size=10) == [0.0, 240.0]


def rows_of_lengths(lengths: list[int]) -> DataProto:
    return DataProto.from_dict(
        {
            "prompts": DataProto.jagged([torch.zeros(1, dtype=torch.int64)] * len(lengths)),
            "responses": DataProto.jagged([torch.zeros(n - 1, dtype=torch.int64) for n in lengths]),
        },
        meta_info={"step": 3},
    )


def settings(folder: Path, **actor: Any) -> RunConfig:
    return RunConfig(model=ModelConfig(path=save_tiny_model(folder, "llama")), actor=ActorConfig(**actor))


def test_replicas_get_rows_of_equal_work_or_neighbours(tmp_path: Path):
    batch = rows_of_lengths([9, 8, 7, 6, 4, 3, 2, 1])
    assert by_work(batch, 2, settings(tmp_path, balance=False)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert by_work(batch, 1, settings(tmp_path)) == [[0, 1, 2, 3, 4, 5, 6, 7]]
    parts = by_work(batch, 2, settings(tmp_path))
    lengths = [9, 8, 7, 6, 4, 3, 2, 1]
    assert sorted(map(len, parts)) == [4, 4] and sums(lengths, parts) == [20, 20]


def test_each_update_is_shared_by_its_work(tmp_path: Path):
    """The two long rows of each update go to different replicas, whatever their place in the batch."""
    config = settings(tmp_path, mini_batch_size=4, shuffle=True)
    updates = update_rows(16, config, step=3, epoch=0)
    lengths = [0] * 16
    for rows in updates:
        for row, length in zip(rows, (30, 30, 5, 5), strict=True):
            lengths[row] = length
    parts = by_work_of_updates(rows_of_lengths(lengths), 2, config)
    assert sorted(map(len, parts)) == [8, 8]
    for rows in updates:
        for part in parts:
            assert sum(lengths[row] for row in rows if row in part) == 35
    neighbours = by_work_of_updates(rows_of_lengths(lengths), 2, settings(tmp_path, mini_batch_size=4, balance=False))
    assert neighbours == [[0, 1, 4, 5, 8, 9, 12, 13], [2, 3, 6, 7, 10, 11, 14, 15]]


def test_replicas_that_got_more_in_one_update_get_less_in_the_next(tmp_path: Path):
    # Each update has rows of 9, 1 and 1 tokens: two replicas get 9 and 2 tokens of it, in turns.
    batch = rows_of_lengths([9, 1, 1] * 4)
    parts = by_work_of_updates(batch, 2, settings(tmp_path, mini_batch_size=3))
    assert sums([9, 1, 1] * 4, parts) == [22, 22]


def test_which_rows_share_an_update_depends_on_seed_step_and_epoch_alone(tmp_path: Path):
    plain = settings(tmp_path, mini_batch_size=2)
    assert update_rows(5, plain, step=1, epoch=0) == [[0, 1], [2, 3], [4]]
    assert update_rows(5, settings(tmp_path), step=1, epoch=0) == [[0, 1, 2, 3, 4]]
    mixed = settings(tmp_path, mini_batch_size=4, shuffle=True)
    first = update_rows(12, mixed, step=1, epoch=0)
    assert first == update_rows(12, mixed, step=1, epoch=0)
    assert sorted(row for rows in first for row in rows) == list(range(12)) and len(first) == 3
    others = [update_rows(12, mixed, step=2, epoch=0), update_rows(12, mixed, step=1, epoch=1)]
    assert first not in others and others[0] != others[1]


def test_replicas_come_to_equal_numbers_of_micro_batches():
    lengths = [9, 8, 7, 6, 2, 1]
    assert even_out([[0, 1], [2, 3], [4, 5]], lengths, 3) == [[0, 1], [2, 3], [4, 5]]
    # 17 tokens are halved first, then 13; what is halved keeps its longest row first.
    assert even_out([[0, 1], [2, 3], [4, 5]], lengths, 5) == [[4, 5], [0], [1], [2], [3]]
    assert even_out([[0, 1, 2, 3]], lengths, 2) == [[0, 2], [1, 3]]
    assert even_out([[0], [1]], lengths, 4) == [[0], [1], [], []]
    assert even_out([], lengths, 2) == [[], []]
