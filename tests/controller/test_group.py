"""WorkerGroup on real processes: calls, futures, fused roles, and errors that say who failed where."""

from __future__ import annotations

import inspect
import os
import pydoc
import re
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from hybridflow.config import RunConfig
from hybridflow.controller.future import together
from hybridflow.controller.group import DataFuture, WorkerGroup
from hybridflow.controller.placement import AbsentRole
from hybridflow.controller.pool import ResourcePool
from hybridflow.errors import ConfigError, DataError, PlacementError, WorkerDiedError, WorkerError
from hybridflow.protocol.data import DataProto
from hybridflow.protocol.transfer import PerRank, Protocol
from hybridflow.resharding.layout import ParallelLayout
from hybridflow.timing import now
from hybridflow.workers.base import Worker, register
from tests.controller.conftest import group_on, wait_until_gone
from tests.controller.echo import Echo, LoudEcho, Refuses

pytestmark = [pytest.mark.ray, pytest.mark.distributed]


def numbers(num_rows: int) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(num_rows)}, meta_info={"step": 3})


# ---------------------------------------------------------------------------------------------------- calls


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("num_rows", [1, 4, 5])
def test_rows_come_back_in_order(pool: ResourcePool, tp: int, num_rows: int):
    group = group_on(pool, f"rows_tp{tp}", tp=tp)
    batch = numbers(num_rows)
    for method in (group.by_rank, group.prepared):
        back = method(batch)
        assert back["x"].tolist() == list(range(num_rows))
        assert back.meta_info == {"step": 3}
    assert group.prepared(batch)["sample_ids"].tolist() == list(range(num_rows)), "prepare runs before the split"
    assert "sample_ids" not in batch and batch.meta_info == {"step": 3}


def test_a_replica_answers_once_from_its_collector(pool: ResourcePool):
    # tp 2: both ranks get all rows and rank 0 answers. dp 2: 3 rows are [0, 1] on rank 0 and [2, padding] on rank 1.
    together = group_on(pool, "together", tp=2).by_replica(numbers(3), 10, tag="a")
    assert together["x"].tolist() == [0, 10, 20]
    assert together["rank"].tolist() == [0, 0, 0] and together["padded"].tolist() == [0, 0, 0]
    assert together.meta_info["tag"] == "a"
    apart = group_on(pool, "apart").by_replica(numbers(3), scale=10)
    assert apart["x"].tolist() == [0, 10, 20]
    assert apart["rank"].tolist() == [0, 0, 1] and apart["padded"].tolist() == [0, 0, 1]


def test_metrics_come_back_as_one_dict_and_uneven_updates_are_refused_on_the_driver(pool: ResourcePool):
    group = group_on(pool, "metrics")
    assert group.update(numbers(4)) == {"loss": 3.0, "rank": 0.5}  # (0 + 1 + 2 + 3) / 2 and (0 + 1) / 2
    with pytest.raises(DataError, match=r"metrics\.update: 5 rows do not divide among 2 replicas"):
        group.update(numbers(5))
    assert group.update(numbers(2))["loss"] == 0.5, "a refused batch breaks nothing"


def test_each_rank_gets_its_own_value_of_a_per_rank_argument(pool: ResourcePool):
    group = group_on(pool, "per_rank")
    assert group.own(PerRank(["a", "b"]), common=[1, 2]) == [(0, "a", [1, 2]), (1, "b", [1, 2])]


def test_groups_stay_on_one_replica_and_rows_come_back_in_order(pool: ResourcePool):
    groups = torch.tensor([0, 1, 1, 1, 0, 0])
    batch = numbers(6).union(DataProto.from_dict({"group_ids": groups}))
    back = group_on(pool, "grouped").whole_groups(batch)
    assert back["x"].tolist() == [0, 1, 2, 3, 4, 5]
    first = back["rank"][0].item()
    assert back["rank"].tolist() == [first if group == 0 else 1 - first for group in groups.tolist()]


def test_a_group_with_a_generation_layout_shows_its_replicas(pool: ResourcePool):
    layout = ParallelLayout.on(2, tp=2).generation(tp=1)
    group = WorkerGroup(pool, "generation", Echo, layout, RunConfig(name="test"))
    assert [facts["coordinates"].dp for facts in group.facts()] == [0, 1]
    assert group.by_replica(numbers(3))["rank"].tolist() == [0, 0, 0], "THREE_D goes by the training layout"
    assert "tp1 pp1 cp1 dp2" in group.describe()


