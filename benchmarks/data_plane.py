"""What the data plane costs, against plain Ray actors that pass the same tensors by hand, in the same run.

    python benchmarks/data_plane.py           # 4 + 4 workers, up to 1 GB in the object store, under a minute
    python benchmarks/data_plane.py --small   # an eighth of the bytes, to see that it runs

Prints a table: each row a claim, the two times, their ratio and the target. Medians; the sides take turns, of several
calls each, so that what a call leaves to be done behind it (to let go of what was read) is in the time of its own side.
"""

from __future__ import annotations

import gc
import logging
import os
import pickle
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import ray
import torch
from plane_workers import COLUMNS, WIDTH, PlainActor

from hybridflow.config import RunConfig
from hybridflow.controller.group import WorkerGroup
from hybridflow.controller.pool import ResourcePool
from hybridflow.protocol.data import DataProto
from hybridflow.resharding.layout import ParallelLayout

WORKERS = 4
ROW_BYTES = len(COLUMNS) * WIDTH * 4
MIB = 2**20

Row = tuple[str, str, str, str, str, bool]
"""What, ours, what it is held against, ratio, target, whether it is met."""


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def once(run: Callable[[], Any]) -> float:
    """Seconds of one run."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def in_turn(*runs: Callable[[], Any], turns: int = 15, calls: int = 5) -> list[float]:
    """Median seconds of a call of each, measured in turn so that a busy machine slows all of them."""
    found: list[list[float]] = [[] for _ in runs]
    for _ in range(turns):
        for run, seconds in zip(runs, found, strict=True):
            run()  # may wait for what another has left behind it
            seconds.append(once(lambda run=run: [run() for _ in range(calls)]) / calls)
    return [statistics.median(seconds) for seconds in found]


def each_after(before: Callable[[], Any], *runs: Callable[[], Any], turns: int = 15) -> list[float]:
    """Median seconds of one call of each, right after ``before``, which may have emptied the caches."""
    found: list[list[float]] = [[] for _ in runs]
    for _ in range(turns):
        for run, seconds in zip(runs, found, strict=True):
            before()
            seconds.append(once(run))
    return [statistics.median(seconds) for seconds in found]


def against(what: str, ours: float, other: float, most: float) -> Row:
    """A row that compares with plain Ray or plain torch, or, where it says so, with another call of ours."""
    ratio = ours / other
    return what, milliseconds(ours), milliseconds(other), f"{ratio:.2f}", f"<= {most:g}", ratio <= most


def at_most(what: str, ours: float, most: float) -> Row:
    """A row with a limit in seconds."""
    return what, milliseconds(ours), "", "", f"<= {milliseconds(most)}", ours <= most


class Plane:
    """The groups of one side, the actors of the other, and a batch that both have made."""

    def __init__(self, source: WorkerGroup, sink: WorkerGroup, makers: list[Any], readers: list[Any]) -> None:
        self.source, self.sink, self.makers, self.readers = source, sink, makers, readers

    def make(self, size: int) -> DataProto:
        """A batch of ``size`` bytes in the processes of the source."""
        return self.source.make(DataProto({"start": torch.arange(size // ROW_BYTES)}))

    def make_plain(self, size: int) -> list[list[Any]]:
        starts = np.array_split(np.arange(size // ROW_BYTES), WORKERS)
        return ray.get([maker.make.remote(start) for maker, start in zip(self.makers, starts, strict=True)])

    def read_plain(self, shards: list[list[Any]], sent: int = len(COLUMNS), read: int = len(COLUMNS)) -> np.ndarray:
        """The readers are sent the references of some columns, and read some of these."""
        refs = [r.read.remote(shard[:sent], read) for r, shard in zip(self.readers, shards, strict=True)]
        return np.concatenate(ray.get(refs))


def dispatch_seconds(plane: Plane, batches: list[DataProto]) -> list[float]:
    """Seconds of the driver until a call that reads all of a batch is on its way, for each batch."""
    found: list[list[float]] = [[] for _ in batches]
    for _ in range(25):
        for batch, seconds in zip(batches, found, strict=True):
            start = time.perf_counter()
            future = plane.sink.read(batch, blocking=False)
            seconds.append(time.perf_counter() - start)
            future.result()
    return [statistics.median(seconds) for seconds in found]


def drop_seconds(plane: Plane) -> float:
    """Seconds of the driver to let go of a batch with an object for each column and worker."""
    found = []
    for _ in range(15):
        batch = [plane.make(8 * MIB)]
        found.append(once(batch.clear))
    return statistics.median(found)


def remote_rows(plane: Plane, size: int) -> list[Row]:
    """A batch of one group is read by another."""
    process = psutil.Process()
    plane.sink.read(plane.make(MIB))  # what a first call imports and sets up is no part of a batch
    gc.collect()
    before = process.memory_info().rss
    batch, shards = plane.make(size), plane.make_plain(size)
    assert np.allclose(plane.sink.read(batch)["total"].numpy(), plane.read_plain(shards)), "both sides add up alike"

    def read_all() -> torch.Tensor:
        return plane.sink.read(batch)["total"]

    def read_one() -> torch.Tensor:
        return plane.sink.read(batch, COLUMNS[:1])["total"]

    def plain_one() -> np.ndarray:
        return plane.read_plain(shards, sent=1)

    whole, plain, part, one_sent, all_sent = in_turn(
        read_all, lambda: plane.read_plain(shards), read_one, plain_one, lambda: plane.read_plain(shards, read=1)
    )
    cold, cold_plain = each_after(read_all, read_one, plain_one)
    grown = (process.memory_info().rss - before) / MIB
    label = f"{size // MIB} MiB"
    return [
        against(f"read {label} of another group, all columns", whole, plain, 1.15),
        against(f"read 1 of {len(COLUMNS)} columns, against plain Ray that is sent one reference", part, one_sent, 3.0),
        against(f"    the same, against plain Ray that is sent all {len(COLUMNS)}", part, all_sent, 1.5),
        against("    once, right after all columns; sent one reference", cold, cold_plain, 3.0),
        (
            f"driver's memory: {label} made, and read in all rows above",
            f"{grown:.1f} MiB",
            "",
            "",
            "< 10 MiB",
            grown < 10,
        ),
    ]


def own_rows(plane: Plane, small: int, middle: int, large: int) -> list[Row]:
    """One column against all of them, and the driver's own time, whatever the bytes."""
    batches = [plane.make(size) for size in (small, middle, large)]
    rows = []
    for batch, size in zip(batches[1:], (middle, large), strict=True):
        part, whole = in_turn(
            lambda batch=batch: plane.sink.read(batch, COLUMNS[:1])["total"],
            lambda batch=batch: plane.sink.read(batch)["total"],
        )
        rows.append(against(f"read 1 of {len(COLUMNS)} columns of {size // MIB} MiB, against all", part, whole, 0.25))
    first, second, third = dispatch_seconds(plane, batches)
    rows += [
        at_most(f"dispatch of {middle // MIB} MiB to {WORKERS} workers", second, 0.020),
        against(f"dispatch of {large // MIB} MiB against {small // MIB} MiB", third, first, 2.0),
        at_most(f"drop of a batch of {len(COLUMNS) * WORKERS} objects", drop_seconds(plane), 0.010),
    ]
    batch = batches[-1]
    order = torch.randperm(len(batch))
    parts = batch.chunk(WORKERS)
    for name, run in {
        "reorder": lambda: batch.reorder(order),
        "repeat(8)": lambda: batch.repeat(8),
        "chunk(4)": lambda: batch.chunk(4),
        "concat of 4": lambda: DataProto.concat(parts),
        "select": lambda: batch.select(list(COLUMNS[:4])),
    }.items():
        rows.append(
            at_most(
                f"{name} of {large // MIB} MiB, {len(batch)} rows",
                statistics.median(once(run) for _ in range(9)),
                0.010,
            )
        )
    return rows


