"""Packed streams against what they stand for: sequences one at a time, on one rank."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from hybridflow.engines.megatron.attention import CausalAttention
from hybridflow.engines.megatron.batch import make_micro_batch
from hybridflow.engines.megatron.packing import pack
from hybridflow.errors import DataError

CPU = torch.device("cpu")
HEADS, KV_HEADS, WIDTH = 4, 2, 8


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_a_stream_by_hand():
    prompts, responses = [ids(5, 6), ids(7), ids(8)], [ids(10, 11), ids(), ids(12)]
    masks = [torch.tensor([True, False]), torch.tensor([], dtype=torch.bool), torch.tensor([True])]
    micro = make_micro_batch(prompts, responses, masks, [2, 0, 1], CPU, multiple=6)
    # Row 2: 8 -> 12. Row 0: 5 6 10 -> (6 10 11, of which 10 is wanted). Row 1 predicts nothing. Two tokens of padding.
    assert micro.input_ids.tolist() == [8, 5, 6, 10, 0, 0]
    assert micro.position_ids.tolist() == [0, 0, 1, 2, 0, 1]
    assert micro.targets.tolist() == [12, -1, 10, -1, -1, -1]
    assert micro.lengths == (1, 3, 2)
    assert micro.mask.tolist() == [[True, False], [True, False], [False, False]]
    assert micro.unflatten(torch.tensor([1.5, 2.5])).tolist() == [[1.5, 0], [2.5, 0], [0, 0]]


def test_no_rows_ask_for_nothing():
    micro = make_micro_batch([], [], None, [], CPU, multiple=4)
    assert (micro.input_ids.tolist(), micro.targets.tolist(), micro.lengths) == ([0] * 4, [-1] * 4, (4,))
    assert micro.mask.shape == (0, 0)


def test_an_empty_prompt_and_a_mask_of_another_length_are_refused_by_row():
    with pytest.raises(DataError, match="prompts: row 1 has no token"):
        make_micro_batch([ids(1), ids()], [ids(2), ids(3)], None, [0, 1], CPU)
    with pytest.raises(DataError, match="response_mask: row 0 has 1 entries for 2 response tokens"):
        make_micro_batch([ids(1)], [ids(2, 3)], [torch.ones(1, dtype=torch.bool)], [0], CPU)


def test_zigzag_chunks_by_hand():
    lengths = (5, 3, 8)  # 16 tokens, chunks of 4 for two ranks
    assert pack(lengths, 2, 0, CPU).tokens.tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    assert pack(lengths, 2, 1, CPU).tokens.tolist() == [4, 5, 6, 7, 8, 9, 10, 11]
    assert [group.queries.shape[0] for group in pack(lengths, 1, 0, CPU).groups] == [2, 1], "3 is less than half of 8"


@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("lengths", [(16,), (1,) * 8, (5, 3, 8), (1, 30, 2, 2, 13), (7, 7, 2)], ids=str)
def test_packed_attention_is_that_of_each_sequence_alone(lengths, cp_size):
    """Values and gradients; the ranks of a context-parallel group one after another in this process."""
    generator = torch.Generator().manual_seed(0)
    total = sum(lengths)
    q, k, v = (
        torch.randn(total, heads, WIDTH, generator=generator, requires_grad=True)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    weight = torch.randn(total, HEADS, WIDTH, generator=generator)
    each = [
        F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in parts), is_causal=True, enable_gqa=True)
        for parts in zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    ]
    expected = torch.cat([x[0].transpose(0, 1) for x in each])
    gradients = torch.autograd.grad((expected * weight).sum(), (q, k, v))

    attention = CausalAttention(SimpleNamespace(), 1, None, "self", pg_collection=SimpleNamespace(cp=None))
    parts = [pack(lengths, cp_size, rank, CPU) for rank in range(cp_size)]
    gathered = torch.cat([part.tokens for part in parts])
    assert sorted(gathered.tolist()) == list(range(total))
    out = torch.zeros_like(expected)
    for part in parts:
        answers = [attention._attend(q[part.tokens], k[gathered], v[gathered], group) for group in part.groups]
        out = out.index_copy(0, part.tokens, sum(answers))
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
    for found, wanted in zip(torch.autograd.grad((out * weight).sum(), (q, k, v)), gradients, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("cp_size", [2, 4])
def test_context_parallel_ranks_have_equal_shares_of_a_long_sequence(cp_size):
    seen = [int(group.mask.sum()) for rank in range(cp_size) for group in pack((64,), cp_size, rank, CPU).groups]
    assert seen == [64 * 65 // 2 // cp_size] * cp_size


def test_a_rectangle_by_hand():
    long, short = pack((3, 1, 5), 1, 0, CPU).groups  # tokens 0 1 2 | 3 | 4 5 6 7 8
    assert long.queries.shape == (2, 5) and long.queries.tokens.tolist() == [0, 1, 2, 4, 5, 6, 7, 8]
    assert long.queries.sources.tolist() == [4, 5, 6, 7, 8, 0, 1, 2, 2, 2], "the longest first; 2 is repeated"
    assert (short.queries.shape, short.queries.sources.tolist()) == ((1, 1), [3])
    x = torch.arange(9.0, dtype=torch.float64)
    assert long.keys.fill(x).tolist() == [[4, 5, 6, 7, 8], [0, 1, 2, 2, 2]]
    assert long.keys.take(10 + long.keys.fill(x), 9).tolist() == [10, 11, 12, 0, 14, 15, 16, 17, 18]


@pytest.mark.parametrize("lengths", [(3, 1, 5), (4, 3)], ids=str)
def test_gradients_go_to_the_tokens_they_came_from(lengths):
    cells = pack(lengths, 1, 0, CPU).groups[0].queries
    weights = torch.rand(*cells.shape, dtype=torch.float64)
    x = torch.rand(sum(lengths), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda y: cells.take(weights * cells.fill(y) ** 2, len(y)), (x,))