def test_fused_roles_share_objects_in_one_process(pool: ResourcePool):
    actor, rollout = group_on(pool, "fused_actor"), group_on(pool, "fused_rollout", tp=2)
    actor.put("weights", [1])
    rollout.append_to_peer("fused_actor", "weights", 2)
    assert actor.peer_item("fused_actor", "weights") == [[1, 2], [1, 2]]
    assert actor.facts()[0]["pid"] == rollout.facts()[0]["pid"]
    same, identities = zip(*rollout.adopt("fused_actor", "weights"), strict=True)
    assert same == (True, True) and list(identities) == actor.identity("weights"), "one object, not a copy"
    with pytest.raises(WorkerError, match="role 'critic' has no worker in this process of pool 'main'"):
        rollout.peer_item("critic", "weights")


def test_an_override_keeps_its_registration_and_a_path_names_a_class(pool: ResourcePool):
    group = group_on(pool, "override", LoudEcho)
    assert group.by_rank(numbers(2)).keys() == ["y"]
    named = WorkerGroup(pool, "named", "tests.controller.echo:Echo", ParallelLayout.on(2), RunConfig(name="t"))
    assert named.facts()[1]["role"] == "named"
    with pytest.raises(PlacementError, match="is not a worker"):
        WorkerGroup(pool, "named", "tests.controller.echo:Nothing", ParallelLayout.on(2), RunConfig(name="t"))


def test_a_method_with_nothing_to_do_is_answered_on_the_driver(pool: ResourcePool):
    idle, busy = (
        WorkerGroup(pool, name, Echo, ParallelLayout.on(2), RunConfig(name=name)) for name in ("idle", "busy")
    )
    assert len(idle.only_if_needed(numbers(3))) == 0 and idle.only_if_needed(numbers(3)).keys() == []
    for nobody in (idle, AbsentRole("critic")):
        future = nobody.only_if_needed(numbers(3), blocking=False)
        assert future.done() and future.result(timeout=1.0).keys() == []
        assert together(future, busy.only_if_needed(numbers(3), blocking=False))[0].keys() == []
        with pytest.raises(DataError, match="by_replica: the batch has no rows"):  # it is an argument as any other
            busy.by_replica(future)
    assert busy.only_if_needed(numbers(3))["x"].tolist() == [0, 1, 2]
    assert {span.role for span in pool.spans if span.method == "only_if_needed"} == {"busy"}
    with pytest.raises(TypeError, match="missing a required argument: 'batch'"):
        idle.only_if_needed()


def test_methods_show_the_workers_signature_and_docstring(pool: ResourcePool):
    group = group_on(pool, "signature")
    assert str(inspect.signature(group.by_replica)) == (
        "(batch: 'DataProto', scale: 'int' = 1, *, tag: 'str' = 'none', blocking: bool = True, "
        "timeout: float | None = None) -> 'DataProto'"
    )
    shown = pydoc.plain(pydoc.render_doc(group.facts))
    assert (
        "facts(*, blocking: bool = True, timeout: float | None = None)" in shown and "Where this rank stands." in shown
    )
    refusal = (
        r"^signature.by_replica\(batch: .*, scale: .* = 1, \*, tag: .*\): got an unexpected keyword argument 'scall'"
    )
    with pytest.raises(TypeError, match=refusal):
        group.by_replica(numbers(2), scall=2)


def test_an_unknown_method_lists_those_there_are(pool: ResourcePool):
    group = group_on(pool, "unknown")
    with pytest.raises(
        AttributeError, match=r"role 'unknown' has no method 'generate'. Registered methods: adopt, append"
    ):
        group.generate(numbers(1))


def test_describe_names_ranks_processes_and_coordinates(pool: ResourcePool):
    lines = group_on(pool, "shown", tp=2).describe().splitlines()
    assert lines[0] == "WorkerGroup('shown': Echo on pool 'main', tp2 pp1 cp1 dp1)"
    assert lines[1].split() == ["rank", "node", "device", "pid", "dp", "pp", "cp", "tp"]
    assert lines[2].split() == ["0", pool.places[0].node, "CPU", str(pool.places[0].pid), "0", "0", "0", "0", "*"]
    assert lines[3].split() == ["1", pool.places[1].node, "CPU", str(pool.places[1].pid), "0", "0", "0", "1"]


