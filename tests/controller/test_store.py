"""Rows in the object store: who fetches what, without a copy on one node, how long objects live, and who may write."""

from __future__ import annotations

import gc
import os
import re
import signal
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
import torch

from hybridflow.controller.group import WorkerGroup
from hybridflow.controller.message import message, opened, packed
from hybridflow.controller.pool import ResourcePool
from hybridflow.controller.store import Borrowed, Stored, address_of, reference
from hybridflow.errors import DataError, WorkerError
from hybridflow.protocol.data import DataProto
from hybridflow.protocol.remote import Inline
from tests.controller.conftest import group_on
from tests.controller.rows import WIDE, RowWorker

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def cpu_pool(ray_session: str) -> Iterator[ResourcePool]:
    with ResourcePool("rows", [2], kind="cpu", cores_per_device=0.5) as started:
        yield started


@pytest.fixture(scope="module")
def maker(cpu_pool: ResourcePool) -> WorkerGroup:
    return group_on(cpu_pool, "maker", RowWorker)


def numbers(count: int) -> DataProto:
    return DataProto({"x": torch.arange(count)}, meta_info={"step": 1})


def handles(batch: DataProto, key: str) -> list:
    return batch._columns[key].handles


def in_store() -> tuple[int, int]:
    """Bytes and objects in this node's shared memory, by Ray's own count."""
    from ray._private.internal_api import node_stats

    (node,) = ray.nodes()
    stats = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"]).store_stats
    return stats.object_store_bytes_used, stats.num_local_objects


def settled(at_most: int, seconds: float = 10.0) -> int:
    """Bytes in the store once they are no more than this, or after some seconds: freed objects take a moment to go."""
    deadline = time.monotonic() + seconds
    while in_store()[0] > at_most and time.monotonic() < deadline:
        time.sleep(0.1)
    return in_store()[0]


def test_large_columns_stay_in_the_store_and_small_ones_come_along(maker: WorkerGroup):
    before = settled(0)
    made = maker.make(numbers(6))
    assert [type(handle) for handle in handles(made, "wide")] == [Stored, Stored]
    assert {type(handle) for key in ("tokens", "double", "name") for handle in handles(made, key)} == {Inline}
    assert not any(handle.fetched for key in ("wide", "tokens", "name") for handle in handles(made, key))
    assert str(made.signature("wide")) == f"dense [rows, {WIDE}] float32 on cpu"
    assert made.meta_info == {"made_by": "make"}
    assert in_store()[0] - before >= 6 * WIDE * 4 and in_store()[1] == 2
    assert made["wide"][:, 7].tolist() == [0, 1, 2, 3, 4, 5] and made["double"].tolist() == [0, 2, 4, 6, 8, 10]
    assert made["name"].tolist() == [f"row {i}" for i in range(6)]
    assert made.lengths("tokens").tolist() == [0, 1, 2, 3, 4, 5]
    assert maker.lengths_only(made)["length"].tolist() == [0, 1, 2, 3, 4, 5]


def test_rows_are_moved_on_the_driver_and_read_by_the_workers(maker: WorkerGroup):
    made = maker.make(numbers(6))
    moved = DataProto.concat([made.reorder([5, 4, 3, 2, 1, 0]), made[1:3]]).repeat(2).select(["wide"], [])
    assert maker.first_of(moved)["first"].tolist() == [5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0, 1, 1, 2, 2]
    assert not any(handle.fetched for handle in handles(made, "wide")), "the driver has read none of it"


def test_a_batch_that_is_passed_on_unread_moves_nothing(maker: WorkerGroup):
    made = maker.make(numbers(4))
    objects = in_store()
    back = maker.pass_on(made)
    assert [handle.key for handle in handles(back, "wide")] == [handle.key for handle in handles(made, "wide")]
    assert in_store() == objects and back["wide"][:, 0].tolist() == [0, 1, 2, 3]


def test_cells_that_nobody_reads_are_not_unpickled_with_the_columns_that_are(maker: WorkerGroup):
    made = maker.make_cells(numbers(4))
    assert {type(handle) for key in ("wide", "wider", "cell") for handle in handles(made, key)} == {Stored}
    read = maker.read_columns(made, ["wide", "wider"])
    assert read["wide"].tolist() == [0, 1, 2, 3] and read["wider"].tolist() == [1, 2, 3, 4]
    assert read["unpickled"].tolist() == [0, 0, 0, 0]
    assert [cell.text[:2] for cell in made["cell"]] == ["00", "11", "22", "33"]


