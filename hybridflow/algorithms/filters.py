"""Which samples train, and what length costs: DAPO's filters (Yu et al. 2025, arXiv 2503.14476), as pure functions."""

from __future__ import annotations

import torch

from hybridflow.algorithms.masked import GroupScores, check_rows, check_tokens
from hybridflow.errors import DataError


def with_signal(scores: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Dynamic sampling's filter: [B] bool, True for the rows of groups whose valid scores are not all equal.

    A group is kept or dropped as a whole, failed rewards (not finite) included; a group of one has no signal.

    Args:
        scores: [B] float.
        groups: [B] int64.
    """
    g = GroupScores.of(scores, groups)
    return ~g.constant[g.index]


def group_shares(rewards: torch.Tensor, solved: torch.Tensor, groups: torch.Tensor) -> dict[str, float]:
    """What the groups of a batch look like; answers without a reward (not finite) are left out.

    Args:
        rewards: [B] float.
        solved: [B] bool.
        groups: [B] int64.

    Returns:
        Shares of all groups: ``groups_without_signal``, whose rewards are all equal, so that they give no advantage;
        ``groups_all_solved`` and ``groups_none_solved``, which a binary reward gives no signal either.
    """
    g = GroupScores.of(torch.where(rewards.isfinite(), solved.to(rewards.dtype), torch.nan), groups)
    return {
        "groups_without_signal": GroupScores.of(rewards, groups).constant.double().mean().item(),
        "groups_all_solved": ((g.count > 0) & (g.mean == 1)).double().mean().item(),
        "groups_none_solved": ((g.count > 0) & (g.mean == 0)).double().mean().item(),
    }


def without_overlong(mask: torch.Tensor, cut: torch.Tensor) -> torch.Tensor:
    """Overlong filtering: the mask [B, T], False in rows that were cut at the longest response.

    Args:
        mask: [B, T] bool.
        cut: [B] bool: generation ended by the limit, not by the model.
    """
    check_tokens(mask)
    check_rows(mask, cut=cut)
    return mask & ~cut[:, None]


def overlong_penalty(lengths: torch.Tensor, longest: int, buffer: int, penalty: float = 1.0) -> torch.Tensor:
    """Soft overlong punishment (DAPO, eq. 13), to be added to the score: [B] float32, from 0 down to -penalty.

    0 up to longest - buffer tokens, then -(len - (longest - buffer)) / buffer * penalty, and -penalty from longest on.

    Args:
        lengths: [B] int64: tokens of each response.
        longest: the limit, ``rollout.max_tokens``.
        buffer: tokens before the limit over which the penalty grows, 0 < buffer <= longest.
    """
    if not 0 < buffer <= longest:
        raise DataError(
            f"algorithm.overlong_buffer={buffer}: has to be above 0 and at most the limit of {longest} tokens."
        )
    over = (lengths - (longest - buffer)).clamp(min=0, max=buffer)
    return -over.float() / buffer * penalty
