"""Timers: sums by name, what no timer covers, and names that a driver may not use."""

import pytest

from hybridflow.errors import HybridFlowError
from hybridflow.timing import STEP_NAMES, Timer


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_seconds_add_up_by_name_and_the_rest_is_other() -> None:
    clock = Clock()
    timer = Timer(clock)
    clock.now += 0.5
    for seconds in (1.0, 2.0):
        with timer("generate"):
            clock.now += seconds
    with timer("update_actor"):
        clock.now += 4.0
    clock.now += 0.25
    assert timer.flush() == {"time/generate": 3.0, "time/update_actor": 4.0, "time/other": 0.75, "time/step": 7.75}


def test_flush_starts_anew() -> None:
    clock = Clock()
    timer = Timer(clock)
    with timer("save"):
        clock.now += 1.0
    timer.flush()
    clock.now += 2.0
    assert timer.flush() == {"time/other": 2.0, "time/step": 2.0}


def test_a_failing_block_is_timed_and_leaves_the_timer_usable() -> None:
    clock = Clock()
    timer = Timer(clock)
    with pytest.raises(KeyError):
        with timer("reward"):
            clock.now += 1.0
            raise KeyError("x")
    with timer("reward"):
        clock.now += 1.0
    assert timer.flush()["time/reward"] == 2.0


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(HybridFlowError, match=r"timer\('update_actr'\) .* Did you mean 'update_actor'\? Known: "):
        with Timer()("update_actr"):
            pass


def test_a_timer_inside_a_timer_is_refused() -> None:
    timer = Timer()
    with timer("generate"):
        with pytest.raises(HybridFlowError, match=r"timer\('reward'\) stands inside timer\('generate'\)"):
            with timer("reward"):
                pass


def test_the_names_are_those_of_a_step() -> None:
    assert len(set(STEP_NAMES)) == len(STEP_NAMES) == 14


def test_each_use_leaves_a_span_on_the_given_clock() -> None:
    clock = Clock()
    timer = Timer(clock)
    for _ in range(2):
        with timer("reward"):
            clock.now += 1.0
    timer.flush()
    assert timer.spans == [("reward", 100.0, 101.0), ("reward", 101.0, 102.0)]