def test_a_layout_has_to_fill_the_pool_and_names_must_not_clash(pool: ResourcePool):
    with pytest.raises(ConfigError, match=r"1\*1\*1\*4 = 4 ranks, but pool 'main' has 2 devices"):
        WorkerGroup(pool, "r", Echo, ParallelLayout(dp=4), RunConfig(name="t"))
    with pytest.raises(PlacementError, match="not started"):
        WorkerGroup(ResourcePool("cold", [1]), "r", Echo, ParallelLayout(), RunConfig(name="t"))

    class Clash(Worker):
        @register(Protocol.ONE_TO_ALL)
        def describe(self) -> None: ...

    with pytest.raises(ConfigError, match=r"Clash\.describe: a WorkerGroup uses this name"):
        WorkerGroup(pool, "r", Clash, ParallelLayout.on(2), RunConfig(name="t"))


# -------------------------------------------------------------------------------------------------- futures


def test_a_future_is_done_after_a_while_and_serves_as_an_argument(pool: ResourcePool):
    group, other = group_on(pool, "future"), group_on(pool, "future_other", tp=2)
    future = group.nap(0.5, blocking=False)
    assert isinstance(future, DataFuture) and not future.done()
    with pytest.raises(WorkerError, match=r"TimeoutError: no answer within 0.05 s from ranks \[0, 1\] of 2 \(pid"):
        future.result(timeout=0.05)
    assert future.result() == [0.5, 0.5] and future.done() and future.result() == [0.5, 0.5]
    scaled = other.by_replica(group.by_replica(numbers(3), 2, blocking=False), scale=5)
    assert scaled["x"].tolist() == [0, 10, 20]


def test_calls_of_two_roles_on_one_pool_run_in_the_order_of_the_driver(pool: ResourcePool):
    first, second = group_on(pool, "order_a"), group_on(pool, "order_b", tp=2)
    futures = [group.sum_of_ranks(blocking=False) for group in (first, second, first, second)]
    assert [future.result() for future in futures] == [[3.0, 3.0]] * 4


def test_each_rank_says_when_it_worked_and_how_much_memory_it_held(pool: ResourcePool):
    group = group_on(pool, "measured")
    group.step = 7
    pool.spans.clear()
    before = now()
    group.nap(0.3, ranks=[1])
    after = now()
    assert [(s.pool, s.role, s.method, s.step) for s in pool.spans] == [("main", "measured", "nap", 7)] * 2
    by_rank = {span.rank: span for span in pool.spans}
    assert all(before <= span.begin <= span.end <= after for span in by_rank.values())
    assert by_rank[0].end - by_rank[0].begin < 0.3 <= by_rank[1].end - by_rank[1].begin
    # A process with torch in it, on a machine of gigabytes; a short call is not asked.
    assert 50 * 2**20 < by_rank[1].peak < 2**40 and by_rank[0].peak == 0


# --------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("value", "ValueError: asked to fail with value"),
        ("unpicklable", "Unpicklable: carries a lock"),
        ("exit", "SystemExit: 3"),
        ("keyboard", "KeyboardInterrupt"),
        ("cancelled", "CancelledError"),
    ],
)
def test_an_exception_arrives_with_role_rank_method_step_and_traceback(pool: ResourcePool, kind: str, cause: str):
    group = group_on(pool, f"raises_{kind}")
    group.step = 12
    with pytest.raises(WorkerError) as error:
        group.fail(kind, ranks=[1])
    found = error.value
    assert (found.role, found.rank, found.method, found.step) == (f"raises_{kind}", 1, "fail", 12)
    assert found.cause == cause
    assert "echo.py" in found.traceback and "in fail" in found.traceback
    assert f"raises_{kind}.fail failed on rank 1 in step 12: {cause}" in str(found)


def test_a_message_of_any_length_arrives_shortened(pool: ResourcePool):
    with pytest.raises(WorkerError) as error:
        group_on(pool, "long").fail("long")
    assert error.value.cause.startswith("ValueError: xxxx") and "characters ...\nxxx" in error.value.cause
    assert len(error.value.cause) < 5_000 and len(error.value.traceback) < 25_000
    assert "in fail" in error.value.traceback


