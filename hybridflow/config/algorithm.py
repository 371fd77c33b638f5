"""Settings of algorithms: from rewards to advantages, and which samples train."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from hybridflow.config.base import Settings


@dataclass
class CorrectionConfig(Settings):
    """Weights for samples of another policy than the trainer's (``hybridflow.algorithms.correction``).

    Attributes:
        level: ratio train / rollout per ``token``, or one a sequence: the product (``sequence``) or the geometric mean
            (``geometric``) of its tokens'; ``none`` weighs nothing.
        bound: ``truncate`` (at ``high``), ``clip`` (at both bounds), ``mask`` (weight 0 outside of them) or ``none``.
        low, high: bounds of the weights.
        reject: take whole sequences out of the loss whose ratio (``sequence``, ``geometric``, or that of any ``token``)
            is outside of its bounds; ``none`` rejects nothing.
        reject_low, reject_high: bounds of the rejection.
    """

    level: str = "none"
    bound: str = "truncate"
    low: float = 0.0
    high: float = 2.0
    reject: str = "none"
    reject_low: float = 0.5
    reject_high: float = 2.0


@dataclass
class AlgorithmConfig(Settings):
    """From rewards to advantages (``hybridflow.algorithms.advantages`` and ``step``; formulas: docs/algorithms.md).

    Attributes:
        estimator: ``grpo``, ``rloo``, ``reinforce_plus_plus``, ``reinforce_plus_plus_baseline``, ``opo``, ``gpg``,
            ``maxrl``, ``pass_at_k``, ``gae``, ``remax``, ``grpo_stepwise``, ``distill``, ``distill_hybrid``, or a
            function of your own (``package.module:name`` or ``path/file.py:name``).
        normalize_std: divide by the group's standard deviation (false: Dr. GRPO).
        eps: added to the standard deviation.
        single: advantage of a group of one: ``zero``, or ``raw`` for its score.
        gamma: discount of ``gae`` and ``reinforce_plus_plus``.
        lam: lambda of ``gae``.
        whiten: whiten the advantages of ``gae``.
        k: answers drawn in ``pass_at_k``.
        lambda_rl, lambda_opd: weights of the reward's and of the teacher's advantage in ``distill_hybrid``.
        opd_clip: bound of the teacher's advantage there.
        options: keyword arguments for an estimator of your own.
        kl_coef: weight of the KL to the reference in the reward; above 0 needs the role ``reference``.
        kl_kind: its estimator, as ``actor.loss.kl_kind``.
        kl_target: above 0, ``kl_coef`` is where the weight begins, and each step changes it so that the mean KL per
            token comes to this.
        kl_horizon: responses over which a KL that is off by a fifth or more changes the weight by a fifth.
        overlong_filter: keep responses that were cut at ``rollout.max_tokens`` out of the loss (DAPO).
        overlong_buffer: tokens before ``rollout.max_tokens`` over which a penalty for length grows from 0 (DAPO); 0
            turns it off.
        overlong_penalty: the penalty at ``rollout.max_tokens``.
    """

    estimator: str = "grpo"
    normalize_std: bool = True
    eps: float = 1e-6
    single: str = "zero"
    gamma: float = 1.0
    lam: float = 1.0
    whiten: bool = True
    k: int = 1
    lambda_rl: float = 1.0
    lambda_opd: float = 1.0
    opd_clip: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)
    kl_coef: float = 0.0
    kl_kind: str = "k1"
    kl_target: float = 0.0
    kl_horizon: float = 10000.0
    overlong_filter: bool = False
    overlong_buffer: int = 0
    overlong_penalty: float = 1.0
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)


@dataclass
class DynamicSamplingConfig(Settings):
    """Replacing groups whose answers teach nothing (``hybridflow.data.dynamic``).

    Attributes:
        by: what has to differ inside a group: ``solved`` or ``rewards``; penalties of ``algorithm`` do not count.
        max_tries: generations of one step, the first one included.
    """

    by: str = "solved"
    max_tries: int = 5


@dataclass
class PreferenceConfig(Settings):
    """DPO's loss of a pair (``hybridflow.algorithms.preferences``).

    Attributes:
        beta: weight of the log-ratio to the reference; above 0.
        label_smoothing: the chance that a pair is labelled the wrong way round, below 0.5.
    """

    beta: float = 0.1
    label_smoothing: float = 0.0


@dataclass
class SafetyConfig(Settings):
    """How much costs weigh against rewards (``hybridflow.algorithms.safety``).

    Attributes:
        cost_limit: the mean cost of an answer that is accepted.
        multiplier: the Lagrange multiplier before the first step.
        multiplier_lr: how fast its logarithm follows the excess of the mean cost over the limit.
        max_multiplier: its upper bound.
    """

    cost_limit: float = 0.0
    multiplier: float = 1.0
    multiplier_lr: float = 0.1
    max_multiplier: float = 5.0


@dataclass
class ReferenceConfig(Settings):
    """The policy that a KL is measured to.

    Attributes:
        update_every: steps after which the reference takes the weights that the actor then has; 0 keeps those that the
            run started from.
    """

    update_every: int = 0


@dataclass
class TeacherConfig(Settings):
    """The model that is learned from.

    Attributes:
        path: local Hugging Face folder of any supported architecture, with the tokenizer of ``model.path``.
    """

    path: str = MISSING
