"""Rules about the algorithm: what an estimator and a loss read, what they ignore, and what a driver can give them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from hybridflow.checks.base import SCORERS, Facts, Problem, rule
from hybridflow.checks.values import ESTIMATOR_SETTINGS, GROUPED, LOSS_SETTINGS, OTHER_COLUMNS, present
from hybridflow.config import DPOConfig, PairsConfig, PPOConfig, RLConfig, SFTConfig


@rule("actor.loss.name", "algorithm.estimator")
def what_is_ignored_is_said(facts: Facts) -> Iterator[Problem]:
    """A function of the user's own may read anything."""
    loss = facts.config.actor.loss
    yield from _ignored("actor.loss", loss, "name", LOSS_SETTINGS)
    if isinstance(facts.config, RLConfig):
        yield from _ignored("algorithm", facts.config.algorithm, "estimator", ESTIMATOR_SETTINGS)
    if loss.scale and loss.aggregation != "seq-mean-token-sum-norm":
        yield Problem(
            "actor.loss.scale",
            f"actor.loss.scale={loss.scale:g} is ignored by actor.loss.aggregation={loss.aggregation!r}.",
            warning=True,
        )


BOUND_READS = {"none": (), "truncate": ("high",), "clip": ("low", "high"), "mask": ("low", "high")}


@rule("actor.loss", "algorithm", *SCORERS)
def settings_of_what_is_off_are_ignored(facts: Facts) -> Iterator[Problem]:
    loss = facts.config.actor.loss
    if not loss.kl_coef:
        yield from _unread("actor.loss", loss, ("kl_kind",), "actor.loss.kl_coef=0")
    if isinstance(facts.config, RLConfig):
        algorithm = facts.config.algorithm
        for switch, name in (
            ("kl_coef", "kl_kind"),
            ("kl_target", "kl_horizon"),
            ("overlong_buffer", "overlong_penalty"),
        ):
            if not getattr(algorithm, switch):
                yield from _unread("algorithm", algorithm, (name,), f"algorithm.{switch}=0")
        c, here = algorithm.correction, "algorithm.correction"
        if c.level == "none":
            yield from _unread(here, c, ("bound", "low", "high"), f"{here}.level='none'")
        else:
            unread = [name for name in ("low", "high") if name not in BOUND_READS[c.bound]]
            yield from _unread(here, c, unread, f"{here}.bound={c.bound!r}")
        if c.reject == "none":
            yield from _unread(here, c, ("reject_low", "reject_high"), f"{here}.reject='none'")
    for role in SCORERS:
        for path, judge in present(facts.config, f"{role}.judge"):
            if not judge.path:
                names = [field.name for field in dataclasses.fields(judge)]
                yield from _unread(path, judge, names, f"{path}.path=''")


@rule("actor", "algorithm", "data.prompts_per_step", "rollout.n")
def own_log_probs_are_the_old_ones(facts: Facts) -> Iterator[Problem]:
    actor, here = facts.config.actor, "actor.loss.old_log_probs"
    if actor.loss.old_log_probs != "own":
        return
    if facts.updates > 1:
        yield Problem(
            here,
            f"{here}='own' takes every ratio to be 1, which holds for one update a step; here are {facts.updates} = "
            f"actor.epochs * rows / actor.mini_batch_size = {actor.epochs} * {facts.rows} / {facts.rows_per_update}. "
            f"Set {here}=log_probs, or actor.epochs=1 and actor.mini_batch_size=0.",
        )
    readers = [f"actor.loss.name={actor.loss.name!r}"] if actor.loss.name in ("clip_cov", "kl_cov") else []
    if isinstance(facts.config, RLConfig):
        algorithm = facts.config.algorithm
        if algorithm.estimator in ("distill", "distill_hybrid"):
            readers.append(f"algorithm.estimator={algorithm.estimator!r}")
        readers += [f"algorithm.kl_coef={algorithm.kl_coef:g}"] if algorithm.kl_coef else []
        readers += [
            f"algorithm.correction.{name}={value!r}"
            for name, value in (("level", algorithm.correction.level), ("reject", algorithm.correction.reject))
            if value != "none"
        ]
    for reader in readers:
        yield Problem(
            here, f"{reader} reads the column log_probs, which {here}='own' does not make. Set {here}=log_probs."
        )


