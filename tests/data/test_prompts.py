"""Steps, epochs, the split and the limits of a prompt source."""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path

import pytest

from hybridflow.config import DataConfig, RolloutConfig
from hybridflow.data.demo import byte_tokenizer
from hybridflow.data.prompts import PromptSource, SupervisedSource, split_rows
from hybridflow.data.sources import Row
from hybridflow.errors import ConfigError, DataError, ModelError

USER, ASSISTANT, END = 258, 259, 260


def write_rows(path: Path, *prompts: str) -> str:
    path.write_text("".join(json.dumps({"prompt": p, "ground_truth": p.upper()}) + "\n" for p in prompts))
    return str(path)


@pytest.fixture
def ten(tmp_path: Path) -> str:
    return write_rows(tmp_path / "ten.jsonl", *"abcdefghij")


def source(train: str, tokenizer, seed: int = 0, kind=PromptSource, limits: RolloutConfig | None = None, **settings):
    settings = {"evaluate_share": 0.0, "prompts_per_step": 4, **settings}
    return kind(DataConfig(train=train, **settings), tokenizer, limits or RolloutConfig(), seed)


def uids(prompts: PromptSource, steps: range) -> list[int]:
    """What steps of 4 prompts each show; steps count from 1."""
    return [uid for step in steps for uid in prompts.batch(4 * (step - 1), 4)["uid"].tolist()]


def test_a_batch_has_the_columns_of_the_contract(ten: str, tokenizer):
    batch = source(ten, tokenizer, shuffle=False, system_prompt="S").batch(4, 4)
    assert batch["uid"].tolist() == [4, 5, 6, 7]
    assert batch["group_ids"].tolist() == [4, 5, 6, 7]
    assert batch.flat("prompts")[:6].tolist() == [257, ord("S"), END, USER, ord("e"), END]
    assert batch.lengths("prompts").tolist() == [7] * 4
    assert batch["messages"][0] == [{"role": "system", "content": "S"}, {"role": "user", "content": "e"}]
    assert list(batch["ground_truth"]) == ["E", "F", "G", "H"]
    assert list(batch["data_source"]) == ["ten"] * 4
    assert list(batch["extra_info"]) == [{}] * 4


def test_each_epoch_shows_each_prompt_once_and_its_end_runs_into_the_next(ten: str, tokenizer):
    seen = uids(source(ten, tokenizer), range(1, 6))
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert seen[:10] != seen[10:]


def test_a_batch_depends_on_seed_and_place_alone(ten: str, tokenizer):
    straight = source(ten, tokenizer)
    resumed = source(ten, tokenizer)
    assert uids(resumed, range(8, 10)) == uids(straight, range(1, 10))[-8:]
    assert uids(straight, range(1, 3)) == uids(resumed, range(1, 3))
    assert uids(source(ten, tokenizer, seed=1), range(1, 4)) != uids(straight, range(1, 4))


def test_without_shuffling_the_order_is_the_sources(ten: str, tokenizer):
    assert uids(source(ten, tokenizer, shuffle=False), range(1, 4)) == [*range(10), 0, 1]


def test_more_prompts_a_step_than_there_are_is_an_error(ten: str, tokenizer):
    with pytest.raises(ConfigError, match=r"data\.prompts_per_step=11 is more than the 10 training prompts"):
        source(ten, tokenizer, prompts_per_step=11)


def test_the_split_is_random_seeded_and_without_overlap(ten: str, tokenizer):
    first, again = (source(ten, tokenizer, evaluate_share=0.3) for _ in range(2))
    held_out = first.held_out()["uid"].tolist()
    assert len(first) == 7 and len(held_out) == 3
    assert sorted(held_out + uids(first, range(1, 8))[:7]) == list(range(10))
    assert again.held_out()["uid"].tolist() == held_out
    others = {tuple(source(ten, tokenizer, seed=s, evaluate_share=0.3).held_out()["uid"].tolist()) for s in range(8)}
    assert len(others) > 4


