"""Safe RLHF: rewards against costs, weighed by a Lagrange multiplier (Dai et al. 2023, arXiv 2310.12773).

Where it stands: :func:`safe_advantages` is the advantage step of its driver, :func:`next_multiplier` what moves the
multiplier from step to step. A cost above ``safety.cost_limit`` is a violation; a failed cost (NaN) counts nowhere.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from hybridflow.algorithms.step import compute_advantages
from hybridflow.config import SafeRLHFConfig, SafetyConfig
from hybridflow.protocol.data import DataProto


def next_multiplier(multiplier: float, costs: torch.Tensor, config: SafetyConfig) -> float:
    """One step up the dual: log m += lr * m * (mean cost - limit), m at most ``max_multiplier``.

    A step changes log m by at most 20.

    Source: arXiv 2310.12773, the update of lambda in log space of the authors' code.

    Args:
        multiplier: m, above 0.
        costs: [B], NaN where a cost failed; a batch of such costs moves nothing.
    """
    known = costs.double()[costs.isfinite()]
    excess = known.mean().item() - config.cost_limit if len(known) else 0.0
    # Costs of any scale: exp of more than 709 raises, and exp of less than -745 is 0, which no later step changes.
    exponent = min(20.0, max(-20.0, config.multiplier_lr * multiplier * excess))
    return min(config.max_multiplier, multiplier * math.exp(exponent))


def safe_advantages(batch: DataProto, config: SafeRLHFConfig, multiplier: float) -> DataProto:
    """Advantages of rewards and of costs as one: (A - m * A_cost) / (1 + m) (arXiv 2310.12773).

    Each part is what :func:`.step.compute_advantages` makes of its own column and its own critic's values; the KL to
    the reference, where there is one, is taken off the rewards.

    Args:
        batch: as for :func:`.step.compute_advantages`, and ``costs`` [B], jagged ``cost_values``.
        multiplier: m, at least 0.

    Returns:
        Jagged ``advantages``, ``returns`` and ``cost_returns``, and what else the reward's part has;
        ``meta_info["metrics"]`` also has ``safety/multiplier``, ``cost/mean`` and ``cost/violations``, the share of
        answers whose cost is above the limit; both of the costs that did not fail, NaN where all did.
    """
    of_rewards = compute_advantages(batch, config)
    algorithm = replace(config.algorithm, kl_coef=0.0, overlong_buffer=0)
    as_rewards = DataProto.from_dict({"rewards": batch["costs"], "values": batch["cost_values"]})
    rest = batch.select([key for key in batch.batch.keys() if key not in ("rewards", "values")])  # noqa: SIM118
    of_costs = compute_advantages(rest.union(as_rewards), replace(config, algorithm=algorithm))
    mixed = (of_rewards.flat("advantages") - multiplier * of_costs.flat("advantages")) / (1 + multiplier)
    advantages = DataProto.jagged(mixed.split(of_rewards.lengths("advantages").tolist()))
    known = batch["costs"][batch["costs"].isfinite()]
    metrics = {
        **of_rewards.meta_info.get("metrics", {}),
        "safety/multiplier": multiplier,
        "cost/mean": known.double().mean().item(),
        # Not in float64: a cost of 0.2 is 0.200000003 there, and above a limit of 0.2.
        "cost/violations": (known > config.safety.cost_limit).double().mean().item(),
    }
    kept = of_rewards.select([key for key in of_rewards.keys() if key != "advantages"])  # noqa: SIM118
    return kept.union(
        DataProto.from_dict(
            {"advantages": advantages, "cost_returns": of_costs["returns"]}, meta_info={"metrics": metrics}
        )
    )