def test_a_future_inside_of_another_value_is_refused_with_what_to_do(pool: ResourcePool):
    group = group_on(pool, "inside")
    with pytest.raises(DataError, match=r"DataFuture\(inside.nap, .*\) cannot be sent inside .*argument of its own"):
        group.own(PerRank([group.nap(0.0, blocking=False)] * 2), None)


def test_values_that_cannot_be_sent_are_the_methods_error(pool: ResourcePool):
    group = group_on(pool, "unsent")
    with pytest.raises(
        DataError, match=r"the arguments of unsent\.put cannot be sent to other processes \(TypeError: c"
    ):
        group.put("lock", [threading.Lock()])
    assert group.nap(0.0) == [0.0, 0.0], "nothing was queued"
    with pytest.raises(WorkerError, match=r"unsent\.unsendable failed on rank \d.*lock"):
        group.unsendable()


def test_a_worker_that_cannot_be_built_says_so(pool: ResourcePool):
    with pytest.raises(WorkerError, match=r"bad\.create failed on rank \d: ValueError: cannot be built"):
        group_on(pool, "bad", Refuses)


def test_a_call_that_every_rank_refuses_leaves_the_role_usable(pool: ResourcePool):
    group = group_on(pool, "alike")
    with pytest.raises(WorkerError):
        group.fail("value")
    assert group.nap(0.0) == [0.0, 0.0]


def test_a_call_that_failed_on_some_ranks_only_breaks_its_role_but_not_its_pool(pool: ResourcePool):
    group, other = group_on(pool, "split"), group_on(pool, "split_peer")
    group.step = 4
    with pytest.raises(WorkerError):
        group.fail("value", ranks=[0])
    assert other.nap(0.0) == [0.0, 0.0]
    with pytest.raises(WorkerError) as error:
        group.nap(0.0)
    assert "split.nap failed" in str(error.value) and error.value.method == "nap"
    assert "not called, because the role on pool 'main' is broken" in error.value.cause
    assert "since split.fail failed on rank 0 in step 4 (ValueError: asked to fail with value)" in error.value.cause
    assert "it succeeded on some ranks and not on others" in error.value.cause


def test_a_rank_that_raises_is_reported_soon_and_its_peer_does_not_hang_in_the_collective(fresh_pool: ResourcePool):
    group, other = group_on(fresh_pool, "actor", tp=2), group_on(fresh_pool, "reference")
    group.step = 8
    pids = [place.pid for place in fresh_pool.places]
    before = time.monotonic()
    with pytest.raises(WorkerError, match=r"actor\.fail_in_collective failed on rank 1 in step 8.*no gradient today"):
        group.fail_in_collective(1)
    assert time.monotonic() - before < 30.0
    assert wait_until_gone(pids[:1], 5.0) == [], "a process in a collective heeds nothing else"
    assert wait_until_gone(pids[1:], 0.0) == pids[1:], "the one that raised is left"
    for role in (group, other):
        with pytest.raises(WorkerError) as error:
            role.facts()
        assert "pool 'fresh' is broken since actor.fail_in_collective failed on rank 1 in step 8" in error.value.cause
        assert "no gradient today" in error.value.cause
        assert "the processes of ranks [0], which did not leave it, were ended" in error.value.cause
        assert "Stop the pool, start it again" in error.value.cause
    fresh_pool.stop()
    with fresh_pool:
        assert group_on(fresh_pool, "actor", tp=2).sum_of_ranks() == [3.0, 3.0], "a broken pool starts anew"


def test_a_failed_call_is_cancelled_where_it_still_computes_and_other_roles_go_on(pool: ResourcePool, tmp_path: Path):
    group, other = group_on(pool, "cancelled"), group_on(pool, "cancelled_peer")
    with pytest.raises(WorkerError, match=r"cancelled\.fail_or_count failed on rank 0: RuntimeError: bad batch"):
        group.fail_or_count(0, str(tmp_path / "count"))
    stopped_at = (tmp_path / "count.1").read_text()
    assert int(stopped_at) > 0
    assert other.sum_of_ranks() == [3.0, 3.0], "the processes and their world live on"
    assert (tmp_path / "count.1").read_text() == stopped_at
    with pytest.raises(
        WorkerError, match=r"not called, because the role.*bad batch\): it was cancelled on ranks \[1\]"
    ):
        group.nap(0.0)


