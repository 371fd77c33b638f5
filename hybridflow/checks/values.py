"""Rules about single settings: which numbers and which names they take, and which settings a chosen name reads.

Invariant: every numeric setting of every schema stands in ``RANGES``; a test proves it.
"""

from __future__ import annotations

import importlib.util
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from hybridflow.checks.base import Facts, Problem, rule
from hybridflow.config import RunConfig
from hybridflow.errors import nearest
from hybridflow.settings import expand, value_at
from hybridflow.sinks import SINKS

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}

# The registries themselves import torch or more; tests hold all these tables against them.

# The settings of `algorithm` that each estimator reads.
ESTIMATOR_SETTINGS: dict[str, tuple[str, ...]] = {
    "gae": ("gamma", "lam", "whiten"),
    "grpo": ("normalize_std", "eps", "single"),
    "grpo_stepwise": ("normalize_std", "eps", "single"),
    "rloo": ("single",),
    "reinforce_plus_plus": ("gamma",),
    "reinforce_plus_plus_baseline": ("single",),
    "remax": (),
    "opo": ("single",),
    "gpg": ("single",),
    "maxrl": (),
    "pass_at_k": ("k",),
    "distill": (),
    "distill_hybrid": ("normalize_std", "eps", "single", "lambda_rl", "lambda_opd", "opd_clip"),
}
GROUPED = ("grpo", "rloo", "reinforce_plus_plus_baseline", "opo", "gpg", "maxrl", "pass_at_k", "distill_hybrid")
"""Estimators that compare the samples of one prompt."""
OTHER_COLUMNS = {
    "gae": "values",
    "remax": "baseline_rewards",
    "grpo_stepwise": "step_scores",
    "distill": "teacher_log_probs",
    "distill_hybrid": "teacher_log_probs",
}
"""Columns that estimators read besides scores; ``makes`` of a driver's schema says which it has."""

# The settings of `actor.loss` that each loss reads, besides those of the aggregation, the entropy and the KL.
LOSS_SETTINGS: dict[str, tuple[str, ...]] = {
    "ppo": ("old_log_probs", "clip_low", "clip_high", "dual_clip"),
    "gspo": ("old_log_probs", "clip_low", "clip_high", "dual_clip"),
    "gmpo": ("old_log_probs", "clip_low", "clip_high"),
    "cispo": ("old_log_probs", "clip_low", "clip_high"),
    "sapo": ("old_log_probs", "tau_positive", "tau_negative"),
    "reinforce": (),
    "gpg": (),
    "clip_cov": ("old_log_probs", "clip_low", "clip_high", "dual_clip", "cov_share", "cov_low", "cov_high"),
    "kl_cov": ("old_log_probs", "cov_share", "cov_kl_coef"),
    "dppo_tv": ("old_log_probs", "clip_low", "clip_high"),
    "dppo_kl": ("old_log_probs", "clip_low", "clip_high"),
    "sft": (),
}
OPTIMIZERS = ("actor.optimizer", "critic.optimizer", "cost_critic.optimizer")
KL_KINDS = ("k1", "k2", "k3", "low_var", "abs", "k1+", "k3+", "low_var+", "abs+")

CHOICES: dict[str, tuple[str, ...]] = {
    "model.dtype": tuple(DTYPE_BYTES),
    "pools.*.kind": ("device", "cpu"),
    "actor.recompute": ("none", "selective", "full"),
    **{f"{optimizer}.schedule": ("constant", "linear", "cosine") for optimizer in OPTIMIZERS},
    "actor.loss.name": tuple(LOSS_SETTINGS),
    "actor.loss.old_log_probs": ("log_probs", "rollout_log_probs", "own"),
    "actor.loss.aggregation": ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"),
    "actor.loss.kl_kind": KL_KINDS,
    "algorithm.estimator": tuple(ESTIMATOR_SETTINGS),
    "algorithm.single": ("zero", "raw"),
    "algorithm.kl_kind": KL_KINDS,
    "algorithm.correction.level": ("none", "token", "sequence", "geometric"),
    "algorithm.correction.bound": ("none", "truncate", "clip", "mask"),
    "algorithm.correction.reject": ("none", "token", "sequence", "geometric"),
    "data.long_prompts": ("error", "filter"),
    "dynamic_sampling.by": ("solved", "rewards"),
    "evaluate.mode": ("max", "min"),
    "rollout.check_sync": ("off", "sample", "full"),
}
IMPORTABLE = ("actor.loss.name", "actor.loss.kl_kind", "algorithm.estimator", "algorithm.kl_kind")
"""Names that may also be a function of the user's own, ``package.module:name`` or ``path/file.py:name``."""


SETS: dict[str, tuple[str, ...]] = {
    "memory.offload": ("gradients", "optimizer", "parameters", "others"),
    "tracking.trackers": tuple(SINKS),
}
"""Lists whose order says nothing, and the names that they may have."""


