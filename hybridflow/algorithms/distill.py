"""On-policy distillation: a teacher's log-probabilities of what the student wrote, as advantages or as a loss.

Invariants: gradients reach the student only, never the teacher; nothing outside the mask is read.
"""

from __future__ import annotations

import torch

from hybridflow.algorithms.masked import check_batch, check_tokens
from hybridflow.errors import DataError


def distill(
    teacher_log_probs: torch.Tensor, log_probs: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per-token advantage log pi_teacher - log pi_old: the reverse KL's reward on the student's own samples.

    Source: Lu, "On-Policy Distillation" (Thinking Machines, 2025); Agarwal et al. 2024 (arXiv 2306.13649). An estimator
    like those of :mod:`.advantages`: both inputs are constants of the update.

    Args:
        teacher_log_probs, log_probs: [B, T] float: of the sampled tokens, under the teacher and under the student
            before the update.
        mask: [B, T] bool.
    """
    check_batch(mask, teacher_log_probs=teacher_log_probs, log_probs=log_probs)
    difference = teacher_log_probs.detach().float() - log_probs.detach().float()
    advantages = torch.where(mask, difference, 0.0)
    return advantages, advantages.clone()


def hybrid(
    grpo_advantages: torch.Tensor,
    opd_advantages: torch.Tensor,
    accepted: torch.Tensor,
    lambda_rl: float = 1.0,
    lambda_opd: float = 1.0,
    clip: float = 1.0,
) -> torch.Tensor:
    """A_t = m_t (lambda_rl A_i + lambda_opd h_i clip(a_t, -clip, clip)), where h_i says that the teacher is trusted.

    Source: OpenClaw-RL (2026, arXiv 2603.10165), which adds a hint-conditioned teacher's advantage to GRPO's where the
    hint was accepted. With ``lambda_opd=0`` and ``lambda_rl=1`` the result is GRPO's, bit for bit.

    Args:
        grpo_advantages: [B, T] float32: A_i, zero outside the mask as every estimator returns it.
        opd_advantages: [B, T] float32: a_t of :func:`distill`, likewise.
        accepted: [B] bool: h.
        clip: c, at least 0.
    """
    if grpo_advantages.shape != opd_advantages.shape or accepted.shape != grpo_advantages.shape[:1]:
        raise DataError(
            f"grpo_advantages {list(grpo_advantages.shape)}, opd_advantages {list(opd_advantages.shape)}, accepted "
            f"{list(accepted.shape)}: give [B, T], [B, T] and [B]."
        )
    if not clip >= 0:
        raise DataError(f"clip={clip}: advantages are clipped to [-clip, clip], so it is at least 0.")
    weight = lambda_opd * accepted.float()[:, None]
    scaled = lambda_rl * grpo_advantages
    # Not added where the weight is 0: x + 0 * y is not always x, bit for bit.
    return torch.where(weight != 0, scaled + weight * opd_advantages.clamp(-clip, clip), scaled)


def topk_reverse_kl(log_probs: torch.Tensor, teacher_log_probs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """KL(student || teacher) over the teacher's K likeliest tokens and one bin for all others, per position.

    sum_k p_k (log p_k - log q_k) + p_tail (log p_tail - log q_tail) with p_tail = 1 - sum_k p_k: a lower bound of the
    full KL (data processing), 0 only where both agree on all K + 1 bins. The tails are at least 1e-8.

    Args:
        log_probs: [B, T, K] float: the student's log-probabilities of the teacher's K likeliest tokens; the gradient
            flows here.
        teacher_log_probs: [B, T, K] float: the teacher's of the same tokens.
        mask: [B, T] bool.

    Returns:
        [B, T], 0 outside the mask.
    """
    check_tokens(mask)
    if log_probs.shape != teacher_log_probs.shape or log_probs.dim() != 3 or log_probs.shape[:2] != mask.shape:
        raise DataError(
            f"log_probs {list(log_probs.shape)} and teacher_log_probs {list(teacher_log_probs.shape)}: give [B, T, K] "
            f"for a mask {list(mask.shape)}."
        )
    # A place outside the mask gets two equal distributions before any logarithm: NaN there would reach the gradient.
    even = -torch.log(torch.tensor(log_probs.shape[-1] + 1.0))
    log_p = torch.where(mask[..., None], log_probs, even.to(log_probs))
    log_q = torch.where(mask[..., None], teacher_log_probs.detach().to(log_p), even.to(log_p))
    p, q = log_p.exp(), log_q.exp()
    p_tail, q_tail = (1.0 - p.sum(dim=-1)).clamp(min=1e-8), (1.0 - q.sum(dim=-1)).clamp(min=1e-8)
    return (p * (log_p - log_q)).sum(dim=-1) + p_tail * (p_tail.log() - q_tail.log())
