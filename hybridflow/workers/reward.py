"""The roles reward and cost: texts of answers to numbers.

Where it stands: after the rollout, on a pool of ``kind: cpu`` or beside other roles. Invariant: no answer can stop a
batch; see :mod:`hybridflow.rewards.scorer` for what a failing one gets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hybridflow.config import RewardConfig
from hybridflow.data.chat import decode
from hybridflow.errors import RewardError
from hybridflow.models.tokenizer import load_tokenizer
from hybridflow.protocol.data import DataProto
from hybridflow.protocol.transfer import Protocol
from hybridflow.rewards.scorer import Scorer, Scores
from hybridflow.rewards.steps import step_numbers
from hybridflow.workers.base import Worker, register

OWN_COLUMNS = frozenset(
    {"messages", "ground_truth", "response_text", "reward_error", "reward_components", "answer", "verdict"}
)


class RewardWorker(Worker):
    """Scores answers by the function and the components of the role's settings, in processes of its own."""

    scorer: Scorer | None = None

    def setup(self) -> None:
        config = self.context.config
        self.tokenizer = load_tokenizer(config.model.tokenizer_path or config.model.path)
        self.settings: RewardConfig = getattr(config, self.context.role)
        self.scorer = Scorer(self.settings, self.context.role)

    @register(Protocol.DP, uneven="balance")
    def score(self, batch: DataProto) -> DataProto:
        """Score the answers of a batch.

        Args:
            batch: ``responses`` (jagged int64), ``messages``, ``ground_truth``; further object columns
                (``data_source``, ``extra_info``, ``finish_reason``) are offered to the function.

        Returns:
            ``rewards`` (float32, NaN where scoring failed), ``solved`` (bool), ``response_text``, ``reward_error``,
            ``answer`` (the final answer as the function has read it, or None); if there are ``reward.components``,
            ``reward_components``: a dict of each answer's scores before weights, None where scoring failed. With
            ``reward.step_end`` also ``step_scores`` (jagged float32, one for each step) and ``step_ids`` (jagged
            int64, the responses' lengths). ``meta_info["metrics"]`` as in
            :class:`hybridflow.rewards.scorer.Scores`, each as ``reward/<name>``. The role ``cost`` gives
            ``costs``, ``cost_error`` and ``cost_components`` alone, and ``cost/<name>``.

        Raises:
            RewardError: if more than ``max_failed`` of this process's answers could not be scored, or if
                ``reward.step_end`` is given and the function says no steps.
        """
        assert self.scorer is not None, "setup() has to run first"
        ids = batch.flat("responses").split(batch.lengths("responses").tolist())
        texts = decode(self.tokenizer, [row.tolist() for row in ids])
        columns: dict[str, Sequence[Any]] = {
            key: list(batch.non_tensor_batch[key]) for key in batch.non_tensor_batch if key not in OWN_COLUMNS
        }
        messages, ground_truth = (list(batch.non_tensor_batch[key]) for key in ("messages", "ground_truth"))
        more, failed, metrics = self.further(messages, texts, ground_truth)
        scores = self.scorer.score(messages, texts, ground_truth, failed, **columns, **more)
        answer = columns_of(self.context.role, scores, texts, more, metrics)
        steps = self.settings.step_end and self.context.role == "reward"
        return answer.union(self._steps(ids, scores)) if steps else answer

    def further(
        self, messages: Sequence[Any], texts: Sequence[str], ground_truth: Sequence[Any]
    ) -> tuple[dict[str, Sequence[Any]], dict[int, str], dict[str, float]]:
        """What a role adds to the columns that its functions are offered.

        Returns:
            The columns, which the scored batch gets too; rows that cannot be scored, and why; metrics.
        """
        return {}, {}, {}

    def _steps(self, ids: Sequence[torch.Tensor], scores: Scores) -> DataProto:
        """The scores of the steps, and the step of each token; -1 where the function has given none."""
        reward = self.context.config.reward
        for steps, error in zip(scores.steps, scores.errors, strict=True):
            if steps is None and error is None:
                raise RewardError(
                    f"reward.step_end={reward.step_end!r}, but {reward.function} returned no 'steps'. Return "
                    "{'score': ..., 'steps': [...]}, a number for each step, or set reward.step_end=''."
                )
        found = [list(steps or ()) for steps in scores.steps]
        pieces = {token: decode(self.tokenizer, [[token]])[0] for token in torch.cat(list(ids)).unique().tolist()}
        numbers = []
        for row, given in zip(ids, found, strict=True):
            steps = step_numbers([pieces[token] for token in row.tolist()], reward.step_end)
            numbers.append([step if step < len(given) else -1 for step in steps])
        return DataProto.from_dict(
            {
                "step_ids": DataProto.jagged(numbers, dtype=torch.int64),
                "step_scores": DataProto.jagged(found, dtype=torch.float32),
            }
        )

    def close(self) -> None:
        if self.scorer is not None:
            self.scorer.close()


def columns_of(
    role: str,
    scores: Scores,
    texts: Sequence[str],
    more: Mapping[str, Sequence[Any]] | None = None,
    metrics: Mapping[str, float] | None = None,
) -> DataProto:
    """Scores as the columns of the role ``reward`` or ``cost``; see :meth:`RewardWorker.score`.

    Args:
        more: further columns; those of the role ``cost`` have its name before theirs.
        metrics: further ones.
    """
    prefix = "" if role == "reward" else f"{role}_"
    tensors = {f"{role}s": torch.tensor(scores.rewards, dtype=torch.float32)}
    objects: dict[str, Sequence[Any]] = {f"{role}_error": scores.errors}
    objects |= {f"{prefix}{name}": column for name, column in (more or {}).items()}
    if scores.components:
        objects[f"{role}_components"] = scores.components
    if role == "reward":
        tensors["solved"] = torch.tensor(scores.solved, dtype=torch.bool)
        objects |= {"response_text": texts, "answer": scores.answers}
    found = {f"{role}/{name}": value for name, value in {**scores.metrics, **(metrics or {})}.items()}
    return DataProto.from_dict(tensors=tensors, non_tensors=objects, meta_info={"metrics": found})
