"""The plan of a resharding: which slice of which source parameter becomes which slice of which target parameter.

Both sides are tables (``models/tables``) in the coordinates of the Hugging Face tensors; the plan is the intersection
of their boxes. Pure: importable without torch, ray, vllm or megatron. ``resharding/transport`` carries plans out.

Invariant: each element of a target box is written exactly once, and a plan that cannot fill a target does not exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hybridflow.errors import ModelError
from hybridflow.resharding.boxes import Box, ParameterBoxes, Ranges, find, merge, slices


@dataclass(frozen=True)
class Copy:
    """``target[target_name][target_slices] = source[source_name][source_slices]``; both sides have the same extents."""

    source_name: str
    source_slices: tuple[slice, ...]
    target_name: str
    target_slices: tuple[slice, ...]


def plan_local(source: Mapping[str, ParameterBoxes], target: Mapping[str, ParameterBoxes]) -> list[Copy]:
    """Fill every box of ``target`` from ``source``, both in one process.

    Padding (what no target box covers) is left alone. Where several source parameters hold an element (a tied
    embedding's copy), the first one in the table provides it.

    Raises:
        ModelError: no source holds a part of a target parameter; names the parameter, the tensor and the slice.
    """
    holders = boxes_by_tensor(source)
    plan: list[Copy] = []
    for parameter in target.values():
        pieces = []
        for box in parameter.boxes:
            found, missing = find(box, holders.get(box.tensor, []))
            if missing:
                raise ModelError(
                    f"{parameter.name}: no source parameter holds {describe(box.tensor, missing[0])}"
                    f"{f' and {len(missing) - 1} other parts' if len(missing) > 1 else ''}. "
                    "The source layout has to hold the whole of what the target layout needs."
                )
            pieces.extend(found)
        plan.extend(
            Copy(str(piece.key), slices(piece.source), parameter.name, slices(piece.target)) for piece in merge(pieces)
        )
    return plan


def boxes_by_tensor(table: Mapping[str, ParameterBoxes]) -> dict[str, list[tuple[str, Box]]]:
    """(parameter name, box) of everyone who holds a part of a tensor, by the tensor's name."""
    holders: dict[str, list[tuple[str, Box]]] = {}
    for name, parameter in table.items():
        for box in parameter.boxes:
            holders.setdefault(box.tensor, []).append((name, box))
    return holders


def describe(tensor: str, part: Ranges) -> str:
    """A slice as people write it: ``model.norm.weight[0:8]``."""
    return f"{tensor}[{', '.join(f'{start}:{stop}' for start, stop in part)}]"
