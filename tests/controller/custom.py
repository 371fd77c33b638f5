"""Protocols of one's own, as docs/dataflow.md says, and a worker that uses them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hybridflow.protocol.data import DataProto
from hybridflow.protocol.transfer import Call, Dispatch, collect_list, register_protocol
from hybridflow.resharding.layout import Layout
from hybridflow.workers.base import Worker, register


def to_last(layout: Layout, call: Call) -> Dispatch:
    nothing = ((None,), {})
    return Dispatch([nothing] * (layout.world_size - 1) + [(call.args, dict(call.kwargs))])


def from_last(layout: Layout, call: Call, dispatch: Dispatch, outputs: Sequence[Any]) -> Any:
    return outputs[-1]


def deal(layout: Layout, call: Call) -> Dispatch:
    """Rank r takes rows r, r + n, r + 2n ..., as cards are dealt."""

    def of_rank(rank: int) -> Any:
        return call.payload(lambda value: value[rank :: layout.world_size] if isinstance(value, DataProto) else value)

    return Dispatch([of_rank(rank) for rank in range(layout.world_size)])


def gather(layout: Layout, call: Call, dispatch: Dispatch, outputs: Sequence[Any]) -> DataProto:
    joined = DataProto.concat(outputs)
    dealt = [row for rank in range(layout.world_size) for row in range(rank, len(joined), layout.world_size)]
    return joined.reorder(np.argsort(dealt))


def to_first_only(layout: Layout, call: Call) -> Dispatch:
    """Wrong where there are more ranks than one."""
    return Dispatch([(call.args, dict(call.kwargs))])


register_protocol("LAST_RANK", to_last, from_last)
register_protocol("DEALT", deal, gather)
register_protocol("TOO_FEW", to_first_only, collect_list)


class CustomWorker(Worker):
    @register("LAST_RANK")
    def judge(self, batch: DataProto | None) -> DataProto | None:
        """Every rank runs, and those that were given nothing have nothing to do."""
        if batch is None:
            return None
        return DataProto({"judged": batch["x"] * 10, "rank": torch.full((len(batch),), self.context.rank)})

    @register("DEALT")
    def number(self, batch: DataProto, add: int) -> DataProto:
        return DataProto({"x": batch["x"] + add, "rank": torch.full((len(batch),), self.context.rank)})

    @register("TOO_FEW")
    def lost(self, batch: DataProto) -> None: ...