def test_what_was_queued_behind_a_failed_call_does_not_run(pool: ResourcePool, tmp_path: Path):
    # Rank 0 raises and would go on to the second call's collective, which rank 1 is not in yet.
    group, other = group_on(pool, "queued"), group_on(pool, "queued_peer")
    first = group.fail_or_count(0, str(tmp_path / "count"), blocking=False)
    second = other.sum_of_ranks(blocking=False)
    with pytest.raises(
        WorkerError, match="not run, because queued.fail_or_count, queued before it, failed on this rank"
    ):
        second.result()
    with pytest.raises(WorkerError, match="bad batch"):
        first.result()


def test_a_call_that_still_runs_is_not_cancelled_for_the_failure_of_the_next(pool: ResourcePool):
    group, other = group_on(pool, "before"), group_on(pool, "after")
    first = group.nap(3.0, ranks=[1], blocking=False)
    second = other.fail("value", ranks=[0], blocking=False)  # at once, while rank 1 is still in the first call
    before = time.monotonic()
    while time.monotonic() - before < 1.0:
        assert not second.done(), "it has failed, but has not ended"
        time.sleep(0.1)
    with pytest.raises(WorkerError, match="after.fail failed on rank 0: ValueError"):
        second.result()
    assert first.result() == [3.0, 3.0]
    assert group.nap(0.0) == [0.0, 0.0]


# ---------------------------------------------------------------------------------------------- unread futures


def test_a_failure_of_an_unread_future_is_told_by_the_next_call_of_its_role(pool: ResourcePool):
    group, other = group_on(pool, "unread"), group_on(pool, "unread_peer")
    group.step = 7
    future = group.fail("value", blocking=False)
    future.wait()
    assert other.nap(0.0) == [0.0, 0.0], "another role is not concerned"
    group.step = 8
    with pytest.raises(WorkerError) as error:
        group.nap(0.0)
    told = error.value
    assert (told.role, told.method, told.step) == ("unread", "nap", 8)
    assert re.search(
        r"not called, because unread\.fail failed on rank \d in step 7 \(ValueError: asked to fail with value\) and "
        r"nobody has read its future\. The role itself is whole",
        told.cause,
    )
    assert "in fail" in told.traceback
    assert group.nap(0.0) == [0.0, 0.0], "it is told once"
    with pytest.raises(WorkerError, match="unread.fail failed .* in step 7"):
        future.result()


def test_a_failure_that_was_read_is_not_told_again(pool: ResourcePool):
    group = group_on(pool, "read")
    future = group.fail("value", blocking=False)
    with pytest.raises(WorkerError):
        future.result()
    assert group.nap(0.0) == [0.0, 0.0]


def test_the_end_of_a_pool_waits_for_unread_calls_and_tells_of_their_failures(ray_session: str, tmp_path: Path):
    with pytest.raises(WorkerError, match="late.fail failed on rank 0: ValueError") as error:
        with ResourcePool("late", [1], cores_per_device=0.5) as pool:
            group = group_on(pool, "late")
            group.count_to(50, str(tmp_path / "count"), blocking=False)
            group.fail("value", blocking=False)
    assert (tmp_path / "count.0").read_text() == "49", "a call that was asked for is not cut off"
    assert error.value.__notes__ == ["It was an asynchronous call, and nobody has read its future."]
    assert not pool.started
    with pytest.raises(KeyError, match="the driver's own"):
        with ResourcePool("late", [1], cores_per_device=0.5) as pool:
            group_on(pool, "late").nap(60.0, blocking=False)
            raise KeyError("the driver's own")


# --------------------------------------------------------------------------------------------------- timeouts


def test_a_call_that_is_over_its_time_says_who_is_silent_and_where_and_is_cancelled(pool: ResourcePool):
    group, other = group_on(pool, "slow"), group_on(pool, "slow_peer")
    before = time.monotonic()
    with pytest.raises(WorkerError) as error:
        group.nap(60.0, ranks=[1], timeout=0.5)
    assert time.monotonic() - before < 30.0
    found = error.value
    assert (found.rank, found.method) == (1, "nap")
    assert f"TimeoutError: no answer within 0.5 s from ranks [1] of 2 ({pool.places[1]})" in found.cause
    line = next(i for i, line in enumerate(inspect.getsourcelines(Echo.nap)[0]) if "time.sleep" in line)
    line += inspect.getsourcelines(Echo.nap)[1]
    assert found.traceback.splitlines() == [
        f"rank 1 ({pool.places[1]}) stands at",
        f"    echo.py:{line} in Echo.nap",
    ]
    with pytest.raises(WorkerError, match=r"not called.*within 0.5 s.*it was cancelled on ranks \[1\]"):
        group.nap(0.0)
    assert other.nap(0.0) == [0.0, 0.0]