def test_equal_prompts_are_held_out_together():
    rows = [(i, Row([{"role": "user", "content": "ab"[i % 2]}])) for i in range(10)]
    train, held_out = split_rows(rows, 0.1, seed=0)
    assert len(train) == len(held_out) == 5
    assert {uid % 2 for uid, _ in train} != {uid % 2 for uid, _ in held_out}


def test_a_large_share_leaves_a_prompt_to_train_on():
    rows = [(i, Row([{"role": "user", "content": text}])) for i, text in enumerate("abc")]
    train, held_out = split_rows(rows, 0.99, seed=0)
    assert (len(train), len(held_out)) == (1, 2)


def test_one_prompt_for_all_rows_leaves_nothing_to_hold_out_and_says_so(tokenizer, tmp_path: Path):
    train = write_rows(tmp_path / "one.jsonl", *["1+1="] * 4)
    with pytest.raises(ConfigError) as error:
        source(train, tokenizer, evaluate_share=0.1)
    assert "data.evaluate_share=0.1: all 4 rows of" in str(error.value)
    assert "the same prompt, so none can be held out. Name other prompts in data.evaluate, or set" in str(error.value)
    prompts = source(train, tokenizer, evaluate_share=0)
    assert (len(prompts), len(prompts.held_out())) == (4, 0)


def test_the_first_held_out_prompts_are_a_constant_random_sample(ten: str, tokenizer):
    prompts = source(ten, tokenizer, evaluate=ten, evaluate_share=0.5)
    order = prompts.held_out()["uid"].tolist()
    assert sorted(order) == list(range(10)) != order
    assert prompts.held_out()["uid"].tolist() == order


def test_nothing_held_out_is_a_batch_without_rows(ten: str, tokenizer):
    assert len(source(ten, tokenizer).held_out()) == 0


@pytest.mark.parametrize(("start", "count"), [(-1, 4), (0, 0)])
def test_there_are_no_prompts_before_the_first(ten: str, tokenizer, start: int, count: int):
    with pytest.raises(DataError, match="places count from 0"):
        source(ten, tokenizer).batch(start, count)


def test_a_tokenizer_that_cannot_be_used_is_refused(ten: str):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ModelError, match="has no chat template"):
        source(ten, tokenizer)


def test_a_prompt_without_tokens_is_refused_with_its_row(ten: str):
    empty = byte_tokenizer()
    empty.chat_template = "{% if messages[0]['content'] != 'c' %}{{ messages[0]['content'] }}{% endif %}"
    with pytest.raises(DataError, match=r"ten\.jsonl, line 3: the chat template makes no tokens of the conversation"):
        source(ten, empty)


def test_evaluation_prompts_that_are_trained_on_are_counted(ten: str, tokenizer, tmp_path: Path, caplog):
    other = write_rows(tmp_path / "other.jsonl", "a", "x", "b")
    with caplog.at_level(logging.WARNING):
        source(ten, tokenizer, evaluate=other)
    assert "2 of 3 evaluation prompts" in caplog.text


def test_procedural_evaluation_prompts_are_not_the_training_prompts(tokenizer, caplog):
    task = "reasoning_gym:chain_sum"
    options = {"size": 20, "min_digits": 4, "min_terms": 4}
    prompts = source(task, tokenizer, evaluate=task, options=options)
    assert len(prompts.held_out()) == len(prompts) == 20
    assert not caplog.text


def test_a_prompt_that_is_too_long_is_an_error_that_names_it(tokenizer, tmp_path: Path):
    path = write_rows(tmp_path / "a.jsonl", "a", "b" * 30, "c", "d" * 40)
    with pytest.raises(DataError) as caught:
        source(path, tokenizer, limits=RolloutConfig(max_prompt_tokens=32), prompts_per_step=2)
    message = str(caught.value)
    assert "2 of 4 rows" in message and "a.jsonl, line 2: 33 tokens, rollout.max_prompt_tokens=32" in message
    assert "has 43 tokens" in message and "data.long_prompts=filter" in message


