"""A model on megatron-core for one role: log-probabilities or values, updates, and its weights by name.

Where it stands: workers hold one engine each; it is the only thing they know of megatron-core. Every method enters the
engine's own layout, so engines of several roles live in one process.

Invariants: an update's result depends neither on the layout nor on how rows were cut into micro-batches; an engine
without an optimizer never changes its weights itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from hybridflow.config import OptimizerConfig
from hybridflow.engines.megatron.batch import MicroBatch, make_micro_batch
from hybridflow.engines.megatron.model import build_model
from hybridflow.engines.megatron.optimizer import Optimizer
from hybridflow.engines.megatron.packing import pack
from hybridflow.engines.megatron.parallel import ModelParallel
from hybridflow.errors import ModelError
from hybridflow.models.hf_io import load_parameters
from hybridflow.models.spec import ModelSpec
from hybridflow.models.tables import SCORE, SCORE_BIAS, chunk_prefix, megatron_table, padded_vocab_size
from hybridflow.platform import current
from hybridflow.resharding.boxes import ParameterBoxes
from hybridflow.resharding.layout import ParallelLayout

from megatron.core.distributed import (  # isort: skip
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func  # isort: skip

# (the head's answers [b, T] one by one, micro-batch) -> (scalar share of the loss, metric sums)
LossOf = Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]


class MegatronEngine:
    """One model in one layout on the process's torch.distributed world. Building it is collective.

    Args:
        folder: Hugging Face folder with the weights.
        layout: parallel degrees; their product is the world's size.
        dtype: of the parameters; bfloat16 keeps float32 main copies in the optimizer.
        valid_vocab: ids from here on are never drawn: their logits are masked before the softmax.
        optimizer: hyper-parameters, or None for a frozen model.
        total_updates: optimizer updates of the run, for decaying schedules.
        sequence_parallel: tensor-parallel ranks share the tokens between their linear layers.
        recompute: what backward computes again instead of keeping: ``none``, ``selective`` or ``full``.
        scoring: for a model whose head gives one number a token: what kind (key of :data:`.spec.SCORING`) it becomes
            where the folder holds a language model. The new head begins with zeros. "" is a language model.

    Raises:
        ModelError: the folder holds a model that scores, and a language model is wanted.

    Attributes:
        token_multiple: micro-batches have a multiple of this many tokens, so that ranks can share them evenly.
        table: what each local parameter is made of.
        changes: how often the weights may have changed: by updates, and by loading a checkpoint.
    """

    def __init__(
        self,
        folder: str,
        layout: ParallelLayout,
        dtype: torch.dtype,
        valid_vocab: int,
        optimizer: OptimizerConfig | None = None,
        total_updates: int = 1,
        seed: int = 0,
        sequence_parallel: bool = True,
        recompute: str = "none",
        scoring: str = "",
    ) -> None:
        stored = ModelSpec.from_folder(folder)
        if stored.scores and not scoring:
            raise ModelError(f"{folder}: {stored.raw['architectures'][0]} scores texts; a language model is needed.")
        self.spec = stored.scoring(scoring) if scoring else stored
        self.changes = 0
        self.layout, self.dtype, self.device = layout, dtype, current().device()
        self.parallel = ModelParallel(layout, seed)
        self.token_multiple = (2 * layout.cp if layout.cp > 1 else 1) * (layout.tp if sequence_parallel else 1)
        self.table: dict[str, ParameterBoxes] = megatron_table(
            self.spec, layout, self.parallel.coordinates, padded_vocab_size(self.spec, layout.tp)
        )
        with self.parallel:
            chunks = build_model(self.spec, self.parallel, dtype, valid_vocab, sequence_parallel, recompute)
            self.modules = {chunk_prefix(layout, number): module for number, module in enumerate(chunks)}
            self.models: list[torch.nn.Module] = [*chunks]
            for module in chunks:
                module.requires_grad_(optimizer is not None)
            self._load(folder, stored)
            self.optimizer = None
            if optimizer is not None:
                self._train(optimizer, total_updates)

    def _load(self, folder: str, stored: ModelSpec) -> None:
        """Fill the parameters; those that the stored model lacks, of a new head, with zeros."""
        parameters = self.parameters()
        new = {
            name
            for name, boxes in self.table.items()
            if not stored.scores and any(box.tensor in (SCORE, SCORE_BIAS) for box in boxes.boxes)
        }
        for name in new:
            parameters.pop(name).zero_()
        load_parameters(folder, {name: boxes for name, boxes in self.table.items() if name not in new}, parameters)

    def _train(self, settings: OptimizerConfig, total_updates: int) -> None:
        """Wrap the model for training and build its optimizer."""
        replicas = self.layout.dp * self.layout.cp
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=settings.distributed and replicas > 1
        )
        wrapped = {
            prefix: DistributedDataParallel(module.config, ddp_config, module)
            for prefix, module in self.modules.items()
        }
        self.models = [*wrapped.values()]
        no_sync = [model.no_sync for model in wrapped.values()]
        config: Any = next(iter(self.modules.values())).config
        config.finalize_model_grads_func = self._finalize
        config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        self.optimizer = Optimizer(wrapped, settings, self.dtype, total_updates)

    @staticmethod
    def _finalize(model: list[Any], num_tokens: torch.Tensor | None = None, **kwargs: Any) -> None:
        """Sum gradients over the data-parallel ranks; losses are already divided by global counts."""
        finalize_model_grads(model, None, **kwargs)

    def parameters(self) -> dict[str, torch.Tensor]:
        """Live local parameters by megatron-core's name; see :func:`megatron_table`."""
        return {
            f"{prefix}{name}": parameter.data
            for prefix, module in self.modules.items()
            for name, parameter in module.named_parameters()
        }

    def weights_changed(self, version: int) -> None:
        """Somebody has written into :meth:`parameters`; of a model without an optimizer, whose state would not fit."""
        assert self.optimizer is None
        self.changes += 1

    @property
    def answers(self) -> bool:
        """Whether this rank holds the last pipeline stage, which alone knows the head's answers and losses."""
        return self.parallel.coordinates.pp == self.layout.pp - 1

    def optimizer_states(self) -> tuple[dict[str, ParameterBoxes], dict[str, dict[str, torch.Tensor]]]:
        """Live optimizer state of this rank; see :meth:`Optimizer.states`."""
        with self.parallel:
            return self._trained().states(self.table)

    def score(
        self, micro_batches: Sequence[MicroBatch], temperature: float = 1.0, with_entropy: bool = True
    ) -> list[torch.Tensor]:
        """Score tokens with the current weights.

        Returns:
            One float32 tensor a micro-batch, for its wanted tokens row by row: ``[2, N]`` log-probability and entropy,
            or ``[1, N]`` of a model with a ``scoring`` head. An empty list on ranks that do not hold the last pipeline
            stage.
        """
        with self.parallel, torch.no_grad():
            return self._run(
                micro_batches, lambda output, micro, **_: output, temperature, with_entropy, training=False
            )

    def update(
        self, micro_batches: Sequence[MicroBatch], loss_of: LossOf, temperature: float = 1.0, with_entropy: bool = False
    ) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        """One optimizer update over the given micro-batches, at least one.

        Experts that are spread over data-parallel ranks compute the tokens of all of them, so those ranks give equal
        numbers of micro-batches here and in :meth:`score`.

        Returns:
            Sums of the losses' metrics over this rank's micro-batches (``loss`` among them; empty on ranks that do not
            hold the last pipeline stage), and the optimizer's own metrics (see :meth:`Optimizer.step`).
        """
        optimizer = self._trained()
        self.changes += 1

        def loss(output: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
            value, metrics = loss_of(*map(micro.unflatten, output), micro)
            # The count is ignored: see _finalize.
            return value, torch.zeros((), dtype=torch.int), {"loss": value.detach(), **metrics}

        with self.parallel:
            optimizer.zero_grad()
            found = self._run(micro_batches, loss, temperature, with_entropy, training=True)
            stepped = optimizer.step()
        sums: dict[str, torch.Tensor] = {}
        for metrics in found:
            for name, value in metrics.items():
                sums[name] = sums.get(name, 0.0) + value
        return sums, stepped

    def gather_over_replicas(self, values: Sequence[float] | torch.Tensor) -> torch.Tensor:
        """The numbers of all data-parallel ranks, in their order; one collective.

        Args:
            values: [n] of this rank; n is equal on all.

        Returns:
            [ranks, n] float64 on the CPU.
        """
        mine = torch.as_tensor(values, dtype=torch.float64, device=self.device)
        found = [torch.empty_like(mine) for _ in range(dist.get_world_size(self.parallel.dp_group))]
        dist.all_gather(found, mine, group=self.parallel.dp_group)
        return torch.stack(found).cpu()

    def _trained(self) -> Optimizer:
        if self.optimizer is None:
            raise RuntimeError("this engine was built without an optimizer: its weights are frozen")
        return self.optimizer

    def _run(
        self,
        micro_batches: Sequence[MicroBatch],
        loss: Callable[..., Any],
        temperature: float,
        with_entropy: bool,
        training: bool,
    ) -> list[Any]:
        """Drive megatron-core's schedule over the micro-batches; what ``loss`` said of each."""
        self.parallel.check()
        given = len(micro_batches)
        micro_batches = [*micro_batches, *[self._nothing()] * (self._num_forwards(given) - given)]
        layout, rank = self.layout, self.parallel.coordinates.cp
        inputs = [(micro, pack(micro.lengths, layout.cp, rank, self.device)) for micro in micro_batches]

        def forward_step(batches: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
            micro, packing = next(batches)
            answer = model(micro.input_ids, micro.position_ids, micro.targets, packing, temperature, with_entropy)
            return answer, partial(loss, micro=micro)

        iterators = [iter(inputs) for _ in self.models]
        found = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.models if len(self.models) > 1 else self.models[0],
            num_microbatches=len(inputs),
            # Only where no stage has to be told the shape of what it receives.
            seq_length=self.token_multiple,
            micro_batch_size=1,
            forward_only=not training,
            collect_non_loss_data=not training,
        )
        return found[:given]

    def _num_forwards(self, given: int) -> int:
        """Micro-batches that the schedule needs: an interleaved one takes whole rounds of the pipeline's stages."""
        return -(-given // self.layout.pp) * self.layout.pp if self.layout.vpp > 1 else given

    def _nothing(self) -> MicroBatch:
        """A micro-batch that asks for nothing and adds nothing to a gradient."""
        return make_micro_batch([], [], None, [], self.device, self.token_multiple)
