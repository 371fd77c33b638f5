"""Policy losses: pure functions from log-probabilities to one number per token, and how tokens become a scalar.

A loss is ``(log_probs, old_log_probs, advantages, mask, config) -> (loss [B, T], metrics)``. The scalar is
:func:`aggregate` of it: a SUM over this piece of the batch divided by GLOBAL counts (all micro-batches and
data-parallel ranks of one optimizer update), so that no split, padding or packing changes the gradient.

Invariants: what stands at masked positions, NaN and inf included, never reaches loss, metrics or gradient.
Shapes: [B, T] float32 with a bool mask [B, T]. Metrics are sums over unmasked tokens, to be divided by the global
count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from hybridflow.algorithms.kl import kl
from hybridflow.config import LossConfig
from hybridflow.errors import ConfigError, nearest

Metrics = dict[str, torch.Tensor]
LossFunction = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, LossConfig], tuple[torch.Tensor, Metrics]
]


def ppo(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    config: LossConfig,
) -> tuple[torch.Tensor, Metrics]:
    """The clipped surrogate of PPO (Schulman et al. 2017, eq. 7), with separate bounds (DAPO) and the dual clip.

    r = exp(log_probs - old_log_probs), the log-ratio clamped to +-20;
    loss = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)); with ``dual_clip`` c > 1 and A < 0 at most -A c
    (Ye et al. 2020, eq. 5).
    """
    log_ratio = torch.where(mask, log_probs - old_log_probs, 0.0).clamp(-20.0, 20.0)
    advantages = torch.where(mask, advantages, 0.0)
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    loss = torch.maximum(plain, clipped)
    if config.dual_clip:
        loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * config.dual_clip), loss)
    with torch.no_grad():
        metrics = {
            "clip_fraction": ((clipped > plain) & mask).sum(),
            "approx_kl": torch.where(mask, ratio - 1.0 - log_ratio, 0.0).sum(),
            "ratio": torch.where(mask, ratio, 0.0).sum(),
        }
    return loss, metrics


def sft(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    config: LossConfig,
) -> tuple[torch.Tensor, Metrics]:
    """Negative log-likelihood of the given tokens; ``old_log_probs`` and ``advantages`` are not read."""
    return torch.where(mask, -log_probs, 0.0), {}


# Each loss with the columns of the batch it reads.
LOSSES: dict[str, tuple[LossFunction, tuple[str, ...]]] = {
    "ppo": (ppo, ("log_probs", "advantages")),
    "sft": (sft, ()),
}
AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")


def columns_of(config: LossConfig) -> tuple[str, ...]:
    """The columns that the configured objective reads; ConfigError lists the known losses."""
    if config.name not in LOSSES:
        raise ConfigError(f"actor.loss.name={config.name!r} is not a loss.{nearest(config.name, LOSSES)}")
    return LOSSES[config.name][1] + (("ref_log_probs",) if config.kl_coef else ())


def objective(
    log_probs: torch.Tensor,
    entropy: torch.Tensor,
    columns: Mapping[str, torch.Tensor],
    mask: torch.Tensor,
    config: LossConfig,
    num_tokens: float,
    num_sequences: float,
) -> tuple[torch.Tensor, Metrics]:
    """The configured loss, plus ``kl_coef`` * KL to the reference, minus ``entropy_coef`` * entropy, as a scalar.

    Args:
        log_probs, entropy: [B, T] of the policy in training.
        columns: [B, T] each; those of :func:`columns_of`. ``log_probs`` there are the old ones.
        num_tokens, num_sequences: global counts, see :func:`aggregate`.

    Returns:
        This piece's share of the scalar, and metric sums over its unmasked tokens.
    """
    # Cleaned first: a NaN behind a later mask would still reach the gradient as 0 * NaN.
    log_probs, entropy = torch.where(mask, log_probs, 0.0), torch.where(mask, entropy, 0.0)
    columns = {name: torch.where(mask, column, 0.0) for name, column in columns.items()}
    nothing = torch.zeros_like(log_probs)
    loss, metrics = LOSSES[config.name][0](
        log_probs, columns.get("log_probs", nothing), columns.get("advantages", nothing), mask, config
    )
    if config.kl_coef:
        divergence = kl(log_probs, columns["ref_log_probs"], config.kl_kind)
        loss = loss + config.kl_coef * divergence
        metrics["kl"] = divergence.detach().sum()
    if config.entropy_coef:
        loss = loss - config.entropy_coef * entropy
        metrics["entropy"] = entropy.detach().sum()
    return aggregate(loss, mask, config.aggregation, num_tokens, num_sequences), metrics


def aggregate(
    loss: torch.Tensor, mask: torch.Tensor, mode: str, num_tokens: float, num_sequences: float
) -> torch.Tensor:
    """This piece's share of the scalar loss.

    Args:
        loss: [B, T] per-token loss.
        mask: [B, T] bool.
        mode: ``token-mean``: sum / num_tokens; ``seq-mean-token-sum``: sum / num_sequences;
            ``seq-mean-token-mean``: sum over rows of the row's token mean / num_sequences.
        num_tokens: unmasked tokens of the whole update, over all micro-batches and data-parallel ranks.
        num_sequences: rows with at least one unmasked token, counted likewise.
    """
    loss = torch.where(mask, loss, 0.0)
    if mode == "token-mean":
        return loss.sum() / max(num_tokens, 1)
    if mode == "seq-mean-token-sum":
        return loss.sum() / max(num_sequences, 1)
    if mode == "seq-mean-token-mean":
        return (loss.sum(dim=1) / mask.sum(dim=1).clamp(min=1)).sum() / max(num_sequences, 1)
    raise ConfigError(f"actor.loss.aggregation={mode!r} is not an aggregation.{nearest(mode, AGGREGATIONS)}")
