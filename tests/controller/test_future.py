"""Futures as arguments: device processes wait for each other, the driver for none of them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from hybridflow.controller import future as futures
from hybridflow.controller.future import DataFuture, together
from hybridflow.controller.pool import ResourcePool
from hybridflow.data.batching import keep_groups
from hybridflow.errors import DataError, WorkerDiedError, WorkerError
from hybridflow.protocol.data import DataProto
from hybridflow.protocol.transfer import Protocol
from hybridflow.workers.base import register
from tests.controller.conftest import group_on
from tests.controller.custom import CustomWorker
from tests.controller.rows import RowWorker

pytestmark = pytest.mark.ray


def add_one(batch: DataProto) -> DataProto:
    """Runs before rows are spread, wherever that is."""
    return DataProto({"x": batch["x"] + 1, "group": batch["x"] % 2})


class Spreading(RowWorker):
    @register(Protocol.DP, prepare=add_one, spread=keep_groups("group"))
    def spread_out(self, batch: DataProto) -> DataProto:
        return DataProto({"x": batch["x"], "rank": torch.full((len(batch),), self.context.rank)})


@pytest.fixture(scope="module")
def two(ray_session: str) -> Iterator[ResourcePool]:
    with ResourcePool("two", [2], kind="cpu", cores_per_device=0.5) as started:
        yield started


@pytest.fixture(scope="module")
def one(ray_session: str) -> Iterator[ResourcePool]:
    with ResourcePool("one", [1], kind="cpu", cores_per_device=0.5) as started:
        yield started


def numbers(count: int, start: int = 0) -> DataProto:
    return DataProto({"x": torch.arange(start, start + count)})


def test_a_future_is_an_argument_before_it_has_a_value(two: ResourcePool, one: ResourcePool):
    rollout, actor = group_on(two, "rollout", RowWorker), group_on(one, "actor", RowWorker)
    before = time.monotonic()
    made = rollout.work(numbers(5), 5.0, blocking=False)
    worked = actor.work(made, 0.0, blocking=False)
    back = rollout.work(worked, 0.0, blocking=False)
    assert time.monotonic() - before < 4.0, "the driver has not waited"
    assert repr(back) == "DataFuture(rollout.work, waiting)" and not back.done()
    with pytest.raises(WorkerError, match=r"no answer within 0.01 s from ranks \[0, 1\] of 2 .*which wait for actor.w"):
        back.result(timeout=0.01)
    assert back.result()["x"].tolist() == [3, 4, 5, 6, 7] and worked.result()["x"].tolist() == [2, 3, 4, 5, 6]
    assert made.done() and back.result() is back.result()
    assert worked.result()["clock"][0, 0] >= made.result()["clock"][:, 1].max() - 0.001


def test_two_pools_overlap_without_threads_in_the_driver(two: ResourcePool, one: ResourcePool):
    rollout, actor = group_on(two, "generating", RowWorker), group_on(one, "training", RowWorker)
    for group in (rollout, actor):
        group.work(numbers(2), 0.0)
    threads = threading.active_count()
    generated, trained = [], []
    for step in range(4):
        generated.append(rollout.work(numbers(2, start=10 * step), 1.0, blocking=False))
        trained.append(actor.work(generated[-1], 1.0, blocking=False))
    assert threading.active_count() == threads
    results = [future.result() for future in trained]
    assert [found["x"].tolist() for found in results] == [[10 * step + 2, 10 * step + 3] for step in range(4)]
    for step in range(3):
        training, generation = results[step]["clock"][0], generated[step + 1].result()["clock"][0]
        both = min(training[1], generation[1]) - max(training[0], generation[0])
        assert both > 0.3, f"training of step {step} and generation of step {step + 1} ran at the same time"
    seconds = results[-1]["clock"][0, 1] - generated[0].result()["clock"][0, 0]
    assert seconds < 4 * 2.0 - 1.0, "4 steps took less than their parts one after another"


def test_prepare_and_spread_run_where_the_argument_arrives(two: ResourcePool, one: ResourcePool):
    source, spreading = group_on(one, "source", RowWorker), group_on(two, "spreading", Spreading)
    now = spreading.spread_out(numbers(5, start=1))
    later = spreading.spread_out(source.work(numbers(5), 0.2, blocking=False))
    assert later["x"].tolist() == now["x"].tolist() == [2, 3, 4, 5, 6]
    assert later["rank"].tolist() == now["rank"].tolist() and set(later["rank"].tolist()) == {0, 1}
    again = source.work(spreading.spread_out(source.work(numbers(5), 0.2, blocking=False), blocking=False), 0.0)
    assert again["x"].tolist() == [3, 4, 5, 6, 7], "rows that were spread out of order come back in order there too"


def test_protocols_of_ones_own_serve_calls_and_futures_alike(two: ResourcePool, one: ResourcePool):
    source, custom = group_on(one, "custom_source", RowWorker), group_on(two, "custom", CustomWorker)
    judged = custom.judge(numbers(3))
    assert judged["judged"].tolist() == [0, 10, 20] and judged["rank"].tolist() == [1, 1, 1]
    for batch in (numbers(5, start=1), source.work(numbers(5), 0.2, blocking=False)):
        numbered = custom.number(batch, add=100, blocking=False)
        assert custom.judge(numbered)["judged"].tolist() == [1010, 1020, 1030, 1040, 1050]
        assert numbered.result()["x"].tolist() == [101, 102, 103, 104, 105]
        assert numbered.result()["rank"].tolist() == [0, 1, 0, 1, 0]
    with pytest.raises(DataError, match=r"custom.lost: distribute of protocol 'TOO_FEW' gave 1 payloads for 2 ranks"):
        custom.lost(numbers(2))


def test_large_columns_and_plain_values_arrive_from_a_future(two: ResourcePool, one: ResourcePool):
    rollout, actor = group_on(two, "large_rollout", RowWorker), group_on(one, "large_actor", RowWorker)
    made = rollout.make(numbers(6), blocking=False)
    firsts = actor.first_of(made, key="wide", blocking=False)
    assert firsts.result()["first"].tolist() == [0, 1, 2, 3, 4, 5]
    seconds = actor.hang(0.2, blocking=False)
    assert group_on(two, "plain", RowWorker).hang(0.1) == [[0.1], [0.1]] and seconds.result() == [[0.2]]


def test_a_failure_arrives_as_the_error_of_the_call_that_failed(two: ResourcePool, one: ResourcePool):
    rollout, actor = group_on(two, "failing", RowWorker), group_on(one, "waiting", RowWorker)
    rollout.step = 7
    made = rollout.fail(numbers(4), 0.5, blocking=False)
    trained = actor.work(actor.work(made, 0.0, blocking=False), 0.0, blocking=False)
    with pytest.raises(WorkerError) as error:
        trained.result()
    assert (error.value.role, error.value.method, error.value.step) == ("failing", "fail", 7)
    assert error.value.cause == "ValueError: no rows today, not even these 2" and "in fail" in error.value.traceback
    assert actor.work(numbers(2), 0.0)["x"].tolist() == [1, 2], "the roles are whole"
    assert rollout.work(numbers(2), 0.0)["x"].tolist() == [1, 2]
    failed = rollout.fail(numbers(4), blocking=False)
    failed.wait()
    with pytest.raises(WorkerError, match="no rows today"):
        actor.work(failed, 0.0)


def test_a_role_whose_waiting_call_was_left_out_says_so_once(two: ResourcePool, one: ResourcePool):
    rollout, actor = group_on(two, "fails", RowWorker), group_on(one, "left_out", RowWorker)
    made = rollout.fail(numbers(4), 0.5, blocking=False)
    actor.work(made, 0.0, blocking=False)
    with pytest.raises(WorkerError, match="no rows today"):
        made.result()
    with pytest.raises(WorkerError, match="so that left_out.work, which takes its value, did not run"):
        actor.work(numbers(2), 0.0)
    assert actor.work(numbers(2), 0.0)["x"].tolist() == [1, 2]


def test_a_wrong_batch_from_a_future_is_the_error_of_the_call_that_takes_it(two: ResourcePool, one: ResourcePool):
    source, spreading = group_on(one, "wrong", RowWorker), group_on(two, "refusing", Spreading)
    with pytest.raises(WorkerError, match=r"refusing.spread_out failed on rank \d: DataError: no column 'x'") as error:
        spreading.spread_out(source.first_of(DataProto({"wide": torch.zeros(3, 2)}), blocking=False))
    assert error.value.role == "refusing"


def test_the_time_of_a_call_begins_when_its_arguments_are_there(two: ResourcePool, one: ResourcePool):
    rollout, actor = group_on(two, "slow_source", RowWorker), group_on(one, "quick", RowWorker)
    made = rollout.work(numbers(2), 1.5, blocking=False)
    assert actor.work(made, 0.0, timeout=1.0)["x"].tolist() == [2, 3]


def test_the_death_of_a_process_ends_those_that_wait_for_it_and_breaks_only_its_own_pool(one: ResourcePool):
    actor = group_on(one, "outliving", RowWorker)
    with ResourcePool("doomed", [1], kind="cpu", cores_per_device=0.5) as doomed:
        made = group_on(doomed, "dying", RowWorker).work(numbers(2), 60.0, blocking=False)
        waiting = actor.work(made, 0.0, blocking=False)
        behind = actor.work(numbers(2), 0.0, blocking=False)
        time.sleep(0.5)
        os.kill(doomed.places[0].pid, signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match="dying.work failed on rank 0: the process is gone"):
            waiting.result()
        assert behind.result()["x"].tolist() == [1, 2]
        assert actor.work(numbers(2), 0.0)["x"].tolist() == [1, 2]


def test_calls_that_belong_together_give_their_values_in_order(two: ResourcePool, one: ResourcePool):
    rollout, actor = group_on(two, "takes", RowWorker), group_on(one, "gives", RowWorker)
    slow, quick = rollout.hang(0.3, blocking=False), actor.hang(0.0, blocking=False)
    assert together(slow, quick) == [[[0.3], [0.3]], [[0.0]]]


def test_a_call_ends_with_the_one_that_it_belongs_to(ray_session: str):
    """As of two pools whose processes exchange data: one side raises, or is gone, and the other would wait for ever."""
    with (
        ResourcePool("left", [1], cores_per_device=0.5) as left,
        ResourcePool("right", [1], cores_per_device=0.5) as right,
    ):
        sender, receiver = group_on(left, "sender"), group_on(right, "receiver")
        before = time.monotonic()
        with pytest.raises(WorkerError, match="sender.fail failed on rank 0: ValueError: asked"):
            together(receiver.nap(600.0, blocking=False), sender.fail("plain", blocking=False))
        assert time.monotonic() - before < 30
        with pytest.raises(WorkerError, match="ended, because sender.fail, which it exchanges data with, failed"):
            receiver.nap(0.0)
    with (
        ResourcePool("left", [1], cores_per_device=0.5) as left,
        ResourcePool("right", [1], cores_per_device=0.5) as right,
    ):
        sender, receiver = group_on(left, "sender"), group_on(right, "receiver")
        with pytest.raises(WorkerDiedError, match="sender.crash failed on rank 0: the process is gone"):
            together(receiver.nap(600.0, blocking=False), sender.crash(0, "exit", blocking=False))


def test_an_answer_is_not_lost_where_ctrl_c_comes_while_it_is_read(two: ResourcePool, monkeypatch: pytest.MonkeyPatch):
    def pressed(_: object) -> None:
        raise KeyboardInterrupt

    rollout = group_on(two, "rollout", RowWorker)
    made = rollout.work(numbers(3), 0.0, blocking=False)
    with monkeypatch.context() as patch:
        patch.setattr(futures, "opened", pressed)
        with pytest.raises(KeyboardInterrupt):
            made.result()
    assert made.result(timeout=20)["x"].tolist() == [1, 2, 3]


def test_threads_that_ask_for_one_future_all_get_its_value(two: ResourcePool):
    """A thread that calls a group looks at all of its pool's open calls, also those that another thread waits for."""
    rollout = group_on(two, "rollout", RowWorker)
    made = rollout.work(numbers(3), 0.3, blocking=False)
    values: list[DataProto] = []
    waiting = [threading.Thread(target=lambda: values.append(made.result()), daemon=True) for _ in range(2)]
    [thread.start() for thread in waiting]
    until = time.monotonic() + 20
    while not made.done() and time.monotonic() < until:
        pass
    [thread.join(5) for thread in waiting]
    assert [value["x"].tolist() for value in values] == [[1, 2, 3]] * 2


