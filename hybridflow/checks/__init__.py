"""Every rule that settings have to keep together, checked before anything starts, and the plan that follows from them.

Where it stands: between the typed configuration and :func:`hybridflow.launch`. It reads files, makes an empty folder
for a moment where one has to be written to, and starts nothing; it imports neither ray, torch, vllm nor megatron. The
invariant: what passes here fails later only for reasons that settings do not show (a machine without memory, a broken
row); and all problems are reported at once, each with field, value, rule and fix.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

# Importing a module registers its rules; their order here is the order of the problems.
from hybridflow.checks import values, placement, cluster, batches, algorithm, files, memory  # noqa: F401  # isort: skip
from hybridflow.checks.base import RULES, Facts, Problem
from hybridflow.checks.batches import arithmetic
from hybridflow.checks.memory import device_memory
from hybridflow.checks.placement import ROLES
from hybridflow.config import RunConfig
from hybridflow.errors import ConfigError
from hybridflow.planner.memory import DeviceMemory, table
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
        memory: the estimate for the fullest device of each pool.
        arithmetic: how the rows of a step are shared: what, number of rows, how it comes about.
        warnings: settings that are ignored or likely not meant.
    """

    run_dir: Path
    layouts: Mapping[str, Layout]
    rows: int
    rows_per_update: int
    updates: int
    micro_batches: int | None
    max_tokens: int
    memory: tuple[DeviceMemory, ...] = ()
    arithmetic: tuple[tuple[str, str, str], ...] = ()
    warnings: tuple[str, ...] = ()
    placement: tuple[tuple[str, ...], ...] = field(default=(), repr=False)

    def placement_table(self, nodes: Mapping[str, str] | None = None) -> str:
        """Pools, roles and layouts, memory, the arithmetic of a step and the warnings, as plain text.

        Args:
            nodes: where each pool runs, by name; a further column.
        """
        rows = [("pool", "devices", "role", "layout"), *self.placement]
        if nodes is not None:
            rows = [(*rows[0], "nodes"), *((*row, nodes[row[0]]) for row in self.placement)]
        lines = [*_aligned(rows), ""]
        if self.arithmetic:
            lines += [*_aligned([("rows of", "", "how"), *self.arithmetic]), ""]
        if self.memory:
            lines += [*_aligned(table([*self.memory])), ""]
        lines += [f"run folder: {self.run_dir}", *(f"warning: {text}" for text in self.warnings)]
        return "\n".join(lines)


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """A table with a header; columns of numbers stand to the right."""
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    numbers = [all(cell[:1] in "-0123456789" for cell in column[1:]) for column in columns]
    lines = [
        "  ".join(
            cell.rjust(w) if n else cell.ljust(w) for cell, w, n in zip(row, widths, numbers, strict=True)
        ).rstrip()
        for row in rows
    ]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]


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
            try:
                found += function(facts)
            except OSError as error:  # a path that the system does not even look at: too long, a folder without access
                found.append(Problem("", f"{error.filename}: {error.strerror}. Give another path."))
    problems = [
        *dict.fromkeys(p.text for p in found if not p.warning)
    ]  # a fault of the actor's layout is the rollout's
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
        memory=tuple(device_memory(facts)),
        arithmetic=tuple(arithmetic(facts)),
        warnings=warnings,
        placement=tuple(
            (at.pool, f"{config.pools[at.pool].devices} {config.pools[at.pool].kind}", role, str(layouts[role]))
            for role, at in ((role, facts.placed[role]) for role in layouts)
        ),
    )
