"""Micro-batches by rows and by tokens."""

import pytest

from hybridflow.data.batching import micro_batches
from hybridflow.errors import ConfigError


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
