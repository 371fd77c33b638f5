"""One row of a DataProto, as a driver or a reward function reads it: ``for row in data`` and ``data[i]``.

Invariant: its ``meta_info`` is a copy; its tensors and cells are those of the DataProto.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from hybridflow.errors import DataError, nearest


@dataclass(frozen=True)
class DataProtoItem:
    """One row, ``data[i]``: tensors without their row dim (views), and cells.

    A jagged column gives its row with the row's own length. ``item["key"]`` reads either kind.
    """

    batch: dict[str, torch.Tensor] = field(default_factory=dict)
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, key: str) -> Any:
        row = {**self.batch, **self.non_tensor_batch}
        if key not in row:
            raise DataError(f"no column {key!r} in this row.{nearest(key, row)}")
        return row[key]