@rule("actor.loss")
def aggregation_has_its_scale(facts: Facts) -> Iterator[Problem]:
    loss = facts.config.actor.loss
    if loss.aggregation == "seq-mean-token-sum-norm" and loss.scale == 0:
        yield Problem(
            "actor.loss.scale",
            "actor.loss.scale=0: actor.loss.aggregation='seq-mean-token-sum-norm' divides each sequence's sum by it. "
            "Set it above 0, such as to ${rollout.max_tokens}.",
        )


@rule("actor.loss")
def covariances_have_room(facts: Facts) -> Iterator[Problem]:
    loss = facts.config.actor.loss
    if loss.cov_low >= loss.cov_high:
        yield Problem(
            "actor.loss.cov_low",
            f"actor.loss.cov_low={loss.cov_low} has to be below actor.loss.cov_high={loss.cov_high}: tokens are drawn "
            "from those in between.",
        )


@rule("actor.loss")
def kl_in_the_loss_has_a_gradient(facts: Facts) -> Iterator[Problem]:
    loss = facts.config.actor.loss
    if loss.kl_coef > 0 and loss.kl_kind == "k1":
        yield Problem(
            "actor.loss.kl_kind",
            "actor.loss.kl_kind='k1' has a gradient of 0 in expectation, so it regularises nothing in a loss. Use k2, "
            "k3 or k1+.",
            warning=True,
        )


@rule("algorithm", "actor.loss", "rollout")
def estimator_suits_the_driver(facts: Facts) -> Iterator[Problem]:
    config, n = facts.config, facts.config.rollout.n
    if not isinstance(config, RLConfig):
        return
    estimator = config.algorithm.estimator
    makes = config.makes
    if makes is not None and config.reward.step_end:
        makes = (*makes, OTHER_COLUMNS["grpo_stepwise"])
    if makes is not None and estimator in OTHER_COLUMNS and OTHER_COLUMNS[estimator] not in makes:
        fitting = ", ".join(n for n in ESTIMATOR_SETTINGS if n not in OTHER_COLUMNS or OTHER_COLUMNS[n] in makes)
        yield Problem(
            "algorithm.estimator",
            f"algorithm.estimator={estimator!r} reads the column {OTHER_COLUMNS[estimator]!r}, which this driver does "
            f"not make. Choose one of {fitting}."
            + (" For rewards of single steps set reward.step_end." if estimator == "grpo_stepwise" else ""),
        )
    for column in config.makes or ():
        if estimator in ESTIMATOR_SETTINGS and OTHER_COLUMNS.get(estimator) != column:
            reader = next(name for name, read in OTHER_COLUMNS.items() if read == column)
            yield Problem(
                "algorithm.estimator",
                f"algorithm.estimator={estimator!r} does not read the column {column!r}, which this driver pays for. "
                f"Set it to {reader}, or take another driver, such as examples/grpo.py.",
                warning=True,
            )
    if n < 2 and estimator in GROUPED and config.algorithm.single == "zero":
        yield Problem(
            "rollout.n",
            f"rollout.n={n}: algorithm.estimator={estimator!r} compares the samples of one prompt, so one alone has "
            "advantage 0. Set it to 2 or more.",
        )
    if config.rollout.sampling.temperature == 0:
        yield Problem(
            "rollout.sampling.temperature",
            "rollout.sampling.temperature=0: all samples of a prompt would be equal, and nothing is learned. Set "
            "it above 0, such as 1.0. (Evaluation has its own: evaluate.sampling.)",
        )
    if config.actor.loss.name == "sft":
        yield Problem(
            "actor.loss.name", "actor.loss.name='sft' ignores advantages; choose a policy loss, such as 'ppo'."
        )
    if estimator == "pass_at_k" and config.algorithm.k > n:
        yield Problem(
            "algorithm.k",
            f"algorithm.k={config.algorithm.k} answers cannot be drawn from rollout.n={n}. Lower it to at most {n}.",
        )


