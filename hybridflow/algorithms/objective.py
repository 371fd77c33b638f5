"""From one number per token to the scalar of an update: the configured loss, KL, entropy, and how tokens are averaged.

Where it stands: the actor calls :func:`objective` for each micro-batch, the critic :func:`value_objective`. Invariant:
the scalar is a SUM over this piece of the batch divided by GLOBAL counts (all micro-batches and data-parallel ranks of
one optimizer update), so that no split, padding or packing changes the gradient. A row without an unmasked token counts
in no denominator.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from hybridflow.algorithms.kl import kl
from hybridflow.algorithms.losses import Metrics, find_loss, value_loss
from hybridflow.algorithms.masked import check_tokens, clean, row_mean
from hybridflow.config import LossConfig
from hybridflow.errors import ConfigError, DataError, nearest

AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
OWN = "own"
OLD_LOG_PROBS = ("log_probs", "rollout_log_probs", OWN)
"""What the ratio may be taken to: the trainer's log-probabilities before its updates, the rollout's (both columns), or
those of the update's own forward pass."""


def mask_column(offered: Collection[str]) -> str:
    """The column that says which tokens count: ``loss_mask`` where a batch has it, else ``response_mask``."""
    return "loss_mask" if "loss_mask" in offered else "response_mask"


def columns_of(config: LossConfig, offered: Collection[str]) -> tuple[str, ...]:
    """The token columns that the configured objective reads from a batch.

    Args:
        offered: names of the batch's columns. ``loss_weights`` is read wherever it is there.

    Raises:
        ConfigError: lists the known losses.
        DataError: names the column that the batch lacks.
    """
    reads = [config.old_log_probs if name == "old_log_probs" else name for name in find_loss(config.name).reads]
    reads = [name for name in reads if name != OWN]
    reads += ["ref_log_probs"] if config.kl_coef else []
    for name in reads:
        if name not in offered:
            raise DataError(
                f"actor.loss.name={config.name!r} reads the column {name!r}, which the batch lacks. It has "
                f"{', '.join(offered)}."
            )
    return (*reads, *(["loss_weights"] if "loss_weights" in offered else []))


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
        columns: [B, T] each; those of :func:`columns_of`. ``loss_weights`` multiply the policy loss alone.
        num_tokens, num_sequences: global counts, see :func:`aggregate`.

    Returns:
        This piece's share of the scalar, and metric sums over its unmasked tokens.
    """
    log_probs, entropy = clean(mask, log_probs=log_probs, entropy=entropy)
    columns = dict(zip(columns, clean(mask, **columns), strict=True))
    loss_function = find_loss(config.name)
    nothing = torch.zeros_like(log_probs)
    extra = {name: columns[name] for name in loss_function.reads if name not in ("old_log_probs", "advantages")}
    old = log_probs.detach() if config.old_log_probs == OWN else columns.get(config.old_log_probs, nothing)
    loss, metrics = loss_function.function(log_probs, old, columns.get("advantages", nothing), mask, config, **extra)
    check_tokens(mask, loss=loss)
    if "loss_weights" in columns:
        loss = loss * columns["loss_weights"]
    if config.kl_coef:
        divergence = kl(log_probs, columns["ref_log_probs"], config.kl_kind)
        loss = loss + config.kl_coef * divergence
        metrics["kl"] = divergence.detach().sum()
    if config.entropy_coef:
        loss = loss - config.entropy_coef * entropy
        metrics["entropy"] = entropy.detach().sum()
    scale = config.scale or None
    return aggregate(loss, mask, config.aggregation, num_tokens, num_sequences, scale), metrics


def value_objective(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    mask: torch.Tensor,
    clip: float,
    num_tokens: float,
) -> tuple[torch.Tensor, Metrics]:
    """The critic's loss as a scalar: :func:`.losses.value_loss` averaged over tokens.

    Args:
        values: [B, T] of the critic in training; others as for the value loss.
        num_tokens: global count, see :func:`aggregate`.

    Returns:
        This piece's share of the scalar, and metric sums over its unmasked tokens: those of the value loss, and what
        :func:`explained_variance` takes.
    """
    loss, metrics = value_loss(values, old_values, returns, mask, clip)
    v, target = (x.double() for x in clean(mask, values=values.detach(), returns=returns))
    error = target - v
    moments = {"return": target, "return_square": target**2, "error": error, "error_square": error**2}
    sums = {name: moment.sum() for name, moment in moments.items()}
    return aggregate(loss, mask, "token-mean", num_tokens, num_tokens), {**metrics, **sums}


def explained_variance(means: Mapping[str, float]) -> dict[str, float]:
    """What a critic knows of the returns: 1 - variance(return - value) / variance(return), at most 1.

    Args:
        means: of the sums of :func:`value_objective` over all tokens.

    Returns:
        The means with ``explained_variance`` (0 where all returns are equal) in place of the moments it is made from.
    """
    variance = means["return_square"] - means["return"] ** 2
    unexplained = means["error_square"] - means["error"] ** 2
    kept = {name: mean for name, mean in means.items() if name not in ("return_square", "error", "error_square")}
    return {**kept, "explained_variance": 1 - unexplained / variance if variance > 1e-12 else 0.0}


def aggregate(
    loss: torch.Tensor,
    mask: torch.Tensor,
    mode: str,
    num_tokens: float,
    num_sequences: float,
    scale: float | None = None,
) -> torch.Tensor:
    """This piece's share of the scalar loss.

    Args:
        loss: [B, T] per-token loss.
        mask: [B, T] bool.
        mode: ``token-mean``: sum / num_tokens; ``seq-mean-token-sum``: sum / num_sequences; ``seq-mean-token-mean``:
            sum over rows of the row's token mean / num_sequences; ``seq-mean-token-sum-norm``: sum / scale /
            num_sequences.
        num_tokens: unmasked tokens of the whole update, over all micro-batches and data-parallel ranks; at least 1.
        num_sequences: rows with at least one unmasked token, counted likewise.
        scale: constant length of seq-mean-token-sum-norm, such as the longest response (Dr. GRPO, arXiv 2503.20783).

    Raises:
        ConfigError: for an unknown mode, or one without the scale it needs.
        DataError: where no token of the update counts.
    """
    check_tokens(mask, loss=loss)
    if mode not in AGGREGATIONS:
        raise ConfigError(f"actor.loss.aggregation={mode!r} is not an aggregation.{nearest(mode, AGGREGATIONS)}")
    if not (num_tokens > 0 and num_sequences > 0):
        raise DataError(
            f"num_tokens={num_tokens:g}, num_sequences={num_sequences:g}: every token of the update is masked, so "
            "there is nothing to average over."
        )
    loss = torch.where(mask, loss, 0.0)
    if mode == "token-mean":
        return loss.sum() / num_tokens
    if mode == "seq-mean-token-sum":
        return loss.sum() / num_sequences
    if mode == "seq-mean-token-mean":
        return row_mean(loss, mask).sum() / num_sequences
    if scale is None or not scale > 0:
        raise ConfigError(
            f"actor.loss.scale={scale}: {mode} divides each sequence's sum by it. Set it above 0, such as to "
            "${rollout.max_tokens}."
        )
    return loss.sum() / scale / num_sequences
