"""Rules about where roles stand: pools, layouts, and what this version can place."""

from __future__ import annotations

from collections.abc import Iterator

from hybridflow.checks.base import CRITICS, SCORERS, Facts, Problem, rule
from hybridflow.checks.values import present
from hybridflow.config import (
    DistillConfig,
    DPOConfig,
    PPOConfig,
    RewardModelConfig,
    RLConfig,
    RunConfig,
    SafeRLHFConfig,
)
from hybridflow.errors import ConfigError, nearest
from hybridflow.resharding.layout import GenerationLayout

ROLES = ("actor", "critic", "cost_critic", "rollout", "reference", "teacher", "reward", "cost")
_WITH_REWARDS = ("actor", "rollout", "reward")
REQUIRED_ROLES = {
    RunConfig: ("actor",),
    DPOConfig: ("actor", "reference"),
    RLConfig: _WITH_REWARDS,
    PPOConfig: (*_WITH_REWARDS, "critic"),
    SafeRLHFConfig: (*_WITH_REWARDS, "critic", "cost", "cost_critic"),
    DistillConfig: ("actor", "rollout", "teacher", "reward"),
}
"""Roles without which a driver cannot run, by its schema or the nearest one above it. Without rollout and reward the
other drivers run and are not evaluated."""
OWN_ROLES = (*CRITICS, "cost", "teacher")
"""Roles with settings of their own name, that only some drivers have and those need."""
KL_COEFS = ("actor.loss.kl_coef", "algorithm.kl_coef")
AXES = {"tp": 1, "pp": 1, "cp": 1, "ep": 1, "etp": 0, "vpp": 1}
"""Axes of a layout besides dp, with the degree that leaves one unused."""
AVAILABLE_AXES: dict[str, tuple[str, ...]] = {
    "actor": tuple(AXES),
    **{role: tuple(AXES) for role in (*CRITICS, "reference", "teacher", *SCORERS)},
    "rollout": ("tp", "ep"),
}
"""Axes of a layout besides dp that the engine of a role offers in this version."""


def required_roles(config: RunConfig) -> tuple[str, ...]:
    """What :data:`REQUIRED_ROLES` says of a configuration."""
    return next(REQUIRED_ROLES[kind] for kind in type(config).__mro__ if kind in REQUIRED_ROLES)


@rule()
def roles_are_known(facts: Facts) -> Iterator[Problem]:
    for role in facts.config.roles:
        if role not in ROLES:
            yield Problem(f"roles.{role}", f"roles.{role}: there is no role {role!r}.{nearest(role, ROLES)}")
    for role in OWN_ROLES:
        if role in facts.placed and not hasattr(facts.config, role):
            yield Problem(
                f"roles.{role}",
                f"roles.{role} is placed, but this driver has no {role}. Set roles.{role}=null.",
            )
    if isinstance(facts.config, RewardModelConfig):
        for role in facts.placed:
            if role in ROLES and role != "actor":
                yield Problem(
                    f"roles.{role}",
                    f"roles.{role} is placed, but a reward model's training never calls it. Set roles.{role}=null, or "
                    "use placement=trainer.",
                    warning=True,
                )
    for role in required_roles(facts.config):
        if role not in facts.placed:
            pools = nearest("", facts.config.pools).strip().replace("Known", "Pools")
            yield Problem(
                f"roles.{role}", f"roles.{role} is not placed. Give it as roles.{role}={{pool: NAME}}. {pools}"
            )


@rule()
def pools_exist(facts: Facts) -> Iterator[Problem]:
    pools = facts.config.pools
    for role, at in facts.placed.items():
        if at.pool not in pools:
            yield Problem(f"roles.{role}", f"roles.{role}.pool={at.pool!r}: no such pool.{nearest(at.pool, pools)}")
        elif role in facts.model_roles() and pools[at.pool].kind == "cpu":
            yield Problem(
                f"roles.{role}",
                f"roles.{role}.pool={at.pool!r} has kind 'cpu', whose processes have no device; {role} computes with "
                f"the model. Give it a pool of kind 'device', or set pools.{at.pool}.kind=device.",
            )
    for pool in pools:
        if pool not in {at.pool for at in facts.placed.values()}:
            yield Problem(f"pools.{pool}", f"pools.{pool} has no role, so it is not started.", warning=True)


