"""A tokenizer that would go wrong in silence is refused; texts and ids go to and fro exactly."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from hybridflow.data.chat import (
    answer_text,
    check_tokenizer,
    decode,
    encode,
    end_of_turn,
    prompt_text,
    with_system_prompt,
)
from hybridflow.data.demo import byte_tokenizer
from hybridflow.data.prompts import special_ids
from hybridflow.errors import DataError, ModelError
from hybridflow.models.tokenizer import load_tokenizer

MESSAGES = [{"role": "user", "content": "23+45="}]
USER, ASSISTANT, END = 258, 259, 260

# The shape of Qwen's and SmolLM2's templates: text behind the role, a line break behind the end of turn.
CHATML = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] | trim + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


def test_a_prompt_ends_where_the_assistant_begins(tokenizer):
    (ids,) = encode(tokenizer, [prompt_text(tokenizer, MESSAGES)])
    assert ids == [USER, *b"23+45=", END, ASSISTANT]
    assert ids == tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)


def test_an_answer_ends_with_the_token_that_ends_the_turn(tokenizer):
    (ids,) = encode(tokenizer, [answer_text(tokenizer, MESSAGES, "68")])
    assert end_of_turn(tokenizer, ids, special_ids(tokenizer)) == [*b"68", END]


def test_blanks_behind_the_end_of_turn_are_not_learnt():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHATML
    (ids,) = encode(tokenizer, [answer_text(tokenizer, MESSAGES, " 68 ")])
    assert ids == [*b"68", END, ord("\n")]
    assert end_of_turn(tokenizer, ids, special_ids(tokenizer)) == [*b"68", END]


def test_a_template_without_an_end_of_turn_gets_the_end_of_sequence_token():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] + '\n' }}{% endfor %}"
    (ids,) = encode(tokenizer, [answer_text(tokenizer, MESSAGES, "68")])
    assert end_of_turn(tokenizer, ids, special_ids(tokenizer)) == [*b"68\n", END]


def test_a_template_that_rewrites_the_prompt_is_refused_for_answers():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ messages | length }}{{ messages[-1]['content'] }}"
    with pytest.raises(DataError, match="row 1: the chat template writes the prompt differently"):
        answer_text(tokenizer, MESSAGES, "68", "row 1")


def test_a_conversation_that_the_template_refuses_names_its_row():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('only users speak') }}"
    with pytest.raises(DataError, match="row 7: the chat template refuses the conversation: only users speak"):
        prompt_text(tokenizer, MESSAGES, "row 7")


def test_a_template_that_fails_names_the_row():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] + 1 }}"
    with pytest.raises(DataError, match="row 7: the chat template refuses the conversation: can only concatenate str"):
        prompt_text(tokenizer, MESSAGES, "row 7")


def test_every_byte_survives_and_special_tokens_do_not_show(tokenizer):
    text = "hä? \x00\n✓ 😀"
    (ids,) = encode(tokenizer, [text])
    assert ids == list(text.encode())
    assert decode(tokenizer, [[*ids, END]]) == [text]


def test_the_system_prompt_stands_before_rows_that_have_none():
    system = {"role": "system", "content": "Be brief."}
    assert with_system_prompt(MESSAGES, "Be brief.") == [system, *MESSAGES]
    assert with_system_prompt([system, *MESSAGES], "Be long.") == [system, *MESSAGES]
    assert with_system_prompt(MESSAGES, "") == MESSAGES


def test_a_tokenizer_without_a_chat_template_is_refused_with_the_fix(demo: Path, tmp_path: Path):
    shutil.copytree(demo / "model", tmp_path / "base")
    (tmp_path / "base" / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match=r"tokenizer at .*base has no chat template.*model\.tokenizer_path"):
        check_tokenizer(load_tokenizer(str(tmp_path / "base")))


@pytest.mark.parametrize("name", ["pad_token", "eos_token"])
def test_a_pad_or_end_token_that_is_real_text_is_refused(demo: Path, tmp_path: Path, name: str):
    shutil.copytree(demo / "model", tmp_path / "odd")
    path = tmp_path / "odd" / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: "!"}))
    with pytest.raises(ModelError, match=rf"{name} is '!' \(id 33\), which ordinary text is made of"):
        check_tokenizer(load_tokenizer(str(tmp_path / "odd")))


def test_a_pad_token_that_is_the_end_token_is_harmless():
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    check_tokenizer(tokenizer)
    tokenizer.pad_token = None
    check_tokenizer(tokenizer)
