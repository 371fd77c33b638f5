"""What n answers to each prompt say about a model: unbiased pass@k with bootstrap intervals, mean, majority.

Pure functions on counts and answers; nothing is generated here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch

from hybridflow.errors import DataError


@dataclass(frozen=True)
class Interval:
    """An estimate and the bounds that a share of bootstrap samples lies in."""

    value: float
    low: float
    high: float


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that k answers drawn without replacement from n, of which c are right, hold a right one.

    1 - C(n - c, k) / C(n, k), the unbiased estimator of Chen et al. 2021 (arXiv 2107.03374, eq. 1), in exact integers.

    Raises:
        DataError: unless 0 <= c <= n and 0 <= k <= n.
    """
    if not (0 <= c <= n and 0 <= k <= n):
        raise DataError(f"pass@k with n={n} answers, c={c} right, k={k} drawn: 0 <= c <= n and 0 <= k <= n.")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def pass_at_all_k(
    solved: torch.Tensor, groups: torch.Tensor, confidence: float = 0.95, resamples: int = 1000, seed: int = 0
) -> dict[int, Interval]:
    """Mean pass@k over the prompts for every k up to the smallest number of answers to a prompt.

    The interval is the percentile bootstrap over prompts (Efron 1979): prompts are drawn with replacement, answers stay
    together.

    Args:
        solved: [B] bool.
        groups: [B] int64 labels of prompts.
        confidence: share of the bootstrap means inside the interval, between 0 and 1.
        resamples: bootstrap samples.

    Raises:
        DataError: where there are no rows, or shapes differ.
    """
    if solved.shape != groups.shape or solved.dim() != 1 or not len(solved):
        raise DataError(f"solved {list(solved.shape)} and groups {list(groups.shape)}: both are [B], one a row, B > 0.")
    if not 0 < confidence < 1:
        raise DataError(f"confidence={confidence}: a share between 0 and 1, such as 0.95.")
    labels, index = torch.unique(groups, return_inverse=True)
    zeros = torch.zeros(len(labels), dtype=torch.int64, device=index.device)
    count = zeros.index_add(0, index, torch.ones_like(index)).tolist()
    right = zeros.index_add(0, index, solved.long()).tolist()
    draws = torch.randint(len(labels), (resamples, len(labels)), generator=torch.Generator().manual_seed(seed))
    tails = torch.tensor([(1 - confidence) / 2, (1 + confidence) / 2], dtype=torch.float64)
    found = {}
    for k in range(1, min(count) + 1):
        each = torch.tensor([pass_at_k(n, c, k) for n, c in zip(count, right, strict=True)], dtype=torch.float64)
        low, high = each[draws].mean(dim=1).quantile(tails).tolist()
        found[k] = Interval(each.mean().item(), low, high)
    return found


def best_of(values: Mapping[int, float], mode: str) -> tuple[int, int]:
    """The step of the best evaluation and how many have come after it; the first of equal ones is the best.

    Args:
        values: of a metric by step, in the order of the steps, at least one; NaN is worse than any number.
        mode: ``max`` or ``min``.
    """
    sign = {"max": 1.0, "min": -1.0}[mode]
    steps = list(values)
    rank = [-math.inf if math.isnan(value) else sign * value for value in values.values()]
    at = rank.index(max(rank))
    return steps[at], len(steps) - 1 - at


def majority(answers: Sequence[Sequence[Hashable | None]], solved: Sequence[Sequence[bool]]) -> float:
    """Share of prompts whose most frequent answer is right (self-consistency, Wang et al. 2022, arXiv 2203.11171).

    Args:
        answers: of each prompt, the final answers that were extracted, equal ones comparing equal; None where an answer
            holds none: it has no vote.
        solved: whether each of them is right; equal answers to a prompt are judged alike.

    Answers with equally many votes share the point: two of three tied answers right give 2 / 3.
    """
    points = []
    for given, right in zip(answers, solved, strict=True):
        judged = {answer: ok for answer, ok in zip(given, right, strict=True) if answer is not None}
        votes = Counter(answer for answer in given if answer is not None)
        top = [answer for answer, n in votes.items() if n == max(votes.values())]
        points.append(sum(judged[answer] for answer in top) / len(top) if top else 0.0)
    if not points:
        raise DataError("majority of no prompts: give at least one.")
    return sum(points) / len(points)
