"""Row numbers: pruning, joining and runs, worked out by hand."""

import numpy as np

from hybridflow.protocol.rows import Rows, contiguous


def of(sizes: tuple[int, ...], *index: int) -> Rows:
    return Rows(sizes, contiguous(np.array(index, dtype=np.int64)))


def shown(rows: Rows) -> tuple:
    return rows.sizes, list(rows.index)


def test_rows_are_taken_and_pieces_without_rows_are_dropped():
    rows = Rows((3, 2, 4), range(9))
    taken, kept = rows.take(range(1, 3))
    assert shown(taken) == ((3,), [1, 2]) and list(kept) == [0]
    taken, kept = rows.take(range(4, 7))
    assert shown(taken) == ((2, 4), [1, 2, 3]) and list(kept) == [1, 2] and isinstance(taken.index, range)
    taken, kept = rows.take(np.array([8, 0, 8]))
    assert shown(taken) == ((3, 4), [6, 0, 6]) and list(kept) == [0, 2]
    again, kept = taken.take(np.array([2, 0]))
    assert shown(again) == ((4,), [3, 3]) and list(kept) == [1]
    assert shown(rows.take(range(5, 5))[0]) == ((), [])


def test_consecutive_numbers_become_a_range_again():
    rows = Rows((3, 2), range(5))
    assert rows.take(np.array([0, 1, 2, 3, 4]))[0].index == range(5)
    shuffled = rows.take(np.array([4, 0, 1, 2, 3]))[0]
    assert isinstance(shuffled.index, np.ndarray)
    assert shuffled.take(np.array([1, 2, 3, 4, 0]))[0].is_whole()
    assert isinstance(contiguous(np.array([0, 2, 1, 3])), np.ndarray)


def test_a_range_of_a_range_counts_from_the_pieces():
    part, kept = Rows((5,), range(1, 5)).take(range(1, 3))
    assert shown(part) == ((5,), [2, 3]) and list(kept) == [0]
    taken, _ = Rows((5,), range(1, 5)).take(np.array([3, 0]))
    assert shown(taken) == ((5,), [4, 1])


def test_joining_finds_pieces_again_and_keeps_ranges():
    first, second = Rows((4,), range(2)), Rows((4,), range(2, 4))
    assert Rows.concat([first, second], [(0,), (0,)], (4,)).index == range(4)
    assert Rows.concat([second, first], [(0,), (0,)], (4,)).index.tolist() == [2, 3, 0, 1]
    assert Rows.concat([Rows((2,), range(2)), Rows((3,), range(3))], [(0,), (1,)], (2, 3)).index == range(5)
    # The second part has pieces 2 and 0 of the result, in this order: its row 0 is row 5 and its row 1 is row 0.
    joined = Rows.concat([Rows((2, 3), range(5)), of((1, 2), 0, 1)], [(0, 1), (2, 0)], (2, 3, 1))
    assert list(joined.index) == [0, 1, 2, 3, 4, 5, 0]
    empty = Rows((), range(0))
    assert shown(Rows.concat([empty, first, empty], [(), (0,), ()], (4,))) == ((4,), [0, 1])
    assert shown(Rows.concat([empty, empty], [(), ()], ())) == ((), [])


def test_compacting_leaves_only_named_rows_in_the_given_pieces():
    rows, kept = of((4, 3, 2), 1, 1, 5, 3).compact([0, 1])
    assert rows.sizes == (2, 1, 2) and list(rows.index) == [0, 0, 2, 1]
    assert [list(index) for index in kept] == [[1, 3], [1]]
    rows, kept = of((4, 3), 2, 3, 4).compact([0])
    assert shown(rows) == ((2, 3), [0, 1, 2]) and kept == [range(2, 4)] and isinstance(rows.index, range)


def test_runs_are_stretches_inside_of_one_piece():
    rows = Rows((3, 2, 4), range(1, 7))
    assert list(rows.runs()) == [(0, range(1, 3)), (1, range(2)), (2, range(2))] and rows.num_runs() == 3
    jumping = of((3, 2), 0, 1, 4, 3, 2)
    found = [(piece, list(index)) for piece, index in jumping.runs()]
    assert found == [(0, [0, 1]), (1, [1, 0]), (0, [2])] and jumping.num_runs() == 3
