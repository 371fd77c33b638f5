"""What rules are made of: a problem, the facts that rules share, and the list of rules.

A rule is a generator of :class:`Problem`; it is skipped where a field it reads is already known to be wrong, so it may
rely on that field.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hybridflow.config import EngineConfig, JudgeConfig, RewardModelConfig, RoleConfig, RunConfig
from hybridflow.errors import ConfigError
from hybridflow.models.spec import ModelSpec
from hybridflow.resharding.layout import Layout, ParallelLayout, training_of

CRITICS = ("critic", "cost_critic")
"""Roles that give values."""
SCORERS = ("reward", "cost")
"""Roles that score answers, by functions or by a model."""


@dataclass(frozen=True)
class Problem:
    """Something wrong with a setting, or (``warning``) something that is likely not meant."""

    field: str
    text: str
    warning: bool = False


class Facts:
    """A configuration with what several rules derive from it."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.run_dir = Path(config.runs_dir) / config.name

    @cached_property
    def placed(self) -> dict[str, RoleConfig]:
        return {role: at for role, at in self.config.roles.items() if at is not None}

    @cached_property
    def rows(self) -> int:
        return self.config.data.prompts_per_step * self.config.rollout.n

    @cached_property
    def rows_per_update(self) -> int:
        return self.config.actor.mini_batch_size or self.rows

    @cached_property
    def updates(self) -> int:
        """Optimizer updates of one step."""
        return self.config.actor.epochs * (self.rows // self.rows_per_update)

    @cached_property
    def longest(self) -> int:
        return self.config.rollout.max_prompt_tokens + self.config.rollout.max_tokens

    def layout(self, role: str) -> Layout:
        """The role's layout on its pool; ConfigError where it does not fit.

        One of a role that generates is a generation layout: of the actor's where they share a pool, else of its own
        degrees.
        """
        at, where = self.placed[role], f"roles.{role}.layout"
        generates = role in self.generating()
        axes = ("tp", "pp", "cp") if generates else ("tp", "pp", "cp", "ep", "etp", "vpp")
        degrees = {axis: getattr(at.layout, axis) for axis in axes}
        with _named(where):
            own = ParallelLayout.on(sum(self.config.pools[at.pool].devices), **degrees, where=where)
        if not generates:
            return own
        actor = self.placed.get("actor")
        shared = actor is not None and actor.pool == at.pool
        training = training_of(self.layout("actor")) if shared else own
        with _named(where):
            return training.generation(tp=at.layout.tp, pp=at.layout.pp, ep=at.layout.ep)

    def judge(self, role: str) -> JudgeConfig | None:
        """The settings of a role's judge; None where it has none."""
        judge = getattr(getattr(self.config, role, None), "judge", None) if role in SCORERS else None
        return judge if judge is not None and judge.path else None

    def generating(self) -> dict[str, tuple[str, EngineConfig]]:
        """The placed roles with a vLLM engine: where its limits are set, and what they are."""
        found: dict[str, tuple[str, EngineConfig]] = {}
        for role in self.placed:
            judge = self.judge(role)
            if judge is not None:
                found[role] = f"{role}.judge", judge
            elif role == "rollout":
                found[role] = "rollout", self.config.rollout
        return found

    @cached_property
    def spec(self) -> ModelSpec:
        return ModelSpec.from_folder(self.config.model.path)

    def spec_of(self, role: str) -> ModelSpec:
        """The model of a role as its engine builds it."""
        spec = ModelSpec.from_folder(self.path(role)[1])
        if role == "actor" and isinstance(self.config, RewardModelConfig):
            return spec.scoring("ForSequenceClassification")
        return spec.scoring("ForTokenClassification") if role in CRITICS else spec

    def model_roles(self) -> list[str]:
        """The placed roles that compute with a model."""
        return [role for role in self.placed if role not in SCORERS or self.path(role)[0] != "model.path"]

    def path(self, role: str) -> tuple[str, str]:
        """The setting that says where a role's model lies, and what it says."""
        if judge := self.judge(role):
            return f"{role}.judge.path", judge.path
        own = getattr(getattr(self.config, role, None), "path", "")
        return (f"{role}.path", own) if own else ("model.path", self.config.model.path)


@contextlib.contextmanager
def _named(where: str) -> Iterator[None]:
    """Errors of a layout itself, which knows no role, begin with the setting."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(re.sub(r"^layout\b", where, str(error))) from None


Rule = Callable[[Facts], Iterator[Problem]]
RULES: list[tuple[Rule, tuple[str, ...]]] = []


def rule(*reads: str) -> Callable[[Rule], Rule]:
    """Register a rule; ``reads`` are fields, or prefixes of fields, whose problems make it pointless."""

    def register(function: Rule) -> Rule:
        RULES.append((function, reads))
        return function

    return register
