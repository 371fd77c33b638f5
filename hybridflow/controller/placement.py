"""From the placement in YAML to pools and groups.

Where it stands: called by :func:`hybridflow.launch` after the settings were checked. A role that the placement leaves
out (``roles.reference: null``) is an :class:`AbsentRole`, so a driver's loop needs no ``if``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hybridflow.checks.base import SCORERS
from hybridflow.config import RewardModelConfig, RunConfig
from hybridflow.controller.future import Answered, together
from hybridflow.controller.group import WorkerGroup
from hybridflow.controller.pool import ResourcePool, build_pools
from hybridflow.protocol.data import DataProto
from hybridflow.resharding.layout import Layout

# Import paths, not classes: what a role needs is imported in its device processes.
WORKERS = {
    "actor": "hybridflow.workers.actor:ActorWorker",
    "critic": "hybridflow.workers.critic:CriticWorker",
    "cost_critic": "hybridflow.workers.critic:CriticWorker",
    "rollout": "hybridflow.workers.rollout:RolloutWorker",
    "reference": "hybridflow.workers.reference:ReferenceWorker",
    "teacher": "hybridflow.workers.teacher:TeacherWorker",
    "reward": "hybridflow.workers.reward:RewardWorker",
    "cost": "hybridflow.workers.reward:RewardWorker",
}
REWARD_MODEL = "hybridflow.workers.reward_model:RewardModelWorker"
JUDGE = "hybridflow.workers.judge:JudgeWorker"
REWARD_MODEL_IN_TRAINING = "hybridflow.workers.reward_model:RewardModelTrainer"
# The order in which roles are built on a pool: the rollout finds the actor's engine there.
ROLE_ORDER = tuple(WORKERS)


class AbsentRole:
    """Stands for a role that is not placed: every method returns an empty batch, and tells so nowhere else."""

    def __init__(self, role: str) -> None:
        self.role = role

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_"):
            raise AttributeError(method)

        def call(*args: Any, blocking: bool = True, **kwargs: Any) -> Any:
            return DataProto() if blocking else Answered(f"{self.role}.{method}", DataProto())

        return call

    def __bool__(self) -> bool:
        return False


def make_pools(config: RunConfig) -> dict[str, ResourcePool]:
    """The pools that roles use, not started."""
    used = {role.pool for role in config.roles.values() if role is not None}
    return build_pools({name: pool for name, pool in config.pools.items() if name in used})


def make_groups(
    config: RunConfig, pools: Mapping[str, ResourcePool], layouts: Mapping[str, Layout]
) -> dict[str, WorkerGroup | AbsentRole]:
    """One group for each role, in the order in which they are to be set up."""
    groups: dict[str, WorkerGroup | AbsentRole] = {}
    for role in ROLE_ORDER:
        placed = config.roles.get(role)
        if placed is None:
            groups[role] = AbsentRole(role)
        else:
            groups[role] = WorkerGroup(pools[placed.pool], role, worker_of(role, config), layouts[role], config)
    return groups


def join_pools(actor: WorkerGroup | AbsentRole, receiver: WorkerGroup | AbsentRole) -> bool:
    """Let the processes of the actor give weights to those of another role, where these have pools of their own.

    Returns:
        Whether they do: then each sync is a call of both.
    """
    if not (isinstance(actor, WorkerGroup) and isinstance(receiver, WorkerGroup)) or actor.pool is receiver.pool:
        return False
    address = actor.serve_store(actor.pool.places[0].node)[0]
    together(
        actor.join_receiver(receiver.role, receiver.layout, address, blocking=False),
        receiver.join_actor(actor.layout, address, blocking=False),
    )
    return True


def worker_of(role: str, config: RunConfig) -> str:
    """Import path of the class that a role's processes run."""
    if role == "actor" and isinstance(config, RewardModelConfig):
        return REWARD_MODEL_IN_TRAINING
    if role in SCORERS and getattr(config, role).judge.path:
        return JUDGE
    return REWARD_MODEL if role in SCORERS and getattr(config, role).path else WORKERS[role]
