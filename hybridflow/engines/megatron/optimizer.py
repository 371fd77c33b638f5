"""megatron-core's AdamW for one model: built, stepped, and its state by parameter name.

Where it stands: the last part of an update, after gradients were summed over the data-parallel ranks.
Invariant: a non-finite gradient norm never reaches the weights; the step is skipped and reported.
"""

from __future__ import annotations

import math

import torch

from hybridflow.config import OptimizerConfig
from hybridflow.engines.megatron import cpu
from hybridflow.errors import ConfigError, nearest
from hybridflow.platform import current

from megatron.core import optimizer as megatron_optimizer  # isort: skip
from megatron.core.distributed import DistributedDataParallel  # isort: skip
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32  # isort: skip

SCHEDULES = ("constant", "linear", "cosine")
MOMENTS = ("exp_avg", "exp_avg_sq")


def learning_rate(config: OptimizerConfig, update: int, total_updates: int) -> float:
    """The learning rate of optimizer update ``update`` (1-based).

    Linear from ``lr / warmup_steps`` at update 1 to ``lr`` at update ``warmup_steps``; from there constant, or down to
    ``min_lr`` at update ``decay_steps`` (all ``total_updates`` where it is 0) on a line or half a cosine.
    """
    if update <= config.warmup_steps:
        return config.lr * update / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    if config.schedule not in SCHEDULES:
        raise ConfigError(f"actor.optimizer.schedule={config.schedule!r}.{nearest(config.schedule, SCHEDULES)}")
    end = config.decay_steps or total_updates
    progress = min(1.0, (update - config.warmup_steps) / max(1, end - config.warmup_steps))
    share = 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.min_lr + (config.lr - config.min_lr) * share


class Optimizer:
    """AdamW over one DDP-wrapped model. Every method runs inside the model's :class:`ModelParallel` context.

    Args:
        model: the wrapped model; its parameters' dtype decides whether fp32 main copies are kept (bfloat16).
        config: hyper-parameters. Weight decay applies to matrices only: not to biases, nor to norms.
        total_updates: optimizer updates of the whole run, for decaying schedules.
    """

    def __init__(self, model: DistributedDataParallel, config: OptimizerConfig, dtype: torch.dtype, total_updates: int):
        self.model, self.config, self.total_updates = model, config, total_updates
        self.updates = 0
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
            use_distributed_optimizer=False,
        )
        cpu.install()
        with cpu.cuda_type_names():
            inner = megatron_optimizer.get_megatron_optimizer(
                settings, [model], use_gloo_process_groups=not current().is_cuda
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
        self.model.zero_grad_buffer()
        self.inner.zero_grad()

    @torch.no_grad()
    def states(self) -> dict[str, dict[str, torch.Tensor]]:
        """Live optimizer state by kind and parameter name.

        Kinds: ``exp_avg``, ``exp_avg_sq``, and ``main`` for models in bfloat16. Moments that do not exist yet (no
        update so far) are made, as zeros. Each tensor has its parameter's shape.
        """
        owner = {
            parameter: part.optimizer
            for part in self.inner.chained_optimizers
            for group in part.optimizer.param_groups
            for parameter in group["params"]
        }
        found: dict[str, dict[str, torch.Tensor]] = {kind: {} for kind in MOMENTS}
        for name, parameter in self.model.module.named_parameters():
            main = getattr(parameter, "main_param", parameter)
            state = owner[main].state[main]
            if not state:
                state["step"] = torch.tensor(0.0)
                state |= {kind: torch.zeros_like(main, dtype=torch.float32) for kind in MOMENTS}
            for kind in MOMENTS:
                found[kind][name] = state[kind]
            if main is not parameter:
                found.setdefault("main", {})[name] = main
        return found

    def set_updates(self, updates: int) -> None:
        """Continue after ``updates`` updates: the schedule's clock and Adam's bias correction."""
        self.updates = updates
        for part in self.inner.chained_optimizers:
            for state in part.optimizer.state.values():
                # One tensor for each parameter: Adam increments it in place.
                state["step"] = torch.tensor(float(updates))
