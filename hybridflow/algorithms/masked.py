"""Masked arithmetic that estimators and losses share: checks of shapes, row sums, whitening, statistics of groups.

Invariant: what stands outside the mask, NaN and inf included, never reaches a result. Statistics are summed in float64,
so that the order of rows changes nothing that float32 shows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hybridflow.errors import DataError

SINGLES = ("zero", "raw")
"""What a group with one valid score gives: 0, or its score."""


def check_tokens(mask: torch.Tensor, **tensors: torch.Tensor) -> None:
    """Check a mask [B, T] and tensors [B, T] of its shape.

    Raises:
        DataError: names the tensor and both shapes.
    """
    if mask.dtype != torch.bool or mask.dim() != 2:
        raise DataError(f"mask is {mask.dtype} {list(mask.shape)}: give a bool tensor [B, T], such as mask.bool().")
    for name, tensor in tensors.items():
        if tensor.shape != mask.shape:
            raise DataError(
                f"{name} is {list(tensor.shape)} for a mask {list(mask.shape)}: give [B, T], one number a token; "
                "nothing is padded or cut."
            )


def check_finite(mask: torch.Tensor, **tensors: torch.Tensor) -> None:
    """Check what a model has computed, [B, T] of the mask's shape: one number that is none would spread over a batch.

    Rewards are another matter: one that is not finite has failed, and its row is left out.

    Raises:
        DataError: names the tensor, the row, the token and the value.
    """
    for name, tensor in tensors.items():
        bad = mask & ~tensor.isfinite()
        if bad.any():
            row, token = bad.nonzero()[0].tolist()
            raise DataError(
                f"{name} of row {row} is {tensor[row, token].item()} at token {token}, and {int(bad.sum())} of "
                f"{int(mask.sum())} tokens are not finite: the weights that it was computed with are not, or overflow. "
                f"Look at the loss and the gradient norm of the last updates, and go on from an earlier checkpoint."
            )


def check_rows(mask: torch.Tensor, **tensors: torch.Tensor) -> None:
    """Check tensors [B] against the rows of a mask [B, T].

    Raises:
        DataError: names the tensor and both shapes.
    """
    for name, tensor in tensors.items():
        if tensor.shape != mask.shape[:1]:
            raise DataError(
                f"{name} is {list(tensor.shape)} for a mask {list(mask.shape)}: give [B], one number a row."
            )


def check_labels(**tensors: torch.Tensor) -> None:
    """Check tensors of labels, which are integers.

    Raises:
        DataError: names the tensor and its dtype.
    """
    for name, tensor in tensors.items():
        if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
            raise DataError(f"{name} are {tensor.dtype}: give integers, such as {name}.long().")


def check_batch(mask: torch.Tensor, **tensors: torch.Tensor) -> None:
    """As :func:`check_tokens`, for a whole batch, of which at least one token has to count."""
    check_tokens(mask, **tensors)
    if not bool(mask.any()):
        raise DataError(f"mask {list(mask.shape)} is False everywhere: no token of the batch could be trained on.")


def clean(mask: torch.Tensor, **tensors: torch.Tensor) -> list[torch.Tensor]:
    """Tensors [B, T] of the mask's shape with 0 outside of it, in the order given; halves become float32.

    A loss begins with this: a NaN that only a later mask hides would still reach the gradient, as 0 * NaN.
    """
    check_tokens(mask, **tensors)
    cleaned = (torch.where(mask, x, torch.zeros_like(x)) for x in tensors.values())
    return [x.float() if x.dtype in (torch.float16, torch.bfloat16) else x for x in cleaned]


def row_sum(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum over the unmasked places of each row, [B]."""
    return torch.where(mask, x, 0.0).sum(dim=1)


def row_mean(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean over the unmasked places of each row, [B]; 0 for a row without any."""
    return row_sum(x, mask) / mask.sum(dim=1).clamp(min=1)


def whitened(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(x - mean) * rsqrt(variance + 1e-8) over all unmasked places, [B, T] float64, 0 elsewhere.

    The variance is unbiased (n - 1); one single unmasked place gives 0.
    """
    x = torch.where(mask, x, 0.0).double()
    count = mask.sum()
    centred = torch.where(mask, x - x.sum() / count.clamp(min=1), 0.0)
    variance = centred.square().sum() / (count - 1).clamp(min=1)
    return centred * torch.rsqrt(variance + 1e-8)


@dataclass(frozen=True)
class GroupScores:
    """Scores [B] with the statistics of their groups.

    Attributes:
        value: [B] float64, 0 where the score is not finite.
        valid: [B] bool: the score is finite. Others are failed rewards: they enter no statistic.
        index: [B] int64: the number of the row's group, 0 <= index < G.
        count: [G] float64: valid scores of each group.
        mean: [G] float64; 0 for a group without a valid score.
        constant: [G] bool: all valid scores of the group are equal.
    """

    value: torch.Tensor
    valid: torch.Tensor
    index: torch.Tensor
    count: torch.Tensor
    mean: torch.Tensor
    constant: torch.Tensor

    @classmethod
    def of(cls, scores: torch.Tensor, groups: torch.Tensor) -> GroupScores:
        """Args: scores [B] float, groups [B] integer labels (rows with the same label answer the same prompt)."""
        if scores.dim() != 1 or scores.shape != groups.shape:
            raise DataError(f"scores {list(scores.shape)} and groups {list(groups.shape)}: both are [B], one a row.")
        check_labels(groups=groups)
        valid = scores.isfinite()
        value = torch.where(valid, scores, 0.0).double()
        labels, index = torch.unique(groups, return_inverse=True)
        zeros = value.new_zeros(len(labels))
        count = zeros.index_add(0, index, valid.double())
        mean = zeros.index_add(0, index, value) / count.clamp(min=1)
        low = (zeros + torch.inf).scatter_reduce(0, index, value.where(valid, torch.inf), "amin")
        high = (zeros - torch.inf).scatter_reduce(0, index, value.where(valid, -torch.inf), "amax")
        return cls(value, valid, index, count, mean, low >= high)

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """Sum of x [B] over the valid rows of each group, [G]."""
        return torch.zeros_like(self.mean).index_add(0, self.index, torch.where(self.valid, x, 0.0))

    def minus(self, baseline: torch.Tensor) -> torch.Tensor:
        """Score minus its group's baseline [G], as [B]: exactly 0 in constant groups and where the score failed."""
        signal = self.valid & ~self.constant[self.index]
        return torch.where(signal, self.value - baseline[self.index], 0.0)

    def with_singles(self, x: torch.Tensor, single: str) -> torch.Tensor:
        """x [B] with what rows that are alone in their group get: 0 (``zero``) or their score (``raw``)."""
        if single not in SINGLES:
            raise DataError(f"single={single!r}: a group of one gives {' or '.join(map(repr, SINGLES))}.")
        alone = self.valid & (self.count == 1)[self.index]
        return torch.where(alone, self.value if single == "raw" else 0.0, x)