def test_the_time_of_an_asynchronous_call_counts_from_its_submission(pool: ResourcePool):
    group = group_on(pool, "slow_future", timeout=0.3)  # what a call gets that names none
    future = group.nap(60.0, blocking=False)
    time.sleep(0.5)
    with pytest.raises(WorkerError, match=r"nap failed on rank 0.*within 0.3 s from ranks \[0, 1\].*nobody has read"):
        group.nap(0.0)
    with pytest.raises(WorkerError, match="TimeoutError"):
        future.result()


def test_a_rank_that_hangs_in_a_collective_after_its_time_is_ended(fresh_pool: ResourcePool):
    group = group_on(fresh_pool, "actor", tp=2)
    with pytest.raises(WorkerError) as error:
        group.reduce_among([0], timeout=0.5)
    assert "no answer within 0.5 s from ranks [0] of 2" in error.value.cause
    assert re.search(r"distributed_c10d.py:\d+ in all_reduce", error.value.traceback)
    assert "in Echo.reduce_among" in error.value.traceback
    with pytest.raises(WorkerError, match=r"the processes of ranks \[0\], which did not leave it, were ended"):
        group.facts()


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan")])
def test_a_time_that_is_none_is_refused(pool: ResourcePool, timeout: float):
    with pytest.raises(ConfigError, match=r"no_time\.nap\(timeout=.*\): give seconds above 0"):
        group_on(pool, "no_time").nap(0.0, timeout=timeout)


# ------------------------------------------------------------------------------------------------------ deaths


def test_a_killed_process_is_reported_by_name_within_seconds(fresh_pool: ResourcePool, tmp_path: Path):
    group = group_on(fresh_pool, "actor", tp=2)
    group.step = 5
    started = tmp_path / "started"
    future = group.reduce_while_waiting_for(1, str(started), blocking=False)
    while not (started.exists() and started.read_text()):
        time.sleep(0.02)
    time.sleep(0.5)  # the peer waits in all_reduce by now
    pid = int(started.read_text())
    assert pid == fresh_pool.places[1].pid
    os.kill(pid, signal.SIGKILL)
    before = time.monotonic()
    with pytest.raises(WorkerDiedError) as error:
        future.result()
    assert time.monotonic() - before < 10.0
    died = error.value
    assert (died.role, died.rank, died.method, died.step) == ("actor", 1, "reduce_while_waiting_for", 5)
    assert died.cause == (
        f"the process is gone (pid {pid} on node {fresh_pool.places[1].node}): it was killed, crashed or exited "
        f"without a word (Ray's SYSTEM_ERROR, end of file); its log: {fresh_pool.places[1].log}"
    )
    with pytest.raises(WorkerDiedError, match=r"pool 'fresh' is broken since actor.*its process is gone"):
        group.facts()


def test_a_process_killed_between_two_calls_is_reported_by_the_next(fresh_pool: ResourcePool):
    group = group_on(fresh_pool, "actor", tp=2)
    os.kill(fresh_pool.places[0].pid, signal.SIGTERM)
    assert wait_until_gone([fresh_pool.places[0].pid], 5.0) == []
    before = time.monotonic()
    with pytest.raises(WorkerDiedError, match=r"actor\.sum_of_ranks failed on rank 0.*receives a SIGTERM"):
        group.sum_of_ranks()
    assert time.monotonic() - before < 10.0


def test_a_crash_in_native_code_is_named_by_the_process_log(fresh_pool: ResourcePool):
    with pytest.raises(WorkerDiedError) as error:
        group_on(fresh_pool, "actor", tp=2).crash(1, "segfault")
    assert error.value.rank == 1 and "\n" not in error.value.cause
    assert "it crashed: Segmentation fault in string_at (__init__.py, line" in error.value.cause
    assert error.value.cause.endswith(f"its log: {fresh_pool.places[1].log}")
