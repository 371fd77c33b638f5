"""From a checked configuration to a running :class:`Run`, and back to nothing.

Order: settings, then data, reward function and run folder (all without Ray, in seconds), then Ray, pools, roles, the
checkpoint. Whatever fails, what was started is stopped.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hybridflow import checks
from hybridflow.checkpoint import CheckpointStore
from hybridflow.config import RunConfig, SFTConfig
from hybridflow.controller.group import WorkerGroup
from hybridflow.controller.placement import make_groups, make_pools
from hybridflow.controller.run import Run
from hybridflow.data.prompts import PromptSource, SupervisedSource
from hybridflow.models.tokenizer import load_tokenizer
from hybridflow.rewards.functions import load_function
from hybridflow.tracking import Tracker


@contextlib.contextmanager
def launch(config: RunConfig) -> Iterator[Run]:
    """Start everything a driver needs and hand it out; stop it all at the end.

    Args:
        config: the typed configuration, as ``hybridflow.driver`` gives it.

    Raises:
        ConfigError, DataError, ModelError, RewardError: a setting, the data, the model folder or the reward function is
            wrong; nothing was started.
        PlacementError: the cluster cannot hold the placement.
    """
    plan = checks.check(config)
    print(plan.placement_table())
    tokenizer = load_tokenizer(config.model.tokenizer_path or config.model.path)
    kind = SupervisedSource if isinstance(config, SFTConfig) else PromptSource
    source = kind(config.data, tokenizer, config.rollout, config.seed)
    print(source.describe())
    if config.roles.get("reward") is not None:
        load_function(config.reward.function)
    store = CheckpointStore(Path(plan.run_dir) / "checkpoints", config.checkpoint.keep)
    resumed = _checkpoint_to_resume(config, store)

    with contextlib.ExitStack() as stack:
        tracker = stack.enter_context(Tracker(config, plan, resumed_step=resumed[0] if resumed else 0))
        stack.enter_context(_ray(config))
        pools = make_pools(config)
        for pool in pools.values():
            stack.enter_context(pool)
        groups = make_groups(config, pools, plan.layouts)
        for group in groups.values():
            if isinstance(group, WorkerGroup):
                group.setup()
        run = Run(config, plan, groups, source, tracker, store)
        if resumed:
            run.restore(*resumed)
        yield run
        tracker.finish()


def _checkpoint_to_resume(config: RunConfig, store: CheckpointStore) -> tuple[int, Path] | None:
    """The checkpoint that ``checkpoint.resume`` names, or None for a new run."""
    ...


@contextlib.contextmanager
def _ray(config: RunConfig) -> Iterator[None]:
    """Join the cluster at ``ray.address``, or start Ray on this machine for the length of the run."""
    import ray

    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "180")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    settings: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING, "include_dashboard": False}
    if config.ray.address:
        ray.init(address=config.ray.address, log_to_driver=False, logging_level=logging.WARNING)
    else:
        ray.init(object_store_memory=int(config.ray.object_store_gb * 2**30), **settings)
    try:
        yield
    finally:
        ray.shutdown()
