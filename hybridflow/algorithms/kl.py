"""The KL divergence to a reference policy: estimators per token, its place in the reward, its coefficient.

Source: J. Schulman, "Approximating KL Divergence" (2020). An estimator takes log-probabilities [B, T] of the sampled
tokens under the policy (p) and the reference (q); with d = log p - log q:

    k1       d                  unbiased, may be negative
    k2       d^2 / 2            biased, low variance; its gradient is that of the KL, in expectation
    k3       exp(-d) - 1 + d    unbiased, never negative; d clamped to +-20 and the value to +-10
    low_var  another name of k3
    abs      |d|

A name with a plus (``k3+``) has the value of that estimator and the gradient of k2 (straight-through). In a loss k1
needs it: its own gradient is 0 in expectation, whatever the policies are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from hybridflow.algorithms.masked import clean
from hybridflow.config import AlgorithmConfig
from hybridflow.errors import ConfigError, DataError
from hybridflow.importing import named

Estimator = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def k1(log_probs: torch.Tensor, ref_log_probs: torch.Tensor) -> torch.Tensor:
    return log_probs - ref_log_probs


def k2(log_probs: torch.Tensor, ref_log_probs: torch.Tensor) -> torch.Tensor:
    return 0.5 * (log_probs - ref_log_probs).square()


def k3(log_probs: torch.Tensor, ref_log_probs: torch.Tensor) -> torch.Tensor:
    log_ratio = (ref_log_probs - log_probs).clamp(-20.0, 20.0)
    return (log_ratio.exp() - 1.0 - log_ratio).clamp(-10.0, 10.0)


def absolute(log_probs: torch.Tensor, ref_log_probs: torch.Tensor) -> torch.Tensor:
    return (log_probs - ref_log_probs).abs()


def straight_through(estimator: Estimator, log_probs: torch.Tensor, ref_log_probs: torch.Tensor) -> torch.Tensor:
    """The value of ``estimator`` with the gradient of k2."""
    carrier = k2(log_probs, ref_log_probs)
    return carrier - carrier.detach() + estimator(log_probs, ref_log_probs).detach()


KINDS: dict[str, Estimator] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "low_var": k3,
    "abs": absolute,
    "k1+": partial(straight_through, k1),
    "k3+": partial(straight_through, k3),
    "low_var+": partial(straight_through, k3),
    "abs+": partial(straight_through, absolute),
}


def kl(
    log_probs: torch.Tensor, ref_log_probs: torch.Tensor, kind: str, setting: str = "actor.loss.kl_kind"
) -> torch.Tensor:
    """The estimator named ``kind`` (or a user's, by import path), [B, T] like its inputs.

    Raises:
        ConfigError: names ``setting`` and lists the known kinds.
        DataError: names both shapes where they differ.
    """
    _check_shapes(log_probs=log_probs, ref_log_probs=ref_log_probs)
    return named(kind, KINDS, setting)(log_probs, ref_log_probs)


def _check_shapes(**tensors: torch.Tensor) -> None:
    (name, x), (ref_name, ref) = tensors.items()
    if x.shape != ref.shape:
        raise DataError(f"{name} is {list(x.shape)}, {ref_name} {list(ref.shape)}: give both for the same tokens.")


def full(logits: torch.Tensor, ref_logits: torch.Tensor) -> torch.Tensor:
    """The exact KL(p || q) = sum_v p_v (log p_v - log q_v) where whole logits [..., V] are at hand; [...]."""
    _check_shapes(logits=logits, ref_logits=ref_logits)
    log_p, log_q = logits.log_softmax(dim=-1), ref_logits.log_softmax(dim=-1)
    return (log_p.exp() * (log_p - log_q)).sum(dim=-1)


def penalised(
    rewards: torch.Tensor,
    log_probs: torch.Tensor,
    ref_log_probs: torch.Tensor,
    mask: torch.Tensor,
    coef: float,
    kind: str = "k1",
) -> tuple[torch.Tensor, torch.Tensor]:
    """KL in the reward: r_t - coef * kl_t (InstructGPT, Ouyang et al. 2022, arXiv 2203.02155, eq. 2).

    Args:
        rewards, log_probs, ref_log_probs: [B, T] float; no gradient flows.
        mask: [B, T] bool.

    Returns:
        rewards [B, T] and the KL [B, T], 0 outside the mask.
    """
    rewards, p, q = clean(mask, rewards=rewards, log_probs=log_probs.detach(), ref_log_probs=ref_log_probs.detach())
    divergence = kl(p, q, kind, "algorithm.kl_kind")
    return rewards - coef * divergence, divergence


@dataclass(frozen=True)
class FixedKL:
    """A coefficient that stays."""

    coef: float

    def after(self, kl: float, num_samples: int) -> FixedKL:
        """The controller for the next step."""
        return self


@dataclass(frozen=True)
class AdaptiveKL:
    """A coefficient that keeps the KL near a target (Ziegler et al. 2019, arXiv 1909.08593, section 2.2).

    coef <- coef (1 + clip(kl / target - 1, -0.2, 0.2) * num_samples / horizon)

    Attributes:
        coef: of the coming step.
        target: wanted mean KL per token, above 0.
        horizon: samples over which an error of 0.2 or more changes the coefficient by a fifth.
    """

    coef: float
    target: float
    horizon: float

    def __post_init__(self) -> None:
        if not (self.coef >= 0 and self.target > 0 and self.horizon > 0):
            raise ConfigError(f"{self}: coef has to be at least 0, target and horizon above 0.")

    def after(self, kl: float, num_samples: int) -> AdaptiveKL:
        """The controller for the next step, after one of ``num_samples`` responses with mean KL ``kl``."""
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        return replace(self, coef=self.coef * (1.0 + error * num_samples / self.horizon))


def controller_of(config: AlgorithmConfig) -> FixedKL | AdaptiveKL:
    """The controller of the KL in the reward, at its start."""
    if config.kl_target:
        return AdaptiveKL(config.kl_coef, config.kl_target, config.kl_horizon)
    return FixedKL(config.kl_coef)
