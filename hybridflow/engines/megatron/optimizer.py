"""megatron-core's AdamW for one model: built, stepped, and its state by parameter name.

Where it stands: the last part of an update, after gradients were summed over the data-parallel ranks. With the
distributed optimizer each of those ranks then updates its share of the elements, and the weights are gathered again.
Invariant: a non-finite gradient norm never reaches the weights; the step is skipped and reported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hybridflow.config import OptimizerConfig
from hybridflow.engines.megatron import cpu
from hybridflow.errors import ConfigError, nearest
from hybridflow.platform import current
from hybridflow.resharding.boxes import ParameterBoxes, crop, extents, num_elements, rectangles

from megatron.core import optimizer as megatron_optimizer  # isort: skip
from megatron.core.distributed import DistributedDataParallel  # isort: skip
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32  # isort: skip
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # isort: skip

SCHEDULES = ("constant", "linear", "cosine")
MOMENTS = ("exp_avg", "exp_avg_sq")


def learning_rate(config: OptimizerConfig, update: int, total_updates: int) -> float:
    """The learning rate of optimizer update ``update`` (1-based).

    Linear from ``lr / warmup_steps`` at update 1 to ``lr`` at update ``warmup_steps`` (``lr`` at update 1 without a
    warm-up); from there constant, or on a line or half a cosine that is at ``min_lr`` after update ``decay_steps`` (all
    ``total_updates`` where it is 0), so that the last update still trains.
    """
    if update <= config.warmup_steps:
        return config.lr * update / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    if config.schedule not in SCHEDULES:
        raise ConfigError(f"actor.optimizer.schedule={config.schedule!r}.{nearest(config.schedule, SCHEDULES)}")
    end = config.decay_steps or total_updates
    peak = max(1, config.warmup_steps)
    progress = min(1.0, (update - peak) / max(1, end + 1 - peak))
    share = 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.min_lr + (config.lr - config.min_lr) * share


class Optimizer:
    """AdamW over one model. Every method runs inside the model's :class:`ModelParallel` context.

    With the distributed optimizer a rank holds moments and main copies of a part of its parameters only: a range of
    elements, which :meth:`states` gives as rectangles.

    Args:
        model: the wrapped chunks of the model by the prefix of their parameters' names (``""`` where there is one);
            the parameters' dtype decides whether fp32 main copies are kept (bfloat16).
        config: hyper-parameters. Weight decay applies to matrices only: not to biases, nor to norms.
        total_updates: optimizer updates of the whole run, for decaying schedules.
    """

    def __init__(
        self,
        model: Mapping[str, DistributedDataParallel],
        config: OptimizerConfig,
        dtype: torch.dtype,
        total_updates: int,
    ):
        self.model, self.config, self.total_updates = model, config, total_updates
        self.updates = 0
        chunks: list[Any] = list(model.values())
        settings = megatron_optimizer.OptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=config.min_lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.beta1,
            adam_beta2=config.beta2,
            adam_eps=config.eps,
            clip_grad=config.clip_grad or math.inf,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=chunks[0].ddp_config.use_distributed_optimizer,
        )
        cpu.install()
        with cpu.cuda_type_names():
            inner = megatron_optimizer.get_megatron_optimizer(
                settings, chunks, use_gloo_process_groups=not current().is_cuda
            )
        assert isinstance(inner, megatron_optimizer.ChainedOptimizer)
        self.inner = inner

    @torch.no_grad()
    def step(self) -> dict[str, float]:
        """Clip and apply the accumulated gradients.

        Returns:
            ``grad_norm`` before clipping, ``lr``, and ``update_skipped`` (1 where the norm was not finite).
        """
        lr = learning_rate(self.config, self.updates + 1, self.total_updates)
        for group in self.inner.param_groups:
            group["lr"] = lr
            group["weight_decay"] = self.config.weight_decay * group["wd_mult"]
        with cpu.cuda_type_names():
            self.inner.prepare_grads()
            norm = float(self.inner.get_grad_norm())
            finite = math.isfinite(norm)
            if finite:
                for part in self.inner.chained_optimizers:
                    clip_grad_by_total_norm_fp32(list[torch.Tensor](part.get_parameters()), part.config.clip_grad, norm)
                self.inner.step_with_ready_grads()
        self.updates += 1
        return {"grad_norm": norm, "lr": lr, "update_skipped": float(not finite)}

    def zero_grad(self) -> None:
        for chunk in self.model.values():
            chunk.zero_grad_buffer()
        self.inner.zero_grad()

    @torch.no_grad()
    def states(
        self, table: Mapping[str, ParameterBoxes]
    ) -> tuple[dict[str, ParameterBoxes], dict[str, dict[str, torch.Tensor]]]:
        """This rank's live optimizer state, in the coordinates of the parameters' table.

        Args:
            table: of the model's parameters.

        Returns:
            A table of rectangles, and for each kind of state their views by name. Kinds: ``exp_avg``, ``exp_avg_sq``,
            and ``main`` for models in bfloat16. Without the distributed optimizer a rectangle is a whole parameter.
        """
        rectangles_of: dict[str, ParameterBoxes] = {}
        found: dict[str, dict[str, torch.Tensor]] = {kind: {} for kind in MOMENTS}
        for name, shard in self._shards().items():
            tensors = {kind: shard.state[kind] for kind in MOMENTS}
            if not shard.is_parameter:
                tensors["main"] = shard.main
            offset = 0
            for number, region in enumerate(rectangles(table[name].shape, shard.start, shard.start + len(shard))):
                piece = f"{name}[{number}]"
                rectangles_of[piece] = crop(table[name], region, piece)
                stop = offset + num_elements(region)
                for kind, tensor in tensors.items():
                    found.setdefault(kind, {})[piece] = tensor.view(-1)[offset:stop].view(extents(region))
                offset = stop
        return rectangles_of, found

    def _shards(self) -> dict[str, _Shard]:
        """What this rank updates, by parameter name; parameters it updates nothing of are missing.

        Moments that do not exist yet (no update so far) are made, as zeros.
        """
        names = {p: f"{prefix}{n}" for prefix, chunk in self.model.items() for n, p in chunk.module.named_parameters()}
        found = {}
        for part in self.inner.chained_optimizers:
            if isinstance(part, DistributedOptimizer):
                for parameter, (group, order) in part.model_param_group_index_map.items():
                    main = part.optimizer.param_groups[group]["params"][order]
                    start = part._get_model_param_range_map(parameter)["param"].start
                    found[names[parameter]] = _shard(part, main, start, main.dtype == parameter.dtype)
            else:
                parameter_of = {getattr(parameter, "main_param", parameter): parameter for parameter in names}
                for group in part.optimizer.param_groups:
                    for main in group["params"]:
                        parameter = parameter_of[main]
                        found[names[parameter]] = _shard(part, main, 0, main is parameter)
        return found

    def set_updates(self, updates: int) -> None:
        """Continue after ``updates`` updates: the schedule's clock and Adam's bias correction."""
        self.updates = updates
        for shard in self._shards().values():
            # One tensor for each parameter: Adam increments it in place.
            shard.state["step"] = torch.tensor(float(updates))


@dataclass(frozen=True)
class _Shard:
    """The elements of one parameter that this rank updates.

    Attributes:
        start: number of the first one in the parameter.
        main: what AdamW updates: the elements themselves, or their fp32 copies.
        state: AdamW's state of it.
        is_parameter: whether ``main`` is the elements themselves.
    """

    start: int
    main: torch.Tensor
    state: dict[str, torch.Tensor]
    is_parameter: bool

    def __len__(self) -> int:
        return self.main.numel()


def _shard(part: Any, main: torch.Tensor, start: int, is_parameter: bool) -> _Shard:
    state = part.optimizer.state[main]
    if not state:
        state["step"] = torch.tensor(0.0)
        state |= {kind: torch.zeros_like(main, dtype=torch.float32) for kind in MOMENTS}
    return _Shard(start, main, state, is_parameter)
