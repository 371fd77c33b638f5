"""The advantage step of a driver: from the columns of a batch to the columns that the update reads.

Where it stands: between rewards and log-probabilities, and ``actor.update``. All choices are the configuration's
(``algorithm`` and ``actor.loss``), all arithmetic is in the pure functions of this folder; here jagged columns become
padded tensors and back. Invariant: the batch is seen whole, so that groups, whitening and selections depend on nothing
but its rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

from hybridflow.algorithms.advantages import ESTIMATORS
from hybridflow.algorithms.correction import correct
from hybridflow.algorithms.filters import overlong_penalty, without_overlong
from hybridflow.algorithms.kl import KINDS, penalised
from hybridflow.algorithms.losses import find_loss, select_clip_cov, select_kl_cov
from hybridflow.algorithms.masked import check_finite
from hybridflow.algorithms.objective import OWN
from hybridflow.config import LossConfig, RLConfig, RunConfig
from hybridflow.errors import ConfigError, DataError, nearest
from hybridflow.importing import named, parameters_of
from hybridflow.protocol.data import DataProto

KL_COEF = "kl_coef"
"""Key in ``meta_info`` of a step's prompts."""
COLUMNS = {"scores": "rewards", "groups": "group_ids", "baseline_scores": "baseline_rewards"}
"""Arguments of estimators that are columns under another name."""
STEP_SCORES = "step_scores"
OF_MODELS = ("values", "log_probs", "ref_log_probs", "rollout_log_probs", "teacher_log_probs")
"""Token columns that models compute."""
SETTINGS = (
    *("normalize_std", "eps", "single", "gamma", "lam", "whiten", "k"),
    *("lambda_rl", "lambda_opd", "opd_clip"),
)
"""Arguments of estimators that are settings of ``algorithm``."""


def compute_advantages(batch: DataProto, config: RLConfig) -> DataProto:
    """Advantages and what goes with them, by ``config.algorithm`` and ``config.actor.loss``.

    Args:
        batch: ``rewards`` [B], ``group_ids`` [B], ``response_mask`` and what the configuration needs: ``log_probs``,
            ``rollout_log_probs``, ``ref_log_probs``, ``finish_reason``, or other columns that the estimator names. An
            estimator gets as arguments: ``mask`` [B, T]; ``scores`` [B] and ``groups`` [B]; ``rewards`` [B, T], the
            score at the last unmasked token, less the KL; settings; ``algorithm.options``; and any column by its name.
            ``meta_info["kl_coef"]`` is the weight of the KL in the reward where it is adapted (the run sets it, see
            ``algorithm.kl_target``); else it is ``algorithm.kl_coef``.

    Returns:
        Jagged ``advantages`` and ``returns``. Where configured, ``loss_mask`` (``response_mask`` less what is filtered
        or rejected), ``loss_weights`` and ``high_covariance``; metrics in ``meta_info["metrics"]``.

    Raises:
        DataError: a column that is needed is missing, or has other lengths than ``response_mask``.
    """
    columns = _Columns(batch)
    algorithm, metrics = config.algorithm, dict[str, float]()
    kl_coef = float(batch.meta_info.get(KL_COEF, algorithm.kl_coef))
    scores, rewards = _rewards(columns, config, kl_coef, metrics)
    advantages, returns = _estimate(columns, config, scores, rewards)
    found = {"advantages": advantages, "returns": returns}

    mask = columns.mask
    if algorithm.overlong_filter:
        cut = torch.tensor([reason == "length" for reason in columns.cells("finish_reason")])
        mask = without_overlong(mask, cut)
    correction = algorithm.correction
    if correction.level != "none" or correction.reject != "none":
        corrected = correct(columns.tokens("log_probs"), columns.tokens("rollout_log_probs"), mask, correction)
        mask, found["loss_weights"] = corrected.mask, corrected.weights
        metrics |= {f"correction/{name}": value for name, value in corrected.metrics.items()}
    if mask is not columns.mask:
        found["loss_mask"] = mask
    if "high_covariance" in find_loss(config.actor.loss.name).reads:
        found["high_covariance"] = _high_covariance(columns, advantages, mask, config)
    tensors = {name: DataProto.from_padded(column, columns.lengths) for name, column in found.items()}
    return DataProto.from_dict(tensors=tensors, meta_info={"metrics": metrics} if metrics else None)


def check_functions(config: RunConfig) -> None:
    """Import what the configuration names, so that a run fails before anything is started.

    Raises:
        ConfigError: names the setting, and what is there instead.
    """
    loss = config.actor.loss
    _check_own(loss, f"actor.loss.name={loss.name!r}", find_loss(loss.name).reads)
    named(loss.kl_kind, KINDS, "actor.loss.kl_kind")
    if isinstance(config, RLConfig):
        named(config.algorithm.kl_kind, KINDS, "algorithm.kl_kind")
        function = named(config.algorithm.estimator, ESTIMATORS, "algorithm.estimator")
        known = parameters_of(function)
        needed = [p.name for p in inspect.signature(function).parameters.values() if p.default is p.empty]
        _check_own(loss, f"algorithm.estimator={config.algorithm.estimator!r}", needed)
        for option in config.algorithm.options:
            if known is not None and option not in known:
                raise ConfigError(
                    f"algorithm.options.{option}: {config.algorithm.estimator} has no such argument."
                    f"{nearest(option, known)}"
                )