def test_roles_of_one_process_read_the_same_memory(maker: WorkerGroup, cpu_pool: ResourcePool):
    reader = group_on(cpu_pool, "reader", RowWorker)
    made = maker.make(numbers(4))
    first, second = maker.first_of(made), reader.first_of(made)
    assert first["address"].tolist() == second["address"].tolist()
    half = reader.first_of(made[[1, 3]][:2])  # one row of each shard, read in place: a view of the same object
    assert half["address"].tolist() == [first["address"][0] + WIDE * 4, first["address"][2] + WIDE * 4]


@pytest.mark.parametrize("key", ["wide", "double", "tokens"])
def test_a_method_that_writes_to_its_argument_fails_by_name(maker: WorkerGroup, key: str):
    made = maker.make(numbers(4))
    with pytest.raises(WorkerError, match=rf"DataError: maker.write: column '{key}' was written to in place"):
        maker.write(made, key)


def test_writing_on_the_driver_is_told_when_the_batch_is_sent(maker: WorkerGroup):
    made = maker.make(numbers(4))
    made["double"].zero_()
    with pytest.raises(DataError, match=r"rows of a batch: column 'double' was written to in place"):
        maker.pass_on(made)
    made.batch["wide"] = torch.zeros(4, 2)
    assert maker.pass_on(made.select(["wide"], []))["wide"].tolist() == [[0, 0]] * 4


def test_objects_go_when_the_driver_drops_its_batches(maker: WorkerGroup, cpu_pool: ResourcePool):
    """200 steps of making, moving, reading and passing on: 100 MB in all, in a store of 200 MB that stays as it was."""
    other = group_on(cpu_pool, "other", RowWorker)
    gc.collect()
    before, known = settled(0), other.references()
    most = 0
    for step in range(200):
        batch = maker.make(numbers(4))
        batch = batch.union(other.first_of(batch, blocking=False).result())
        future = other.pass_on(batch.reorder([3, 2, 1, 0]), blocking=False)
        maker.first_of(future)
        if step % 20 == 19:
            assert batch["wide"][3, 0] == 3
            most = max(most, in_store()[0])
    # Ray frees objects once a second, or a hundred at a time.
    assert most - before < 80 * 4 * WIDE * 4, "at no time were there more than the objects of some steps"
    del batch, future
    assert settled(before) <= before
    after = other.references()
    assert all(new <= old + 10 for old, new in zip(known, after, strict=True)), (known, after)


def test_a_reference_is_made_anywhere_from_what_its_own_process_says_of_it(maker: WorkerGroup):
    """Ray's internal calls: what is relied on is that they exist, copy no rows, and take no part in counting."""
    ref = ray.put(list(range(100)))
    name, owner, status = address_of(ref)
    assert name == ref.binary() and owner and status, "where it is known, no owner has to be asked"
    made = maker.make(numbers(4)).select(["wide"], [])
    (handle, _) = handles(made, "wide")
    again = reference(handle.address)
    rows: Any = ray.get(again)
    assert again.binary() == handle.key and rows[:, 0].tolist() == [0, 1]
    del made, handle, _, again
    gc.collect()
    time.sleep(2)
    assert rows[1, 7] == 1, "rows that have been read stay, whatever their process does"


def test_rows_stay_while_a_call_needs_them_though_the_driver_drops_the_batch(maker: WorkerGroup):
    """Ray frees what nobody refers to within a second; the ranks read two seconds later."""
    gc.collect()
    before = settled(0)
    made = maker.make(numbers(4))
    read = maker.first_late(made, 2.5, blocking=False)
    passed = maker.pass_on(maker.pass_on_late(made.select(["wide"], []), 0.5, blocking=False), blocking=False)
    del made
    gc.collect()
    assert read.result()["first"].tolist() == [0, 1, 2, 3]
    back = passed.result()
    del read, passed
    gc.collect()
    time.sleep(2)
    assert back["wide"][:, 3].tolist() == [0, 1, 2, 3], "what comes back unread is the driver's to keep"
    del back
    gc.collect()
    assert settled(before) <= before


def test_rows_stay_while_a_call_waits_for_the_one_that_gives_them(maker: WorkerGroup):
    """The first call's value is read, cut and dropped by the driver before the second call has begun to read it."""
    made = maker.make(numbers(4))
    first = maker.pass_on_late(made, 0.2, blocking=False)
    second = maker.first_late(first, 2.5, blocking=False)
    first.result().pop(["wide"])
    del made, first
    gc.collect()
    assert second.result()["first"].tolist() == [0, 1, 2, 3]


def test_what_a_worker_keeps_of_a_batch_stays_and_can_be_sent(maker: WorkerGroup):
    gc.collect()
    before = settled(0)
    maker.keep(maker.make(numbers(4)))
    gc.collect()
    time.sleep(2)  # the driver has no batch, and Ray frees within a second
    back = maker.kept_rows(numbers(4))
    assert back["first"].tolist() == [0, 1, 2, 3]
    gc.collect()
    time.sleep(2)
    assert back["wide"][:, 5].tolist() == [0, 1, 2, 3] and back["name"].tolist() == [f"row {i}" for i in range(4)]
    del back
    gc.collect()
    assert settled(before) <= before


