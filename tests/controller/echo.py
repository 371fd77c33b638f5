"""Workers of the controller's tests. They are real workers: what they compute is only small."""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from hybridflow.data.batching import keep_groups
from hybridflow.protocol.data import DataProto
from hybridflow.protocol.transfer import Protocol
from hybridflow.workers.base import Worker, WorkerContext, register


class Unpicklable(Exception):
    """An exception that no pickle can carry."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


def mark_prepared(batch: DataProto) -> DataProto:
    """Runs on the driver, before rows are split."""
    return batch.union(DataProto.from_dict({"sample_ids": torch.arange(len(batch))}))


class Echo(Worker):
    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self.items: dict[str, object] = {}
        self.ready = False

    def setup(self) -> None:
        self.ready = True

    @register(Protocol.ONE_TO_ALL)
    def facts(self) -> dict[str, object]:
        """Where this rank stands.

        Second line of the docstring.
        """
        return {
            "rank": self.context.rank,
            "role": self.context.role,
            "coordinates": self.context.coordinates,
            "world_size": self.context.world_size,
            "device": str(self.context.device),
            "pid": os.getpid(),
            "ready": self.ready,
            "threads": torch.get_num_threads(),
            "environment": {k: os.environ.get(k) for k in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")},
            "store": (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")),
            "distributed": dist.is_initialized(),
        }

    @register(Protocol.DP, unless=lambda config: config.name == "idle")
    def only_if_needed(self, batch: DataProto) -> DataProto:
        return batch

    @register(Protocol.DP)
    def by_rank(self, batch: DataProto) -> DataProto:
        return batch

    @register(Protocol.THREE_D)
    def by_replica(self, batch: DataProto, scale: int = 1, *, tag: str = "none") -> DataProto:
        """Multiply ``x``, and say which rank and coordinates did it."""
        rows = len(batch)
        return DataProto.from_dict(
            {
                "x": batch["x"] * scale,
                "rank": torch.full((rows,), self.context.rank),
                "padded": torch.full((rows,), batch.meta_info["padded_rows"]),
            },
            meta_info={"tag": tag},
        )

    @register(Protocol.THREE_D, prepare=mark_prepared)
    def prepared(self, batch: DataProto) -> DataProto:
        return batch

    @register(Protocol.ALL_TO_ALL)
    def own(self, value: object, common: object) -> tuple[int, object, object]:
        return self.context.rank, value, common

    @register(Protocol.THREE_D, uneven="balance", spread=keep_groups("group_ids"))
    def whole_groups(self, batch: DataProto) -> DataProto:
        """Which rank took each row."""
        return DataProto.from_dict({"x": batch["x"], "rank": torch.full((len(batch),), self.context.rank)})

    @register(Protocol.THREE_D, uneven="refuse")
    def update(self, batch: DataProto) -> dict[str, float]:
        return {"loss": float(batch["x"].sum()), "rank": float(self.context.rank)}

    @register(Protocol.ONE_TO_ALL)
    def sum_of_ranks(self) -> float:
        value = torch.tensor([float(self.context.rank + 1)])
        dist.all_reduce(value)
        return value.item()

    @register(Protocol.ONE_TO_ALL)
    def put(self, key: str, value: object) -> None:
        self.items[key] = value

    @register(Protocol.ONE_TO_ALL)
    def peer_item(self, role: str, key: str) -> object:
        peer = self.context.peers[role]
        assert isinstance(peer, Echo)
        return peer.items[key]

    @register(Protocol.ONE_TO_ALL)
    def append_to_peer(self, role: str, key: str, value: object) -> None:
        peer = self.context.peers[role]
        assert isinstance(peer, Echo)
        found = peer.items[key]
        assert isinstance(found, list)
        found.append(value)

    @register(Protocol.ONE_TO_ALL)
    def adopt(self, role: str, key: str) -> tuple[bool, int]:
        """Take a peer's object as one's own: whether it is the very object, and its identity."""
        peer = self.context.peers[role]
        assert isinstance(peer, Echo)
        self.items[key] = peer.items[key]
        return self.items[key] is self.context.peers[role].items[key], id(self.items[key])  # type: ignore[attr-defined]

    @register(Protocol.ONE_TO_ALL)
    def identity(self, key: str) -> int:
        return id(self.items[key])

    @register(Protocol.ONE_TO_ALL)
    def crash(self, rank: int, how: str) -> None:
        """End this process without a word, as a bug in native code does; the others wait for it in a collective."""
        if self.context.rank == rank:
            if how == "segfault":
                ctypes.string_at(0)
            os._exit(7)
        dist.all_reduce(torch.zeros(1))

    @register(Protocol.ONE_TO_ALL)
    def count_to(self, number: int, path: str) -> int:
        """Write how far it has come, forever if need be: a long computation in Python."""
        for i in range(number):
            count = Path(f"{path}.{self.context.rank}")
            new = count.with_suffix(".new")
            new.write_text(str(i))
            new.replace(count)  # whole at any moment, also where it is cancelled
            time.sleep(0.01)
        return number

    @register(Protocol.ONE_TO_ALL)
    def fail_or_count(self, failing: int, path: str) -> int:
        """One rank fails once the others count."""
        others = set(range(self.context.world_size)) - {failing}
        while self.context.rank == failing:
            if all(Path(f"{path}.{rank}").exists() for rank in others):
                raise RuntimeError("bad batch")
            time.sleep(0.01)
        return self.count_to(10**9, path)

    @register(Protocol.ONE_TO_ALL)
    def fail(self, kind: str, ranks: list[int] | None = None) -> str:
        if ranks is not None and self.context.rank not in ranks:
            return "fine"
        if kind == "unpicklable":
            raise Unpicklable("carries a lock")
        if kind == "exit":
            sys.exit(3)
        if kind == "keyboard":
            raise KeyboardInterrupt
        if kind == "cancelled":
            raise asyncio.CancelledError
        if kind == "long":
            raise ValueError("x" * 1_000_000)
        raise ValueError(f"asked to fail with {kind}")

    @register(Protocol.ONE_TO_ALL)
    def fail_in_collective(self, rank: int) -> None:
        """One rank raises, the others wait for it in a collective."""
        if self.context.rank == rank:
            raise RuntimeError("no gradient today")
        dist.all_reduce(torch.zeros(1))

    @register(Protocol.ONE_TO_ALL)
    def reduce_while_waiting_for(self, rank: int, started: str) -> None:
        """One rank sleeps and the others wait for it in a collective; tells through a file that it has begun."""
        if self.context.rank == rank:
            with open(started, "w") as f:
                f.write(str(os.getpid()))
            time.sleep(600)
        dist.all_reduce(torch.zeros(1))

    @register(Protocol.ONE_TO_ALL)
    def reduce_among(self, ranks: list[int]) -> None:
        """A collective that ranks outside of ``ranks`` do not join: the others hang in it."""
        if self.context.rank in ranks:
            dist.all_reduce(torch.zeros(1))

    @register(Protocol.ONE_TO_ALL)
    def nap(self, seconds: float, ranks: list[int] | None = None) -> float:
        if ranks is None or self.context.rank in ranks:
            time.sleep(seconds)
        return seconds

    @register(Protocol.ONE_TO_ALL)
    def unsendable(self) -> object:
        return threading.Lock()


class LoudEcho(Echo):
    """Overrides without registering again."""

    def by_rank(self, batch: DataProto) -> DataProto:
        return batch.rename("x", "y")

    def close(self) -> None:
        path = self.items.get("close_file")
        if path is not None:
            with open(f"{path}.{self.context.rank}", "w") as f:
                f.write("closed")


class Refuses(Worker):
    def __init__(self, context: WorkerContext) -> None:
        raise ValueError("cannot be built")
