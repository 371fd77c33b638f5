"""Pairs of a chosen and a rejected answer to one prompt: what reward models and DPO learn from.

Where it stands: beside :class:`hybridflow.data.prompts.SupervisedSource`, whose answers are here two a prompt.
Invariant: a pair is two neighbouring rows of a batch, the chosen one first, with the same ``group_ids``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hybridflow.config import DataConfig
from hybridflow.data.prompts import Prompt, SupervisedSource
from hybridflow.data.sources import Row, messages_of, read_records, row_from
from hybridflow.errors import DataError, nearest
from hybridflow.protocol.data import DataProto

REJECTED = "rejected"


class PairSource(SupervisedSource):
    """Prompts with a chosen and a rejected answer.

    A row has them in ``data.chosen_key`` and ``data.rejected_key``: texts beside a prompt, or whole conversations that
    differ in their last message (their prompt then needs no column). ``batch(start, count)`` has 2 * ``count`` rows and
    the further column ``chosen`` (bool). Held-out rows need no answers: they are prompts to be answered.
    """

    def _load(self, source: str, seed: int) -> list[Row]:
        rows = [
            row_from(_with_answers(record, where, self.config), where, self.config)
            for record, where in read_records(source)
        ]
        if not rows:
            raise DataError(f"{source} holds no rows. Give a file with at least one pair.")
        return rows

    def _answers(self, row: Row) -> Sequence[str]:
        if row.answer is None or REJECTED not in row.extra_info:
            raise DataError(
                f"{row.where}: no pair: the row has no column {self.config.chosen_key!r} (data.chosen_key). Name the "
                "columns of the two answers in data.chosen_key and data.rejected_key."
            )
        return [row.answer, row.extra_info[REJECTED]]

    def _collate(self, prompts: Sequence[Prompt], start: int) -> DataProto:
        chosen = torch.tensor([True, False] * len(prompts))
        return super()._collate(prompts, start).union(DataProto.from_dict({"chosen": chosen}))


class ComparedPairSource(PairSource):
    """Pairs to train on, and to be told apart: ``held_out`` gives pairs too."""

    answered = ("train", "evaluate")


def _with_answers(record: Any, where: str, config: DataConfig) -> Any:
    """The record with the chosen answer as its prompt's last message, and the rejected one's text as ``rejected``."""
    keys = (config.chosen_key, config.rejected_key)
    if not isinstance(record, Mapping) or all(record.get(key) is None for key in keys):
        return record
    for key, name, other in zip(keys, ("chosen_key", "rejected_key"), reversed(keys), strict=True):
        if record.get(key) is None:
            missing = f"{'value in ' if key in record else ''}column {key!r}"
            raise DataError(
                f"{where}: no {missing} (data.{name}) beside {other!r}.{'' if key in record else nearest(key, record)}"
            )
    prompt_key = config.prompt_key if record.get(config.prompt_key) is not None else "messages"
    prompt, texts = record.get(prompt_key), []
    if prompt is not None:
        prompt = messages_of(prompt, f"{where}, column {prompt_key!r}")
    for key in keys:
        text, before = _answer_of(record[key], f"{where}, column {key!r}")
        texts.append(text)
        prompt = before if prompt is None else prompt
        if before is not None and before != prompt:
            raise DataError(f"{where}: column {key!r} is a conversation with another prompt than the row's.")
    if texts[0] == texts[1]:
        raise DataError(f"{where}: the chosen and the rejected answer are equal: {texts[0]!r:.80}. Remove the row.")
    if prompt is None:
        raise DataError(f"{where}: no prompt: no column {config.prompt_key!r} (data.prompt_key), and texts as answers.")
    found = {key: value for key, value in record.items() if key not in (*keys, prompt_key)}
    found[prompt_key] = [*prompt, {"role": "assistant", "content": texts[0]}]
    extra = found.get("extra_info") or {}
    if isinstance(extra, Mapping):  # else the row is refused for it
        found["extra_info"] = {**extra, REJECTED: texts[1]}
    return found


def _answer_of(value: Any, where: str) -> tuple[str, Any]:
    """An answer's text and, of a conversation, the messages before it."""
    if isinstance(value, str):
        return value, None
    messages = messages_of(value, where) if isinstance(value, list) and value else []
    if not messages or messages[-1]["role"] != "assistant":
        raise DataError(f"{where}: an answer is a text, or a conversation that ends in an assistant message.")
    return messages[-1]["content"], messages[:-1]