def _check_own(loss: LossConfig, reader: str, reads: Iterable[str]) -> None:
    """Where the update's own log-probabilities are the old ones, ``actor.log_probs`` makes no columns."""
    for name in ("log_probs", "entropy"):
        if loss.old_log_probs == OWN and name in reads:
            raise ConfigError(
                f"actor.loss.old_log_probs={OWN!r}: {reader} reads the column {name}, which is not made then. "
                f"Set actor.loss.old_log_probs=log_probs."
            )


class _Columns:
    """The batch's columns as padded tensors; every token column has the lengths of ``response_mask``."""

    def __init__(self, batch: DataProto) -> None:
        self.batch = batch
        self.lengths = batch.lengths("response_mask")
        self.mask = batch.to_padded("response_mask", value=False)

    def tokens(self, name: str) -> torch.Tensor:
        """A jagged column as [B, T]."""
        lengths = self.batch.lengths(name)
        if not torch.equal(lengths, self.lengths):
            row = int((lengths != self.lengths).nonzero()[0])
            raise DataError(
                f"{name}: row {row} has {int(lengths[row])} entries for {int(self.lengths[row])} response tokens."
            )
        padded = self.batch.to_padded(name)
        if name in OF_MODELS:
            check_finite(self.mask, **{name: padded})
        return padded

    def cells(self, name: str) -> Any:
        """A column of one cell a row."""
        return self.batch[name]

    def any(self, name: str) -> Any:
        """A column of either kind."""
        column = self.batch[name]
        if name == STEP_SCORES and column.is_nested:
            return self.batch.to_padded(name, value=torch.nan)  # one a step, not one a token
        return self.tokens(name) if isinstance(column, torch.Tensor) and column.is_nested else column


def _rewards(
    columns: _Columns, config: RLConfig, kl_coef: float, metrics: dict[str, float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The score of each response [B] and its tokens' rewards [B, T], after penalties."""
    algorithm, mask = config.algorithm, columns.mask
    scores = columns.cells("rewards").float()
    if algorithm.overlong_buffer:
        longest = config.rollout.max_tokens
        penalty = overlong_penalty(columns.lengths, longest, algorithm.overlong_buffer, algorithm.overlong_penalty)
        metrics["reward/overlong_penalty"] = penalty.mean().item()
        scores = scores + penalty
    place = torch.arange(mask.shape[1])
    last = torch.where(mask, place, -1).amax(dim=1, keepdim=True) if mask.shape[1] else place
    rewards = torch.where((place == last) & mask, scores[:, None], 0.0)
    if kl_coef:
        ref = columns.tokens("ref_log_probs")
        rewards, kl = penalised(rewards, columns.tokens("log_probs"), ref, mask, kl_coef, algorithm.kl_kind)
        metrics["reward/kl_coef"] = kl_coef
        metrics["reward/kl"] = kl.sum().item() / max(int(mask.sum()), 1)
        scores = scores - kl_coef * kl.sum(dim=1)
    return scores, rewards


def _estimate(
    columns: _Columns, config: RLConfig, scores: torch.Tensor, rewards: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call the estimator with what its arguments name."""
    algorithm = config.algorithm
    function: Callable[..., Any] = named(algorithm.estimator, ESTIMATORS, "algorithm.estimator")
    given: dict[str, Any] = {"scores": scores, "rewards": rewards, "mask": columns.mask, **algorithm.options}
    arguments: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        column = COLUMNS.get(name, name)
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments |= algorithm.options
        elif name in given:
            arguments[name] = given[name]
        elif name in SETTINGS:
            arguments[name] = getattr(algorithm, name)
        elif column in columns.batch:
            arguments[name] = columns.any(column)
        elif parameter.default is parameter.empty:
            raise DataError(
                f"algorithm.estimator={algorithm.estimator!r} needs {name!r}, and the batch has no column {column!r}. "
                f"It has {', '.join(columns.batch.keys())}."
            )
    answer = function(**arguments)
    if not (isinstance(answer, tuple | list) and [isinstance(x, torch.Tensor) for x in answer] == [True, True]):
        raise DataError(
            f"algorithm.estimator={algorithm.estimator!r} returned a {type(answer).__name__}: return two tensors "
            "[B, T], advantages and returns."
        )
    advantages, returns = answer
    for name, found in (("advantages", advantages), ("returns", returns)):
        if found.shape != columns.mask.shape:
            raise DataError(
                f"algorithm.estimator={algorithm.estimator!r} returned {name} {list(found.shape)} for a mask "
                f"{list(columns.mask.shape)}: return two tensors [B, T]."
            )
    if not arguments.keys() & {"scores", "rewards"}:
        return torch.where(columns.mask, advantages, 0.0), returns
    # The convention for failed rewards, also where a user's function does not know it.
    return torch.where(scores.isfinite()[:, None] & columns.mask, advantages, 0.0), returns


def _high_covariance(columns: _Columns, advantages: torch.Tensor, mask: torch.Tensor, config: RLConfig) -> torch.Tensor:
    """The tokens that Clip-Cov or KL-Cov treat in their own way."""
    loss, log_probs = config.actor.loss, columns.tokens("log_probs")
    if loss.name == "kl_cov":
        return select_kl_cov(log_probs, advantages, mask, loss.cov_share)
    seed = config.seed * 1_000_003 + int(columns.batch.meta_info.get("step", 0))
    return select_clip_cov(log_probs, advantages, mask, loss.cov_share, loss.cov_low, loss.cov_high, seed)
