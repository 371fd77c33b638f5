"""The table of three rows that the DataProto tests share."""

import torch

from hybridflow.protocol.data import DataProto

TOKENS = [[1, 2], [], [3, 4, 5]]


def table() -> DataProto:
    """Three rows; row 1 has no tokens."""
    return DataProto.from_dict(
        tensors={
            "rewards": torch.tensor([0.5, 1.5, 2.5]),
            "tokens": DataProto.jagged([torch.tensor(row, dtype=torch.int64) for row in TOKENS]),
        },
        non_tensors={"answer": ["a", "b", "c"]},
        meta_info={"temperature": 0.7, "nested": {"steps": [1]}},
    )


def tokens(data: DataProto, key: str = "tokens") -> list:
    return [row.tolist() for row in data[key].unbind()]


def rows(data: DataProto) -> list[tuple]:
    return list(zip(data["rewards"].tolist(), tokens(data), data["answer"].tolist(), strict=True))


A, B, C = (0.5, [1, 2], "a"), (1.5, [], "b"), (2.5, [3, 4, 5], "c")
