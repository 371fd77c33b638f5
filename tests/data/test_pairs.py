"""Pairs: how rows are read, what a batch of them is, and what each broken row is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hybridflow.config import DataConfig, RolloutConfig
from hybridflow.data.demo import SPECIAL_TOKENS
from hybridflow.data.pairs import PairSource
from hybridflow.errors import DataError

END = 256 + SPECIAL_TOKENS.index("<|end|>")
PROMPT = [{"role": "user", "content": "2+3="}]


def said(text: str) -> list[dict[str, str]]:
    """A conversation that ends in an answer."""
    return [*PROMPT, {"role": "assistant", "content": text}]


def source(path: Path, tokenizer, *rows: Any, **settings: Any) -> PairSource:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(train=str(path), **{"prompts_per_step": 1, "evaluate_share": 0, "shuffle": False, **settings})
    return PairSource(config, tokenizer, RolloutConfig(max_tokens=16), seed=0)


def test_a_pair_is_two_rows_the_chosen_answer_first(tokenizer, tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": "no"} for i in range(3)]
    batch = source(tmp_path / "a.jsonl", tokenizer, *rows).batch(1, 2)
    assert batch["chosen"].tolist() == [True, False, True, False]
    assert batch["group_ids"].tolist() == [1, 1, 2, 2]
    assert batch["uid"].tolist() == [1, 1, 2, 2]
    assert batch.lengths("responses").tolist() == [2, 3, 2, 3]
    assert batch.flat("responses").tolist() == [ord("2"), END, *b"no", END, ord("3"), END, *b"no", END]
    assert batch.flat("response_mask").all()
    assert batch.lengths("prompts").tolist() == [7] * 4


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2+3=", "chosen": "5", "rejected": "6"},
        {"prompt": PROMPT, "chosen": "5", "rejected": "6"},
        {"messages": PROMPT, "chosen": said("5"), "rejected": said("6")},
        {"chosen": said("5"), "rejected": said("6")},
        {"prompt": "2+3=", "chosen": said("5"), "rejected": said("6")},
    ],
)
def test_texts_and_conversations_are_the_same_pair(row: dict[str, Any], tokenizer, tmp_path: Path) -> None:
    batch = source(tmp_path / "a.jsonl", tokenizer, row).batch(0, 1)
    assert batch.flat("responses").tolist() == [ord("5"), END, ord("6"), END]
    assert list(batch["messages"]) == [PROMPT, PROMPT]
    assert list(batch["ground_truth"]) == ["5", "5"]


def test_a_column_of_extra_info_does_not_take_the_place_of_the_rejected_answer(tokenizer, tmp_path: Path) -> None:
    row = {"prompt": "2+3=", "chosen": "5", "rejected": "6", "extra_info": {"rejected": "9", "index": 1}}
    batch = source(tmp_path / "a.jsonl", tokenizer, row).batch(0, 1)
    assert batch.flat("responses").tolist() == [ord("5"), END, ord("6"), END]
    assert batch["extra_info"][0]["index"] == 1


def test_columns_have_the_names_that_the_settings_say(tokenizer, tmp_path: Path) -> None:
    row = {"question": "2+3=", "good": "5", "bad": "6", "ground_truth": "five"}
    found = source(tmp_path / "a.jsonl", tokenizer, row, prompt_key="question", chosen_key="good", rejected_key="bad")
    batch = found.batch(0, 1)
    assert batch.flat("responses").tolist() == [ord("5"), END, ord("6"), END]
    assert list(batch["ground_truth"]) == ["five", "five"]


def test_held_out_rows_are_prompts_with_or_without_answers(tokenizer, tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text(json.dumps({"prompt": "1+1=", "ground_truth": "2"}) + "\n")
    pair = {"prompt": "2+3=", "chosen": "5", "rejected": "6"}
    held_out = source(tmp_path / "a.jsonl", tokenizer, pair, evaluate=str(tmp_path / "b.jsonl")).held_out()
    assert len(held_out) == 1 and "responses" not in held_out
    split = source(tmp_path / "a.jsonl", tokenizer, pair, {**pair, "prompt": "4+1="}, evaluate_share=0.5)
    assert (len(split), len(split.held_out())) == (1, 1)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "ground_truth": "b"}, "line 1: no pair: the row has no column 'chosen' (data.chosen_key)"),
        (
            {"prompt": "a", "chosen": "b", "rejectd": "c"},
            "line 1: no column 'rejected' (data.rejected_key) beside 'chosen'. Did you mean 'rejectd'?",
        ),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "line 1: the chosen and the rejected answer are equal: 'b'"),
        ({"chosen": "b", "rejected": "c"}, "line 1: no prompt: no column 'prompt' (data.prompt_key)"),
        (
            {"prompt": "a", "chosen": None, "rejected": "c"},
            "no value in column 'chosen' (data.chosen_key) beside 'rejec",
        ),
        (
            {"prompt": 5, "chosen": "b", "rejected": "c"},
            "column 'prompt': a prompt is a text or a list of messages, not 5",
        ),
        ({"prompt": "", "chosen": "b", "rejected": "c"}, "column 'prompt': the prompt is empty."),
        ({"prompt": "other", "chosen": said("b"), "rejected": said("c")}, "is a conversation with another prompt than"),
        ({"prompt": "a", "chosen": "b", "rejected": "\ud800"}, r"line 1: '\ud800' is one half of a pair (surrogate)"),
        (
            {"chosen": said("b"), "rejected": [*PROMPT, {"role": "assistant", "content": "c", "tool_calls": [1]}]},
            "column 'rejected': message 2 has 'tool_calls', which would not reach the model",
        ),
        ({"chosen": said("b"), "rejected": [{"role": "user", "content": "x"}, *said("c")[1:]]}, "with another prompt"),
        ({"prompt": "a", "chosen": "b", "rejected": PROMPT}, "column 'rejected': an answer is a text, or a"),
        ({"prompt": "a", "chosen": 3, "rejected": "c"}, "column 'chosen': an answer is a text, or a conversation"),
        ({"prompt": "a", "chosen": "b" * 30, "rejected": "c"}, "an answer of 31 tokens, rollout.max_tokens=16"),
        ([1], "line 1: a row is an object with columns, not list."),
    ],
)
def test_a_row_that_is_no_pair_is_told_why(row: Any, message: str, tokenizer, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        source(tmp_path / "a.jsonl", tokenizer, row)
    assert message in str(caught.value)


def test_the_pairs_of_the_demo_are_a_sum_and_one_with_a_wrong_digit(demo: Path) -> None:
    rows = [json.loads(line) for line in (demo / "pairs.jsonl").open()]
    train = [json.loads(line) for line in (demo / "train.jsonl").open()]
    assert [row["prompt"] for row in rows] == [row["messages"] for row in train]
    for row in rows:
        a, b = row["prompt"][0]["content"].rstrip("=").split("+")
        assert int(row["chosen"]) == int(a) + int(b)
        assert len(row["rejected"]) == len(row["chosen"])
        assert sum(x != y for x, y in zip(row["chosen"], row["rejected"], strict=True)) == 1
