"""Losses for pairs of a chosen and a rejected answer: Bradley-Terry for reward models, DPO for policies.

Losses return one number per pair [N]; the caller averages by the global number of pairs. :func:`dpo_advantages` is the
step of DPO's driver, :func:`bradley_terry_weights` that of a reward model's: what a pair's loss asks of its two
answers, so that the update needs to know nothing of pairs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hybridflow.algorithms.losses import Metrics
from hybridflow.algorithms.masked import row_sum
from hybridflow.config import PreferenceConfig
from hybridflow.errors import ConfigError, DataError
from hybridflow.protocol.data import DataProto


def bradley_terry(
    chosen: torch.Tensor, rejected: torch.Tensor, margin: torch.Tensor | float = 0.0
) -> tuple[torch.Tensor, Metrics]:
    """-log sigmoid(chosen - rejected - margin) (Bradley and Terry 1952; margin: Llama 2, arXiv 2307.09288, eq. 2).

    Args:
        chosen, rejected: [N] float: scores of the two answers.
        margin: by how much the chosen one should be better, [N] or one number.

    Returns:
        The loss [N], and sums over pairs of ``accuracy`` (the chosen one scores higher) and ``score_gap``.
    """
    margins = {"margin": margin} if isinstance(margin, torch.Tensor) and margin.dim() else {}
    _check_pairs(chosen=chosen, rejected=rejected, **margins)
    gap = chosen - rejected
    return -F.logsigmoid(gap - margin), {"accuracy": (gap > 0).sum(), "score_gap": gap.detach().sum()}


def dpo(
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    ref_chosen: torch.Tensor,
    ref_rejected: torch.Tensor,
    beta: float,
    label_smoothing: float = 0.0,
) -> tuple[torch.Tensor, Metrics]:
    """DPO (Rafailov et al. 2023, arXiv 2305.18290, eq. 7): -log sigmoid(beta * gap).

    gap = log(pi / pi_ref) of the chosen answer minus that of the rejected one. With ``label_smoothing`` e, the chance
    that a pair is labelled the wrong way round: -(1 - e) log sigmoid(beta * gap) - e log sigmoid(-beta * gap).

    Args:
        chosen, rejected: [N] float: sums of the policy's log-probabilities over the answer's tokens.
        ref_chosen, ref_rejected: [N] float: the reference's; no gradient flows there.
        beta: above 0.
        label_smoothing: from 0 to below 0.5.

    Returns:
        The loss [N], and sums over pairs of ``accuracy`` (gap > 0), ``chosen_reward`` and ``rejected_reward`` (beta
        times the log-ratio).
    """
    _check_pairs(chosen=chosen, rejected=rejected, ref_chosen=ref_chosen, ref_rejected=ref_rejected)
    if not (beta > 0 and 0 <= label_smoothing < 0.5):
        raise ConfigError(
            f"beta={beta}, label_smoothing={label_smoothing}: beta is above 0, label_smoothing in [0, 0.5)."
        )
    good, bad = chosen - ref_chosen.detach(), rejected - ref_rejected.detach()
    gap = beta * (good - bad)
    loss = -(1 - label_smoothing) * F.logsigmoid(gap) - label_smoothing * F.logsigmoid(-gap)
    metrics = {
        "accuracy": (gap > 0).sum(),
        "chosen_reward": beta * good.detach().sum(),
        "rejected_reward": beta * bad.detach().sum(),
    }
    return loss, metrics


def dpo_advantages(batch: DataProto, config: PreferenceConfig) -> DataProto:
    """One weight per answer, such that the plain policy gradient of the batch is the gradient of :func:`dpo`.

    The gradient of mean_i loss_i is sum_i (d loss_i / d s) grad s over both answers of each pair, s the sum of an
    answer's log-probabilities. The factor in front needs log-probabilities alone; with it as ``advantages``, the loss
    ``reinforce`` (-A log p) aggregated as ``seq-mean-token-sum`` has that very gradient, however rows are spread over
    micro-batches and ranks. It is the gradient at the weights that gave ``log_probs``: one update a step.

    Args:
        batch: jagged ``log_probs``, ``ref_log_probs``, ``response_mask``; ``chosen`` [B] bool, True and False by turns.

    Returns:
        Jagged ``advantages``. ``meta_info["metrics"]``: ``preference/loss``, ``accuracy`` (the chosen answer's
        log-ratio is the greater one), ``chosen_reward``, ``rejected_reward`` and ``margin`` between them, means over
        pairs.

    Raises:
        DataError: where rows are not pairs, or an answer has no token.
    """
    _check_order(batch)
    mask = batch.to_padded("response_mask", value=False)
    if not bool(mask.any(dim=1).all()):
        raise DataError(f"response_mask: row {int((~mask.any(dim=1)).nonzero()[0])} has no token to learn.")
    sums = row_sum(batch.to_padded("log_probs").double(), mask).requires_grad_()
    ref = row_sum(batch.to_padded("ref_log_probs").double(), mask)
    with torch.enable_grad():
        loss, sums_of = dpo(sums[0::2], sums[1::2], ref[0::2], ref[1::2], config.beta, config.label_smoothing)
        (slope,) = torch.autograd.grad(loss.mean(), sums)
    # The update divides by the number of sequences, the gradient above already has its denominator.
    weights = torch.where(mask, (-slope * len(batch))[:, None], 0.0).float()
    metrics = {"loss": loss.mean().item(), **{name: float(x) / len(loss) for name, x in sums_of.items()}}
    metrics["margin"] = metrics["chosen_reward"] - metrics["rejected_reward"]
    return DataProto.from_dict(
        {"advantages": DataProto.from_padded(weights, batch.lengths("response_mask"))},
        meta_info={"metrics": {f"preference/{name}": value for name, value in metrics.items()}},
    )


def bradley_terry_weights(batch: DataProto) -> DataProto:
    """One weight per answer, such that -sum weight * score / rows has the gradient of :func:`bradley_terry`.

    As :func:`dpo_advantages`, of scores: the factor of each score's gradient in that of the mean loss over pairs. It is
    the gradient at the weights that gave ``scores``: one update a step.

    Args:
        batch: ``scores`` [B], and ``chosen`` [B] bool, True and False by turns.

    Returns:
        ``score_weights`` [B]. ``meta_info["metrics"]``: ``preference/loss``, ``accuracy`` and ``score_gap``, means over
        pairs.
    """
    _check_order(batch)
    scores = batch["scores"].double().requires_grad_()
    with torch.enable_grad():
        loss, sums = bradley_terry(scores[0::2], scores[1::2])
        (slope,) = torch.autograd.grad(loss.mean(), scores)
    metrics = {"loss": loss.mean().item(), **{name: float(x) / len(loss) for name, x in sums.items()}}
    return DataProto.from_dict(
        {"score_weights": (-slope * len(batch)).float()},
        meta_info={"metrics": {f"preference/{name}": value for name, value in metrics.items()}},
    )


def _check_order(batch: DataProto) -> None:
    chosen = batch["chosen"].tolist()
    if chosen != [True, False] * (len(chosen) // 2):
        raise DataError("chosen: pairs are two neighbouring rows, the chosen answer first. Keep the order of the rows.")


def _check_pairs(**tensors: torch.Tensor) -> None:
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    first = next(iter(shapes.values()))
    if len(first) != 1 or any(shape != first for shape in shapes.values()):
        raise DataError(f"{', '.join(f'{n} {s}' for n, s in shapes.items())}: give [N] each, one number a pair.")
