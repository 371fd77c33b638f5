"""The columns of one kind of a DataProto, as a mapping: ``data.batch`` and ``data.non_tensor_batch``.

A view reads and writes the columns of its DataProto, wherever their rows are: reading a column fetches it, assigning
one checks its rows. Invariant: a DataProto is as consistent after an assignment as it was before.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import torch

from hybridflow.errors import DataError, MissingColumn, nearest
from hybridflow.protocol import columns as col
from hybridflow.protocol.remote import Column
from hybridflow.protocol.rows import Rows

if TYPE_CHECKING:
    from tensordict import TensorDict


class ColumnView(MutableMapping[str, Any]):
    """Columns of one kind by name.

    Args:
        columns: all columns of the DataProto; the view writes to it.
        objects: show object columns; otherwise tensor columns.
    """

    def __init__(self, columns: dict[str, Column], objects: bool) -> None:
        self._columns, self._objects = columns, objects

    @property
    def kind(self) -> str:
        return "non_tensor_batch" if self._objects else "batch"

    def __iter__(self) -> Iterator[str]:
        return iter([key for key, column in self._columns.items() if column.is_object == self._objects])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, key: object) -> bool:
        return key in self._columns and self._columns[key].is_object == self._objects  # type: ignore[index]

    def __getitem__(self, key: str) -> Any:
        """The column, a tensor [B, ...] (nested where jagged) or an object array [B]; fetched where it is remote.

        Raises:
            MissingColumn: names the key and the nearest one.
        """
        if key not in self:
            raise MissingColumn(f"no {key!r} in {self.kind}.{nearest(str(key), self)}")
        return self._columns[key].value()

    def __setitem__(self, key: str, value: Any) -> None:
        """Add or replace a column.

        Raises:
            DataError: where its rows do not fit, the other kind has a column of the name, or the column it replaces has
                been written to in place.
        """
        if key in self._columns and key not in self:
            other = "batch" if self._objects else "non_tensor_batch"
            raise DataError(f"column {key!r} is in {other} already: a name has one kind. Rename one, or pop it first.")
        column = Column.checked(key, col.as_objects(key, value) if self._objects else value)
        if column.is_object != self._objects:
            raise DataError(f"column {key!r} is a {type(value).__name__}: batch holds tensors [B, ...].")
        old = self._columns.get(key)
        refuse_written(f"{self.kind}[{key!r}] = ...", {key: old} if old is not None else {})
        check_rows({**{name: c for name, c in self._columns.items() if name != key}, key: column})
        self._columns[key] = column

    def __delitem__(self, key: str) -> None:
        if key not in self:
            raise MissingColumn(f"no {key!r} in {self.kind}.{nearest(str(key), self)}")
        del self._columns[key]

    def __repr__(self) -> str:
        return f"{self.kind}({', '.join(f'{key}: {self._columns[key].signature}' for key in self)})"


class TensorView(ColumnView):
    """The tensor columns."""

    def __init__(self, columns: dict[str, Column]) -> None:
        super().__init__(columns, objects=False)

    @property
    def batch_size(self) -> torch.Size:
        """[B]; [0] without columns."""
        return torch.Size([next((len(column) for column in self._columns.values()), 0)])

    def to_tensordict(self) -> TensorDict:
        """The tensor columns as a TensorDict, all of them fetched."""
        from tensordict import TensorDict

        return TensorDict(dict(self.items()), batch_size=self.batch_size)


def built(tensors: Mapping[str, Any], objects: Mapping[str, Any]) -> dict[str, Column]:
    """Columns from what a user gave. Raises DataError that names the column and the fix; see ``DataProto``."""
    for key in objects:
        if key in tensors:
            raise DataError(f"column {key!r} is given as a tensor and as an object column: rename one.")
    columns: dict[str, Column] = {}
    rows: Rows | None = None
    for key, value in (*tensors.items(), *((key, col.as_objects(key, cells)) for key, cells in objects.items())):
        if key in tensors and not isinstance(value, torch.Tensor):
            raise DataError(f"column {key!r} is a {type(value).__name__}: give a torch.Tensor [B, ...].")
        columns[key] = Column.checked(key, value, rows)
        rows = columns[key].rows
    check_rows(columns)
    return columns


def check_rows(columns: dict[str, Column]) -> None:
    """All columns have the same number of rows. Raises DataError: names both columns, both numbers and the fix."""
    first = next(iter(columns), "")
    for key, column in columns.items():
        if len(column) != len(columns[first]):
            raise DataError(
                f"column {key!r} has {len(column)} rows, column {first!r} has {len(columns[first])}: all columns of a "
                f"DataProto have the same number of rows. Repeat or drop rows before you combine them."
            )


def known_names(
    method: str, kind: str, wanted: str | Iterable[str] | None, known: Iterable[str], columns: Container[str]
) -> list[str]:
    """The wanted names as a list; None is all that are known. Raises DataError for one that is not known.

    Args:
        method, kind: for the message.
        columns: those of the batch, of both kinds.
    """
    known = list(known)
    names = known if wanted is None else [wanted] if isinstance(wanted, str) else list(wanted)
    for name in names:
        if name not in known:
            # Most often the name is right and the kind is wrong.
            place = " It is a column of the other kind." if name in columns else ""
            raise DataError(f"{method}: no {name!r} in {kind}.{place}{nearest(str(name), known)}")
    return names


def refuse_written(where: str, columns: dict[str, Column]) -> None:
    """Rows that another process made are shared by all who read them, so nobody may write to them in place.

    Raises:
        DataError: names the column that has been written to, and the fix.
    """
    for key, column in columns.items():
        if column.was_written:
            raise DataError(
                f"{where}: column {key!r} was written to in place, but its rows come from another process and are "
                f"shared with all who read them. Write to a copy: changed = batch[{key!r}].clone()."
            )
