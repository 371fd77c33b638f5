"""A stream is the order of its source, whatever is taken and given back on the way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybridflow.config import DataConfig, RolloutConfig
from hybridflow.data.prompts import PromptSource
from hybridflow.data.stream import PromptStream
from hybridflow.errors import DataError


@pytest.fixture
def source(tmp_path: Path, tokenizer) -> PromptSource:
    path = tmp_path / "ten.jsonl"
    path.write_text("".join(json.dumps({"prompt": p, "ground_truth": p}) + "\n" for p in "abcdefghij"))
    return PromptSource(
        DataConfig(train=str(path), evaluate_share=0.0, prompts_per_step=4), tokenizer, RolloutConfig(), 0
    )


def test_steps_of_any_size_show_the_same_order(source: PromptSource):
    order = source.batch(0, 25)["uid"].tolist()
    stream = PromptStream(source)
    taken = [stream.take(count, step) for step, count in enumerate((4, 7, 1, 13), 1)]
    assert [uid for part in taken for uid in part["uid"].tolist()] == order
    assert [group for part in taken for group in part["group_ids"].tolist()] == list(range(25))
    assert [part.meta_info for part in taken] == [{"step": step} for step in (1, 2, 3, 4)]
    assert stream.position == 25


def test_what_is_given_back_comes_next(source: PromptSource):
    stream = PromptStream(source)
    first = stream.take(4, 1)["uid"].tolist()
    stream.give_back(3)
    assert stream.take(3, 2)["uid"].tolist() == first[1:]
    with pytest.raises(DataError, match=r"give_back\(5\): 4 prompts have been taken"):
        stream.give_back(5)


def test_a_stream_that_stands_where_another_stood_goes_on_as_it(source: PromptSource):
    one, other = PromptStream(source), PromptStream(source)
    one.take(11, 1)
    other.position = one.position
    assert other.take(9, 2)["uid"].tolist() == one.take(9, 2)["uid"].tolist()


def test_every_batch_carries_what_the_stream_is_given(source: PromptSource):
    stream = PromptStream(source)
    stream.meta["kl_coef"] = 0.5
    assert [stream.take(2, step).meta_info for step in (1, 1)] == [{"kl_coef": 0.5, "step": 1}] * 2
