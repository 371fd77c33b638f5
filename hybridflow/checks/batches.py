"""Rules about the arithmetic of a step: rows, updates, tokens, the schedule and how tokens are drawn."""

from __future__ import annotations

import math
from collections.abc import Iterator

from hybridflow.checks.base import Facts, Problem, rule
from hybridflow.checks.values import OPTIMIZERS, present
from hybridflow.config import OptimizerConfig, RLConfig


@rule("roles", "pools", "data.prompts_per_step", "rollout.n", "actor.mini_batch_size")
def batches_divide(facts: Facts) -> Iterator[Problem]:
    prompts, n, mini = facts.config.data.prompts_per_step, facts.config.rollout.n, facts.config.actor.mini_batch_size
    product = f"data.prompts_per_step * rollout.n = {prompts} * {n} = {facts.rows} rows"
    dp = facts.layout("actor").dp
    if mini and facts.rows % mini:
        fitting = [d for d in range(1, facts.rows + 1) if facts.rows % d == 0]
        yield Problem(
            "actor.mini_batch_size",
            f"actor.mini_batch_size={mini} does not divide {product}. Set it to one of {', '.join(map(str, fitting))}, "
            "or to 0 for the whole batch.",
        )
    elif facts.rows_per_update < dp:
        field, value = ("actor.mini_batch_size", f"actor.mini_batch_size={mini}") if mini else ("rollout.n", product)
        yield Problem(
            field,
            f"{value} is less than the {dp} data-parallel ranks of roles.actor, so some of them have nothing to "
            f"compute in an update. Raise it to at least {dp}.",
            warning=True,
        )


@rule("actor.micro_batch_tokens", "rollout")
def a_row_fits_a_micro_batch(facts: Facts) -> Iterator[Problem]:
    budget, limits = facts.config.actor.micro_batch_tokens, facts.config.rollout
    if 0 < budget < facts.longest:
        yield Problem(
            "actor.micro_batch_tokens",
            f"actor.micro_batch_tokens={budget} is less than one row may have: rollout.max_prompt_tokens + "
            f"rollout.max_tokens = {limits.max_prompt_tokens} + {limits.max_tokens} = {facts.longest}. Raise it to at "
            f"least {facts.longest}, or set it to 0 to cut by actor.micro_batch_size.",
        )


@rule("actor", "critic", "data.prompts_per_step", "rollout.n", "steps")
def schedule_fits_the_run(facts: Facts) -> Iterator[Problem]:
    for here in OPTIMIZERS:
        steps = facts.config.actor_steps if here == "actor.optimizer" else facts.config.steps
        for _, o in present(facts.config, here):
            yield from _schedule_problems(here, o, steps, facts.updates)


def _schedule_problems(here: str, o: OptimizerConfig, steps: int, updates: int) -> Iterator[Problem]:
    if o.min_lr > o.lr:
        yield Problem(f"{here}.min_lr", f"{here}.min_lr={o.min_lr} is above {here}.lr={o.lr}. Lower it.")
    if o.warmup_steps >= steps * updates:
        yield Problem(
            f"{here}.warmup_steps",
            f"{here}.warmup_steps={o.warmup_steps} is no less than the run's {steps * updates} updates (steps * "
            f"updates a step = {steps} * {updates}): the learning rate is never constant.",
            warning=True,
        )
    if o.schedule == "constant" and (o.decay_steps or o.min_lr):
        yield Problem(
            f"{here}.schedule",
            f"{here}.schedule='constant' ignores {here}.decay_steps and {here}.min_lr.",
            warning=True,
        )
    elif o.schedule != "constant" and 0 < o.decay_steps <= o.warmup_steps:
        yield Problem(
            f"{here}.decay_steps",
            f"{here}.decay_steps={o.decay_steps} ends the decay before the warm-up of "
            f"{here}.warmup_steps={o.warmup_steps} does. Raise it, or set it to 0 for the whole run.",
        )


@rule("rollout.sampling")
def truncated_sampling_is_seen(facts: Facts) -> Iterator[Problem]:
    s = facts.config.rollout.sampling
    if (s.top_p < 1 or s.top_k > 0) and isinstance(facts.config, RLConfig):
        yield Problem(
            "rollout.sampling",
            f"rollout.sampling.top_p={s.top_p}, top_k={s.top_k}: rollouts are drawn from a truncated distribution, "
            "while the trainer's log_probs are over the full one. Expect a mismatch; top_p=1 and top_k=0 avoid it.",
            warning=True,
        )


def arithmetic(facts: Facts) -> Iterator[tuple[str, str, str]]:
    """How the rows of one step are shared: (what, rows, how it comes about), from the whole to one forward."""
    config, actor = facts.config, facts.config.actor
    prompts, n, rows = config.data.prompts_per_step, config.rollout.n, facts.rows
    yield "a step", str(rows), f"{prompts} prompts * {n} samples; at most {rows * facts.longest} tokens"
    if "rollout" in facts.placed:
        replicas = facts.layout("rollout").dp
        yield "a rollout replica", _shared(rows, replicas), f"{replicas} replicas"
    dp, update = facts.layout("actor").dp, facts.rows_per_update
    each = math.ceil(update / dp)
    name = "actor.mini_batch_size" if actor.mini_batch_size else "actor.mini_batch_size=0: the whole batch"
    yield "an update", str(update), f"{name}; {facts.updates} update(s) a step, in {actor.epochs} epoch(s)"
    yield "an update on a replica", _shared(update, dp), f"{dp} data-parallel replicas of the actor"
    if actor.micro_batch_tokens:
        least = min(actor.micro_batch_tokens // facts.longest, each)
        yield "a forward", str(least), f"at least; as many as have {actor.micro_batch_tokens} tokens together"
    else:
        size = min(actor.micro_batch_size, each)
        forwards = math.ceil(each / actor.micro_batch_size)
        yield (
            "a forward",
            str(size),
            f"actor.micro_batch_size={actor.micro_batch_size}; {forwards} forward(s) an update",
        )


def _shared(rows: int, replicas: int) -> str:
    low, high = rows // replicas, math.ceil(rows / replicas)
    return str(low) if low == high else f"{low}-{high}"
