"""The prompts of every training step, and the ones held out.

Where it stands: first in the flow; a batch is what the rollout (or, with answers, the supervised update) takes.
Invariants: ``batch`` is a function of (seed, place) alone, so a resumed run needs to know only its place
(:mod:`hybridflow.data.stream`); every epoch shows each prompt once; where one source is split, no prompt is both held
out and trained on; nothing is cut.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from hybridflow.config import DataConfig, RolloutConfig
from hybridflow.data.chat import (
    Tokenizer,
    answer_text,
    check_tokenizer,
    encode,
    end_of_turn,
    prompt_text,
    with_system_prompt,
)
from hybridflow.data.sources import Row, load_rows, stream_seed
from hybridflow.errors import ConfigError, DataError
from hybridflow.protocol.data import DataProto

log = logging.getLogger(__name__)

LONG_PROMPTS = ("error", "filter")


@dataclass(frozen=True)
class Prompt:
    """A row with its token ids.

    Attributes:
        uid: number of the row in its source.
        row: what the source says; ``row.messages`` begins with the system prompt.
        ids: token ids up to where the model begins.
        responses: token ids of the answers to learn from, each with its end of turn.
    """

    uid: int
    row: Row
    ids: list[int]
    responses: tuple[list[int], ...] = ()


class PromptSource:
    """Prompts to sample from.

    Args:
        config: the sources and how to read them.
        tokenizer: the model's; checked by :func:`hybridflow.data.chat.check_tokenizer`.
        limits: ``max_prompt_tokens`` and, for answers, ``max_tokens``.
        seed: of the split, of the order and of procedural tasks.

    Raises:
        DataError: for rows that cannot be read, and for long ones where ``data.long_prompts`` is ``error``.
        ConfigError: for settings that contradict the data.
        ModelError: for a tokenizer without a chat template, or whose pad or end token is real text.

    Attributes:
        dropped: rows left out for their length, by part (``train``, ``evaluate``).
    """

    def __init__(self, config: DataConfig, tokenizer: Tokenizer, limits: RolloutConfig, seed: int) -> None:
        if config.long_prompts not in LONG_PROMPTS:
            raise ConfigError(f"data.long_prompts={config.long_prompts!r}: choose {' or '.join(LONG_PROMPTS)}.")
        if not 0 <= config.evaluate_share < 1:
            raise ConfigError(f"data.evaluate_share={config.evaluate_share}: choose a share from 0 up to below 1.")
        if config.prompts_per_step < 1:
            raise ConfigError(f"data.prompts_per_step={config.prompts_per_step}: choose at least 1.")
        check_tokenizer(tokenizer)
        self.config, self.tokenizer, self.limits, self.seed = config, tokenizer, limits, seed
        self.dropped: dict[str, int] = {}
        rows = self._numbered(config.train, seed)
        if config.evaluate:
            held_out = self._numbered(config.evaluate, stream_seed("evaluate", seed))
            self._warn_of_overlap(rows, held_out)
        else:
            rows, held_out = split_rows(rows, config.evaluate_share, seed)
            if config.evaluate_share and not held_out:
                raise ConfigError(
                    f"data.evaluate_share={config.evaluate_share}: all {len(rows)} rows of {config.train} have one and "
                    "the same prompt, so none can be held out. Name other prompts in data.evaluate, or set "
                    "data.evaluate_share=0 to go without evaluation."
                )
        self._train = self._prompts(rows, "train")
        self._held_out = self._prompts(held_out, "evaluate")
        if config.prompts_per_step > len(self._train):
            raise ConfigError(
                f"data.prompts_per_step={config.prompts_per_step} is more than the {len(self._train)} training prompts "
                f"of {config.train} ({len(held_out)} held out, {self.dropped['train']} dropped as too long). Lower it, "
                "or give more prompts (data.options.size for a procedural task)."
            )
        self._orders: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        """Training prompts of one epoch."""
        return len(self._train)

    def batch(self, start: int, count: int) -> DataProto:
        """The ``count`` prompts from place ``start`` on of one endless row of epochs.

        A batch may hold the end of one epoch and the start of the next.

        Returns:
            ``prompts`` (jagged int64), ``uid`` (int64), ``group_ids`` (int64: the places, so that no two prompts of a
            run share one), ``messages``, ``ground_truth``, ``data_source``, ``extra_info``.

        Raises:
            DataError: for a negative place or no prompts.
        """
        if start < 0 or count < 1:
            raise DataError(f"There are no prompts at {start} to {start + count}: places count from 0.")
        places = (divmod(place, len(self._train)) for place in range(start, start + count))
        return self._collate([self._train[self._order(epoch)[place]] for epoch, place in places], start)

    def held_out(self) -> DataProto:
        """All held-out prompts with the columns of :meth:`batch`; no rows where nothing is held out.

        Their order is random but always the same, so the first n of them are a fair and constant sample.
        """
        order = np.random.default_rng([self.seed, 2]).permutation(len(self._held_out))
        prompts = [self._held_out[i] for i in order]
        return self._collate(prompts, 0) if any(prompt.responses for prompt in prompts) else collate(prompts)

    def describe(self) -> str:
        """What was read, in one line."""
        lengths = [len(prompt.ids) for prompt in self._train]
        text = (
            f"{len(self._train)} prompts from {self.config.train} ({min(lengths)} to {max(lengths)} tokens, mean "
            f"{sum(lengths) / len(lengths):.1f}), {len(self._held_out)} held out"
            + (f" from {self.config.evaluate}" if self.config.evaluate else "")
        )
        dropped = ", ".join(f"{count} of {part}" for part, count in self.dropped.items() if count)
        return text + (f"; dropped as too long: {dropped}" if dropped else "")

    def _collate(self, prompts: Sequence[Prompt], start: int) -> DataProto:
        return collate(prompts, start)

    def _numbered(self, source: str, seed: int) -> list[tuple[int, Row]]:
        rows = self._load(source, seed)
        return [(uid, _with_messages(row, self.config.system_prompt)) for uid, row in enumerate(rows)]

    def _load(self, source: str, seed: int) -> list[Row]:
        return load_rows(source, self.config, seed)

    def _order(self, epoch: int) -> np.ndarray:
        """Order of the training prompts in an epoch."""
        if not self.config.shuffle:
            return np.arange(len(self._train))
        if epoch not in self._orders:
            self._orders = {e: order for e, order in self._orders.items() if e == epoch - 1}
            self._orders[epoch] = np.random.default_rng([self.seed, 1, epoch]).permutation(len(self._train))
        return self._orders[epoch]

    def _prompts(self, rows: Sequence[tuple[int, Row]], part: str) -> list[Prompt]:
        """Tokenise, and treat rows over the limits as ``data.long_prompts`` says."""
        ids = encode(self.tokenizer, [prompt_text(self.tokenizer, row.messages, row.where) for _, row in rows])
        responses = self._responses([row for _, row in rows], part)
        prompts = [Prompt(uid, row, i, r) for (uid, row), i, r in zip(rows, ids, responses, strict=True)]
        empty = next((prompt.row.where for prompt in prompts if not prompt.ids), None)
        if empty is not None:
            raise DataError(
                f"{empty}: the chat template makes no tokens of the conversation. Mend the row or the template."
            )
        kept = [prompt for prompt in prompts if not self._too_long(prompt)]
        self.dropped[part] = len(prompts) - len(kept)
        if self.dropped[part] and self.config.long_prompts == "error":
            first = next(prompt for prompt in prompts if self._too_long(prompt))
            raise DataError(
                f"{self.dropped[part]} of {len(prompts)} rows are too long; the first is {first.row.where}: "
                f"{self._too_long(first)}. The longest prompt has {max(len(i) for i in ids)} tokens. Raise the limit, "
                "or set data.long_prompts=filter to drop and count such rows. Nothing is ever cut."
            )
        if prompts and not kept:
            raise DataError(f"All {len(prompts)} rows were dropped as too long ({self._too_long(prompts[0])}).")
        return kept

    def _responses(self, rows: Sequence[Row], part: str) -> list[tuple[list[int], ...]]:
        return [()] * len(rows)

    def _too_long(self, prompt: Prompt) -> str:
        """What is too long about a prompt; empty if nothing is."""
        if len(prompt.ids) > self.limits.max_prompt_tokens:
            return f"{len(prompt.ids)} tokens, rollout.max_prompt_tokens={self.limits.max_prompt_tokens}"
        return ""

    def _warn_of_overlap(self, rows: Sequence[tuple[int, Row]], held_out: Sequence[tuple[int, Row]]) -> None:
        seen = {_identity(row) for _, row in rows}
        both = sum(_identity(row) in seen for _, row in held_out)
        if both:
            log.warning(
                "%d of %d evaluation prompts of %s also stand in the training prompts of %s.",
                both,
                len(held_out),
                self.config.evaluate,
                self.config.train,
            )


class SupervisedSource(PromptSource):
    """Prompts with the answers to learn: the final assistant message of a row, else its ground truth.

    ``batch`` has the further columns ``responses`` (jagged int64, end of turn included) and ``response_mask`` (jagged
    bool, all true). ``held_out`` gives prompts alone, to be answered by the model and scored.
    """

    answered: tuple[str, ...] = ("train",)
    """Parts of the data whose rows have answers to learn."""

    def _collate(self, prompts: Sequence[Prompt], start: int) -> DataProto:
        responses = [torch.tensor(response, dtype=torch.int64) for prompt in prompts for response in prompt.responses]
        answers = DataProto.from_dict(
            tensors={
                "responses": DataProto.jagged(responses),
                "response_mask": DataProto.jagged([torch.ones(len(r), dtype=torch.bool) for r in responses]),
            }
        )
        return collate(prompts, start).repeat(len(responses) // len(prompts)).union(answers)

    def _answers(self, row: Row) -> Sequence[str]:
        """The texts to learn from, as many for each row."""
        answer = row.ground_truth if row.answer is None else row.answer
        if answer is None:
            raise DataError(
                f"{row.where}: nothing to learn: no final assistant message and no ground truth. Set data.answer_key."
            )
        return [str(answer)]

    def _responses(self, rows: Sequence[Row], part: str) -> list[tuple[list[int], ...]]:
        if part not in self.answered:
            return [()] * len(rows)
        special = special_ids(self.tokenizer)
        texts = [
            [answer_text(self.tokenizer, row.messages, answer, row.where) for answer in self._answers(row)]
            for row in rows
        ]
        encoded = encode(self.tokenizer, [text for answers in texts for text in answers])
        ids = iter([end_of_turn(self.tokenizer, row, special) for row in encoded])
        found = [tuple(list(next(ids)) for _ in answers) for answers in texts]
        ends = sorted({ids[-1] for answers in found for ids in answers if ids[-1] != self.tokenizer.eos_token_id})
        if ends:
            log.warning(
                "The chat template ends a turn with %s, not with the eos_token %r: unless the model's generation "
                "config stops there too, set rollout.stop_token_ids=%s.",
                self.tokenizer.convert_ids_to_tokens(ends),
                self.tokenizer.eos_token,
                ends,
            )
        return found

    def _too_long(self, prompt: Prompt) -> str:
        longest = max(map(len, prompt.responses), default=0)
        if longest > self.limits.max_tokens:
            return f"an answer of {longest} tokens, rollout.max_tokens={self.limits.max_tokens}"
        return super()._too_long(prompt)


def split_rows(
    rows: Sequence[tuple[int, Row]], share: float, seed: int
) -> tuple[list[tuple[int, Row]], list[tuple[int, Row]]]:
    """Split rows at random into training and held-out rows; equal prompts stay on one side.

    Returns:
        Both parts in the order of the source. The held-out part has about ``share`` of the different prompts; where
        ``share`` is above 0 and there are two, neither part is empty.
    """
    prompts = list(dict.fromkeys(_identity(row) for _, row in rows))
    wanted = min(max(1, round(share * len(prompts))), len(prompts) - 1) if share and prompts else 0
    order = np.random.default_rng([seed, 0]).permutation(len(prompts))
    chosen = {prompts[i] for i in order[:wanted]}
    train = [pair for pair in rows if _identity(pair[1]) not in chosen]
    return train, [pair for pair in rows if _identity(pair[1]) in chosen]


def collate(prompts: Sequence[Prompt], start: int = 0) -> DataProto:
    """Prompts as a batch; ``group_ids`` number them from ``start`` on."""
    return DataProto.from_dict(
        tensors={
            "prompts": DataProto.jagged([prompt.ids for prompt in prompts], dtype=torch.int64),
            "uid": torch.tensor([prompt.uid for prompt in prompts], dtype=torch.int64),
            "group_ids": torch.arange(start, start + len(prompts), dtype=torch.int64),
        },
        non_tensors={
            key: [getattr(prompt.row, key) for prompt in prompts]
            for key in ("messages", "ground_truth", "data_source", "extra_info")
        },
    )


def special_ids(tokenizer: Tokenizer) -> set[int]:
    """Ids of all tokens that the tokenizer marks as special."""
    marked = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return marked | set(tokenizer.all_special_ids)


def _with_messages(row: Row, system_prompt: str) -> Row:
    return replace(row, messages=with_system_prompt(row.messages, system_prompt))


def _identity(row: Row) -> tuple[tuple[str, str], ...]:
    return tuple((message["role"], message["content"]) for message in row.messages)
