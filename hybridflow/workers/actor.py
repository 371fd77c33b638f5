"""The policy in training: log-probabilities, updates, checkpoints.

Where it stands: its engine's weights are what the rollout receives at each sync. The weight version is its count of
training steps. Invariant: an update's result depends on the rows of each mini-batch alone, and which rows these are on
the batch as the driver gave it: not on ranks, micro-batches or padding.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.distributed import TCPStore
from torch.nn.utils.rnn import pad_sequence

from hybridflow.algorithms.metrics import mismatch
from hybridflow.algorithms.objective import OWN, columns_of, mask_column, objective
from hybridflow.data.batching import by_work, by_work_of_updates, update_rows
from hybridflow.protocol.data import DataProto
from hybridflow.protocol.transfer import PADDED_ROWS, Protocol
from hybridflow.resharding.hybrid import TRAINING
from hybridflow.resharding.layout import GenerationLayout
from hybridflow.workers.base import register
from hybridflow.workers.policy import PolicyWorker, rows_of
from hybridflow.workers.sync import WeightSync

if TYPE_CHECKING:
    from hybridflow.engines.megatron.batch import MicroBatch


NUM_ROWS = "num_rows"
"""Key in ``meta_info`` of an update's batch: its number of rows before it was spread."""


def number_rows(batch: DataProto) -> DataProto:
    """The batch with ``row_ids``: the number of each row in the driver's batch, int64 [B]."""
    rows = len(batch)
    return batch.union(DataProto.from_dict({"row_ids": torch.arange(rows)}, meta_info={NUM_ROWS: rows}))


