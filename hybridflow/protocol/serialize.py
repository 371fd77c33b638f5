"""How tensors of a DataProto become bytes: raw buffers, out of band where the pickler can, and files.

:func:`pack` wraps every tensor of a value, also in lists, tuples, dicts and object arrays below it. A wrapped tensor
unpickles as a plain tensor. With pickle protocol 5 and ``buffer_callback`` (Ray, cloudpickle, :func:`write_file`) the
bytes of a contiguous CPU tensor are handed over without a copy, and the tensor that comes back reads the receiver's
buffer in place.

Invariant: exactly the bytes of the tensor's elements travel, never the rest of its storage, and dtype and shape come
back as they were. Tensors arrive on the CPU and without autograd history. A tensor read from a read-only buffer (Ray's
shared memory) must not be written to; ``clone()`` it first.
"""

from __future__ import annotations

import copy
import hashlib
import os
import pickle
import uuid
import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache
from operator import is_not
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hybridflow.errors import DataError
from hybridflow.protocol.jagged import Jagged, is_jagged

MAGIC = b"HFDATA01"
ALIGNMENT = 64
_NUMBER = 8

with warnings.catch_warnings():
    # torch says once in a process that memory it is given is read-only, as rows read in place are: it has said so now.
    warnings.simplefilter("ignore")
    torch.frombuffer(bytes(1), dtype=torch.uint8)

CONSTANTS = frozenset({str, int, float, bool, bytes, type(None)})
"""Types whose values hold no others and never change."""


class PackedTensor:
    """Stands for a dense or nested tensor, or a Jagged, in a pickle; unpickles as the same."""

    def __init__(self, tensor: torch.Tensor | Jagged) -> None:
        self.tensor = tensor

    @property
    def nbytes(self) -> int:
        tensor = self.tensor
        return tensor.values.nbytes + tensor.lengths.nbytes if isinstance(tensor, Jagged) else tensor.nbytes

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        if isinstance(self.tensor, Jagged):
            return Jagged, (PackedTensor(self.tensor.values), PackedTensor(self.tensor.lengths))
        if is_jagged(self.tensor):
            return Jagged.nested, (PackedTensor(Jagged.of(self.tensor)),)
        raw, *how = raw_bytes(self.tensor)
        return restore_tensor, (pickle.PickleBuffer(raw) if protocol >= 5 and raw.size else raw.tobytes(), *how)


class PackedBytes:
    """Stands for a pickled value in a pickle, as a buffer; unpickles as the value."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return pickle.loads, (pickle.PickleBuffer(self.data) if protocol >= 5 else self.data,)


def raw_bytes(tensor: torch.Tensor) -> tuple[Any, str, tuple[int, ...]]:
    """The elements of a dense tensor as a uint8 array, in place where it can be; its dtype's name and its shape."""
    plain = tensor.device.type == "cpu" and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg())
    if not (plain and tensor.is_contiguous()):
        tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    name = _name(tensor.dtype)
    if hasattr(np, name):  # numpy's own views take a quarter of the time
        return tensor.numpy().reshape(-1).view(np.uint8), name, tuple(tensor.shape)
    # A single element may keep any stride, even where the tensor is contiguous, and view() wants 1.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy(), name, tuple(tensor.shape)


