"""vLLM's process groups, made from a generation layout, and the lockstep of a replica's ranks.

vLLM alone would make its groups of neighbouring ranks. Those of a :class:`GenerationLayout` are strided, so that each
rank's training shard lies inside its generation shard; vLLM accepts groups that exist before its engine is built, and
then only compares their sizes.

Invariant: the ranks of one replica are asked for the same, in the same order, and draw the same tokens, so that each of
their engines, which decide alone, computes the same batches. vLLM gathers all logits on every rank, bit for bit the
same, and each response has a seed of its own, so only a fault or unlike machines can break this. It is checked before
and after each call (:func:`require_agreement`), where a rank that ends before the others waits for :data:`PATIENCE` at
most. Replicas share no group and know nothing of each other.
"""

from __future__ import annotations

import hashlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import vllm.distributed.parallel_state as state

from hybridflow import platform
from hybridflow.engines.vllm import cpu
from hybridflow.resharding.layout import GenerationLayout

PATIENCE = timedelta(minutes=2)
"""How long a rank waits for the others of its replica to end what they generate in lockstep."""


def make(layout: GenerationLayout) -> None:
    """Give vLLM the groups of a layout. Collective over the process's torch.distributed world.

    They stay for the life of the process: a later engine in the same layout uses them again.

    Raises:
        RuntimeError: this process already generates in another layout.
    """
    wanted = layout.tp_groups()
    if state.model_parallel_is_initialized():
        found = state.get_tp_group().group_ranks
        if found != wanted:
            raise RuntimeError(
                f"this process generates in the tensor-parallel groups {found} and cannot have {wanted} beside them: "
                f"vLLM keeps one set of groups. Give all rollout engines of a pool the same layout."
            )
        return
    size, rank, backend = dist.get_world_size(), dist.get_rank(), platform.current().backend
    # The index of the GPU comes from LOCAL_RANK.
    state.init_distributed_environment(size, rank, "env://", -1, backend)

    def group(ranks: list[list[int]], name: str) -> Any:
        return state.init_model_parallel_group(ranks, state.get_world_group().local_rank, backend, group_name=name)

    alone = group([[rank] for rank in range(size)], "alone")
    state._TP = state._ETP = group(wanted, cpu.tp_group_name()) if layout.tp > 1 else alone
    state._EP = state._TP  # of models with experts, whether ranks hold slices of each or whole ones
    state._PP = state._DP = state._PCP = state._DCP = alone


def require_agreement(what: str, value: object, patience: timedelta | None = None) -> None:
    """Compare a value among the ranks of this replica. Collective over them; free where a replica is one rank.

    Args:
        what: named in the error.
        value: anything whose ``repr`` says all of it.
        patience: how long to wait for the other ranks; None as long as for any collective.

    Raises:
        RuntimeError: on every rank of the replica, with the ranks that have the same value side by side; or after
            ``patience``, where another rank has not come this far.
    """
    group = state.get_tp_group()
    if group.world_size == 1:
        return
    digest = int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "little") >> 1
    found = [torch.zeros(1, dtype=torch.int64) for _ in range(group.world_size)]
    work = dist.all_gather(found, torch.tensor([digest]), group=group.cpu_group, async_op=True)
    assert work is not None
    try:
        work.wait(*([patience] if patience else []))
    except RuntimeError as error:
        others = [rank for rank in group.ranks if rank != dist.get_rank()]
        raise RuntimeError(
            f"rank {dist.get_rank()} compared {what} with ranks {others}, which generate together with it, and has had "
            f"no answer ({error}). They have failed, or go on where this rank has ended: ranks of a replica must draw "
            f"the same tokens, so put them on devices of one kind, and let nothing write their weights meanwhile."
        ) from error
    same: dict[int, list[int]] = {}
    for rank, theirs in zip(group.ranks, found, strict=True):
        same.setdefault(int(theirs), []).append(rank)
    if len(same) > 1:
        raise RuntimeError(
            f"ranks {group.ranks} generate together, but {what} differ: {' and '.join(map(str, same.values()))} each "
            f"have their own. The ranks of a replica have to be given the same rows, and must not draw from a shared "
            f"generator."
        )