def test_a_batch_that_nobody_keeps_is_not_fetched_when_its_call_ends(maker: WorkerGroup):
    made = maker.make_cells(numbers(4))
    maker.pass_on(made)
    read = maker.read_columns(made, ["wide"])
    assert read["unpickled"].tolist() == [0, 0, 0, 0] and maker.read_columns(made, ["wide"])["unpickled"].sum() == 0


def test_a_call_remembers_what_it_read_by_the_names_of_its_batch_and_fetches_what_is_kept(maker: WorkerGroup):
    made = maker.make_cells(numbers(4)).rename("wide", "first")

    def arrived() -> DataProto:
        return opened(message(packed(made, "the arguments of a call")))

    # What was read, and what the call before had read, in one request; of a method that runs for the first time all
    # tensors of its node, which costs no bytes; cells only where they are read.
    for before, together in (({"wider"}, {"wider"}), (set(), set()), ({"cell"}, set()), (None, {"wider"})):
        batch = arrived()
        borrowed = Borrowed([batch], before)
        assert batch["first"][:, 0].tolist() == [0, 1, 2, 3] and borrowed.read() == {"first"}
        fetched = {key for key, column in batch.columns.items() if any(handle.fetched for handle in column.handles)}
        assert fetched == {"first"} | together
    batch, kept = None, arrived().select(["wider"], [])
    borrowed = Borrowed([kept])
    (column,) = kept.columns.values()
    assert column.entries is not None
    borrowed.give_back()
    assert all(handle.fetched and not handle.portable for handle in handles(kept, "wider"))
    assert kept["wider"][:, 0].tolist() == [1, 2, 3, 4]


def test_who_keeps_one_column_does_not_keep_the_others_that_were_read(maker: WorkerGroup):
    made = maker.make_cells(numbers(4))
    batch = opened(message(packed(made, "the arguments of a call")))
    borrowed = Borrowed([batch])
    kept, others = batch.select(["wide"], []), [handle.fetch() for handle in handles(batch, "wider")]
    assert kept["wide"][:, 0].tolist() == [0, 1, 2, 3] and borrowed.read() == {"wide", "wider"}
    gone = [weakref.ref(other) for other in others]
    borrowed.give_back()
    del batch, borrowed, others
    gc.collect()
    assert [ref() for ref in gone] == [None, None] and kept["wide"][:, 0].tolist() == [0, 1, 2, 3]


def test_a_call_that_has_failed_keeps_no_objects(maker: WorkerGroup, cpu_pool: ResourcePool):
    gc.collect()
    before = settled(0)
    group = group_on(cpu_pool, "breaking", RowWorker)
    made = maker.make(numbers(4)).select(["wide"], [])
    future = group.make(made.union(DataProto({"x": torch.tensor([1, 1, 1, -1])})), blocking=False)
    with pytest.raises(WorkerError, match="breaking.make failed on rank 1"):  # there is no row of length -1
        future.result()
    del made
    gc.collect()
    assert settled(before) <= before, "the pool remembers the failure, and the driver has the future, but no rows"
    with pytest.raises(WorkerError, match="it succeeded on some ranks and not on others"):
        group.make(numbers(4))


def error_of(read: Callable[[], object], seconds: float = 30.0) -> Exception:
    """What reading raises. Rows of a dead process can still be read until Ray has noticed and freed them."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            read()
        except (DataError, WorkerError) as error:
            return error
        time.sleep(0.1)
    raise AssertionError(f"it could be read for {seconds} s")


def test_rows_of_a_process_that_is_gone_are_named_with_their_maker(ray_session: str, maker: WorkerGroup):
    with ResourcePool("doomed", [1], kind="cpu", cores_per_device=0.5) as doomed:
        made = group_on(doomed, "rollout", RowWorker).make(numbers(4))
        os.kill(doomed.places[0].pid, signal.SIGKILL)
        assert made["double"].tolist() == [0, 2, 4, 6], "what came along is here"
        message = "column 'wide' of rollout.make on rank 0 cannot be read any more: the process that made it is gone"
        (handle,) = handles(made, "wide")
        assert isinstance(error_of(handle.load), DataError)  # load() keeps nothing, so it may be tried again
        with pytest.raises(DataError, match=message):
            made["wide"]
        told = error_of(lambda: maker.first_of(made))
        assert isinstance(told, WorkerError) and re.search(
            rf"maker.first_of failed on rank \d: DataError: {message}", str(told)
        )
