"""Advantage estimators: from scores of whole responses to one number per token.

An estimator is a pure function ``(scores [B], groups [B], mask [B, T], ...) -> (advantages, returns)``, both float32
[B, T], zero where the mask is False. ``groups`` are int64 labels: rows with the same label answer the same prompt.
"""

from __future__ import annotations

import torch

from hybridflow.config import AdvantageConfig
from hybridflow.errors import DataError
from hybridflow.protocol.data import DataProto


def grpo(
    scores: torch.Tensor,
    groups: torch.Tensor,
    mask: torch.Tensor,
    normalize_std: bool = True,
    eps: float = 1e-6,
    single: str = "zero",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Group-relative advantages: (r - mean) / (std + eps) inside each group (DeepSeekMath, 2024, section 4.1).

    Conventions: the standard deviation is unbiased (n - 1); ``normalize_std=False`` leaves r - mean (Dr. GRPO, Liu et
    al. 2025); a group of equal scores gives exactly 0; a group of one gives 0 (``single="zero"``) or its score
    (``single="raw"``); a NaN score (the reward failed) leaves its row at 0 and out of mean and deviation.

    Args:
        scores: [B] float.
        groups: [B] int64.
        mask: [B, T] bool.

    Returns:
        advantages and returns, both [B, T] float32; equal here.
    """
    if single not in ("zero", "raw"):
        raise DataError(f"single={single!r}: a group of one gives 'zero' or 'raw'.")
    if not scores.shape == groups.shape == mask.shape[:1]:
        raise DataError(
            f"scores {tuple(scores.shape)}, groups {tuple(groups.shape)} and mask {tuple(mask.shape)} "
            "must agree in their first dimension B."
        )
    scores = scores.float()
    valid = ~scores.isnan()
    labels, index = torch.unique(groups, return_inverse=True)
    value = torch.where(valid, scores, 0.0).double()
    zeros = value.new_zeros(len(labels))
    count = zeros.index_add(0, index, valid.double())
    mean = zeros.index_add(0, index, value) / count.clamp(min=1)
    centred = torch.where(valid, value - mean[index], 0.0)
    lowest = torch.full_like(zeros, torch.inf).scatter_reduce(0, index, value.where(valid, torch.inf), "amin")
    highest = torch.full_like(zeros, -torch.inf).scatter_reduce(0, index, value.where(valid, -torch.inf), "amax")
    centred = torch.where((lowest == highest)[index], 0.0, centred)
    if normalize_std:
        variance = zeros.index_add(0, index, centred.square()) / (count - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + eps)[index]
    if single == "raw":
        centred = torch.where((count == 1)[index] & valid, value, centred)
    advantages = torch.where(mask, centred.float()[:, None], 0.0)
    return advantages, advantages.clone()


def grpo_advantages(batch: DataProto, config: AdvantageConfig) -> DataProto:
    """GRPO's step in a driver: ``rewards``, ``group_ids`` and ``response_mask`` to jagged ``advantages``."""
    lengths = batch.lengths("response_mask")
    mask = batch.padded("response_mask", value=False)
    advantages, _ = grpo(batch["rewards"], batch["group_ids"], mask, config.normalize_std, config.eps)
    return DataProto.from_dict(tensors={"advantages": DataProto.from_padded(advantages, lengths)})
