"""The geometry of boxes against masks: every element counted one by one."""

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.resharding.boxes import (
    Box,
    ParameterBoxes,
    Piece,
    crop,
    extents,
    find,
    intersect,
    merge,
    num_elements,
    rectangles,
    slices,
    subtract,
    translate,
    uncovered,
    whole,
)

SHAPE = (5, 4)


def ranges(shape=SHAPE):
    """A rectangle inside a shape, never empty."""
    return st.tuples(
        *(st.integers(0, n - 1).flatmap(lambda a, n=n: st.tuples(st.just(a), st.integers(a + 1, n))) for n in shape)
    )


def cells(rectangle):
    return set(itertools.product(*(range(start, stop) for start, stop in rectangle)))


def cells_of(rectangles):
    """The cells of disjoint rectangles; fails where two share one."""
    found = [cell for rectangle in rectangles for cell in cells(rectangle)]
    assert len(found) == len(set(found))
    return set(found)


@given(ranges(), ranges())
def test_intersection_and_difference_are_those_of_sets(a, b):
    common = intersect(a, b)
    assert (cells(common) if common else set()) == cells(a) & cells(b)
    assert cells_of(subtract(a, b)) == cells(a) - cells(b)
    assert num_elements(a) == len(cells(a))


@given(ranges(), st.lists(ranges(), max_size=4))
def test_uncovered_is_what_no_cover_holds(region, covers):
    assert cells_of(uncovered(region, covers)) == cells(region) - set().union(*map(cells, covers))


@given(ranges(), st.lists(ranges(), max_size=4))
def test_find_takes_each_element_from_the_first_holder(wanted, held):
    # Holder k keeps its rectangle at the origin of its own parameter; the wanted box starts at (10, 20) in its own.
    target = tuple((10 * (d + 1), 10 * (d + 1) + size) for d, size in enumerate(extents(wanted)))
    holders = [(k, Box("t", r, whole(extents(r)))) for k, r in enumerate(held)]
    pieces, missing = find(Box("t", wanted, target), holders)
    assert cells_of(missing) == cells(wanted) - set().union(*map(cells, held))
    taken = {}
    for piece in pieces:
        in_tensor = translate(piece.target, target, wanted)
        assert translate(piece.source, whole(extents(held[piece.key])), held[piece.key]) == in_tensor
        for cell in cells(in_tensor):
            assert cell not in taken
            taken[cell] = piece.key
    assert taken == {
        c: min(k for k, r in enumerate(held) if c in cells(r))
        for c in cells(wanted)
        if c in set().union(*map(cells, held))
    }


@given(st.lists(st.tuples(st.integers(0, 1), ranges(), st.integers(0, 2), st.integers(0, 2)), max_size=6))
def test_merging_copies_the_same_elements_in_fewer_pieces(drawn):
    pieces = [
        Piece(key, r, tuple((a + d, b + d) for (a, b), d in zip(r, (dy, dx), strict=True))) for key, r, dy, dx in drawn
    ]

    def copied(pieces):
        return sorted(
            (piece.key, source, target)
            for piece in pieces
            for source, target in zip(
                itertools.product(*(range(*r) for r in piece.source)),
                itertools.product(*(range(*r) for r in piece.target)),
                strict=True,
            )
        )

    merged = merge(pieces)
    assert copied(merged) == copied(pieces) and len(merged) <= len(pieces)


def test_merging_joins_neighbours_of_one_key_that_are_neighbours_on_both_sides():
    def piece(key, rows, columns, offset=0):
        shifted = (rows[0] + offset, rows[1] + offset)
        return Piece(key, (rows, columns), (shifted, columns))

    assert merge([piece("a", (0, 2), (0, 4)), piece("a", (2, 5), (0, 4))]) == [piece("a", (0, 5), (0, 4))]
    apart = [piece("a", (0, 1), (0, 4)), piece("b", (1, 2), (0, 4)), piece("b", (2, 3), (0, 4), offset=1)]
    assert merge(apart) == apart


def test_slices_index_a_tensor():
    grid = torch.arange(20).view(SHAPE)
    assert torch.equal(grid[slices(((1, 3), (0, 2)))], torch.tensor([[4, 5], [8, 9]]))


def test_one_expert_of_a_stack_is_found_and_merged_like_a_matrix():
    """A parameter [experts, rows, columns] made of one tensor [rows, columns] an expert."""
    stacked = Box("expert 3", ((0, 4), (0, 2)), ((1, 2), (0, 4), (0, 2)))
    matrix = Box("expert 3", ((2, 6), (0, 2)), ((0, 4), (0, 2)))
    assert find(stacked, [("m", matrix)]) == (
        [Piece("m", ((0, 2), (0, 2)), ((1, 2), (2, 4), (0, 2)))],
        [((0, 2), (0, 2))],
    )
    assert find(matrix, [("s", stacked)]) == (
        [Piece("s", ((1, 2), (2, 4), (0, 2)), ((0, 2), (0, 2)))],
        [((4, 6), (0, 2))],
    )
    assert translate(((1, 2), (1, 3), (0, 2)), stacked.target, stacked.source) == ((1, 3), (0, 2))
    gate = Piece("m", ((0, 4), (0, 2)), ((1, 2), (0, 4), (0, 2)))
    up = Piece("m", ((4, 8), (0, 2)), ((1, 2), (4, 8), (0, 2)))
    next_expert = Piece("m", ((8, 12), (0, 2)), ((2, 3), (0, 4), (0, 2)))
    assert merge([gate, up, next_expert]) == [Piece("m", ((0, 8), (0, 2)), ((1, 2), (0, 8), (0, 2))), next_expert]


@given(st.sampled_from([(7,), (3, 4), (4, 1), (2, 3, 4)]), st.data())
def test_rectangles_are_a_range_of_elements_in_order(shape, data):
    numbers = torch.arange(torch.Size(shape).numel()).view(shape)
    start = data.draw(st.integers(0, numbers.numel()))
    stop = data.draw(st.integers(start, numbers.numel()))
    found = rectangles(shape, start, stop)
    assert [n for part in found for n in numbers[slices(part)].flatten().tolist()] == list(range(start, stop))
    assert len(found) <= 2 * len(shape) - 1
    assert all(num_elements(part) for part in found)


@given(ranges(), st.data())
def test_a_crop_of_a_parameter_is_made_of_the_same_elements(region, data):
    tensors = {name: torch.rand(SHAPE) for name in "ab"}
    boxes = (
        Box("a", ((1, 4), (0, 2)), ((0, 3), (0, 2))),
        Box("b", ((0, 2), (0, 4)), ((3, 5), (0, 4))),  # the last two columns of the first three rows are padding
    )

    def fill(parameter):
        filled = torch.zeros(parameter.shape)
        for box in parameter.boxes:
            filled[slices(box.target)] = tensors[box.tensor][slices(box.source)]
        return filled

    parameter = ParameterBoxes("p", SHAPE, boxes)
    cropped = crop(parameter, region, "q")
    assert (cropped.name, cropped.shape) == ("q", extents(region))
    assert torch.equal(fill(cropped), fill(parameter)[slices(region)])
