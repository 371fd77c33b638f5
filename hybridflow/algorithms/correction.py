"""Off-policy correction: samples of another policy (the rollout engine's, an older version's) weighed for the
trainer's.

Where it stands: in the driver's advantage step, between the trainer's log-probabilities and the update. Every token
carries its own behaviour log-probability, so mixed weight versions inside one trajectory need nothing special.

With ratio = pi_train / pi_rollout of the sampled tokens, log-ratios clamped to +-20:

- **Weights** multiply the policy loss, never its gradient: per token (Yao et al. 2025, "Your efficient RL framework
  secretly brings you off-policy RL training"), or one for a sequence, the product (``sequence``) or the geometric mean
  (``geometric``) of its tokens' ratios. They are cut at ``high`` (``truncate``), at both bounds (``clip``), or become 0
  outside of them (``mask``: IcePop, 2025). A token of weight 0 still counts in the denominators.
- **Rejection** takes whole sequences out of the loss mask, and so out of every denominator: where the product or the
  geometric mean, or any single token's ratio (``token``), is outside of the bounds.
- With PPO's loss and token weights this is **decoupled PPO** (Hilton et al. 2022, arXiv 2110.00641; AReaL, 2025, arXiv
  2505.24298): (pi_prox / pi_behav) min(u A, clip(u) A), u = pi / pi_prox, where the proximal policy is the trainer's
  before its updates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hybridflow.algorithms.masked import check_batch, clean, row_mean, row_sum
from hybridflow.config import CorrectionConfig
from hybridflow.errors import ConfigError, nearest

LEVELS = ("none", "token", "sequence", "geometric")
BOUNDS = ("none", "truncate", "clip", "mask")


@dataclass(frozen=True)
class Correction:
    """What a batch's correction comes to.

    Attributes:
        weights: [B, T] float32, 0 outside ``mask``.
        mask: [B, T] bool: the response mask without rejected sequences.
        metrics: the ratio's before any bound (:func:`off_policy_metrics`); ``weight_mean``, ``weight_max`` and
            ``weight_ess`` of the applied weights; ``bounded`` and ``dropped``, the shares of tokens whose weight a
            bound changed and of tokens that no longer train; ``rejected``, the share of sequences.
    """

    weights: torch.Tensor
    mask: torch.Tensor
    metrics: dict[str, float]


def log_ratios(
    log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, mask: torch.Tensor, level: str, setting: str = "level"
) -> torch.Tensor:
    """log(pi_train / pi_rollout) at a level, clamped to +-20: [B, T] for ``token``, else [B], one a sequence."""
    new, behaviour = clean(mask, log_probs=log_probs.detach(), rollout_log_probs=rollout_log_probs.detach())
    difference = new.double() - behaviour.double()
    if level == "sequence":
        difference = row_sum(difference, mask)
    elif level == "geometric":
        difference = row_mean(difference, mask)
    elif level != "token":
        raise ConfigError(f"algorithm.correction.{setting}={level!r} is not known.{nearest(level, LEVELS[1:])}")
    return difference.clamp(-20.0, 20.0)


def off_policy_metrics(log_ratio: torch.Tensor) -> dict[str, float]:
    """How far two policies are apart, from log(pi_train / pi_rollout) of samples of the rollout.

    Args:
        log_ratio: [N], of tokens or of sequences; NaN shows in every metric.

    Returns:
        ``ratio_mean`` (1 in expectation), ``ess`` (effective sample size as a share, (sum w)^2 / (N sum w^2)), ``k3``
        (the KL of rollout to trainer) and ``chi_square`` (mean w^2 - 1). Empty for no samples.
    """
    if log_ratio.numel() == 0:
        return {}
    log_ratio = log_ratio.double().clamp(-20.0, 20.0)
    ratio = log_ratio.exp()
    square = ratio.square().mean()
    return {
        "ratio_mean": ratio.mean().item(),
        "ess": (ratio.mean().square() / square).item(),
        "k3": (ratio - 1.0 - log_ratio).mean().item(),
        "chi_square": (square - 1.0).item(),
    }


def bounded_weights(ratio: torch.Tensor, bound: str, low: float, high: float) -> torch.Tensor:
    """Importance weights from ratios of any shape: see the module's docstring."""
    _check_bounds("algorithm.correction", low, high)
    if bound == "none":
        return ratio
    if bound == "truncate":
        return ratio.clamp(max=high)
    if bound == "clip":
        return ratio.clamp(low, high)
    if bound == "mask":
        return torch.where((ratio < low) | (ratio > high), 0.0, ratio)
    raise ConfigError(f"algorithm.correction.bound={bound!r} is not known.{nearest(bound, BOUNDS)}")


def rejected(
    log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor,
    mask: torch.Tensor,
    level: str,
    low: float,
    high: float,
) -> torch.Tensor:
    """[B] bool: the sequence's ratio train / rollout (``token``: that of any token) is outside of [low, high]."""
    _check_bounds("algorithm.correction.reject", low, high)
    ratio = log_ratios(log_probs, rollout_log_probs, mask, level, "reject").exp()
    outside = (ratio < low) | (ratio > high)
    return (outside & mask).any(dim=1) if level == "token" else outside & mask.any(dim=1)


def correct(
    log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, mask: torch.Tensor, config: CorrectionConfig
) -> Correction:
    """Weights and mask by the configuration.

    Args:
        log_probs, rollout_log_probs: [B, T] float: of the sampled tokens, under the trainer before its updates and
            under the policy that drew each of them.
        mask: [B, T] bool.
    """
    check_batch(mask, log_probs=log_probs, rollout_log_probs=rollout_log_probs)
    by_token = log_ratios(log_probs, rollout_log_probs, mask, "token")
    weights, plain = torch.ones_like(by_token), torch.ones_like(by_token)
    measured = by_token[mask]
    if config.level != "none":
        at_level = log_ratios(log_probs, rollout_log_probs, mask, config.level)
        ratio = at_level.exp()
        bounded = bounded_weights(ratio, config.bound, config.low, config.high)
        if config.level != "token":
            measured = at_level[mask.any(dim=1)]
            ratio, bounded = (x[:, None].expand_as(weights) for x in (ratio, bounded))
        plain, weights = ratio, bounded
    out = torch.zeros_like(mask[:, 0])
    if config.reject != "none":
        limits = (config.reject_low, config.reject_high)
        out = rejected(log_probs, rollout_log_probs, mask, config.reject, *limits)
    kept = mask & ~out[:, None]
    applied = weights[kept]
    tokens = mask.sum().item()
    metrics = off_policy_metrics(measured) | {
        "bounded": ((weights != plain) & mask).sum().item() / tokens,
        "dropped": ((~kept | (weights == 0)) & mask).sum().item() / tokens,
        "rejected": out.sum().item() / mask.any(dim=1).sum().item(),
    }
    if len(applied):
        metrics |= {
            "weight_mean": applied.mean().item(),
            "weight_max": applied.max().item(),
            "weight_ess": (applied.mean().square() / applied.square().mean().clamp(min=1e-30)).item(),
        }
    return Correction(torch.where(kept, weights, 0.0).float(), kept, metrics)


def _check_bounds(where: str, low: float, high: float) -> None:
    if not 0 <= low < high:
        raise ConfigError(f"{where}: low={low}, high={high}: bounds on the ratio train/rollout need 0 <= low < high.")
