"""The critic: what a response is going to be rewarded with, estimated at each of its tokens.

Where it stands: its values are what ``gae`` measures advantages against, and the returns that come of it are what it is
trained on. The same class serves a critic of rewards (``values``, ``returns``) and one of costs (``cost_values``,
``cost_returns``), by the role's name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from hybridflow.algorithms.objective import explained_variance, value_objective
from hybridflow.config import CriticConfig
from hybridflow.data.batching import by_work
from hybridflow.errors import DataError
from hybridflow.protocol.data import DataProto
from hybridflow.protocol.transfer import Protocol
from hybridflow.workers.base import register
from hybridflow.workers.trained import TrainedWorker


class CriticWorker(TrainedWorker):
    """Trains a value head and the model below it with the clipped value loss."""

    def setup(self) -> None:
        role = self.context.role
        self.settings: CriticConfig = getattr(self.context.config, role)
        prefix = role.removesuffix("critic")
        self._values, self._returns = f"{prefix}values", f"{prefix}returns"
        self.build_trained(self.settings.optimizer, self.settings.path, scoring="ForTokenClassification")

    @register(Protocol.THREE_D, uneven="balance", spread=by_work)
    def values(self, batch: DataProto) -> DataProto | None:
        """The value of the state in which each response token was chosen, under the current weights.

        Args:
            batch: jagged int64 ``prompts`` and ``responses``.

        Returns:
            ``values`` (``cost_values`` of the role ``cost_critic``): jagged float32, the responses' lengths.
        """
        scored = self.score_tokens(batch)
        return None if scored is None else DataProto.from_dict(tensors={self._values: scored[0]})

    def update(self, batch: DataProto) -> dict[str, float]:
        """As :meth:`TrainedWorker.update`, on the columns that :meth:`values` and the estimator made.

        Returns:
            Its metrics as ``critic/<name>`` (or the role's own name): among them ``loss``, ``clip_fraction``,
            ``value`` and ``return`` (means) and ``explained_variance``, see :func:`.objective.explained_variance`.
        """
        return {f"{self.context.role}/{name}": value for name, value in super().update(batch).items()}

    def columns(self, offered: Collection[str]) -> tuple[str, ...]:
        for name in (self._values, self._returns):
            if name not in offered:
                raise DataError(
                    f"{self.context.role}.update reads the column {name!r}, which the batch lacks. It has "
                    f"{', '.join(offered)}."
                )
        return self._values, self._returns

    def loss(
        self,
        answers: Sequence[torch.Tensor],
        columns: Mapping[str, torch.Tensor],
        mask: torch.Tensor,
        num_tokens: float,
        num_sequences: float,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        old, returns = columns[self._values], columns[self._returns]
        return value_objective(answers[0], old, returns, mask, self.settings.clip, num_tokens)

    def metrics(self, means: dict[str, float], aside: torch.Tensor) -> dict[str, float]:
        return explained_variance(means)
