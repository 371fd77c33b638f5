"""A worker that makes, reads and passes on rows, and says what it saw of them."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from hybridflow.protocol.data import DataProto
from hybridflow.protocol.transfer import Protocol
from hybridflow.workers.base import Worker, register

WIDE = 32 * 1024
"""Elements of a row of ``wide``: 128 KiB, so that every shard of it goes to the object store."""


UNPICKLED: list[str] = []
"""Cells that this process has unpickled."""


class Cell:
    def __init__(self, text: str) -> None:
        self.text = text

    def __reduce__(self) -> tuple[Any, ...]:
        return unpickled, (self.text,)


def unpickled(text: str) -> Cell:
    UNPICKLED.append(text[:1])
    return Cell(text)


class RowWorker(Worker):
    kept: DataProto | None = None

    @register(Protocol.DP)
    def keep(self, batch: DataProto) -> None:
        """Keep the batch beyond the call, unread."""
        self.kept = batch

    @register(Protocol.DP)
    def kept_rows(self, batch: DataProto) -> DataProto:
        """What was kept, beside the first element of each of its rows; it is not kept any more."""
        kept, self.kept = self.kept, None
        assert kept is not None
        return kept.union(DataProto({"first": kept["wide"][:, 0].clone()}))

    @register(Protocol.DP)
    def pass_on_late(self, batch: DataProto, seconds: float) -> DataProto:
        """The batch, unread, after some seconds."""
        time.sleep(seconds)
        return batch

    @register(Protocol.DP)
    def first_late(self, batch: DataProto, seconds: float) -> DataProto:
        """The first element of every row of ``wide``, read after some seconds."""
        time.sleep(seconds)
        return DataProto({"first": batch["wide"][:, 0].clone()})

    @register(Protocol.ONE_TO_ALL)
    def references(self) -> int:
        """How many objects this process has told Ray about."""
        from ray._private.worker import global_worker

        process: Any = global_worker
        return len(process.core_worker.get_all_reference_counts())

    @register(Protocol.DP)
    def make_cells(self, batch: DataProto) -> DataProto:
        """Two wide columns, and ``cell`` of 100 kB a row: all of them go to the object store."""
        wide = batch["x"][:, None].expand(-1, WIDE).float()
        return DataProto({"wide": wide, "wider": wide + 1}, {"cell": [Cell(str(int(n)) * 100_000) for n in batch["x"]]})

    @register(Protocol.DP)
    def read_columns(self, batch: DataProto, keys: list[str]) -> DataProto:
        """The first element of every row of some columns, and how many cells this process has unpickled for that."""
        before = len(UNPICKLED)
        first = {key: batch[key][:, 0].clone() for key in keys}
        return DataProto({**first, "unpickled": torch.full((len(batch),), len(UNPICKLED) - before)})

    @register(Protocol.DP)
    def make(self, batch: DataProto) -> DataProto:
        """From ``x``: ``wide`` [B, WIDE] float32 filled with x, jagged ``tokens`` of length x, ``double``, ``name``."""
        x = batch["x"]
        return DataProto(
            {
                "wide": x[:, None].expand(-1, WIDE).float(),
                "tokens": DataProto.jagged([torch.full((int(n),), int(n)) for n in x], dtype=torch.int64),
                "double": 2 * x,
            },
            {"name": [f"row {int(n)}" for n in x]},
            {"made_by": "make"},
        )

    @register(Protocol.DP)
    def pass_on(self, batch: DataProto) -> DataProto:
        """The batch, unread."""
        return batch

    @register(Protocol.DP)
    def first_of(self, batch: DataProto, key: str = "wide") -> DataProto:
        """The first element of every row of a column, and where this process has the first row."""
        column = batch[key]
        address = torch.full((len(batch),), column.data_ptr())
        return DataProto({"first": column[:, 0].clone(), "address": address})

    @register(Protocol.DP)
    def work(self, batch: DataProto, seconds: float) -> DataProto:
        """``x`` plus 1 after some seconds, with the clock before and after, and the process."""
        start = time.time()
        x = batch["x"] + 1
        time.sleep(seconds)
        rows = len(batch)
        clock = torch.tensor([[start, time.time()]], dtype=torch.float64).expand(rows, 2)
        return DataProto({"x": x, "clock": clock, "pid": torch.full((rows,), os.getpid())})

    @register(Protocol.DP)
    def write(self, batch: DataProto, key: str) -> None:
        """Write to a column in place."""
        batch[key].zero_()

    @register(Protocol.DP)
    def lengths_only(self, batch: DataProto) -> DataProto:
        return DataProto({"length": batch.lengths("tokens")})

    @register(Protocol.DP)
    def fail(self, batch: DataProto, seconds: float = 0.0) -> DataProto:
        time.sleep(seconds)
        raise ValueError(f"no rows today, not even these {len(batch)}")

    @register(Protocol.ONE_TO_ALL)
    def hang(self, seconds: float) -> list[float]:
        time.sleep(seconds)
        return [seconds]

    @register(Protocol.ONE_TO_ALL)
    def total(self, value: list[torch.Tensor]) -> float:
        return float(value[0].sum())
