"""Models that score whole texts, prompt and answer: the roles reward and cost as one, and such a model in training.

Where it stands: :class:`RewardModelWorker` is in place of :class:`hybridflow.workers.reward.RewardWorker` where the
role's settings name a ``path``; :class:`RewardModelTrainer` is the actor of examples/reward_model.py.
Invariant: the score is the one at the text's last token, as transformers' ``ForSequenceClassification`` gives it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from hybridflow.data.batching import by_work
from hybridflow.data.chat import decode
from hybridflow.models.tokenizer import load_tokenizer
from hybridflow.protocol.data import DataProto
from hybridflow.protocol.transfer import Protocol
from hybridflow.rewards.scorer import Scores
from hybridflow.workers.base import register
from hybridflow.workers.model import ModelWorker, rows_of
from hybridflow.workers.reward import columns_of
from hybridflow.workers.trained import TrainedWorker

if TYPE_CHECKING:
    from hybridflow.config import RewardConfig

KIND = "ForSequenceClassification"


class RewardModelWorker(ModelWorker):
    """Scores answers by the model in the role's ``path``, in the role's own layout."""

    def setup(self) -> None:
        config = self.context.config
        self.settings: RewardConfig = getattr(config, self.context.role)
        self.tokenizer = load_tokenizer(config.model.tokenizer_path or config.model.path)
        self.build_engine(None, path=self.settings.path, scoring=KIND)

    @register(Protocol.THREE_D, uneven="balance", spread=by_work)
    def score(self, batch: DataProto) -> DataProto | None:
        """Score the answers of a batch.

        Args:
            batch: jagged int64 ``prompts`` and ``responses``.

        Returns:
            The columns of :meth:`hybridflow.workers.reward.RewardWorker.score`; an answer is solved if its score is at
            least ``solved_at``, and none fails.
        """
        scores = score_texts(self, batch)
        if scores is None:
            return None
        found = Scores(
            rewards=scores.tolist(),
            solved=(scores >= self.settings.solved_at).tolist(),
            errors=[None] * len(batch),
            answers=[None] * len(batch),
            steps=[None] * len(batch),
            components=[],
            metrics={},
        )
        texts = decode(self.tokenizer, [row.tolist() for row in rows_of(batch, "responses")])
        return columns_of(self.context.role, found, texts)


class RewardModelTrainer(TrainedWorker):
    """Trains a classifier with one label on pairs of answers; it may begin from a language model."""

    def setup(self) -> None:
        self.build_trained(self.context.config.actor.optimizer, scoring=KIND)

    @register(Protocol.THREE_D, uneven="balance", spread=by_work)
    def scores(self, batch: DataProto) -> DataProto | None:
        """``scores`` of the whole texts under the current weights, float32 [B].

        Args:
            batch: jagged int64 ``prompts`` and ``responses``.
        """
        scores = score_texts(self, batch)
        return None if scores is None else DataProto.from_dict({"scores": scores})

    def update(self, batch: DataProto) -> dict[str, float]:
        """As :meth:`TrainedWorker.update`, on ``score_weights`` [B].

        See :func:`hybridflow.algorithms.preferences.bradley_terry_weights`.
        """
        texts = whole_texts(batch)
        of_tokens = [
            mask * weight for mask, weight in zip(rows_of(texts, "response_mask"), batch["score_weights"], strict=True)
        ]
        weights = DataProto.from_dict({"row_ids": batch["row_ids"], "score_weights": DataProto.jagged(of_tokens)})
        return super().update(texts.union(weights).union(DataProto.from_dict(meta_info=batch.meta_info)))

    def columns(self, offered: Collection[str]) -> tuple[str, ...]:
        return ("score_weights",)

    def loss(
        self,
        answers: Sequence[torch.Tensor],
        columns: Mapping[str, torch.Tensor],
        mask: torch.Tensor,
        num_tokens: float,
        num_sequences: float,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return -(columns["score_weights"] * answers[0])[mask].sum() / num_sequences, {}


def score_texts(worker: ModelWorker, batch: DataProto) -> torch.Tensor | None:
    """The score of each whole text, float32 [B] on the CPU; None on ranks that do not hold the last pipeline stage."""
    scored = worker.score_tokens(whole_texts(batch), "response_mask")
    return None if scored is None else torch.cat(scored[0].unbind()) if len(batch) else torch.empty(0)


def whole_texts(batch: DataProto) -> DataProto:
    """Prompts and responses such that one answer of the model is asked for, after the last token.

    A model answers at the token before the one that is wanted. So each response has a token more, whichever, and it
    alone is wanted.

    Returns:
        ``prompts``; ``responses`` (jagged int64) and ``response_mask`` (jagged bool), both one longer than before.
    """
    responses = rows_of(batch, "responses")
    asked = [torch.arange(len(row) + 1) == len(row) for row in responses]
    longer = [torch.cat([row, row.new_zeros(1)]) for row in responses]
    return DataProto.from_dict(
        {
            "prompts": batch["prompts"],
            "responses": DataProto.jagged(longer, dtype=torch.int64),
            "response_mask": DataProto.jagged(asked, dtype=torch.bool),
        }
    )
