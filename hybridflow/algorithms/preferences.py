"""Losses for pairs of a chosen and a rejected answer: Bradley-Terry for reward models, DPO for policies.

Pure functions that return one number per pair [N]; the caller averages by the global number of pairs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hybridflow.algorithms.losses import Metrics
from hybridflow.errors import ConfigError, DataError


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
    _check_pairs(chosen=chosen, rejected=rejected)
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


def _check_pairs(**tensors: torch.Tensor) -> None:
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    first = next(iter(shapes.values()))
    if len(first) != 1 or any(shape != first for shape in shapes.values()):
        raise DataError(f"{', '.join(f'{n} {s}' for n, s in shapes.items())}: give [N] each, one number a pair.")
