"""Micro-batches by rows and by tokens, and rows shared out by their work."""

import itertools
import random

import pytest
import torch

from hybridflow.config import RunConfig
from hybridflow.data.batching import keep_groups, micro_batches, partition
from hybridflow.errors import ConfigError, DataError
from hybridflow.protocol.data import DataProto


def test_rows_of_similar_length_stand_together():
    assert micro_batches([3, 9, 4, 8, 1], rows=2) == [[1, 3], [2, 0], [4]]


def test_a_token_budget_counts_rows_times_the_longest_row():
    # 9 | 8 | 4+3+1 as three rows of 4 = 12 would pass 10, so two of them: 4, 3 (8 tokens), then 1
    assert micro_batches([3, 9, 4, 8, 1], rows=1, tokens=10) == [[1], [3], [2, 0], [4]]
    assert micro_batches([3, 9, 4, 8, 1], rows=1, tokens=18) == [[1, 3], [2, 0, 4]]


def test_every_row_stands_in_exactly_one_micro_batch():
    lengths = [(i * 7) % 13 + 1 for i in range(50)]
    for budget in (13, 20, 100, 10_000):
        found = micro_batches(lengths, rows=0, tokens=budget)
        assert sorted(i for rows in found for i in rows) == list(range(50))
        assert all(len(rows) * max(lengths[i] for i in rows) <= budget for rows in found)


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


def test_largest_differencing_by_hand():
    # 8-7 = 1, 6-5 = 1, 4-1 = 3, 3-1 = 2: the sums differ by 2. The parts: {8, 6} and {7, 5, 4}.
    assert partition([8, 7, 6, 5, 4], 2) == [[1, 3, 4], [0, 2]]
    # Pairs (8, 7), (6, 5), (4): differences 1, 1 and 4. 4 - 1 = 3, 3 - 1 = 2: {4, 7, 5} and {8, 6}.
    assert partition([8, 7, 6, 5, 4], 2, equal_counts=True) == [[1, 3, 4], [0, 2]]
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
        # 7/6 of the optimum is the method's bound for two parts (Fischetti and Martello 1987).
        assert max(sums(work, parts)) <= 7 / 6 * best_largest_sum(work, num_parts, equal_counts)


def test_long_tailed_lengths_are_shared_within_a_percent():
    draw = random.Random(1)
    work = [float(min(4096, int(draw.lognormvariate(6, 1)) + 1)) for _ in range(1024)]
    neighbours = [list(range(part * 64, part * 64 + 64)) for part in range(16)]
    mean = sum(work) / 16
    assert max(sums(work, neighbours)) > 1.15 * mean
    for equal_counts in (False, True):
        assert max(sums(work, partition(work, 16, equal_counts))) < 1.01 * mean


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
    with pytest.raises(DataError, match=r"no column 'group'"):
        keep_groups("group")(batch, 2, RunConfig())