@rule("roles", "pools", "max_staleness", "steps")
def generation_ahead_needs_a_pool(facts: Facts) -> Iterator[Problem]:
    ahead = getattr(facts.config, "max_staleness", 0)
    if ahead and facts.placed["rollout"].pool == facts.placed["actor"].pool:
        yield Problem(
            "max_staleness",
            f"max_staleness={ahead} generates while the actor trains, but both are on pool "
            f"{facts.placed['actor'].pool!r}, whose processes do one at a time. Use placement=disaggregate, or set "
            f"max_staleness=0.",
        )
    if ahead > facts.config.steps:
        yield Problem(
            "max_staleness",
            f"max_staleness={ahead} with steps={facts.config.steps}: the answers of all steps may be drawn before the "
            f"first update, so that none is drawn by a policy that has learned. Set max_staleness to 1 or 2.",
            warning=True,
        )


@rule("roles", "pools")
def layouts_fill_their_pools(facts: Facts) -> Iterator[Problem]:
    for role in facts.placed:
        try:
            facts.layout(role)
        except ConfigError as error:
            yield Problem(f"roles.{role}.layout", str(error))


@rule("roles", "pools")
def layout_axes_are_available(facts: Facts) -> Iterator[Problem]:
    for role, at in facts.placed.items():
        for axis, unused in AXES.items():
            size = getattr(at.layout, axis)
            if size in (1, unused):
                continue
            kind = "rollout" if role in facts.generating() else role
            if role not in facts.model_roles():
                reason = f"the {role} role has no model to split"
            elif kind == "rollout" and axis == "cp":
                reason = "generation does not split sequences"
            elif kind == "rollout" and axis == "pp":
                reason = "an engine has no pipeline stages"
            elif axis not in AVAILABLE_AXES.get(kind, ()):
                reason = f"in this version {role} can use {', '.join(AVAILABLE_AXES[kind])}"
            else:
                continue
            yield Problem(f"roles.{role}.layout", f"roles.{role}.layout.{axis}={size}: {reason}. Set it to 1.")


@rule("roles", "pools", *SCORERS)
def engines_of_a_pool_are_cut_alike(facts: Facts) -> Iterator[Problem]:
    first: dict[str, str] = {}
    for role in facts.generating():
        other = first.setdefault(facts.placed[role].pool, role)
        mine, theirs = facts.placed[role].layout, facts.placed[other].layout
        if (mine.tp, mine.ep) != (theirs.tp, theirs.ep):
            yield Problem(
                f"roles.{role}.layout",
                f"roles.{role}.layout: tp={mine.tp}, ep={mine.ep} beside roles.{other}.layout with tp={theirs.tp}, "
                f"ep={theirs.ep} on pool {facts.placed[role].pool!r}: vLLM keeps one set of groups in a process. Give "
                f"both the same degrees, or {role} a pool of its own: pools.{role}.devices=[{mine.tp}] "
                f"roles.{role}.pool={role}.",
            )


@rule("roles", "pools")
def a_transition_costs_no_more_than_it_must(facts: Facts) -> Iterator[Problem]:
    layout = facts.layout("rollout") if "rollout" in facts.placed else None
    text = layout.warning() if isinstance(layout, GenerationLayout) else ""
    if text:
        yield Problem("roles.rollout.layout", f"roles.rollout.layout: {text}", warning=True)


@rule("roles")
def reference_is_placed_where_it_is_needed(facts: Facts) -> Iterator[Problem]:
    placed = "reference" in facts.placed
    coefs = {path: coef for name in KL_COEFS for path, coef in present(facts.config, name)}
    for path, coef in coefs.items():
        if coef > 0 and not placed:
            yield Problem(
                "roles.reference",
                f"{path}={coef} measures a KL to the reference, but roles.reference is not placed. "
                f"Use placement=colocate_reference or roles.reference={{pool: NAME}}, or set {path}=0.",
            )
    for path, every in present(facts.config, "reference.update_every"):
        if every and not placed:
            yield Problem(
                path,
                f"{path}={every}: roles.reference is not placed. Use placement=colocate_reference, or set it to 0.",
            )
    if placed and not any(coefs.values()) and "reference" not in required_roles(facts.config):
        yield Problem(
            "roles.reference",
            f"roles.reference is placed, but {' and '.join(f'{path}=0' for path in coefs)} never use it: it costs "
            "memory and a forward a step. Set roles.reference=null.",
            warning=True,
        )