@lru_cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def restore_tensor(buffer: Any, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor whose elements are in a buffer, without a copy."""
    if 0 in shape:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    if isinstance(buffer, bytes) and len(buffer) == 1:
        buffer = bytearray(buffer)  # one object for every b"\1" of the process, which no write may change
    return torch.frombuffer(buffer, dtype=getattr(torch, dtype)).view(shape)


def pack(value: Any, wrap: Callable[[Any], Any] = lambda value: value) -> Any:
    """The value with tensors wrapped for the pickler, below lists, tuples, dicts, dataclasses and object arrays.

    Named tuples and kinds of dict (OrderedDict, defaultdict) count as such. Containers without tensors are handed back
    as they are; a tensor that occurs twice is wrapped once. Tensors inside of other objects are left to those objects.

    Args:
        wrap: what to do with an object that is neither a tensor nor such a container, nor of :data:`CONSTANTS`.
    """
    return _pack(value, wrap, {}, set())


def _pack(value: Any, wrap: Callable[[Any], Any], packed: dict[int, Any], open_ids: set[int]) -> Any:
    """``packed`` maps ids to results; ``open_ids`` are of the containers above this value."""
    if type(value) in CONSTANTS:
        return value
    if isinstance(value, (torch.Tensor, Jagged)):
        plain = isinstance(value, Jagged) or is_jagged(value) or _is_strided(value)
        return packed.setdefault(id(value), PackedTensor(value)) if plain else value
    cells = cells_of(value)
    if cells is None:
        return wrap(value)
    if all([type(cell) in CONSTANTS for cell in cells]):
        return value
    if id(value) in packed or id(value) in open_ids:
        return packed.get(id(value), value)
    open_ids.add(id(value))
    inner = [_pack(cell, wrap, packed, open_ids) for cell in cells]
    open_ids.remove(id(value))
    packed[id(value)] = result = _with_cells(value, inner) if any(map(is_not, inner, cells)) else value
    return result


def cells_of(value: Any) -> Sequence[Any] | None:
    """What a container holds: a list, tuple, dict, dataclass or object array; None for any other value."""
    kind = type(value)
    if kind in CONSTANTS:
        return None
    if kind is list or kind is tuple:
        return value
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, np.ndarray):
        return list(value.flat) if value.dtype == object else None
    if hasattr(value, "_fields") and isinstance(value, tuple):
        return value
    return [getattr(value, name) for name in _set_fields(value)] if is_dataclass(kind) else None


def _set_fields(value: Any) -> list[str]:
    return [field.name for field in fields(value) if hasattr(value, field.name)]


def _with_cells(value: Any, cells: list[Any]) -> Any:
    """A container like ``value`` that holds others."""
    if isinstance(value, tuple):
        return type(value)._make(cells) if hasattr(value, "_fields") else tuple(cells)  # type: ignore[attr-defined]
    if isinstance(value, list):
        return cells
    result = copy.copy(value)
    if isinstance(value, dict):
        for key, cell in zip(value, cells, strict=True):
            result[key] = cell
    elif isinstance(value, np.ndarray):
        for place, cell in enumerate(cells):
            result.flat[place] = cell
    else:
        for name, cell in zip(_set_fields(value), cells, strict=True):
            object.__setattr__(result, name, cell)  # frozen ones too
    return result


def _is_strided(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested


def write_file(path: str | os.PathLike[str], value: Any) -> None:
    """Write a value: magic, frame lengths, SHA-256, then frames (the pickle and each buffer) at multiples of 64 bytes.

    The file appears under its name only when it is complete.
    """
    path = Path(path)
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    frames = [memoryview(head), *(buffer.raw() for buffer in buffers)]
    table = b"".join(n.to_bytes(_NUMBER, "little") for n in (len(frames), *(f.nbytes for f in frames)))
    digest = hashlib.sha256(table)
    for frame in frames:
        digest.update(frame)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(MAGIC + table + digest.digest())
            for frame in frames:
                file.write(bytes(-file.tell() % ALIGNMENT))
                file.write(frame)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_file(path: str | os.PathLike[str]) -> Any:
    """Read what :func:`write_file` wrote. The file is a pickle: read only files you trust.

    Tensors share one buffer of the file's size, and may be written to.

    Raises:
        DataError: names the file where it is something else, cut short, or changed.
        FileNotFoundError: where there is none.
    """
    content = bytearray(Path(path).stat().st_size)
    with open(path, "rb") as file:
        size = file.readinto(content)
    view = memoryview(content)[:size]
    if bytes(view[: len(MAGIC)]) != MAGIC:
        raise DataError(f"{path} is not a DataProto file: it does not start with {MAGIC!r}.")
    place = len(MAGIC) + _NUMBER
    num_frames = int.from_bytes(view[len(MAGIC) : place], "little")
    end = place + num_frames * _NUMBER
    if end + hashlib.sha256().digest_size > size:
        raise DataError(f"{path} is damaged: it is cut short at {size} bytes. Write it again.")
    sizes = [int.from_bytes(view[at : at + _NUMBER], "little") for at in range(place, end, _NUMBER)]
    digest = hashlib.sha256(view[len(MAGIC) : end])
    place = end + digest.digest_size
    expected = bytes(view[end:place])
    frames = []
    for frame_size in sizes:
        place += -place % ALIGNMENT
        frames.append(view[place : place + frame_size])
        place += frame_size
    if place != size:
        raise DataError(f"{path} is damaged: it has {size} bytes where its table says {place}. Write it again.")
    for frame in frames:
        digest.update(frame)
    if digest.digest() != expected:
        raise DataError(f"{path} is damaged: its SHA-256 is not the one it was written with. Write it again.")
    return pickle.loads(frames[0], buffers=frames[1:])