@dataclass(frozen=True)
class Range:
    """The numbers a setting may take; NaN and infinity never."""

    low: float
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False
    also: float | None = None

    def __contains__(self, x: float) -> bool:
        if x == self.also:
            return True
        above = self.low < x if self.open_low else self.low <= x
        below = x < self.high if self.open_high else x <= self.high
        return above and below and math.isfinite(x)

    def __str__(self) -> str:
        if self.low == -math.inf:
            return "finite"
        words = [f"above {self.low:g}" if self.open_low else f"at least {self.low:g}"]
        if self.high < math.inf:
            words.append(f"below {self.high:g}" if self.open_high else f"at most {self.high:.10g}")
        return " and ".join(words) + (f", or {self.also:g}" if self.also is not None else "")


COUNT, NATURAL, POSITIVE, SHARE = Range(1), Range(0), Range(0, open_low=True), Range(0, 1)
ANY = Range(-math.inf)
LARGEST = 10**9
"""Of any whole number that has no smaller limit of its own: what it counts goes into 32 bits somewhere."""
SIZE = Range(0, 1e9, open_low=True)
"""GiB or MiB; counted in bytes, more would overflow."""
NODE_DEVICES = Range(1, 1024)
# vLLM raises temperatures between 0 and 0.01 to 0.01.
TEMPERATURE, TOP_P = Range(0.01, also=0), Range(0, 1, open_low=True)
OPTIMIZER_RANGES: dict[str, Range] = {
    "lr": POSITIVE,
    "min_lr": NATURAL,
    "beta1": Range(0, 1, open_high=True),
    "beta2": Range(0, 1, open_high=True),
    "eps": POSITIVE,
    "weight_decay": NATURAL,
    "clip_grad": NATURAL,
    "warmup_steps": NATURAL,
    "decay_steps": NATURAL,
}
SCORING_RANGES: dict[str, Range] = {
    "components.*.weight": ANY,
    "timeout": POSITIVE,
    "solved_at": ANY,
    "processes": COUNT,
    "in_flight": COUNT,
    "max_failed": SHARE,
    "judge.max_prompt_tokens": COUNT,
    "judge.max_tokens": COUNT,
    "judge.kv_cache_gb": SIZE,
    "judge.max_sequences": COUNT,
}
RANGES: dict[str, Range] = {
    "steps": COUNT,
    "seed": Range(0, 2**32 - 1),
    "pools.*.cores_per_device": NATURAL,
    "pools.*.memory_gb": Range(0, 1e9),
    "roles.*.layout.tp": COUNT,
    "roles.*.layout.pp": COUNT,
    "roles.*.layout.cp": COUNT,
    "roles.*.layout.ep": COUNT,
    "roles.*.layout.etp": NATURAL,
    "roles.*.layout.vpp": COUNT,
    "data.evaluate_share": Range(0, 1, open_high=True),
    "data.prompts_per_step": COUNT,
    "actor.mini_batch_size": NATURAL,
    "actor.micro_batch_size": COUNT,
    "actor.micro_batch_tokens": NATURAL,
    "actor.epochs": COUNT,
    **{f"{optimizer}.{name}": allowed for optimizer in OPTIMIZERS for name, allowed in OPTIMIZER_RANGES.items()},
    "actor.loss.clip_low": SHARE,
    "actor.loss.clip_high": NATURAL,
    "actor.loss.dual_clip": Range(1, open_low=True, also=0),
    "actor.loss.tau_positive": POSITIVE,
    "actor.loss.tau_negative": POSITIVE,
    "actor.loss.cov_share": SHARE,
    "actor.loss.cov_low": ANY,
    "actor.loss.cov_high": ANY,
    "actor.loss.cov_kl_coef": NATURAL,
    "actor.loss.scale": NATURAL,
    "actor.loss.entropy_coef": NATURAL,
    "actor.loss.kl_coef": NATURAL,
    **{f"{critic}.{name}": NATURAL for critic in ("critic", "cost_critic") for name in ("clip", "warmup_steps")},
    "rollout.n": COUNT,
    "rollout.max_prompt_tokens": COUNT,
    "rollout.max_tokens": COUNT,
    "rollout.kv_cache_gb": SIZE,
    "rollout.sync_bucket_mb": SIZE,
    "rollout.max_sequences": COUNT,
    "rollout.sampling.temperature": TEMPERATURE,
    "rollout.sampling.top_p": TOP_P,
    "rollout.sampling.top_k": NATURAL,
    **{f"{role}.{name}": allowed for role in ("reward", "cost") for name, allowed in SCORING_RANGES.items()},
    "reference.update_every": NATURAL,
    "evaluate.every": NATURAL,
    "evaluate.size": NATURAL,
    "evaluate.n": COUNT,
    "evaluate.sampling.temperature": TEMPERATURE,
    "evaluate.sampling.top_p": TOP_P,
    "evaluate.sampling.top_k": NATURAL,
    "evaluate.stop_at": SHARE,
    "evaluate.patience": NATURAL,
    "checkpoint.every": NATURAL,
    "checkpoint.keep": NATURAL,
    "tracking.rollouts_every": NATURAL,
    "tracking.mismatch_limit": NATURAL,
    "tracking.mismatch_stop": NATURAL,
    "ray.object_store_gb": SIZE,
    "dynamic_sampling.max_tries": COUNT,
    "preference.beta": POSITIVE,
    "preference.label_smoothing": Range(0, 0.5, open_high=True),
    "max_staleness": NATURAL,
    "safety.cost_limit": ANY,
    "safety.multiplier": POSITIVE,
    "safety.multiplier_lr": NATURAL,
    "safety.max_multiplier": POSITIVE,
    "algorithm.eps": NATURAL,
    "algorithm.gamma": SHARE,
    "algorithm.lam": SHARE,
    "algorithm.k": COUNT,
    "algorithm.lambda_rl": NATURAL,
    "algorithm.lambda_opd": NATURAL,
    "algorithm.opd_clip": NATURAL,
    "algorithm.kl_coef": NATURAL,
    "algorithm.kl_target": NATURAL,
    "algorithm.kl_horizon": POSITIVE,
    "algorithm.overlong_buffer": NATURAL,
    "algorithm.overlong_penalty": NATURAL,
    "algorithm.correction.low": NATURAL,
    "algorithm.correction.high": POSITIVE,
    "algorithm.correction.reject_low": NATURAL,
    "algorithm.correction.reject_high": POSITIVE,
}