@rule("algorithm", "data.prompts_per_step", "rollout.n")
def an_adapted_kl_stays_above_zero(facts: Facts) -> Iterator[Problem]:
    if isinstance(facts.config, RLConfig):
        algorithm = facts.config.algorithm
        if algorithm.kl_target and not algorithm.kl_coef:
            yield Problem(
                "algorithm.kl_coef",
                f"algorithm.kl_coef=0: algorithm.kl_target={algorithm.kl_target:g} multiplies it step by step, so it "
                "would stay 0. Set it above 0, such as to 0.1.",
            )
        if algorithm.kl_target and algorithm.kl_horizon <= 0.2 * facts.rows:
            n, prompts = facts.config.rollout.n, facts.config.data.prompts_per_step
            yield Problem(
                "algorithm.kl_horizon",
                f"algorithm.kl_horizon={algorithm.kl_horizon:g}: has to be above 0.2 * data.prompts_per_step * "
                f"rollout.n = 0.2 * {prompts} * {n} = {0.2 * facts.rows:g}, else one step could bring the weight of "
                f"the KL to 0 or below. Raise it, such as to {10 * facts.rows}.",
            )


@rule("actor", "algorithm", "reference", "roles", "steps", "data.prompts_per_step", "rollout.n")
def a_reference_keeps_its_distance(facts: Facts) -> Iterator[Problem]:
    config = facts.config
    for path, every in present(config, "reference.update_every"):
        if every >= config.steps:
            text = f"{path}={every} is no less than steps={config.steps}: the reference never changes. Lower it."
            yield Problem(path, text, warning=True)
        if every != 1:
            continue
        # The reference is the policy at the start of each step.
        zero = ["preference.beta"] if isinstance(config, DPOConfig) else []
        zero += ["algorithm.kl_coef"] if isinstance(config, RLConfig) and config.algorithm.kl_coef else []
        zero += ["actor.loss.kl_coef"] if config.actor.loss.kl_coef and facts.updates == 1 else []
        for reader in zero:
            text = f"{path}=1 makes the log-ratio that {reader} weighs 0 in every step. Raise it."
            yield Problem(path, text, warning=True)


@rule("algorithm.estimator", "critic.warmup_steps", "steps")
def a_critic_is_used(facts: Facts) -> Iterator[Problem]:
    config = facts.config
    if not isinstance(config, PPOConfig):
        return
    estimator, warm_up = config.algorithm.estimator, config.critic.warmup_steps
    if estimator != "gae" and estimator in ESTIMATOR_SETTINGS:
        yield Problem(
            "algorithm.estimator",
            f"algorithm.estimator={estimator!r} does not read the critic's values. Set it to gae, or take another "
            "driver, such as examples/grpo.py.",
        )
    if warm_up >= config.steps:
        yield Problem(
            "critic.warmup_steps",
            f"critic.warmup_steps={warm_up} is no less than steps={config.steps}: the actor would never be trained. "
            f"Lower it to below {config.steps}.",
        )
    for path, ignored in present(config, "cost_critic.warmup_steps"):
        if ignored:
            yield Problem(path, f"{path}={ignored} is ignored: critic.warmup_steps counts for both.", warning=True)


@rule("safety")
def a_multiplier_has_room(facts: Facts) -> Iterator[Problem]:
    for _, safety in present(facts.config, "safety"):
        if safety.multiplier > safety.max_multiplier:
            yield Problem(
                "safety.multiplier",
                f"safety.multiplier={safety.multiplier:g} is above safety.max_multiplier={safety.max_multiplier:g}. "
                "Lower it, or raise the bound.",
            )


@rule("algorithm", "rollout")
def length_penalty_fits_the_limit(facts: Facts) -> Iterator[Problem]:
    if isinstance(facts.config, RLConfig) and facts.config.algorithm.overlong_buffer > facts.config.rollout.max_tokens:
        yield Problem(
            "algorithm.overlong_buffer",
            f"algorithm.overlong_buffer={facts.config.algorithm.overlong_buffer} is more than "
            f"rollout.max_tokens={facts.config.rollout.max_tokens}. Lower it.",
        )


@rule("algorithm.correction", "actor.loss")
def correction_is_consistent(facts: Facts) -> Iterator[Problem]:
    if not isinstance(facts.config, RLConfig):
        return
    c, here = facts.config.algorithm.correction, "algorithm.correction"
    for low, high in (("low", "high"), ("reject_low", "reject_high")):
        if getattr(c, low) >= getattr(c, high):
            yield Problem(
                f"{here}.{low}",
                f"{here}.{low}={getattr(c, low)} has to be below {here}.{high}={getattr(c, high)}: they bound the "
                "ratio train / rollout.",
            )
    if c.level != "none" and facts.config.actor.loss.old_log_probs == "rollout_log_probs":
        yield Problem(
            f"{here}.level",
            f"{here}.level={c.level!r} weighs by train / rollout, and actor.loss.old_log_probs='rollout_log_probs' "
            f"puts the same ratio into the loss: samples would be corrected twice. Set {here}.level=none, or "
            "actor.loss.old_log_probs=log_probs.",
        )