class ActorWorker(PolicyWorker):
    """Trains the policy with the loss named by ``actor.loss.name``."""

    def setup(self) -> None:
        config = self.context.config
        rows = config.data.prompts_per_step * config.rollout.n
        updates = config.actor.epochs * (rows // (config.actor.mini_batch_size or rows))
        self.build_engine(config.actor.optimizer, total_updates=config.steps * updates)

    @register(Protocol.THREE_D, uneven="balance", spread=by_work)
    def log_probs(self, batch: DataProto) -> DataProto | None:
        """Log-probabilities and entropy of every response token under the current weights.

        Args:
            batch: jagged int64 ``prompts`` and ``responses``; ``meta_info["temperature"]`` divides the logits.

        Returns:
            ``log_probs`` and ``entropy``: jagged float32, the responses' lengths. Nothing where
            ``actor.loss.old_log_probs`` is ``own``: the update then computes what it needs itself.
        """
        if self.context.config.actor.loss.old_log_probs == OWN:
            return DataProto()
        scored = self.score(batch)
        return scored and DataProto.from_dict(tensors={"log_probs": scored[0], "entropy": scored[1]})

    @register(Protocol.THREE_D, prepare=number_rows, uneven="balance", spread=by_work_of_updates)
    def update(self, batch: DataProto) -> dict[str, float]:
        """Train on the batch: ``epochs`` passes, one optimizer update a mini-batch.

        Args:
            batch: ``prompts``, ``responses``, ``response_mask`` (or ``loss_mask``, which says which of its tokens
                train), and what ``actor.loss`` reads: see :func:`.objective.columns_of`.

        Returns:
            Means over the updates and over all data-parallel ranks (the same on each): the loss and its parts,
            ``grad_norm``, ``lr``, ``update_skipped`` (also where all tokens of a mini-batch are masked), ``updates``.
            Ranks without the model's last pipeline stage know the last four alone.
        """
        self.context.phases.enter(TRAINING)
        config, meta = self.context.config, batch.meta_info
        here = batch["row_ids"][: len(batch) - meta.get(PADDED_ROWS, 0)].tolist()
        place = {row: at for at, row in enumerate(here)}
        history: dict[str, list[float]] = defaultdict(list)
        for epoch in range(config.actor.epochs):
            for rows in update_rows(meta[NUM_ROWS], config, int(meta.get("step", 0)), epoch):
                for name, value in self._update_once(batch, [place[row] for row in rows if row in place]).items():
                    history[name].append(value)
        metrics = {name: sum(values) / len(values) for name, values in history.items()}
        return {**metrics, "updates": float(len(history["grad_norm"]))}

    def _update_once(self, batch: DataProto, rows: list[int]) -> dict[str, float]:
        """One optimizer update on this rank's rows of a mini-batch, maybe none."""
        settings = self.context.config.actor.loss
        mask = mask_column(batch.keys())
        masks = rows_of(batch, mask)
        masks = [masks[i] for i in rows]
        counts = [float(sum(m.sum() for m in masks)), float(sum(bool(m.any()) for m in masks))]
        num_tokens, num_sequences = self.engine.sum_over_replicas(counts)
        if not num_tokens:
            return {"loss": 0.0, "update_skipped": 1.0}
        columns = {key: rows_of(batch, key) for key in columns_of(settings, batch.keys())}
        compare = settings.old_log_probs == OWN and "rollout_log_probs" in batch
        if compare:
            columns["rollout_log_probs"] = rows_of(batch, "rollout_log_probs")
        compared: list[torch.Tensor] = []

        def loss_of(
            log_probs: torch.Tensor, entropy: torch.Tensor, micro: MicroBatch
        ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            padded = {key: _padded(column, micro) for key, column in columns.items()}
            loss, metrics = objective(log_probs, entropy, padded, micro.mask, settings, num_tokens, num_sequences)
            if compare:
                both = torch.stack([padded["rollout_log_probs"], log_probs.detach()])[:, micro.mask].cpu()
                compared.append(both)
                # The mean of -log p over tokens drawn from p.
                metrics.setdefault("entropy", -both[1].sum())
            return loss, metrics

        sums, stepped = self.engine.update(
            self.cut(batch, mask, rows),
            loss_of,
            temperature=float(batch.meta_info.get("temperature", 1.0)),
            with_entropy=bool(settings.entropy_coef),
        )
        if not self.engine.answers:
            return stepped
        totals = self.engine.sum_over_replicas([float(x) for x in sums.values()])
        metrics = {
            name: total if name == "loss" else total / num_tokens for name, total in zip(sums, totals, strict=True)
        }
        return {**metrics, **stepped, **(self._compare(compared) if compare else {})}

    def _compare(self, compared: list[torch.Tensor]) -> dict[str, float]:
        """How far the rollout's log-probabilities are from the trainer's, over all replicas' tokens."""
        mine = torch.cat(compared, dim=1) if compared else torch.empty(2, 0)
        rollout, trainer = torch.cat(self.engine.gather_over_replicas(mine), dim=1)
        return {f"rollout_vs_trainer/{name}": value for name, value in mismatch(rollout, trainer).items()}

    @register(Protocol.ONE_TO_ALL)
    def serve_store(self, host: str) -> tuple[str, int] | None:
        """Rank 0 serves a store at which the rollout's pool finds this one.

        Args:
            host: address of rank 0's node, as the rollout's nodes know it.

        Returns:
            Host and port, which the system chooses; None on other ranks.
        """
        if self.context.rank:
            return None
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return host, self._store.port

    @register(Protocol.ONE_TO_ALL)
    def join_rollout(self, generation: GenerationLayout, address: tuple[str, int]) -> None:
        """Give weights to a rollout on a pool of its own, which does ``join_actor`` at the same time.

        Args:
            generation: the rollout's layout.
            address: what :meth:`serve_store` returned.
        """
        rank, config = self.context.rank, self.context.config
        self._sync = WeightSync.between(self.engine.layout, generation, rank, address, config, actor=self.engine)

    @register(Protocol.ONE_TO_ALL)
    def send_weights(self, version: int) -> dict[str, float]:
        """Give the rollout the current weights as ``version``; the rollout does ``sync_weights`` at the same time.

        Returns:
            What :meth:`hybridflow.workers.sync.WeightSync.run` says.
        """
        self.context.phases.enter(TRAINING)
        return self._sync.run(version)

    @register(Protocol.ONE_TO_ALL)
    def save(self, folder: str) -> None:
        """Write weights (``folder/model``, a Hugging Face folder), optimizer state and counters."""
        from hybridflow.engines.megatron import checkpoint

        self.context.phases.enter(TRAINING)
        checkpoint.save(self.engine, folder, self.context.config.model)

    @register(Protocol.ONE_TO_ALL)
    def load(self, folder: str) -> None:
        """Continue from what :meth:`save` wrote."""
        from hybridflow.engines.megatron import checkpoint

        self.context.phases.enter(TRAINING)
        checkpoint.load(self.engine, folder)


def _padded(column: Sequence[torch.Tensor], micro: MicroBatch) -> torch.Tensor:
    """The micro-batch's rows of a column as [b, T], on its device."""
    rows = [column[i] for i in micro.rows]
    return (pad_sequence(rows, batch_first=True) if rows else column[0].new_zeros(0, 0)).to(micro.mask.device)
