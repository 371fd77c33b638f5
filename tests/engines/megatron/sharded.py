"""megatron-core's own sharded checkpoints of a whole :class:`MegatronEngine`: an oracle for ours.

They share nothing with ours but the engine: megatron-core says which part of which tensor a rank holds, gathers the
optimizer's state by parameter (``fully_reshardable``), and torch writes and reads the files.

megatron-core 0.16.1 loads them wrongly where the optimizer is torch's AdamW, as it is without Transformer Engine and
Apex, so :func:`load` repairs what it does:

- a new optimizer has no state, and asked for it fails;
- the number of updates, ``step``, is missing among what a parameter's state is filled from, which fails too;
- every parameter's ``step`` is the same tensor, which AdamW then increments once for each of them: no error, and the
  second loss after the load is wrong.

Its loader asks for the distributed optimizer on both sides, which an engine has where there are replicas.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from multiprocessing import current_process
from pathlib import Path
from queue import Queue
from typing import Any

import torch
import torch.distributed as dist

from hybridflow.engines.megatron import cpu
from hybridflow.engines.megatron.engine import MegatronEngine

from megatron.core import dist_checkpointing, parallel_state  # isort: skip
from megatron.core.dist_checkpointing.strategies import filesystem_async, torch as _  # isort: skip  # noqa: F401

cpu.install()


def save(engine: MegatronEngine, folder: str) -> None:
    """Write model and optimizer into ``folder``; all ranks call."""
    # Its writer forks processes, which a daemon may not; and would start another one for what they answer.
    current_process().daemon = False
    filesystem_async._results_queue = Queue()
    if dist.get_rank() == 0:
        Path(folder).mkdir()
    dist.barrier()
    with engine.parallel, cpu.cuda_type_names():
        dist_checkpointing.save(_state_of(engine, is_loading=False), folder)


def load(engine: MegatronEngine, folder: str, updates: int) -> None:
    """Continue from what :func:`save` wrote after ``updates`` updates."""
    optimizer: Any = engine.optimizer
    parts = optimizer.inner.chained_optimizers
    for part in parts:
        part._set_main_param_and_optimizer_states = partial(_fill, part)
    with engine.parallel, cpu.cuda_type_names(), torch.no_grad():
        for part in parts:
            part._init_optimizer_states_with_dummy_values()
        found: Any = dist_checkpointing.load(_state_of(engine, is_loading=True), folder)
        (module,) = engine.modules.values()
        module.load_state_dict(found["model"])
        optimizer.inner.load_state_dict(found["optimizer"])
    for state in (state for part in parts for state in part.optimizer.state.values()):
        state["step"] = state["step"].clone()
        assert state["step"] == updates
    optimizer.updates = updates


def _state_of(engine: MegatronEngine, is_loading: bool) -> dict[str, Any]:
    (module,) = engine.modules.values()
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "chained_optim_avoid_prefix": True,
    }
    model = module.sharded_state_dict(metadata=metadata)
    optimizer: Any = engine.optimizer
    return {"model": model, "optimizer": optimizer.inner.sharded_state_dict(model, is_loading, metadata=metadata)}


def _fill(part: Any, parameter: torch.nn.Parameter, tensors: Mapping[str, torch.Tensor]) -> None:
    group, order = part.model_param_group_index_map[parameter]
    main = part.optimizer.param_groups[group]["params"][order]
    for name, tensor in {"param": main, **part.optimizer.state[main]}.items():
        if name != "step":
            tensor.copy_(tensors[name])
