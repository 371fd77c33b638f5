"""Carrying out a plan: inside a process, between the ranks of one world, and between two worlds.

One function serves all three and every backend: :func:`reshard` copies what a rank holds itself and exchanges the rest
in rounds through ``group``, one ``all_to_all_single`` a round, which gloo and NCCL both offer on ordinary groups and on
groups that :func:`join_worlds` makes. Point-to-point operations would need an order that avoids deadlock on NCCL.

Invariants: nothing but the planned slices is written, no full tensor is assembled, a rank never stages more than the
bucket its plan was made for, and all bytes are counted. Nothing may read the targets, or write the sources, meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain

import torch
import torch.distributed as dist

from hybridflow.errors import ModelError
from hybridflow.platform import Platform
from hybridflow.resharding.layout import Groups
from hybridflow.resharding.plan import Copy, RankPlan, Round

Tensors = Mapping[str, torch.Tensor]

JOIN_TIMEOUT = timedelta(hours=1)
"""As long as a device process waits for its peers in a collective."""


@dataclass(frozen=True)
class Traffic:
    """What one rank moved in one transition, in bytes.

    Attributes:
        sent, received: to and from other ranks, as they travel (in the targets' dtype).
        copied: written to targets from this rank's own sources.
        shared: of targets that use their source's memory.
        staged: largest extra memory at any time: the buffers of an exchange.
        rounds: exchanges.
    """

    sent: int = 0
    received: int = 0
    copied: int = 0
    shared: int = 0
    staged: int = 0
    rounds: int = 0


@torch.no_grad()
def reshard(
    plan: RankPlan,
    sources: Tensors,
    targets: Tensors,
    *,
    dtype: torch.dtype,
    group: dist.ProcessGroup | None = None,
    share: bool = False,
) -> Traffic:
    """Fill this rank's targets, and send others what they need from here. Collective over the plan's group.

    Args:
        plan: this rank's part.
        sources, targets: parameters by name; empty where this rank has no such side. With ``share`` the targets are the
            engine's own parameters, whose ``data`` is replaced.
        dtype: of all targets, on every rank of the group; sources of another dtype are cast before they travel.
        group: the plan's ranks in its order; not needed where the plan has no rounds.
        share: let targets that coincide with a source in elements, dtype and device use its memory. Later writes into
            the source are then seen at once, so nothing may generate while the source is updated. Checked at each call,
            because a trainer may move its parameters.

    Raises:
        ModelError: a parameter is missing, smaller than its table said, or a target of another dtype.
    """
    names: set[str] = set()
    if share:
        names = {
            name
            for name, same in plan.coinciding.items()
            if _share(_parameter(sources, "source", same), _parameter(targets, "target", name))
        }
    copied = copy_local((copy for copy in plan.copies if copy.target_name not in names), sources, targets)
    shared = sum(_num_bytes(targets[name]) for name in names)
    if not plan.rounds:
        return Traffic(copied=copied, shared=shared)
    if group is None or group.size() != len(plan.group):
        raise ModelError(
            f"rank {plan.rank} exchanges slices with ranks {list(plan.group)}, but was given "
            f"{'no process group' if group is None else f'a process group of {group.size()}'}. Pass the group of these."
        )
    sent, received, staged = (n * dtype.itemsize for n in _exchange(plan, sources, targets, dtype, group))
    return Traffic(sent, received, copied, shared, staged, len(plan.rounds))


def _exchange(
    plan: RankPlan, sources: Tensors, targets: Tensors, dtype: torch.dtype, group: dist.ProcessGroup
) -> tuple[int, int, int]:
    """Pack, exchange and unpack round by round; returns elements sent, received and of both buffers."""
    # All slices are looked up before the first travels: an error half-way would leave the other ranks waiting.
    for step in plan.rounds:
        for _ in chain(_leaving(step, sources), _arriving(step, targets, dtype)):
            pass
    out_splits = [_splits(step.sends, plan.group) for step in plan.rounds]
    in_splits = [_splits(step.receives, plan.group) for step in plan.rounds]
    device = next(chain(sources.values(), targets.values())).device
    outgoing, incoming = (
        torch.empty(max(map(sum, splits)), dtype=dtype, device=device) for splits in (out_splits, in_splits)
    )
    for step, out_split, in_split in zip(plan.rounds, out_splits, in_splits, strict=True):
        for part, tensor in _parts(outgoing, _leaving(step, sources)):
            part.copy_(tensor)
        parts = incoming[: sum(in_split)], outgoing[: sum(out_split)]
        dist.all_to_all_single(*parts, in_split, out_split, group=group)
        for part, tensor in _parts(incoming, _arriving(step, targets, dtype)):
            tensor.copy_(part)
    return sum(map(sum, out_splits)), sum(map(sum, in_splits)), outgoing.numel() + incoming.numel()


def _leaving(step: Round, sources: Tensors) -> Iterator[torch.Tensor]:
    """The slices that go to each peer. One by one, here and below: thousands of views at once are memory too."""
    for _, copies in step.sends:
        for copy in copies:
            yield _view(sources, "source", copy.source_name, copy.source_slices)


def _arriving(step: Round, targets: Tensors, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """The places of the slices that come from each peer."""
    for _, copies in step.receives:
        for copy in copies:
            tensor = _view(targets, "target", copy.target_name, copy.target_slices)
            if tensor.dtype != dtype:
                raise ModelError(
                    f"{copy.target_name}: slices travel as {dtype}, the target parameter is {tensor.dtype}."
                )
            yield tensor


def _parts(buffer: torch.Tensor, slices: Iterable[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each slice with its place in the buffer, one after the other."""
    offset = 0
    for tensor in slices:
        yield buffer[offset : offset + tensor.numel()].view(tensor.shape), tensor
        offset += tensor.numel()


def _splits(side: tuple[tuple[int, tuple[Copy, ...]], ...], ranks: tuple[int, ...]) -> list[int]:
    """Elements for each rank of the group."""
    sizes = {peer: sum(copy.num_elements for copy in copies) for peer, copies in side}
    return [sizes.get(rank, 0) for rank in ranks]


def _share(source: torch.Tensor, target: torch.Tensor) -> bool:
    """Let the target use the source's memory; False where dtype or device differ."""
    if (source.dtype, source.device) != (target.dtype, target.device):
        return False
    if target.data_ptr() != source.data_ptr():
        target.data = source.data
    return True


@torch.no_grad()
def copy_local(plan: Iterable[Copy], source_params: Tensors, target_params: Tensors) -> int:
    """Copy every planned slice, casting to the target's dtype and device.

    Returns:
        Bytes written to targets.

    Raises:
        ModelError: a parameter is missing, or smaller than its table said.
    """
    written = 0
    for copy in plan:
        source = _view(source_params, "source", copy.source_name, copy.source_slices)
        target = _view(target_params, "target", copy.target_name, copy.target_slices)
        target.copy_(source.view(target.shape))
        written += _num_bytes(target)
    return written


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _view(parameters: Tensors, side: str, name: str, part: tuple[slice, ...]) -> torch.Tensor:
    """The slice of a parameter. Checked, because a tensor answers a slice past its end with a shorter one."""
    tensor = _parameter(parameters, side, name)
    if tensor.dim() != len(part) or any(s.stop > size for s, size in zip(part, tensor.shape, strict=True)):
        wanted = [f"{s.start}:{s.stop}" for s in part]
        raise ModelError(f"{name}: the plan needs [{', '.join(wanted)}], the {side} parameter is {list(tensor.shape)}.")
    return tensor[part]


def _parameter(parameters: Tensors, side: str, name: str) -> torch.Tensor:
    if name not in parameters:
        raise ModelError(f"{name}: planned as a {side}, but the {side} model has no such parameter.")
    return parameters[name]


def join_worlds(store: dist.Store, rank: int, size: int, platform: Platform) -> dist.ProcessGroup:
    """A process group over processes of several torch.distributed worlds, such as a trainer's and a rollout's pool.

    Collective over its members. It stands beside the worlds and changes neither; collectives that name no rank of a
    world, ``all_to_all_single`` among them, take it as their ``group``.

    Args:
        store: one that all members reach, with no keys of others: a TCPStore that one of them serves, or a PrefixStore
            of it.
        rank: of this process, 0 <= rank < size.
        platform: what all members compute on.
    """
    group = dist.ProcessGroup(store, rank, size)
    if platform.is_cuda:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = JOIN_TIMEOUT
        kind, member = dist.ProcessGroup.BackendType.NCCL, dist.ProcessGroupNCCL(store, rank, size, options)
    else:
        kind, member = dist.ProcessGroup.BackendType.GLOO, dist.ProcessGroupGloo(store, rank, size, JOIN_TIMEOUT)
    member._set_sequence_number_for_group()
    group._set_default_backend(kind)
    group._register_backend(platform.device(), kind, member)
    return group


def make_group(groups: Groups) -> dist.ProcessGroup | None:
    """The process group of this rank's group in a partition of the world; None where it is alone.

    Collective over the whole world.
    """
    if all(len(group) == 1 for group in groups):
        return None
    mine, _ = dist.new_subgroups_by_enumeration(groups)
    assert isinstance(mine, dist.ProcessGroup)
    return mine