def test_a_call_is_queued_on_all_ranks_or_on_none(two: ResourcePool, monkeypatch: pytest.MonkeyPatch):
    """Ctrl-C behind the first rank does not leave the others without the call."""
    rollout = group_on(two, "rollout", RowWorker)
    queue = two.lines[0].call

    def queue_under_ctrl_c(*args: object, **kwargs: object) -> None:
        queue(*args, **kwargs)  # type: ignore[arg-type]
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(two.lines[0], "call", queue_under_ctrl_c)
        with pytest.raises(KeyboardInterrupt):
            rollout.work(numbers(3), 0.0)
    (interrupted,) = two.open_calls
    assert interrupted.result(timeout=20)["x"].tolist() == [1, 2, 3]


def test_open_calls_are_known_in_the_order_in_which_they_were_queued(two: ResourcePool):
    """A second thread cannot queue its call between the two."""

    class Ordered(dict[DataFuture, None]):
        def __setitem__(self, call: DataFuture, value: None) -> None:
            held.append(two.lock.locked())
            super().__setitem__(call, value)

    held: list[bool] = []
    rollout, two.open_calls = group_on(two, "rollout", RowWorker), Ordered(two.open_calls)
    rollout.work(numbers(3), 0.0)
    assert held == [True]


def test_a_process_that_is_stopped_keeps_no_caller_waiting_and_its_calls_have_their_time(fresh_pool: ResourcePool):
    group = group_on(fresh_pool, "actor")
    os.kill(fresh_pool.places[1].pid, signal.SIGSTOP)
    before = time.monotonic()
    calls = [group.put(str(n), bytes(200_000), timeout=1.0, blocking=False) for n in range(40)]  # 8 MB for each rank
    assert time.monotonic() - before < 10.0, "what the sockets do not hold is sent later"
    with pytest.raises(
        WorkerError, match=r"actor.put failed on rank 1: TimeoutError: no answer within 1 s from ranks \[1\]"
    ):
        calls[0].result()
    for call in calls[1:]:
        with pytest.raises(WorkerError, match=r"actor.put failed on rank 1.*it was ended, because it did not leave"):
            call.result()
    with pytest.raises(WorkerError, match=r"the processes of ranks \[1\], which did not leave it, were ended"):
        group.facts()
    assert time.monotonic() - before < 60.0