@rule("algorithm.correction", "actor.loss", "max_staleness")
def old_answers_are_weighed(facts: Facts) -> Iterator[Problem]:
    """A loss of the user's own may weigh them itself."""
    config, ahead = facts.config, getattr(facts.config, "max_staleness", 0)
    if not isinstance(config, RLConfig) or not ahead or ":" in config.actor.loss.name:
        return
    loss = config.actor.loss
    weighed = "old_log_probs" in LOSS_SETTINGS.get(loss.name, ()) and loss.old_log_probs == "rollout_log_probs"
    if config.algorithm.correction.level == "none" and not weighed:
        yield Problem(
            "algorithm.correction.level",
            f"max_staleness={ahead} trains on answers of older policies, and algorithm.correction.level='none' weighs "
            "them as if they were the trainer's own. Set algorithm=decoupled_ppo, or "
            "actor.loss.old_log_probs=rollout_log_probs.",
            warning=True,
        )


@rule("actor.loss", "rollout.n")
def supervised_settings_suit_the_driver(facts: Facts) -> Iterator[Problem]:
    loss, n = facts.config.actor.loss.name, facts.config.rollout.n
    if isinstance(facts.config, SFTConfig):
        if loss != "sft":
            yield Problem("actor.loss.name", f"actor.loss.name={loss!r}: supervised fine-tuning needs 'sft'.")
        if n != 1:
            yield Problem("rollout.n", f"rollout.n={n}: a supervised batch has one answer a prompt. Set it to 1.")


@rule("actor", "rollout.n", "data.prompts_per_step")
def pairs_suit_the_driver(facts: Facts) -> Iterator[Problem]:
    actor, n = facts.config.actor, facts.config.rollout.n
    if not isinstance(facts.config, PairsConfig):
        return
    if n != 2:
        yield Problem("rollout.n", f"rollout.n={n}: a pair has two answers, the chosen and the rejected. Set it to 2.")
    if facts.updates > 1:
        yield Problem(
            "actor.mini_batch_size",
            f"{facts.updates} updates a step = actor.epochs * rows / actor.mini_batch_size = {actor.epochs} * "
            f"{facts.rows} / {facts.rows_per_update}: answers are weighed by the weights before the step, which holds "
            "for one update. Set actor.epochs=1 and actor.mini_batch_size=0; data.prompts_per_step is the batch size.",
        )
    for name, wanted in (("name", "reinforce"), ("aggregation", "seq-mean-token-sum"), ("old_log_probs", "log_probs")):
        value = getattr(actor.loss, name)
        if isinstance(facts.config, DPOConfig) and value != wanted:
            yield Problem(
                f"actor.loss.{name}",
                f"actor.loss.{name}={value!r}: DPO's gradient is that of {wanted!r} with a weight for each answer, "
                f"which the driver computes. Set it to {wanted}.",
            )


def _unread(path: str, settings: Any, names: Iterable[str], because: str) -> Iterator[Problem]:
    """Those of the settings that differ from their default."""
    for name in names:
        value = getattr(settings, name)
        if value != getattr(type(settings)(), name):
            yield Problem(f"{path}.{name}", f"{path}.{name}={value!r} is ignored: {because}.", warning=True)


READ_BY_ALL = (("old_log_probs", "own"),)
"""Values of settings that mean something whatever is chosen: ``own`` saves a pass of the model with every loss."""


def _ignored(path: str, settings: Any, chooser: str, reads: dict[str, tuple[str, ...]]) -> Iterator[Problem]:
    """Settings that differ from their default, that some choice reads, and the chosen one does not."""
    chosen = getattr(settings, chooser)
    if chosen not in reads:
        return
    some = {name for names in reads.values() for name in names} | {"options"}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if (field.name, value) in READ_BY_ALL:
            continue
        if field.name in some and field.name not in reads[chosen] and value != getattr(type(settings)(), field.name):
            yield Problem(
                f"{path}.{field.name}",
                f"{path}.{field.name}={value!r} is ignored by {path}.{chooser}={chosen!r}.",
                warning=True,
            )