def test_long_prompts_are_filtered_and_counted_and_never_cut(tokenizer, tmp_path: Path):
    path = write_rows(tmp_path / "a.jsonl", "a", "b" * 30, "c", "d" * 40)
    limits = RolloutConfig(max_prompt_tokens=32)
    prompts = source(path, tokenizer, limits=limits, prompts_per_step=2, long_prompts="filter")
    assert sorted(prompts.batch(0, 2)["uid"].tolist()) == [0, 2]
    assert prompts.dropped == {"train": 2, "evaluate": 0}
    assert "dropped as too long: 2 of train" in prompts.describe()
    with pytest.raises(DataError, match="All 4 rows were dropped"):
        source(path, tokenizer, limits=RolloutConfig(max_prompt_tokens=3), long_prompts="filter")


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"long_prompts": "truncate"}, "data.long_prompts='truncate'"),
        ({"evaluate_share": 1.0}, "data.evaluate_share=1.0"),
        ({"prompts_per_step": 0}, "data.prompts_per_step=0"),
    ],
)
def test_settings_out_of_range_are_refused(ten: str, tokenizer, settings: dict, wanted: str):
    with pytest.raises(ConfigError, match=wanted):
        source(ten, tokenizer, **settings)


def test_answers_are_learnt_with_their_end(ten: str, tokenizer):
    batch = source(ten, tokenizer, kind=SupervisedSource, shuffle=False).batch(0, 4)
    assert batch.flat("responses").tolist() == [x for letter in b"ABCD" for x in (letter, END)]
    assert batch.flat("response_mask").tolist() == [True] * 8
    assert batch.lengths("response_mask").tolist() == [2] * 4
    assert batch.flat("prompts")[:4].tolist() == [USER, ord("a"), END, ASSISTANT]


def test_the_final_assistant_message_is_learnt_rather_than_the_ground_truth(tokenizer, tmp_path: Path):
    talk = [{"role": "user", "content": "2+3="}, {"role": "assistant", "content": "It is 5"}]
    path = tmp_path / "talk.jsonl"
    path.write_text(json.dumps({"messages": talk, "ground_truth": 5}))
    batch = source(str(path), tokenizer, kind=SupervisedSource, prompts_per_step=1).batch(0, 1)
    assert batch.flat("responses").tolist() == [*b"It is 5", END]
    assert list(batch["ground_truth"]) == [5]


def test_held_out_prompts_of_supervised_training_have_no_answers(ten: str, tokenizer):
    batch = source(ten, tokenizer, kind=SupervisedSource, evaluate_share=0.3).held_out()
    assert "responses" not in batch and len(batch) == 3


def test_an_answer_that_is_too_long_or_missing_is_refused(ten: str, tokenizer):
    with pytest.raises(DataError, match=r"an answer of 2 tokens, rollout\.max_tokens=1"):
        source(ten, tokenizer, kind=SupervisedSource, limits=RolloutConfig(max_tokens=1))
    with pytest.raises(DataError, match=r"ten.jsonl, line 1: nothing to learn"):
        source(ten, tokenizer, kind=SupervisedSource, answer_key="")


def test_the_demo_trains_and_evaluates_on_different_sums(demo: Path, tokenizer):
    prompts = source(str(demo / "train.jsonl"), tokenizer, evaluate=str(demo / "heldout.jsonl"))
    assert (len(prompts), len(prompts.held_out())) == (7290, 810)
    held_out = [messages[0]["content"] for messages in prompts.held_out()["messages"]]
    # A rule on the operands would hold out whole families: each last digit of the sum has to be there, none all of it.
    digits = Counter(sum(map(int, text[:-1].split("+"))) % 10 for text in held_out)
    assert len(digits) == 10 and max(digits.values()) < 130
