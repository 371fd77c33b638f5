"""A model on megatron-core for one role: log-probabilities, updates, and its weights by name.

Where it stands: workers hold one engine each; it is the only thing they know of megatron-core. Every method enters the
engine's own layout, so engines of several roles live in one process.

Invariants: an update's result does not depend on how rows were cut into micro-batches or spread over data-parallel
ranks; an engine without an optimizer never changes its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from hybridflow.config import OptimizerConfig
from hybridflow.engines.megatron.batch import MicroBatch
from hybridflow.engines.megatron.model import PolicyModel, build_model
from hybridflow.engines.megatron.optimizer import Optimizer
from hybridflow.engines.megatron.parallel import ModelParallel
from hybridflow.models.hf_io import load_parameters
from hybridflow.models.spec import ModelSpec
from hybridflow.models.tables import megatron_table, padded_vocab_size
from hybridflow.platform import current
from hybridflow.resharding.boxes import ParameterBoxes
from hybridflow.resharding.layout import ParallelLayout

from megatron.core.distributed import (  # isort: skip
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func  # isort: skip

# (log_probs [b, T], entropy [b, T], micro-batch) -> (scalar share of the loss, metric sums)
LossOf = Callable[[torch.Tensor, torch.Tensor, MicroBatch], tuple[torch.Tensor, dict[str, torch.Tensor]]]


class MegatronEngine:
    """One model in one layout on the process's torch.distributed world. Building it is collective.

    Args:
        folder: Hugging Face folder with the weights.
        layout: parallel degrees; their product is the world's size.
        dtype: of the parameters; bfloat16 keeps float32 main copies in the optimizer.
        valid_vocab: ids from here on are never drawn: their logits are masked before the softmax.
        optimizer: hyper-parameters, or None for a frozen model.
        total_updates: optimizer updates of the run, for decaying schedules.
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
    ) -> None:
        self.spec = ModelSpec.from_folder(folder)
        self.dtype = dtype
        self.device = current().device()
        self.parallel = ModelParallel(layout, seed)
        with self.parallel:
            self.module: PolicyModel = build_model(self.spec, self.parallel, dtype, valid_vocab)
            self.table: dict[str, ParameterBoxes] = megatron_table(
                self.spec, layout, self.parallel.coordinates, padded_vocab_size(self.spec, layout.tp)
            )
            self.model: torch.nn.Module = self.module
            if optimizer is None:
                self.module.requires_grad_(False)
            load_parameters(folder, self.table, self.parameters())
            self.optimizer = None
            if optimizer is not None:
                self.model = DistributedDataParallel(
                    self.module.config,
                    DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False),
                    self.module,
                )
                self.module.config.finalize_model_grads_func = self._finalize
                self.module.config.no_sync_func = self.model.no_sync
                self.optimizer = Optimizer(self.model, optimizer, dtype, total_updates)

    @staticmethod
    def _finalize(model: list[Any], num_tokens: torch.Tensor | None = None, **kwargs: Any) -> None:
        """Sum gradients over the data-parallel ranks; losses are already divided by global counts."""
        finalize_model_grads(model, None, **kwargs)

    def parameters(self) -> dict[str, torch.Tensor]:
        """Live local parameters by megatron-core's name."""
        return {name: parameter.data for name, parameter in self.module.named_parameters()}

    def log_probs(
        self, micro_batches: Sequence[MicroBatch], temperature: float = 1.0, with_entropy: bool = True
    ) -> list[torch.Tensor]:
        """Score tokens with the current weights.

        Returns:
            One ``[2, N]`` float32 tensor a micro-batch, log-probability and entropy of its wanted tokens row by row;
            an empty list on ranks that do not hold the last pipeline stage.
        """
        with self.parallel, torch.no_grad():
            self.module.temperature, self.module.with_entropy = temperature, with_entropy
            return self._run(micro_batches, lambda output, micro, non_loss_data=False: output, forward_only=True)

    def update(
        self, micro_batches: Sequence[MicroBatch], loss_of: LossOf, temperature: float = 1.0, with_entropy: bool = False
    ) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        """One optimizer update over the given micro-batches.

        Returns:
            Sums of the losses' metrics over this rank's micro-batches (``loss`` among them), and the optimizer's own
            metrics (see :meth:`Optimizer.step`).
        """
        if self.optimizer is None:
            raise RuntimeError("this engine was built without an optimizer: its weights are frozen")

        def loss(output: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
            value, metrics = loss_of(micro.unflatten(output[0]), micro.unflatten(output[1]), micro)
            # The count is ignored: see _finalize.
            return value, torch.zeros((), dtype=torch.int), {"loss": value.detach(), **metrics}

        with self.parallel:
            self.module.temperature, self.module.with_entropy = temperature, with_entropy
            self.optimizer.zero_grad()
            found = self._run(micro_batches, loss, forward_only=False)
            stepped = self.optimizer.step()
        sums: dict[str, torch.Tensor] = {}
        for metrics in found:
            for name, value in metrics.items():
                sums[name] = sums.get(name, 0.0) + value
        return sums, stepped

    def sum_over_replicas(self, values: Sequence[float]) -> list[float]:
        """Sum numbers over the data-parallel ranks; float64."""
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total, group=self.parallel.dp_group)
        return total.tolist()

    def max_over_replicas(self, value: int) -> int:
        """Largest of the data-parallel ranks' numbers."""
        found = torch.tensor([value], device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.parallel.dp_group)
        return int(found)

    def _run(self, micro_batches: Sequence[MicroBatch], loss: Callable[..., Any], forward_only: bool) -> list[Any]:
        """Drive megatron-core's schedule over the micro-batches."""
        self.parallel.check()

        def forward_step(batches: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
            micro = next(batches)
            return model(micro.input_ids, micro.position_ids, micro.targets), partial(loss, micro=micro)

        shapes = [micro.input_ids.shape for micro in micro_batches]
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(micro_batches),
            model=self.model,
            num_microbatches=len(micro_batches),
            seq_length=max(s for _, s in shapes),
            micro_batch_size=max(b for b, _ in shapes),
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
