"""Estimators of the KL divergence to a reference policy, per token.

Source: J. Schulman, "Approximating KL Divergence" (2020). All take log-probabilities [B, T] of the sampled tokens under
the policy and the reference and return float32 [B, T]; with d = log p - log q:

    k1 = d                  unbiased, may be negative
    k2 = d^2 / 2            biased, low variance
    k3 = exp(-d) - 1 + d    unbiased, never negative; d clamped to +-20 and the value to +-10
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from hybridflow.errors import ConfigError, nearest


def k1(log_probs: torch.Tensor, ref_log_probs: torch.Tensor) -> torch.Tensor:
    return log_probs - ref_log_probs


def k2(log_probs: torch.Tensor, ref_log_probs: torch.Tensor) -> torch.Tensor:
    return 0.5 * (log_probs - ref_log_probs).square()


def k3(log_probs: torch.Tensor, ref_log_probs: torch.Tensor) -> torch.Tensor:
    log_ratio = (ref_log_probs - log_probs).clamp(-20.0, 20.0)
    return (log_ratio.exp() - 1.0 - log_ratio).clamp(-10.0, 10.0)


KINDS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def kl(log_probs: torch.Tensor, ref_log_probs: torch.Tensor, kind: str) -> torch.Tensor:
    """The estimator named ``kind``; ConfigError lists the known names."""
    if kind not in KINDS:
        raise ConfigError(f"actor.loss.kl_kind={kind!r} is not an estimator.{nearest(kind, KINDS)}")
    return KINDS[kind](log_probs, ref_log_probs)
