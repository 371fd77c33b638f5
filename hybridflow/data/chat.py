"""Conversations to token ids and back, by the tokenizer's own chat template.

Where it stands: between rows and batches. Invariants: the ids of a prompt end where the model has to begin, so a
response is exactly what the model chose; nothing is cut.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from hybridflow.errors import DataError, ModelError

Messages = list[dict[str, str]]
Tokenizer = Any
"""A transformers tokenizer (``PreTrainedTokenizerBase``); its own annotations are too wide to be of use."""


def check_tokenizer(tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer that would go wrong in silence.

    A padding token that is also the end-of-sequence token is fine: token columns are jagged and nothing is padded with
    it. A padding or end-of-sequence token that ordinary text contains is not: answers would lose that text when they
    are decoded, and end at it.

    Raises:
        ModelError: without a chat template or an end-of-sequence token, or with a pad or end token that is real text.
    """
    folder = tokenizer.name_or_path or "(made in this process)"
    if not tokenizer.chat_template:
        raise ModelError(
            f"tokenizer at {folder} has no chat template. Base models often have none: use the instruct model's "
            "tokenizer (model.tokenizer_path), or write the template to chat_template.jinja in that folder."
        )
    if tokenizer.eos_token_id is None:
        raise ModelError(f"tokenizer at {folder} has no eos_token: answers would never end. Set it in its config.")
    for name in ("pad_token", "eos_token"):
        token, token_id = getattr(tokenizer, name), getattr(tokenizer, f"{name}_id")
        if token_id is not None and _is_text(tokenizer, token, token_id):
            raise ModelError(
                f"tokenizer at {folder}: {name} is {token!r} (id {token_id}), which ordinary text is made of: answers "
                f"would lose it. Set {name} in tokenizer_config.json to a token of its own"
                + (f", or to the eos_token {tokenizer.eos_token!r}." if name == "pad_token" else ".")
            )


def _is_text(tokenizer: Tokenizer, token: str, token_id: int) -> bool:
    """Whether text that is no marker like ``<|end|>`` or ``[PAD]`` encodes to this id."""
    core = getattr(tokenizer, "backend_tokenizer", None)
    if core is None or re.fullmatch(r"<.+>|\[.+\]", token):
        return False
    from tokenizers import Tokenizer

    # The same model without its added tokens: those match their own spelling before the model sees any text.
    plain = Tokenizer(core.model)
    plain.normalizer, plain.pre_tokenizer, plain.decoder = core.normalizer, core.pre_tokenizer, core.decoder
    return plain.encode(plain.decode([token_id]), add_special_tokens=False).ids == [token_id]


def with_system_prompt(messages: Messages, system_prompt: str) -> Messages:
    """The conversation with ``system_prompt`` before it, unless it is empty or the conversation has its own."""
    if not system_prompt or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system_prompt}, *messages]


def prompt_text(tokenizer: Tokenizer, messages: Messages, where: str = "") -> str:
    """The conversation as the template writes it, up to the point where the assistant speaks.

    Raises:
        DataError: naming ``where``, if the template refuses the conversation (a role it does not know, say).
    """
    return _template(tokenizer, messages, where, add_generation_prompt=True)


def answer_text(tokenizer: Tokenizer, messages: Messages, answer: str, where: str = "") -> str:
    """What follows :func:`prompt_text` when the assistant says ``answer``: the answer and the template's end of turn.

    Raises:
        DataError: if the template writes the conversation differently once it has an answer.
    """
    prompt = prompt_text(tokenizer, messages, where)
    whole = _template(tokenizer, [*messages, {"role": "assistant", "content": answer}], where)
    if not whole.startswith(prompt):
        raise DataError(
            f"{where}: the chat template writes the prompt differently with and without an answer, so the answer's "
            f"tokens cannot be told apart. Prompt ends {prompt[-60:]!r}; conversation ends {whole[-60:]!r}."
        )
    return whole[len(prompt) :]


def _template(tokenizer: Tokenizer, messages: Messages, where: str, **options: Any) -> str:
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except Exception as error:  # a template is a program: besides refusing, it may fail in any way
        raise DataError(f"{where}: the chat template refuses the conversation: {error}") from error
    half = re.search("[\ud800-\udfff]", text)
    if half:
        raise DataError(f"{where}: {half[0]!r} is one half of a pair (surrogate), which is no text. Mend or remove it.")
    return text


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of texts that a template wrote (special tokens stand in the text already)."""
    return tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else []


def end_of_turn(tokenizer: Tokenizer, ids: Sequence[int], special: set[int]) -> list[int]:
    """The ids of :func:`answer_text` up to and with the token that ends the turn.

    Templates write blanks behind that token, which the model never has to produce. Where a template ends a turn without
    a special token, the end-of-sequence token is added.

    Args:
        tokenizer: gives the end-of-sequence token, and decodes.
        ids: ids of the answer's text.
        special: ids of the special tokens.
    """
    last = max((i for i, token in enumerate(ids) if token in special), default=-1)
    if last >= 0 and not tokenizer.decode(ids[last + 1 :]).strip():
        return list(ids[: last + 1])
    return [*ids, tokenizer.eos_token_id]


def decode(tokenizer: Tokenizer, rows: Sequence[Sequence[int]]) -> list[str]:
    """Texts of responses without special tokens."""
    return [tokenizer.decode(list(ids), skip_special_tokens=True) for ids in rows]