@rule()
def numbers_are_in_range(facts: Facts) -> Iterator[Problem]:
    for pattern, allowed in RANGES.items():
        for path, value in present(facts.config, pattern):
            if isinstance(value, int) and value > LARGEST and allowed.high == math.inf:
                yield Problem(path, f"{path}={value}: has to be {replace(allowed, high=LARGEST)}.")
            elif value not in allowed:
                finite = "" if math.isfinite(value) or allowed is ANY else "finite and "
                yield Problem(path, f"{path}={value}: has to be {finite}{allowed}.")
    for path, devices in expand(facts.config, "pools.*.devices"):
        if not devices or not all(number in NODE_DEVICES for number in devices):
            yield Problem(
                path,
                f"{path}={devices}: name the devices of each node, such as [2] or [4,4]. A number has to be "
                f"{NODE_DEVICES}.",
            )
    stops = [item for role in ("reward", "cost") for item in present(facts.config, f"{role}.judge.stop_token_ids")]
    for path, ids in [("rollout.stop_token_ids", facts.config.rollout.stop_token_ids), *stops]:
        if not all(0 <= i <= LARGEST for i in ids):
            yield Problem(path, f"{path}={ids}: token ids have to be at least 0 and at most {LARGEST}.")


@rule()
def names_are_known(facts: Facts) -> Iterator[Problem]:
    for pattern, known in CHOICES.items():
        for path, value in present(facts.config, pattern):
            if value not in known and not (pattern in IMPORTABLE and ":" in value):
                yield Problem(path, f"{path}={value!r} is not known.{nearest(value, known)}")
    for path, known in SETS.items():
        for name, times in Counter(value_at(facts.config, path)).items():
            if times > 1:
                yield Problem(path, f"{path}: {name!r} stands there {times} times. Name it once.")
            if name not in known:
                yield Problem(path, f"{path}: {name!r} is not known.{nearest(name, known)}")
            elif path == "tracking.trackers" and importlib.util.find_spec(SINKS[name].module) is None:
                yield Problem(path, f"{path}: {SINKS[name].missing()}")


@rule()
def shared_weights_stay_in_memory(facts: Facts) -> Iterator[Problem]:
    memory, path = facts.config.memory, "memory.share_weights"
    if not memory.share_weights:
        return
    if not memory.keep_rollout or "parameters" in memory.offload:
        yield Problem(
            path,
            f"{path}=true: weights that leave the memory cannot be shared. Set memory.keep_rollout=true "
            f"(is {str(memory.keep_rollout).lower()}) and leave 'parameters' out of memory.offload={memory.offload}.",
        )
    if not facts.config.rollout.enforce_eager:
        yield Problem(
            path,
            f"{path}=true with rollout.enforce_eager=false: compiled models read weights at the addresses they were "
            f"compiled with. Set one of the two the other way.",
        )


@rule()
def run_name_is_a_folder_name(facts: Facts) -> Iterator[Problem]:
    name = facts.config.name
    odd = name != name.strip() or not name.isprintable() or len(name.encode()) > 255
    if odd or name in ("", ".", "..") or "/" in name:
        yield Problem("name", f"name={name!r}: has to be the name of one folder, without '/'. Its parent is runs_dir.")


def present(config: RunConfig, pattern: str) -> list[tuple[str, Any]]:
    """As :func:`expand`; nothing for settings of another driver's schema."""
    return expand(config, pattern) if hasattr(config, pattern.split(".")[0]) else []
