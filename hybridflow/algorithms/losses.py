"""Policy losses and the value loss: from log-probabilities to one number per token. Every loss is in this module.

A policy loss is a pure function ``(log_probs, old_log_probs, advantages, mask, config) -> (loss [B, T], metrics)``,
where ``config`` is ``actor.loss``. What it needs besides it names as further arguments: token columns of the batch. How
tokens become a scalar, and where KL and entropy are added, is :mod:`.objective`.

Conventions, the same everywhere:

- Shapes [B, T], a bool mask; float32 inside (float64 stays). The loss is 0 outside the mask, and what stands there, NaN
  and inf included, reaches neither loss, metrics nor gradient.
- r = exp(log_probs - old_log_probs); the log-ratio is clamped to +-20. ``clip_low`` and ``clip_high`` bound r to
  [1 - clip_low, 1 + clip_high] unless a loss says otherwise.
- Metrics are sums over unmasked tokens: ``ratio``, ``approx_kl`` (r - 1 - log r, the k3 of old to new) and
  ``clip_fraction``. Divided by the global number of tokens they are means.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from hybridflow.algorithms.masked import check_tokens, clean, row_mean
from hybridflow.config import LossConfig
from hybridflow.errors import ConfigError
from hybridflow.importing import named, parameters_of

Metrics = dict[str, torch.Tensor]
TokenLoss = tuple[torch.Tensor, Metrics]


def _log_ratio(log_probs: torch.Tensor, old_log_probs: torch.Tensor) -> torch.Tensor:
    return (log_probs - old_log_probs).clamp(-20.0, 20.0)


def _clip(ratio: torch.Tensor, config: LossConfig) -> torch.Tensor:
    _check_clips(config)
    return ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)


def _check_clips(config: LossConfig) -> None:
    for name in ("clip_low", "clip_high", "dual_clip"):
        if not getattr(config, name) >= 0:
            raise ConfigError(f"actor.loss.{name}={getattr(config, name)}: has to be at least 0.")


@torch.no_grad()
def _metrics(log_ratio: torch.Tensor, clipped: torch.Tensor, mask: torch.Tensor) -> Metrics:
    ratio = log_ratio.exp()
    return {
        "clip_fraction": (clipped & mask).sum(),
        "approx_kl": torch.where(mask, ratio - 1.0 - log_ratio, 0.0).sum(),
        "ratio": torch.where(mask, ratio, 0.0).sum(),
    }


# --------------------------------------------------------------------------------------------------- clipped surrogates


def ppo(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    config: LossConfig,
) -> TokenLoss:
    """The clipped surrogate of PPO (Schulman et al. 2017, arXiv 1707.06347, eq. 7).

    loss = max(-A r, -A clip(r)). Separate bounds are DAPO's clip-higher (Yu et al. 2025, arXiv 2503.14476). With
    ``dual_clip`` c > 1 the loss of a negative advantage is at most -A c (Ye et al. 2020, arXiv 1912.09729, eq. 5).
    """
    new, old, a = clean(mask, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    log_ratio = _log_ratio(new, old)
    loss, clipped = _surrogate(log_ratio, a, config)
    return loss, _metrics(log_ratio, clipped, mask)


def _surrogate(
    log_ratio: torch.Tensor, advantages: torch.Tensor, config: LossConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's loss, and where its clip is active."""
    ratio = log_ratio.exp()
    plain, bounded = -advantages * ratio, -advantages * _clip(ratio, config)
    loss = torch.maximum(plain, bounded)
    if config.dual_clip:
        loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * config.dual_clip), loss)
    return loss, bounded > plain


