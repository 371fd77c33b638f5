"""Boxes: which rectangle of a Hugging Face tensor sits in which rectangle of a local parameter. Pure arithmetic.

Tables (``models/tables``) are made of boxes, plans (``resharding/plan``) are intersections of them, and checkpoints
(``models/hf_io``) are read and written along them. Hugging Face tensors are the coordinates all engines share.

Invariant: a box maps elements one to one and in order, so its two sides have the same extents, counted from the last
dimension; a parameter may have leading dimensions more, of extent 1 in the box (one expert of a stack of experts). The
boxes of one parameter never overlap in it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, TypeVar

# One half-open range (start, stop) a dimension.
Ranges = tuple[tuple[int, int], ...]
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Box:
    """``parameter[target] == tensor[source]``.

    Attributes:
        tensor: Hugging Face name of the tensor.
        source: ranges in that tensor.
        target: ranges in the local parameter.
    """

    tensor: str
    source: Ranges
    target: Ranges


@dataclass(frozen=True)
class ParameterBoxes:
    """One local parameter: the engine's name, the local shape, what it is made of. What no box covers is padding."""

    name: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


class Piece(NamedTuple):
    """A rectangle cut out of two coordinate systems at once, with the key of where it was found."""

    key: Hashable
    source: Ranges
    target: Ranges


def whole(shape: Sequence[int]) -> Ranges:
    """The ranges that cover a shape."""
    return tuple((0, size) for size in shape)


def extents(ranges: Ranges) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in ranges)


def num_elements(ranges: Ranges) -> int:
    return prod(extents(ranges))


def slices(ranges: Ranges) -> tuple[slice, ...]:
    """The index of a rectangle in a tensor."""
    return tuple(slice(start, stop) for start, stop in ranges)


def intersect(a: Ranges, b: Ranges) -> Ranges | None:
    """The rectangle two rectangles share, or None."""
    both = tuple((max(p[0], q[0]), min(p[1], q[1])) for p, q in zip(a, b, strict=True))
    return both if all(start < stop for start, stop in both) else None


def subtract(a: Ranges, hole: Ranges) -> list[Ranges]:
    """What is left of ``a`` without ``hole``: disjoint rectangles, at most two a dimension."""
    common = intersect(a, hole)
    if common is None:
        return [a]
    left: list[Ranges] = []
    for dim, ((start, stop), (low, high)) in enumerate(zip(a, common, strict=True)):
        for part in ((start, low), (high, stop)):
            if part[0] < part[1]:
                left.append((*common[:dim], part, *a[dim + 1 :]))
    return left


def uncovered(region: Ranges, covers: Iterable[Ranges]) -> list[Ranges]:
    """What of a region no cover reaches: disjoint rectangles."""
    left = [region]
    for cover in covers:
        left = [rest for part in left for rest in subtract(part, cover)]
        if not left:
            break
    return left


def rectangles(shape: Sequence[int], start: int, stop: int) -> list[Ranges]:
    """Elements ``start`` to ``stop`` of a tensor, counted in row-major order, as rectangles in that order.

    At most 2 * dimensions - 1 of them; none where the range is empty.
    """
    if len(shape) == 1:
        return [((start, stop),)] if start < stop else []
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # within one row
        return [((last, last + 1), *rest) for rest in rectangles(shape[1:], start - last * row, stop - last * row)]
    head = [((first - 1, first), *rest) for rest in rectangles(shape[1:], start - (first - 1) * row, row)]
    body: list[Ranges] = [((first, last), *whole(shape[1:]))] if first < last else []
    tail = [((last, last + 1), *rest) for rest in rectangles(shape[1:], 0, stop - last * row)]
    return [*(head if start < first * row else []), *body, *tail]


def crop(parameter: ParameterBoxes, region: Ranges, name: str) -> ParameterBoxes:
    """A rectangle of a parameter as a parameter of its own."""
    origin = whole(extents(region))
    boxes = []
    for box in parameter.boxes:
        common = intersect(box.target, region)
        if common is not None:
            source = translate(common, box.target, box.source)
            boxes.append(Box(box.tensor, source, translate(common, region, origin)))
    return ParameterBoxes(name, extents(region), tuple(boxes))


def translate(part: Ranges, origin: Ranges, to: Ranges) -> Ranges:
    """Move a part of ``origin`` to where it lies in ``to``, of the same extents but for leading ones of 1."""
    same = min(len(origin), len(to))
    moved = (
        (start - begin + new, stop - begin + new)
        for (start, stop), (begin, _), (new, _) in zip(part[-same:], origin[-same:], to[-same:], strict=True)
    )
    return (*to[:-same], *moved)


def find(wanted: Box, holders: Iterable[tuple[Hashable, Box]]) -> tuple[list[Piece], list[Ranges]]:
    """Cut a wanted box along the boxes of those who hold the same tensor.

    Args:
        wanted: the box to fill.
        holders: (key, box) of the same tensor; the first holder of an element provides it.

    Returns:
        Pieces (``source`` in the holder's parameter, ``target`` in the wanted box's parameter), every element of the
        wanted box in at most one, and the rectangles of the tensor that nobody holds.
    """
    left, pieces = [wanted.source], []
    for key, held in holders:
        if not left:
            break
        rest: list[Ranges] = []
        for part in left:
            common = intersect(part, held.source)
            if common is None:
                rest.append(part)
                continue
            source = translate(common, held.source, held.target)
            target = translate(common, wanted.source, wanted.target)
            pieces.append(Piece(key, source, target))
            rest.extend(subtract(part, common))
        left = rest
    return pieces, left


def merge(pieces: Iterable[Piece]) -> list[Piece]:
    """Join neighbours that follow each other on both sides along one dimension: fewer, larger copies."""
    merged: list[Piece] = []
    for piece in pieces:
        while merged and (joined := _join(merged[-1], piece)) is not None:
            merged.pop()
            piece = joined
        merged.append(piece)
    return merged


def _join(a: Piece, b: Piece) -> Piece | None:
    if a.key != b.key or len(a.source) != len(b.source):
        return None
    # Dimensions count from the last one: the two sides of a piece may differ in leading ones of extent 1.
    dims = range(-max(len(a.source), len(a.target)), 0)
    differ = [d for d in dims if _at(a.source, d) != _at(b.source, d) or _at(a.target, d) != _at(b.target, d)]
    if len(differ) != 1 or -differ[0] > min(len(a.source), len(a.target)):
        return None
    dim = differ[0]
    if a.source[dim][1] != b.source[dim][0] or a.target[dim][1] != b.target[dim][0]:
        return None

    def joined(first: Ranges, second: Ranges) -> Ranges:
        at = len(first) + dim
        return (*first[:at], (first[dim][0], second[dim][1]), *first[at + 1 :])

    return Piece(a.key, joined(a.source, b.source), joined(a.target, b.target))


def _at(ranges: Ranges, dim: int) -> tuple[int, int] | None:
    return ranges[dim] if -dim <= len(ranges) else None
