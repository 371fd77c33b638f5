"""Advantage estimators: from rewards to one number per token. Every estimator is in this module.

An estimator is a pure function that returns ``(advantages, returns)``, both float32 [B, T], zero where the mask is
False. It names its inputs, of which there are two kinds:

- ``scores`` [B], one number a response, and ``groups`` [B], integer labels: rows with the same label answer the same
  prompt. Where an estimator knows no other return, returns equal advantages.
- ``rewards`` [B, T], one number a token; the reward of a whole response stands at its last unmasked token.

Conventions, the same everywhere:

- ``mask`` [B, T] bool says which tokens the policy wrote. What stands elsewhere, NaN and inf included, is never read.
- Masked tokens inside a row (a tool's output) are skipped: returns, values and advantages are carried over them, and
  nothing is bootstrapped from padding.
- A score or reward that is not finite says that the reward failed: its row gets 0 and is left out of every mean,
  deviation and baseline. What models compute (values, log_probs) has to be finite where the mask is True.
- A group of constant scores gives exactly 0. A group of one gives 0, or with ``single="raw"`` its score.
- Standard deviations are unbiased (n - 1).

A user's own estimator is named by its import path and gets what its arguments name, see :mod:`.step`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from hybridflow.algorithms.distill import distill, hybrid
from hybridflow.algorithms.evaluation import pass_at_k as unbiased_pass_at_k
from hybridflow.algorithms.masked import GroupScores, check_batch, check_finite, check_labels, check_rows, whitened
from hybridflow.errors import DataError

Estimate = tuple[torch.Tensor, torch.Tensor]


def _spread(x: torch.Tensor, mask: torch.Tensor) -> Estimate:
    """One number a row [B], or one a token [B, T], as advantages and returns."""
    advantages = torch.where(mask, (x if x.dim() == 2 else x[:, None]).float(), 0.0)
    return advantages, advantages.clone()


def _grouped(scores: torch.Tensor, groups: torch.Tensor, mask: torch.Tensor) -> GroupScores:
    check_batch(mask)
    check_rows(mask, scores=scores, groups=groups)
    return GroupScores.of(scores, groups)


def _to_go(rewards: torch.Tensor, mask: torch.Tensor, gamma: float) -> torch.Tensor:
    """Discounted sum of the rewards from each unmasked token on, [B, T] float64; masked tokens discount nothing."""
    rewards = torch.where(mask, rewards, 0.0).double()
    found = torch.zeros_like(rewards)
    following = rewards.new_zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        following = torch.where(mask[:, t], rewards[:, t] + gamma * following, following)
        found[:, t] = following
    return found


def _failed(rewards: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[B] bool: an unmasked reward of the row is not finite."""
    return (~rewards.isfinite() & mask).any(dim=1)


# ---------------------------------------------------------------------------------------- with a critic, or per token


