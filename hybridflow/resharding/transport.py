"""Carrying out a plan. ``copy_local`` serves a source and a target in the same process.

Invariant: nothing but the planned slices is written, no full tensor is assembled, and the bytes written are counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from hybridflow.errors import ModelError
from hybridflow.resharding.plan import Copy


@torch.no_grad()
def copy_local(
    plan: Iterable[Copy], source_params: Mapping[str, torch.Tensor], target_params: Mapping[str, torch.Tensor]
) -> int:
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
        target.copy_(source)
        written += target.numel() * target.element_size()
    return written


def _view(parameters: Mapping[str, torch.Tensor], side: str, name: str, part: tuple[slice, ...]) -> torch.Tensor:
    """The slice of a parameter. Checked, because a tensor answers a slice past its end with a shorter one."""
    if name not in parameters:
        raise ModelError(f"{name}: planned as a {side}, but the {side} model has no such parameter.")
    tensor = parameters[name]
    if tensor.dim() != len(part) or any(s.stop > size for s, size in zip(part, tensor.shape, strict=True)):
        wanted = [f"{s.start}:{s.stop}" for s in part]
        raise ModelError(f"{name}: the plan needs [{', '.join(wanted)}], the {side} parameter is {list(tensor.shape)}.")
    return tensor[part]
