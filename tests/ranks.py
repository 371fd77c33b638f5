"""Run one function on several ranks of a gloo world, each in a process of its own, and give back what each returned."""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import traceback
from collections.abc import Callable
from typing import Any


def _rank(function: Callable[..., Any], rank: int, world: int, store: str, args: tuple[Any, ...], answers: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        dist.barrier()  # a rank that leaves the world would fail the others that are still connecting to one another
        # Pickled here: torch would send a tensor as a handle that dies with this process.
        answers.put((rank, pickle.dumps(function(rank, *args)), None))
    except BaseException:
        answers.put((rank, None, traceback.format_exc()))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def run_ranks(function: Callable[..., Any], world: int, *args: Any, timeout: float = 180.0) -> list[Any]:
    """``[function(rank, *args) for rank in range(world)]``, run at once. A rank's error fails the test with its
    traceback.

    ``function`` must be importable (defined at a module's top level). Ranks are forks of one process that has imported
    :mod:`tests.preload`, and have the environment variables of when that was started.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_rank, args=(function, rank, world, f"{folder}/store", args, answers), daemon=True)
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        try:
            found = {}
            for _ in range(world):
                rank, value, error = answers.get(timeout=timeout)
                assert error is None, f"rank {rank} failed:\n{error}"
                found[rank] = pickle.loads(value)
        finally:
            for process in processes:
                process.join(timeout=10)
                process.kill()
    return [found[rank] for rank in range(world)]