def gspo(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    config: LossConfig,
) -> TokenLoss:
    """GSPO with token-wise gradients (Zheng et al. 2025, arXiv 2507.18071, section 4.3).

    PPO's surrogate with s_t = sg[s] * p_t / sg[p_t], s = exp(mean over the row of the log-ratio): every token has the
    ratio of its sequence, and a gradient of its own. The paper's bounds are 3e-4 and 4e-4, its aggregation is
    seq-mean-token-mean. The metrics are those of s.
    """
    new, old, a = clean(mask, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    sequence = row_mean(new - old, mask)[:, None].detach()
    log_ratio = (sequence + new - new.detach()).clamp(-20.0, 20.0)
    loss, clipped = _surrogate(log_ratio, a, config)
    return torch.where(mask, loss, 0.0), _metrics(log_ratio, clipped, mask)


def gmpo(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    config: LossConfig,
) -> TokenLoss:
    """GMPO, the geometric mean of clipped ratios (Zhao et al. 2025, arXiv 2507.20673).

    loss = -A exp(mean over the row of l_t), l_t = sgn(A) min(sgn(A) log r_t, sgn(A) clip(log r_t)), where log r is
    clipped to [-clip_low, clip_high] (the paper takes 0.4 for both). A is the row's mean advantage. Every token of a
    row carries the row's loss, so seq-mean-token-mean gives the paper's objective.
    """
    new, old, a = clean(mask, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    _check_clips(config)
    log_ratio, sign = _log_ratio(new, old), a.sign()
    bounded = log_ratio.clamp(-config.clip_low, config.clip_high)
    kept = sign * torch.minimum(sign * log_ratio, sign * bounded)
    sequence = -row_mean(a, mask) * row_mean(kept, mask).exp()
    return torch.where(mask, sequence[:, None], 0.0), _metrics(log_ratio, sign * bounded < sign * log_ratio, mask)


def clip_cov(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    config: LossConfig,
    high_covariance: torch.Tensor,
) -> TokenLoss:
    """Clip-Cov (Cui et al. 2025, "The Entropy Mechanism", arXiv 2505.22617).

    PPO's loss, with no gradient from the tokens of ``high_covariance`` [B, T] bool: see :func:`select_clip_cov`.
    """
    new, old, a = clean(mask, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    check_tokens(mask, high_covariance=high_covariance)
    log_ratio = _log_ratio(new, old)
    loss, clipped = _surrogate(log_ratio, a, config)
    return torch.where(high_covariance & mask, 0.0, loss), _metrics(log_ratio, clipped | high_covariance, mask)


def kl_cov(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    config: LossConfig,
    high_covariance: torch.Tensor,
) -> TokenLoss:
    """KL-Cov (Cui et al. 2025, arXiv 2505.22617): nothing is clipped.

    loss = -A r, plus ``cov_kl_coef`` * |log r| for the tokens of ``high_covariance`` [B, T] bool: see
    :func:`select_kl_cov`. The absolute log-ratio is the KL estimate of the authors' code.
    """
    new, old, a = clean(mask, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    check_tokens(mask, high_covariance=high_covariance)
    log_ratio = _log_ratio(new, old)
    chosen = high_covariance & mask
    loss = -a * log_ratio.exp() + torch.where(chosen, config.cov_kl_coef * log_ratio.abs(), 0.0)
    return loss, _metrics(log_ratio, chosen, mask)


# ---------------------------------------------------------------------------------------------- weighted log-likelihood


def reinforce(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    config: LossConfig,
) -> TokenLoss:
    """The policy gradient (Williams 1992): loss = -A log p. ``old_log_probs`` is not read.

    Also the loss of GPG (Chu et al. 2025, arXiv 2504.02546), whose advantages are its own.
    """
    new, a = clean(mask, log_probs=log_probs, advantages=advantages)
    return -a * new, {}


gpg = reinforce


def cispo(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    config: LossConfig,
) -> TokenLoss:
    """CISPO (MiniMax-M1, 2025, arXiv 2506.13585): loss = -sg[clip(r)] A log p.

    The clip bounds the weight, never the gradient. Both sides are clipped; ``clip_low=1`` leaves the lower one open, as
    in the paper.
    """
    new, old, a = clean(mask, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    log_ratio = _log_ratio(new, old)
    ratio = log_ratio.exp().detach()
    weight = _clip(ratio, config)
    return -weight * a * new, _metrics(log_ratio, weight != ratio, mask)


# -------------------------------------------------------------------------------------------------- other trust regions


def sapo(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    config: LossConfig,
) -> TokenLoss:
    """SAPO, a soft gate instead of a clip (Gao et al. 2025, arXiv 2511.20347).

    loss = -A (4 / tau) sigmoid(tau (r - 1)), tau = ``tau_positive`` where A > 0, else ``tau_negative`` (the paper takes
    1 and 1.05, and averages as seq-mean-token-mean). ``clip_fraction`` is always 0.
    """
    new, old, a = clean(mask, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    log_ratio = _log_ratio(new, old)
    tau = torch.where(a > 0, config.tau_positive, config.tau_negative)
    return -a * torch.sigmoid(tau * (log_ratio.exp() - 1.0)) * 4.0 / tau, _metrics(log_ratio, a != a, mask)


def dppo_tv(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    config: LossConfig,
) -> TokenLoss:
    """DPPO with the binary total variation (Qi et al. 2026, arXiv 2602.04879): loss = -A r, or 0 outside the region.

    A token is outside where its probability has moved along its advantage by more than the bound: A > 0 and
    p - p_old > ``clip_high``, or A < 0 and p_old - p > ``clip_low``. The paper anchors the region at the rollout's
    probabilities: ``actor.loss.old_log_probs=rollout_log_probs``.
    """
    new, old, a = clean(mask, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    moved = (new.exp() - old.exp()).detach()
    return _inside_region(new, old, a, mask, config, moved.abs(), moved)


def dppo_kl(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    config: LossConfig,
) -> TokenLoss:
    """DPPO with the binary KL (Qi et al. 2026, arXiv 2602.04879): as :func:`dppo_tv`, with another distance.

    q log(q / p) + (1 - q) log((1 - q) / (1 - p)) of the token's own probability before (q) and now (p).
    """
    new, old, a = clean(mask, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    log_p, log_q = new.detach().double(), old.double()
    p, q = log_p.exp(), log_q.exp()
    others_p, others_q = (-torch.expm1(x) for x in (log_p, log_q))  # 1 - p, exact also near p = 1
    others = others_q * (others_q.clamp(min=1e-12).log() - others_p.clamp(min=1e-12).log())
    return _inside_region(new, old, a, mask, config, q * (log_q - log_p) + others, p - q)


def _inside_region(
    new: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    config: LossConfig,
    distance: torch.Tensor,
    moved: torch.Tensor,
) -> TokenLoss:
    _check_clips(config)
    up = (advantages > 0) & (moved > 0) & (distance > config.clip_high)
    down = (advantages < 0) & (moved < 0) & (distance > config.clip_low)
    log_ratio = _log_ratio(new, old)
    return torch.where(up | down, 0.0, -advantages * log_ratio.exp()), _metrics(log_ratio, up | down, mask)


# ----------------------------------------------------------------------------------------------------------- supervised


def sft(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    config: LossConfig,
) -> TokenLoss:
    """Negative log-likelihood of the given tokens; ``old_log_probs`` and ``advantages`` are not read."""
    (new,) = clean(mask, log_probs=log_probs)
    return -new, {}


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor, clip: float
) -> TokenLoss:
    """Clipped value loss of PPO: max((v - R)^2, (v_clipped - R)^2) / 2, v_clipped = v_old + clip(v - v_old, +-clip).

    Source: the implementation of Schulman et al. 2017; InstructGPT (arXiv 2203.02155).

    Args:
        values: [B, T] of the critic in training; ``old_values`` those that the returns were made with.
        clip: largest change per update that still lowers the loss; 0 turns clipping off.
    """
    if not clip >= 0:
        raise ConfigError(f"clip={clip}: the value clip has to be above 0, or 0 for none.")
    v, old, target = clean(mask, values=values, old_values=old_values, returns=returns)
    plain = (v - target).square()
    bounded = (old + (v - old).clamp(-clip, clip) - target).square() if clip else plain
    metrics = {"clip_fraction": ((bounded > plain) & mask).sum(), "value": v.detach().sum()}
    return 0.5 * torch.maximum(plain, bounded), metrics


# -------------------------------------------------------------------------------------------- tokens of high covariance


def covariance(log_probs: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(log p - mean)(A - mean) of each token, means over all unmasked tokens (arXiv 2505.22617); [B, T] float64.

    For the whole batch at once, under the policy before its updates, so that no cut into mini- or micro-batches changes
    which tokens are selected.
    """
    new, a = (x.double() for x in clean(mask, log_probs=log_probs.detach(), advantages=advantages))
    count = mask.sum().clamp(min=1)
    return torch.where(mask, (new - new.sum() / count) * (a - a.sum() / count), 0.0)


def select_clip_cov(
    log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    share: float,
    low: float,
    high: float,
    seed: int,
) -> torch.Tensor:
    """Clip-Cov's tokens, [B, T] bool: max(1, share * tokens), drawn by seed, of those with low < covariance < high."""
    value = covariance(log_probs, advantages, mask)
    flat = (mask & (value > low) & (value < high)).flatten()
    candidates = flat.nonzero()[:, 0]
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed)).to(candidates.device)
    chosen = torch.zeros_like(flat)
    chosen[candidates[order[: max(1, int(share * int(mask.sum())))]]] = True
    return chosen.view_as(mask)


def select_kl_cov(log_probs: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, share: float) -> torch.Tensor:
    """KL-Cov's tokens, [B, T] bool: the max(1, share * tokens) unmasked ones of the greatest covariance."""
    value = covariance(log_probs, advantages, mask).masked_fill(~mask, -torch.inf).flatten()
    num_tokens = int(mask.sum())
    top = value.topk(min(num_tokens, max(1, int(share * num_tokens)))).indices
    return torch.zeros_like(value, dtype=torch.bool).index_fill(0, top, True).view_as(mask)


# -------------------------------------------------------------------------------------------------------------- by name

OLD_AND_ADVANTAGES = ("old_log_probs", "advantages")


class Loss(NamedTuple):
    """A loss and the token columns it reads; ``old_log_probs`` stands for that of ``actor.loss.old_log_probs``."""

    function: Callable[..., TokenLoss]
    reads: tuple[str, ...] = OLD_AND_ADVANTAGES


LOSSES: dict[str, Loss] = {
    "ppo": Loss(ppo),
    "gspo": Loss(gspo),
    "gmpo": Loss(gmpo),
    "cispo": Loss(cispo),
    "sapo": Loss(sapo),
    "gpg": Loss(gpg, ("advantages",)),
    "reinforce": Loss(reinforce, ("advantages",)),
    "clip_cov": Loss(clip_cov, (*OLD_AND_ADVANTAGES, "high_covariance")),
    "kl_cov": Loss(kl_cov, (*OLD_AND_ADVANTAGES, "high_covariance")),
    "dppo_tv": Loss(dppo_tv),
    "dppo_kl": Loss(dppo_kl),
    "sft": Loss(sft, ()),
}


def find_loss(name: str) -> Loss:
    """The loss of a name, or a user's function by import path, which reads the columns that its arguments name.

    Raises:
        ConfigError: lists the known losses, or says what a user's function has to take.
    """
    found = named(name, LOSSES, "actor.loss.name")
    if isinstance(found, Loss):
        return found
    first = ["log_probs", "old_log_probs", "advantages", "mask", "config"]
    parameters = parameters_of(found)
    if parameters is None or parameters[: len(first)] != first:
        raise ConfigError(
            f"actor.loss.name={name!r} takes ({', '.join(parameters or ['**'])}): a loss is f({', '.join(first)}, "
            "*columns of the batch) -> (loss [B, T], metrics)."
        )
    return Loss(found, (*OLD_AND_ADVANTAGES, *parameters[len(first) :]))