def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
    whiten: bool = True,
) -> Estimate:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv 1506.02438, eq. 11 to 16), the estimator of PPO.

    delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lam A_{t+1}, return_t = A_t + V_t, where t + 1 is the
    next unmasked token of the row and the value after the last one is 0. With ``whiten``, advantages (not returns) are
    whitened over all unmasked tokens: (A - mean) * rsqrt(variance + 1e-8). In a row whose reward failed the returns are
    the values, so that a critic learns nothing from it.

    Args:
        rewards, values: [B, T] float.
        mask: [B, T] bool.
    """
    check_batch(mask, rewards=rewards, values=values)
    check_finite(mask, values=values)
    failed = _failed(rewards, mask)
    usable = mask & ~failed[:, None]
    r, v = torch.where(usable, rewards, 0.0).double(), torch.where(mask, values, 0.0).double()
    advantages = torch.zeros_like(v)
    next_value = next_advantage = v.new_zeros(len(v))
    for t in reversed(range(v.shape[1])):
        here = usable[:, t]
        delta = r[:, t] + gamma * next_value - v[:, t]
        next_advantage = torch.where(here, delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(here, v[:, t], next_value)
        advantages[:, t] = torch.where(here, next_advantage, 0.0)
    returns = (advantages + v).float()
    if whiten:
        advantages = whitened(advantages, usable)
    return advantages.float(), returns


def reinforce_plus_plus(rewards: torch.Tensor, mask: torch.Tensor, gamma: float = 1.0) -> Estimate:
    """REINFORCE++ (Hu 2025, arXiv 2501.03262): the discounted return, whitened over all unmasked tokens.

    Returns are the unwhitened ones.

    Args:
        rewards: [B, T] float.
        mask: [B, T] bool.
    """
    check_batch(mask, rewards=rewards)
    usable = mask & ~_failed(rewards, mask)[:, None]
    returns = torch.where(usable, _to_go(rewards, usable, gamma), 0.0)
    return whitened(returns, usable).float(), returns.float()


def remax(rewards: torch.Tensor, baseline_scores: torch.Tensor, mask: torch.Tensor) -> Estimate:
    """ReMax (Li et al. 2024, arXiv 2310.10505, alg. 1): the return minus the score of the greedy answer.

    Args:
        rewards: [B, T] float.
        baseline_scores: [B] float: score of the greedy answer to the row's prompt; one that is not finite gives 0.
        mask: [B, T] bool.
    """
    check_batch(mask, rewards=rewards)
    check_rows(mask, baseline_scores=baseline_scores)
    usable = mask & ~(_failed(rewards, mask) | ~baseline_scores.isfinite())[:, None]
    returns = torch.where(usable, _to_go(rewards, usable, 1.0), 0.0)
    advantages = torch.where(usable, returns - baseline_scores.double()[:, None], 0.0)
    return advantages.float(), returns.float()


# ----------------------------------------------------------------------------------------------- relative to a group


def grpo(
    scores: torch.Tensor,
    groups: torch.Tensor,
    mask: torch.Tensor,
    normalize_std: bool = True,
    eps: float = 1e-6,
    single: str = "zero",
) -> Estimate:
    """GRPO (DeepSeekMath, 2024, arXiv 2402.03300, section 4.1): (r - mean) / (std + eps) inside each group.

    ``normalize_std=False`` leaves r - mean (Dr. GRPO, Liu et al. 2025, arXiv 2503.20783). A group of one is not
    divided.

    Args:
        scores: [B] float.
        groups: [B] int64.
        mask: [B, T] bool.
    """
    g = _grouped(scores, groups, mask)
    centred = g.minus(g.mean)
    if normalize_std:
        variance = g.total(centred.square()) / (g.count - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + eps)[g.index]
    return _spread(g.with_singles(centred, single), mask)


def grpo_stepwise(
    step_scores: torch.Tensor,
    groups: torch.Tensor,
    step_ids: torch.Tensor,
    mask: torch.Tensor,
    normalize_std: bool = True,
    eps: float = 1e-6,
    single: str = "zero",
) -> Estimate:
    """GRPO with rewards at steps inside a trajectory: as :func:`grpo`, inside each (group, step number).

    A token gets the advantage of its own step (not the sum over later ones, as in DeepSeekMath's process supervision).

    Args:
        step_scores: [B, S] float, NaN where a row has no such step.
        groups: [B] int64.
        step_ids: [B, T] int64: number of the step that the token belongs to, below S; negative for none.
        mask: [B, T] bool.
    """
    check_batch(mask, step_ids=step_ids)
    check_rows(mask, groups=groups)
    check_labels(groups=groups, step_ids=step_ids)
    if step_scores.dim() != 2 or len(step_scores) != len(mask):
        raise DataError(f"step_scores {list(step_scores.shape)}: give [B, S] for the {len(mask)} rows of the mask.")
    num_steps = step_scores.shape[1]
    if num_steps == 0:
        return _spread(torch.zeros(len(mask)), mask)
    highest = int(torch.where(mask, step_ids, -1).max())
    if highest >= num_steps:
        raise DataError(f"step_ids reach {highest}, but step_scores {list(step_scores.shape)} has {num_steps} steps.")
    index = torch.unique(groups, return_inverse=True)[1]
    labels = index[:, None] * num_steps + torch.arange(num_steps, device=index.device)
    flat = torch.ones(step_scores.numel(), 1, dtype=torch.bool, device=mask.device)
    by_step, _ = grpo(step_scores.flatten(), labels.flatten(), flat, normalize_std, eps, single)
    by_token = by_step.view_as(step_scores).gather(1, step_ids.clamp(min=0, max=num_steps - 1))
    return _spread(by_token, mask & (step_ids >= 0))


def rloo(scores: torch.Tensor, groups: torch.Tensor, mask: torch.Tensor, single: str = "zero") -> Estimate:
    """RLOO (Ahmadian et al. 2024, arXiv 2402.14740): the score minus the mean of the group's others.

    Equal to n / (n - 1) * (r - mean).

    Args:
        scores: [B] float.
        groups: [B] int64.
        mask: [B, T] bool.
    """
    g = _grouped(scores, groups, mask)
    scale = g.count / (g.count - 1).clamp(min=1)
    return _spread(g.with_singles(g.minus(g.mean) * scale[g.index], single), mask)


def reinforce_plus_plus_baseline(
    scores: torch.Tensor, groups: torch.Tensor, mask: torch.Tensor, single: str = "zero"
) -> Estimate:
    """REINFORCE++ with a group baseline (Hu 2025, arXiv 2501.03262): r - group mean, whitened over unmasked tokens.

    Args:
        scores: [B] float.
        groups: [B] int64.
        mask: [B, T] bool.
    """
    g = _grouped(scores, groups, mask)
    centred, _ = _spread(g.with_singles(g.minus(g.mean), single), mask)
    return _spread(whitened(centred, mask & g.valid[:, None]), mask)


def opo(scores: torch.Tensor, groups: torch.Tensor, mask: torch.Tensor, single: str = "zero") -> Estimate:
    """OPO (Hao et al. 2025, arXiv 2505.23585): the score minus the length-weighted mean sum(len r) / sum(len).

    A length counts the unmasked tokens.

    Args:
        scores: [B] float.
        groups: [B] int64.
        mask: [B, T] bool.
    """
    g = _grouped(scores, groups, mask)
    lengths = mask.sum(dim=1).double()
    baseline = g.total(lengths * g.value) / g.total(lengths).clamp(min=1)
    return _spread(g.with_singles(g.minus(baseline), single), mask)


def gpg(scores: torch.Tensor, groups: torch.Tensor, mask: torch.Tensor, single: str = "zero") -> Estimate:
    """GPG (Chu et al. 2025, arXiv 2504.02546): (B / number of rows with an advantage) * (r - mean).

    The factor makes up for the rows of groups without signal.

    Args:
        scores: [B] float.
        groups: [B] int64.
        mask: [B, T] bool.
    """
    g = _grouped(scores, groups, mask)
    centred = g.with_singles(g.minus(g.mean), single)
    return _spread(centred * (len(centred) / (centred != 0).sum().clamp(min=1)), mask)


def maxrl(scores: torch.Tensor, groups: torch.Tensor, mask: torch.Tensor) -> Estimate:
    """MaxRL (Tajwar et al. 2026, arXiv 2602.02710): (r - mean) / mean where the group's mean is positive, else 0.

    Args:
        scores: [B] float.
        groups: [B] int64.
        mask: [B, T] bool.
    """
    g = _grouped(scores, groups, mask)
    mean = g.mean[g.index]
    return _spread(torch.where(mean > 0, g.minus(g.mean) / mean.where(mean > 0, 1.0), 0.0), mask)


def pass_at_k(scores: torch.Tensor, groups: torch.Tensor, mask: torch.Tensor, k: int) -> Estimate:
    """Pass@k training (Chen et al. 2025, arXiv 2508.10751, the analytical solution), for scores that are 0 or 1.

    Of n answers to a prompt, of which c are right, R = 1 - C(n-c, k) / C(n, k) is the chance that k drawn ones hold a
    right one, and sigma = sqrt(R (1 - R)). A right answer gets (1 - R) / sigma; a wrong one (R' - R) / sigma, where
    R' = 1 - C(n-c-1, k-1) / C(n-1, k-1) is the chance of a draw that holds it. k = 1 is GRPO with the biased deviation.
    Groups with fewer than k valid scores, and those with R = 0 or 1, give 0.

    Args:
        scores: [B] float, each 0, 1 or not finite.
        groups: [B] int64.
        mask: [B, T] bool.
        k: at least 1.
    """
    if k < 1:
        raise DataError(f"k={k}: draw at least 1 answer.")
    g = _grouped(scores, groups, mask)
    other = g.value[(g.value != 0) & (g.value != 1)]
    if len(other):
        raise DataError(f"scores hold {other[0].item():g}: pass@k needs 0 (wrong) and 1 (right); use a binary reward.")
    right, wrong = torch.zeros_like(g.mean), torch.zeros_like(g.mean)
    for group, (n, c) in enumerate(zip(g.count.long().tolist(), g.total(g.value).long().tolist(), strict=True)):
        if c == 0 or n - c < k:
            continue
        chance = unbiased_pass_at_k(n, c, k)
        sigma = (chance * (1 - chance)) ** 0.5
        right[group] = (1 - chance) / sigma
        wrong[group] = (unbiased_pass_at_k(n - 1, c, k - 1) - chance) / sigma
    advantages = torch.where(g.value == 1, right[g.index], wrong[g.index])
    return _spread(torch.where(g.valid, advantages, 0.0), mask)


def distill_hybrid(
    scores: torch.Tensor,
    groups: torch.Tensor,
    teacher_log_probs: torch.Tensor,
    log_probs: torch.Tensor,
    mask: torch.Tensor,
    accepted: torch.Tensor | None = None,
    normalize_std: bool = True,
    eps: float = 1e-6,
    single: str = "zero",
    lambda_rl: float = 1.0,
    lambda_opd: float = 1.0,
    opd_clip: float = 1.0,
) -> Estimate:
    """:func:`grpo`'s advantage and a teacher's, added by :func:`.distill.hybrid`.

    Args:
        scores: [B] float.
        groups: [B] int64.
        teacher_log_probs, log_probs: [B, T] float, as in :func:`.distill.distill`.
        mask: [B, T] bool.
        accepted: [B] bool: rows in which the teacher is trusted; None trusts it everywhere.
    """
    rewarded, _ = grpo(scores, groups, mask, normalize_std, eps, single)
    taught, _ = distill(teacher_log_probs, log_probs, mask)
    trusted = mask.new_ones(len(mask)) if accepted is None else accepted
    return _spread(hybrid(rewarded, taught, trusted, lambda_rl, lambda_opd, opd_clip), mask)


ESTIMATORS: dict[str, Callable[..., Estimate]] = {
    "gae": gae,
    "grpo": grpo,
    "grpo_stepwise": grpo_stepwise,
    "rloo": rloo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
    "opo": opo,
    "gpg": gpg,
    "maxrl": maxrl,
    "pass_at_k": pass_at_k,
    "distill": distill,
    "distill_hybrid": distill_hybrid,
}