def local_rows(size: int) -> list[Row]:
    """Rows of the driver's own memory, against torch on the same tensors."""
    num_rows = size // (8 * 4096 * 4)
    tensors = {f"key_{i}": torch.randn(num_rows, 4096) for i in range(8)}
    data = DataProto(tensors)

    def dumped(batch: DataProto) -> list[pickle.PickleBuffer]:
        buffers: list[pickle.PickleBuffer] = []
        pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
        return buffers

    assert sum(buffer.raw().nbytes for buffer in dumped(data)) == sum(t.nbytes for t in tensors.values())
    tiny = data[: max(1, num_rows // 64)]
    whole, part = in_turn(lambda: dumped(data), lambda: dumped(tiny))
    parts = data.chunk(4)
    cut = [[part[key] for part in parts] for key in tensors]
    order = torch.randperm(num_rows)
    twice = torch.arange(num_rows).repeat_interleave(2)

    def read(batch: DataProto) -> list[torch.Tensor]:
        return [batch[key] for key in tensors]

    pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "concat of 4": (lambda: read(DataProto.concat(parts)), lambda: [torch.cat(column) for column in cut]),
        "reorder": (lambda: read(data.reorder(order)), lambda: [t.index_select(0, order) for t in tensors.values()]),
        "repeat(2)": (lambda: read(data.repeat(2)), lambda: [t.index_select(0, twice) for t in tensors.values()]),
    }
    label = f"local {size // MIB} MiB, 8 keys"
    rows = [against(f"{label}: pickle out of band, against 1/64 of the rows", whole, part, 1.5)]
    for name, (ours, plain) in pairs.items():
        rows.append(
            against(f"{label}: {name} and reading it, against torch", *in_turn(ours, plain, turns=9, calls=1), 1.3)
        )
    return rows


def empty_rows(plane: Plane) -> list[Row]:
    """A call that does nothing."""
    ours, plain = in_turn(
        plane.sink.nothing, lambda: ray.get([reader.nothing.remote() for reader in plane.readers]), calls=50
    )
    return [against(f"empty call, {WORKERS} workers", ours, plain, 1.5)]


def show(rows: list[Row]) -> None:
    head = ("what", "here", "against", "ratio", "target", "")
    lines = [head, *((*row[:5], "" if row[5] else "MISSED") for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    for line in lines:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())


def main() -> None:
    scale = 8 if "--small" in sys.argv else 1
    torch.set_num_threads(1)
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "180")
    store = 4 * 2**30 // scale + 2**28
    quiet: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    ray.init("local", num_cpus=16, object_store_memory=store, **quiet)
    pools = [ResourcePool(name, [WORKERS], kind="cpu", cores_per_device=0.5) for name in ("source", "sink")]
    with pools[0], pools[1]:
        layout, config = ParallelLayout.on(WORKERS), RunConfig(name="plane")
        groups = [WorkerGroup(pool, pool.name, "plane_workers:PlaneWorker", layout, config) for pool in pools]
        actors = [[PlainActor.options(num_cpus=0.5).remote() for _ in range(WORKERS)] for _ in range(2)]
        plane = Plane(*groups, *actors)
        rows = empty_rows(plane)
        rows += remote_rows(plane, 256 * MIB // scale)
        for actor in (*actors[0], *actors[1]):
            ray.kill(actor)  # eight that are idle take a tenth of the time of a call that reads one column
        rows += own_rows(plane, 64 * MIB // scale, 256 * MIB // scale, 1024 * MIB // scale)
    rows += local_rows(104 * MIB // scale)
    show(rows)
    ray.shutdown()


if __name__ == "__main__":
    main()
