"""From a checked configuration to a running :class:`Run`, and back to nothing.

Order: settings, then data, reward function and run folder (all without Ray, in seconds), then Ray, pools, roles, the
checkpoint. Whatever fails, what was started is stopped.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
import sys
from collections.abc import Iterator
from typing import Any

from hybridflow import checks
from hybridflow.algorithms.step import check_functions
from hybridflow.checkpoint import CheckpointStore, resume_from
from hybridflow.checks.base import SCORERS
from hybridflow.checks.cluster import starts_ray_here
from hybridflow.config import PairsConfig, RewardModelConfig, RunConfig, SFTConfig
from hybridflow.controller.group import WorkerGroup
from hybridflow.controller.placement import make_groups, make_pools
from hybridflow.controller.run import Run
from hybridflow.data.pairs import ComparedPairSource, PairSource
from hybridflow.data.prompts import PromptSource, SupervisedSource
from hybridflow.errors import HybridFlowError, PlacementError
from hybridflow.models.folder import check_model
from hybridflow.rewards.components import check_reward
from hybridflow.tracking import Tracker


@contextlib.contextmanager
def launch(config: RunConfig) -> Iterator[Run]:
    """Start everything a driver needs and hand it out; stop it all at the end.

    Args:
        config: the typed configuration, as ``hybridflow.driver`` gives it.

    Raises:
        ConfigError, DataError, ModelError: a setting, the data or the model folder is wrong; nothing was started.
        PlacementError: the cluster cannot hold the placement.
    """
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)  # a deprecation inside tensordict
    plan = checks.check(config)
    check_functions(config)
    print(plan.placement_table())
    tokenizer = check_model(config)
    source = _source_kind(config)(config.data, tokenizer, config.rollout, config.seed)
    print(source.describe())
    for role in SCORERS:
        if config.roles.get(role) is not None:
            check_reward(getattr(config, role), role)
    store = CheckpointStore(plan.run_dir / "checkpoints", config.checkpoint.keep)
    resumed = resume_from(config.checkpoint.resume, store)

    with contextlib.ExitStack() as stack:
        stack.enter_context(_short_turns())
        tracker = stack.enter_context(Tracker(config, plan, resumed_step=resumed[0] if resumed else 0))
        stack.enter_context(start_or_join(config))
        pools = make_pools(config)
        for pool in pools.values():
            stack.enter_context(pool)
        groups = make_groups(config, pools, plan.layouts)
        for group in groups.values():
            if isinstance(group, WorkerGroup):
                group.setup()
        stack.push(tracker.settle)
        run = Run(config, plan, groups, source, tracker, store)
        if resumed:
            run.restore(resumed[1])
        try:
            yield run
        except (HybridFlowError, KeyboardInterrupt) as error:
            if run.saved_step > 0:
                error.add_note(
                    f"The last checkpoint is of step {run.saved_step}. Go on with the same command and "
                    "checkpoint.resume=auto."
                )
            raise
        tracker.finish()


@contextlib.contextmanager
def _short_turns() -> Iterator[None]:
    """A thread that writes samples gives way to the driver's own within half a millisecond; Python would let it go on
    for 5 ms, also while devices wait for their call."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.0005)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def _source_kind(config: RunConfig) -> type[PromptSource]:
    """What a driver's steps are made of: prompts, prompts with their answers, or pairs of answers."""
    if isinstance(config, PairsConfig):
        return ComparedPairSource if isinstance(config, RewardModelConfig) else PairSource
    return SupervisedSource if isinstance(config, SFTConfig) else PromptSource


@contextlib.contextmanager
def start_or_join(config: RunConfig) -> Iterator[None]:
    """Join the cluster at ``ray.address`` (or RAY_ADDRESS), or start Ray on this machine for the length of the run."""
    import ray

    if ray.is_initialized():
        yield
        return
    settings: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if not starts_ray_here(config.ray.address):
        join_cluster(config.ray.address or os.environ["RAY_ADDRESS"], **settings)
    else:
        os.environ.setdefault("RAY_raylet_start_wait_time_s", "180")  # a busy machine needs longer than Ray's default
        # Large pages for what processes allocate, where the kernel has them: 4 % of a step of a tiny model on a CPU.
        os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
        store = int(config.ray.object_store_gb * 2**30)
        with _in_a_session_of_its_own():
            # Without "local", Ray would join a cluster that somebody has started on this machine.
            ray.init("local", object_store_memory=store, include_dashboard=False, **settings)
    with deaths_left_to_errors():
        try:
            yield
        finally:
            ray.shutdown()


@contextlib.contextmanager
def _in_a_session_of_its_own() -> Iterator[None]:
    """Keep Ray's processes out of the driver's process group.

    A signal to the group (of ``timeout``, of a supervisor) would end Ray under a driver that finishes its step and
    saves. They end with the driver all the same: the kernel sees to it.
    """
    from ray._private import services

    popen = services.ConsolePopen
    services.ConsolePopen = functools.partial(popen, start_new_session=True)
    try:
        yield
    finally:
        services.ConsolePopen = popen


def join_cluster(address: str, **settings: Any) -> None:
    """``ray.init`` for a running cluster; PlacementError in seconds where none answers.

    Args:
        address: ``auto`` or ``host:port``.
        settings: for ``ray.init``.
    """
    import ray

    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if port.isdigit():  # Ray itself tries for minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        ray.init(address=address, **settings)
    except OSError as error:
        raise PlacementError(
            f"ray.address (or RAY_ADDRESS)={address!r}: no Ray cluster answers there ({error}). Start one with "
            "`ray start --head`, mend the address, or leave it empty, so that Ray is started on this machine. Does one "
            f"run there that asks for a token (RAY_AUTH_MODE is {os.environ.get('RAY_AUTH_MODE', 'not set')} here)? "
            "Then set RAY_AUTH_MODE=token, and put what `ray get-auth-token` says on its head into ~/.ray/auth_token."
        ) from error


@contextlib.contextmanager
def deaths_left_to_errors() -> Iterator[None]:
    """Ray prints a paragraph for every worker that dies; the error of the call it was in says the same in a line.

    Ray has no setting for it, so the function that prints is replaced. A Ray without such a function prints as it does.
    """
    from ray._private import worker

    shown = getattr(worker, "print_to_stdstream", None)
    if shown is None:
        yield
        return

    def print_unless_death(data: Any, *args: Any, **kwargs: Any) -> None:
        lines = data.get("lines", ()) if isinstance(data, dict) else ()
        if not any(str(line).startswith("A worker died or was killed") for line in lines):
            shown(data, *args, **kwargs)

    worker.print_to_stdstream = print_unless_death
    try:
        yield
    finally:
        worker.print_to_stdstream = shown
