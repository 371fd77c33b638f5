"""The policy in training: log-probabilities and the configured loss.

Where it stands: its engine's weights are what the rollout receives at each sync. The weight version is its count of
training steps.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch.distributed import TCPStore

from hybridflow.algorithms.metrics import mismatch
from hybridflow.algorithms.objective import OWN, columns_of, objective
from hybridflow.data.batching import by_work
from hybridflow.errors import DataError
from hybridflow.protocol.data import DataProto
from hybridflow.protocol.transfer import Protocol
from hybridflow.resharding.hybrid import TRAINING
from hybridflow.resharding.layout import Layout
from hybridflow.workers.base import register
from hybridflow.workers.sync import WeightSync
from hybridflow.workers.trained import TrainedWorker


class ActorWorker(TrainedWorker):
    """Trains the policy with the loss named by ``actor.loss.name``."""

    def setup(self) -> None:
        settings = self.context.config.actor
        self.with_entropy = bool(settings.loss.entropy_coef)
        self._version: int | None = None  # of the weights that a rollout elsewhere was given last
        self._store: TCPStore | None = None
        self._syncs: dict[str, WeightSync] = {}
        self.build_trained(settings.optimizer, steps=self.context.config.actor_steps)

    @register(
        Protocol.THREE_D,
        uneven="balance",
        spread=by_work,
        unless=lambda config: config.actor.loss.old_log_probs == OWN,
    )
    def log_probs(self, batch: DataProto) -> DataProto | None:
        """Log-probabilities and entropy of every response token under the current weights.

        Args:
            batch: jagged int64 ``prompts`` and ``responses``; ``meta_info["temperature"]`` divides the logits.

        Returns:
            ``log_probs`` and ``entropy``: jagged float32, the responses' lengths. Where ``actor.loss.old_log_probs`` is
            ``own`` the driver has no column and calls no rank: the update then computes what it needs itself, and
            reports ``rollout_vs_trainer`` and an estimate of ``entropy``.
        """
        scored = self.score_tokens(batch)
        return None if scored is None else DataProto.from_dict(tensors={"log_probs": scored[0], "entropy": scored[1]})

    def update(self, batch: DataProto) -> dict[str, float]:
        """Train on the batch: ``actor.epochs`` passes, one optimizer update a mini-batch.

        Args:
            batch: ``prompts``, ``responses``, ``response_mask`` (or ``loss_mask``, which says which of its tokens
                train), and what the loss reads: ``advantages``, ``log_probs``, ...

        Returns:
            Means over the updates and over all data-parallel ranks: the loss and its parts, ``grad_norm``, ``lr``,
            ``update_skipped``, ``updates``.

        Raises:
            DataError: a response has a token that is more than ``max_staleness`` updates older than these weights.
        """
        allowed = getattr(self.context.config, "max_staleness", None)
        if allowed is not None and self._version is not None and len(batch) and "weight_version" in batch:
            oldest = int(batch["weight_version"].min())
            if self._version - oldest > allowed:
                raise DataError(
                    f"a response of the batch was begun with the weights of version {oldest}, and these are of version "
                    f"{self._version}: {self._version - oldest} updates newer, and max_staleness={allowed}. Train on "
                    f"each batch in its own step, or raise max_staleness."
                )
        return super().update(batch)

    def columns(self, offered: Collection[str]) -> tuple[str, ...]:
        """What ``actor.loss`` reads, see :func:`.objective.columns_of`; to compare with, the rollout's where the
        trainer's log-probabilities are the update's own."""
        settings = self.context.config.actor.loss
        compared = settings.old_log_probs == OWN and "rollout_log_probs" in offered
        return (*columns_of(settings, offered), *(["rollout_log_probs"] if compared else []))

    def loss(
        self,
        answers: Sequence[torch.Tensor],
        columns: Mapping[str, torch.Tensor],
        mask: torch.Tensor,
        num_tokens: float,
        num_sequences: float,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        settings, (log_probs, entropy) = self.context.config.actor.loss, answers
        loss, metrics = objective(log_probs, entropy, columns, mask, settings, num_tokens, num_sequences)
        if settings.old_log_probs == OWN and "rollout_log_probs" in columns:
            both = torch.stack([columns["rollout_log_probs"], log_probs.detach()])[:, mask]
            self.aside.append(both)
            # The mean of -log p over tokens drawn from p.
            metrics.setdefault("entropy", -both[1].sum())
        return loss, metrics

    def metrics(self, means: dict[str, float], aside: torch.Tensor) -> dict[str, float]:
        """Also how far the rollout's log-probabilities are from the update's own."""
        compared = mismatch(*aside) if len(aside) else {}
        return means | {f"rollout_vs_trainer/{name}": value for name, value in compared.items()}

    @register(Protocol.ONE_TO_ALL)
    def serve_store(self, host: str) -> tuple[str, int] | None:
        """Rank 0 serves a store at which other pools find this one.

        Args:
            host: address of rank 0's node, as the other pools' nodes know it.

        Returns:
            Host and port, which the system chooses; None on other ranks.
        """
        if self.context.rank:
            return None
        self._store = self._store or TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return host, self._store.port

    @register(Protocol.ONE_TO_ALL)
    def join_receiver(self, role: str, layout: Layout, address: tuple[str, int]) -> None:
        """Give weights to a role on a pool of its own, which does ``join_actor`` at the same time.

        Args:
            role: rollout or reference.
            layout: its layout.
            address: what :meth:`serve_store` returned.
        """
        rank, config = self.context.rank, self.context.config
        mine = self.engine.layout
        self._syncs[role] = WeightSync.between(role, mine, layout, rank, address, config, actor=self.engine)

    @register(Protocol.ONE_TO_ALL)
    def send_weights(self, version: int, role: str = "rollout") -> dict[str, float]:
        """Give a role the current weights as ``version``; the role does ``sync_weights`` at the same time.

        Returns:
            What :meth:`hybridflow.workers.sync.WeightSync.run` says.
        """
        self.context.phases.enter(TRAINING)
        report = self._syncs[role].run(version)
        if role == "rollout":
            self._version = version
        return report
