"""What roles whose model is trained share: the updates of a step, and checkpoints.

Where it stands: between the driver's ``update`` and the engine's; a role says which columns its loss reads and what it
makes of them. Invariant: an update's result depends on the rows of each mini-batch alone, and which rows these are on
the batch as the driver gave it: not on ranks, micro-batches or padding.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from hybridflow.algorithms.objective import mask_column
from hybridflow.config import OptimizerConfig
from hybridflow.data.batching import by_work_of_updates, update_rows
from hybridflow.protocol.data import DataProto
from hybridflow.protocol.transfer import PADDED_ROWS, Protocol
from hybridflow.resharding.hybrid import TRAINING
from hybridflow.workers.base import register
from hybridflow.workers.model import ModelWorker, rows_of

if TYPE_CHECKING:
    from hybridflow.engines.megatron.batch import MicroBatch


NUM_ROWS = "num_rows"
"""Key in ``meta_info`` of an update's batch: its number of rows before it was spread."""


def number_rows(batch: DataProto) -> DataProto:
    """The batch with ``row_ids``: the number of each row in the driver's batch, int64 [B]."""
    rows = len(batch)
    return batch.union(DataProto.from_dict({"row_ids": torch.arange(rows)}, meta_info={NUM_ROWS: rows}))


class TrainedWorker(ModelWorker):
    """A role with an optimizer. Mini-batches and passes are those of ``actor``, for every role.

    Attributes:
        aside: what :meth:`loss` has set aside of each unmasked token, [k, n] of each micro-batch; maybe nothing. Of all
            replicas together it is an argument of :meth:`metrics`.
    """

    with_entropy = False
    aside: list[torch.Tensor]

    def columns(self, offered: Collection[str]) -> tuple[str, ...]:
        """The token columns that :meth:`loss` reads, of those that a batch has."""
        raise NotImplementedError

    def loss(
        self,
        answers: Sequence[torch.Tensor],
        columns: Mapping[str, torch.Tensor],
        mask: torch.Tensor,
        num_tokens: float,
        num_sequences: float,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """A micro-batch's share of the loss, and sums over its unmasked tokens.

        Args:
            answers: of the model's head, [b, T] each.
            columns: [b, T] each.
            mask: [b, T] bool.
            num_tokens, num_sequences: of the whole update.
        """
        raise NotImplementedError

    def metrics(self, means: dict[str, float], aside: torch.Tensor) -> dict[str, float]:
        """What an update reports.

        Args:
            means: of the sums of :meth:`loss`, over all tokens of the update.
            aside: what the losses have set aside, float64 [k, tokens of the update], replica after replica; [0, ...]
                where that is nothing.
        """
        return means

    def build_trained(
        self, optimizer: OptimizerConfig, path: str = "", scoring: str = "", steps: int | None = None
    ) -> None:
        """As :meth:`build_engine`, for all updates of ``steps``, or of the run."""
        config = self.context.config
        rows = config.data.prompts_per_step * config.rollout.n
        updates = config.actor.epochs * (rows // (config.actor.mini_batch_size or rows))
        self.build_engine(optimizer, (config.steps if steps is None else steps) * updates, path, scoring)

    @register(Protocol.THREE_D, prepare=number_rows, uneven="balance", spread=by_work_of_updates)
    def update(self, batch: DataProto) -> dict[str, float]:
        """Train on the batch: ``actor.epochs`` passes, one optimizer update a mini-batch.

        Args:
            batch: ``prompts``, ``responses``, ``response_mask`` (or ``loss_mask``, which says which of its tokens
                train), and what the role's loss reads.

        Returns:
            Means over the updates and over all data-parallel ranks (the same on each): the loss and its parts,
            ``grad_norm``, ``lr``, ``update_skipped`` (also where all tokens of a mini-batch are masked), ``updates``.
            Ranks without the model's last pipeline stage know the last four alone.
        """
        self.context.phases.enter(TRAINING)
        config, meta = self.context.config, batch.meta_info
        prompts, responses = rows_of(batch, "prompts"), rows_of(batch, "responses")
        masks = rows_of(batch, mask_column(batch.keys()))
        columns = {key: rows_of(batch, key) for key in self.columns(batch.keys())}
        temperature = float(meta.get("temperature", 1.0))
        here = batch["row_ids"][: len(batch) - meta.get(PADDED_ROWS, 0)].tolist()
        place = {row: at for at, row in enumerate(here)}
        history: dict[str, list[float]] = defaultdict(list)
        for epoch in range(config.actor.epochs):
            for rows in update_rows(meta[NUM_ROWS], config, int(meta.get("step", 0)), epoch):
                mine = [place[row] for row in rows if row in place]
                micros, counts = self.cut(prompts, responses, masks, mine)
                for name, value in self._update_once(micros, counts, columns, temperature).items():
                    history[name].append(value)
        metrics = {name: sum(values) / len(values) for name, values in history.items()}
        return {**metrics, "updates": float(len(history["grad_norm"]))}

    def _update_once(
        self,
        micros: Sequence[MicroBatch],
        counts: torch.Tensor,
        columns: Mapping[str, Sequence[torch.Tensor]],
        temperature: float,
    ) -> dict[str, float]:
        """One optimizer update on a mini-batch.

        Args:
            micros, counts: as :meth:`cut` returns them, of this rank's rows, maybe none.
            columns: those that the loss reads, of every row of the batch.
        """
        num_tokens, num_sequences = counts.sum(dim=0).tolist()
        if not num_tokens:
            return {"loss": 0.0, "update_skipped": 1.0}
        self.aside = []

        def loss_of(*given: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            *answers, micro = given
            padded = {key: _padded(column, micro) for key, column in columns.items()}
            return self.loss(answers, padded, micro.mask, num_tokens, num_sequences)

        sums, stepped = self.engine.update(micros, loss_of, temperature, self.with_entropy)
        if not self.engine.answers:
            return stepped
        totals, aside = self._over_replicas(sums, counts[:, 0].long().tolist())
        means = {name: total / num_tokens for name, total in totals.items() if name != "loss"}
        return {"loss": totals["loss"], **self.metrics(means, aside), **stepped}

    def _over_replicas(
        self, sums: Mapping[str, torch.Tensor], num_tokens: Sequence[int]
    ) -> tuple[dict[str, float], torch.Tensor]:
        """The sums of all replicas, and what their losses have set aside; one collective.

        Args:
            num_tokens: of each replica.
        """
        mine = torch.tensor([float(x) for x in sums.values()], dtype=torch.float64)
        aside = torch.cat(self.aside, dim=1).cpu() if self.aside else torch.empty(0, 0)
        longest = max(num_tokens)
        filled = pad(aside, (0, longest - aside.shape[1]))
        found = self.engine.gather_over_replicas(torch.cat([mine, filled.flatten()]))
        totals = found[:, : len(mine)].sum(dim=0).tolist()
        parts = found[:, len(mine) :].view(len(found), len(aside), longest)
        together = torch.cat([part[:, :n] for part, n in zip(parts, num_tokens, strict=True)], dim=1)
        return dict(zip(sums, totals, strict=True)), together


def _padded(column: Sequence[torch.Tensor], micro: MicroBatch) -> torch.Tensor:
    """The micro-batch's rows of a column as [b, T], on its device."""
    rows = [column[i] for i in micro.rows]
    return (pad_sequence(rows, batch_first=True) if rows else column[0].new_zeros(0, 0)).to(micro.mask.device)
