"""What ``data_plane.py`` runs in other processes: a worker of HybridFlow, and a plain Ray actor that does the same.

They stand in a module of their own because Ray's processes import it: the script's folder is on their path.
"""

from __future__ import annotations

import numpy as np
import ray
import torch

from hybridflow.protocol.data import DataProto
from hybridflow.protocol.transfer import Protocol
from hybridflow.workers.base import Worker, register

WIDTH = 1024
"""float32 elements of a row of one column: 4 KiB."""

COLUMNS = tuple(f"column_{i:02d}" for i in range(16))


class PlaneWorker(Worker):
    """Makes rows and reads them."""

    @register(Protocol.DP)
    def make(self, batch: DataProto) -> DataProto:
        """16 columns of 4 KiB a row; ``start`` [B] is the first element of each row."""
        start = batch["start"].float()[:, None]
        return DataProto({key: start + torch.arange(WIDTH) + i for i, key in enumerate(COLUMNS)})

    @register(Protocol.DP)
    def read(self, batch: DataProto, keys: tuple[str, ...] = COLUMNS) -> DataProto:
        """The sum of every row over some columns: 4 bytes a row."""
        total = torch.zeros(len(batch))
        for key in keys:
            total += batch[key].sum(dim=1)
        return DataProto({"total": total})

    @register(Protocol.ONE_TO_ALL)
    def nothing(self) -> None:
        """An empty call."""


@ray.remote
class PlainActor:
    """The same by hand: arrays are put one by one, references are passed in lists, and read where they arrive."""

    def __init__(self) -> None:
        torch.set_num_threads(1)

    def make(self, start: np.ndarray) -> list:
        first = torch.from_numpy(start.copy()).float()[:, None]
        return [ray.put((first + torch.arange(WIDTH) + i).numpy()) for i in range(len(COLUMNS))]

    def read(self, columns: list, number: int = len(COLUMNS)) -> np.ndarray:
        """The sum of every row over the first columns of those that were sent."""
        arrays = ray.get(columns[:number])
        total = torch.zeros(len(arrays[0]))
        for array in arrays:
            total += torch.from_dlpack(array).sum(dim=1)
        return total.numpy()

    def nothing(self) -> None:
        pass
