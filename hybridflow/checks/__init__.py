"""Every rule that settings have to keep together, checked before anything starts, and the plan that follows from them.

Where it stands: between the typed configuration and :func:`hybridflow.launch`. Pure: reads files, starts nothing,
imports neither ray, torch, vllm nor megatron. The invariant: what passes here fails later only for reasons that
settings do not show (a machine without memory, a broken row); and all problems are reported at once, each with field,
value, rule and fix.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

# Importing a module registers its rules; their order here is the order of the problems.
from hybridflow.checks import values, placement, cluster, batches, algorithm, files  # noqa: F401  # isort: skip
from hybridflow.checks.base import RULES, Facts, Problem
from hybridflow.checks.placement import ROLES
from hybridflow.config import RunConfig
from hybridflow.errors import ConfigError
from hybridflow.resharding.layout import Layout


@dataclass(frozen=True)
class Plan:
    """What a checked configuration means.

    Attributes:
        run_dir: folder of the run.
        layouts: layout of each placed role on its pool.
        rows: rows of one training step (prompts x samples).
        rows_per_update: rows of one optimizer update over all devices.
        updates: optimizer updates of one training step.
        micro_batches: forwards of one optimizer update on one device; None where a token budget decides.
        max_tokens: most tokens (prompts and responses) of one training step.
        warnings: settings that are ignored or likely not meant.
    """

    run_dir: Path
    layouts: Mapping[str, Layout]
    rows: int
    rows_per_update: int
    updates: int
    micro_batches: int | None
    max_tokens: int
    warnings: tuple[str, ...] = ()
    placement: tuple[tuple[str, ...], ...] = field(default=(), repr=False)

    def placement_table(self, nodes: Mapping[str, str] | None = None) -> str:
        """Pools, roles and layouts, the arithmetic of a step and the warnings, as plain text.

        Args:
            nodes: where each pool runs, by name; a further column.
        """
        rows = [("pool", "devices", "role", "layout"), *self.placement]
        if nodes is not None:
            rows = [(*rows[0], "nodes"), *((*row, nodes[row[0]]) for row in self.placement)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines.insert(1, "  ".join("-" * width for width in widths))
        micro = "by token budget" if self.micro_batches is None else str(self.micro_batches)
        lines += [
            "",
            f"a step: {self.rows} rows, at most {self.max_tokens} tokens; {self.updates} update(s) of "
            f"{self.rows_per_update} rows; micro-batches an update and device: {micro}",
            f"run folder: {self.run_dir}",
            *(f"warning: {text}" for text in self.warnings),
        ]
        return "\n".join(lines)


def check(config: RunConfig) -> Plan:
    """Check every setting of a typed configuration.

    Raises:
        ConfigError: with all problems, each naming field, value, rule and fix.
    """
    facts = Facts(config)
    found: list[Problem] = []
    for function, reads in RULES:
        broken = {p.field for p in found if not p.warning}
        if not any(b == r or b.startswith(f"{r}.") for b in broken for r in reads):
            found += function(facts)
    problems = [p.text for p in found if not p.warning]
    if len(problems) == 1:
        raise ConfigError(problems[0])
    if problems:
        raise ConfigError("\n".join([f"{len(problems)} problems:", *(f"  - {text}" for text in problems)]))
    return _plan(facts, tuple(p.text for p in found))


def _plan(facts: Facts, warnings: tuple[str, ...]) -> Plan:
    config = facts.config
    layouts = {role: facts.layout(role) for role in ROLES if role in facts.placed}
    rows_each = math.ceil(facts.rows_per_update / layouts["actor"].dp)
    by_tokens = config.actor.micro_batch_tokens > 0
    return Plan(
        run_dir=facts.run_dir,
        layouts=layouts,
        rows=facts.rows,
        rows_per_update=facts.rows_per_update,
        updates=facts.updates,
        micro_batches=None if by_tokens else math.ceil(rows_each / config.actor.micro_batch_size),
        max_tokens=facts.rows * facts.longest,
        warnings=warnings,
        placement=tuple(
            (at.pool, f"{config.pools[at.pool].devices} {config.pools[at.pool].kind}", role, str(layouts[role]))
            for role, at in ((role, facts.placed[role]) for role in layouts)
        ),
    )
