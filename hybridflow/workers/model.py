"""What roles with a model share: a model on megatron-core that scores the tokens of responses.

Where it stands: between a batch's jagged columns and the engine's micro-batches. Invariants: rows come back in the
order they came; data-parallel ranks run the same number of micro-batches, because their models may compute together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from hybridflow.config import OptimizerConfig
from hybridflow.data.batching import even_out, micro_batches
from hybridflow.engines.megatron import offload
from hybridflow.models.spec import ModelSpec
from hybridflow.models.tokenizer import vocabulary_size
from hybridflow.protocol.data import DataProto
from hybridflow.protocol.transfer import Protocol
from hybridflow.resharding.hybrid import TRAINING, Part, Slot
from hybridflow.resharding.layout import training_of
from hybridflow.workers.base import Worker, register

if TYPE_CHECKING:
    from hybridflow.engines.megatron.batch import MicroBatch
    from hybridflow.engines.megatron.engine import MegatronEngine


class ModelWorker(Worker):
    """A role with one :class:`MegatronEngine`. Its micro-batches are cut as ``actor`` says."""

    engine: MegatronEngine

    def build_engine(
        self, optimizer: OptimizerConfig | None, total_updates: int = 1, path: str = "", scoring: str = ""
    ) -> None:
        """Load the model. Collective.

        Args:
            path: its folder; "" is ``model.path``.
            scoring: see :class:`MegatronEngine`.
        """
        # Here, not above: the driver imports this module for its signatures and must stay free of megatron-core.
        from hybridflow.engines.megatron.engine import MegatronEngine

        config = self.context.config
        self.path = path or config.model.path
        spec = ModelSpec.from_folder(self.path)
        self.engine = MegatronEngine(
            folder=self.path,
            layout=training_of(self.context.layout),
            dtype=getattr(torch, config.model.dtype),
            valid_vocab=vocabulary_size(config.model.tokenizer_path or config.model.path, spec.vocab_size),
            optimizer=optimizer,
            total_updates=total_updates,
            seed=config.seed,
            sequence_parallel=config.actor.sequence_parallel,
            recompute=config.actor.recompute,
            scoring=scoring,
        )
        self._add_parts()

    def _add_parts(self) -> None:
        """What of this model leaves the memory while the rollout generates; parameters that the rollout takes over are
        its own matter, see :class:`hybridflow.workers.sync.Handover`."""
        memory, role, frozen = self.context.config.memory, self.context.role, self.engine.optimizer is None
        moves: dict[str, tuple[str, Slot, Callable[[MegatronEngine], Iterable[torch.Tensor]]]] = {}
        if not frozen:
            moves["gradients"] = "gradients", Slot.GRADIENTS, offload.gradients
            moves["optimizer"] = "optimizer", Slot.OPTIMIZER, offload.optimizer_state
        if frozen or self.engine.spec.scores:
            moves["others"] = "parameters", Slot.OTHERS, offload.parameters
        for kind in memory.offload:
            if kind in moves:
                name, slot, tensors = moves[kind]
                kept = kind != "gradients"
                version = self._changes if frozen else None
                part = offload.Offload(partial(tensors, self.engine), kept=kept, version=version, folder=memory.folder)
                self.context.phases.add(Part(f"{role}.{name}", slot, part.release, part.restore))

    def _changes(self) -> int:
        return self.engine.changes

    def cut(
        self,
        prompts: Sequence[torch.Tensor],
        responses: Sequence[torch.Tensor],
        masks: Sequence[torch.Tensor] | None,
        rows: Sequence[int],
    ) -> tuple[list[MicroBatch], torch.Tensor]:
        """Rows of a batch as micro-batches, by the actor's settings. Collective over the data-parallel ranks.

        Args:
            prompts, responses: of every row of the batch.
            masks: which response tokens are wanted; None wants every one.
            rows: which rows to take, maybe none.

        Returns:
            The micro-batches, and of each data-parallel rank the number of tokens that are wanted, and of rows that
            have one: float64 [ranks, 2].
        """
        from hybridflow.engines.megatron.batch import make_micro_batch

        settings, engine = self.context.config.actor, self.engine
        lengths = [len(prompts[i]) + len(responses[i]) for i in rows]
        wanted = [len(responses[i]) if masks is None else int(masks[i].sum()) for i in rows]
        cuts = micro_batches(lengths, settings.micro_batch_size, settings.micro_batch_tokens)
        everyones = engine.gather_over_replicas([len(cuts), sum(wanted), sum(n > 0 for n in wanted)])
        cuts = even_out(cuts, lengths, int(everyones[:, 0].max()))
        micros = [
            make_micro_batch(prompts, responses, masks, [rows[i] for i in cut], engine.device, engine.token_multiple)
            for cut in cuts
        ]
        return micros, everyones[:, 1:]

    def score_tokens(self, batch: DataProto, mask: str | None = None) -> tuple[torch.Tensor, ...] | None:
        """The answers of the model's head for response tokens, each jagged float32 [B, j] on the CPU.

        Log-probability and entropy of a language model, the value of a model that scores; None on ranks without the
        model's last pipeline stage, whose answer nobody collects.

        Args:
            mask: name of the column that says which response tokens are wanted; None wants every one.
        """
        self.context.phases.enter(TRAINING)
        masks = None if mask is None else rows_of(batch, mask)
        micros, _ = self.cut(rows_of(batch, "prompts"), rows_of(batch, "responses"), masks, range(len(batch)))
        answers = self.engine.score(micros, float(batch.meta_info.get("temperature", 1.0)))
        if not self.engine.answers:
            return None
        scored: list[torch.Tensor] = [torch.empty(0)] * len(batch)
        for micro, answer in zip(micros, answers, strict=True):
            for row, values in zip(micro.rows, answer.split(micro.mask.sum(dim=1).tolist(), dim=1), strict=True):
                scored[row] = values.cpu()
        return tuple(DataProto.jagged(list(column)) for column in zip(*scored, strict=True))

    @register(Protocol.ONE_TO_ALL)
    def save(self, folder: str) -> None:
        """Write weights (``folder/model``, a Hugging Face folder) and, of a model in training, optimizer state and
        counters."""
        from hybridflow.engines.megatron import checkpoint

        self.context.phases.enter(TRAINING)
        checkpoint.save(self.engine, folder, replace(self.context.config.model, path=self.path))

    @register(Protocol.ONE_TO_ALL)
    def load(self, folder: str) -> None:
        """Continue from what :meth:`save` wrote."""
        from hybridflow.engines.megatron import checkpoint

        self.context.phases.enter(TRAINING)
        checkpoint.load(self.engine, folder)


def rows_of(batch: DataProto, key: str) -> Sequence[torch.Tensor]:
    """The rows of a jagged column as 1-D views."""
    return batch.flat(key).split(batch.lengths(key).tolist())
