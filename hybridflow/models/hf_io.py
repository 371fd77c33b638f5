"""Reading and writing Hugging Face folders through tables: safetensors on one side, local parameters on the other.

Where it stands: engines load their shard at start-up, a run exports its model at the end. Reading touches only the
slices a rank needs; writing assembles one tensor file at a time, from one process or from the ranks of a group.

Invariants: after :func:`load_parameters` every element of every parameter is the checkpoint's or zero (padding); a
folder that :func:`export_folder` made is complete, because it appears under its name only after all of it is on disk.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hybridflow.errors import CheckpointError, HybridFlowError, ModelError, nearest
from hybridflow.models.spec import ModelSpec, read_json
from hybridflow.models.tables import hf_table
from hybridflow.resharding.boxes import Box, ParameterBoxes, Piece, extents, find, slices, uncovered, whole

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
FLOAT_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# What a Hugging Face folder holds besides weights and config.json, and a trained model still needs.
MODEL_FILES = ("generation_config.json", "*.py", "LICENSE*")
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "*.jinja",
    "*chat_template*",
)

Part = tuple[Mapping[str, ParameterBoxes], Mapping[str, torch.Tensor]]


@torch.no_grad()
def load_parameters(
    folder: str | Path, table: Mapping[str, ParameterBoxes], parameters: Mapping[str, torch.Tensor]
) -> None:
    """Fill local parameters from a Hugging Face folder, in place, cast to each parameter's dtype.

    Raises:
        ModelError: table and parameters disagree, or the checkpoint lacks a tensor, or has it in another shape or in a
            dtype that is not floating point; names each.
    """
    _check_parameters(table, parameters)
    needed = {box.tensor for parameter in table.values() for box in parameter.boxes}
    with Checkpoint(folder) as checkpoint:
        checkpoint.check(needed)
        for name, boxes in table.items():
            target = parameters[name]
            for box in boxes.boxes:
                target[slices(box.target)].copy_(checkpoint.read(box))
            for padding in uncovered(whole(boxes.shape), [box.target for box in boxes.boxes]):
                target[slices(padding)].zero_()


class Checkpoint:
    """The safetensors of a Hugging Face folder, one file or an index of several; opened on demand, read by slices."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        if (self.folder / SINGLE_FILE).is_file():
            self._file_of = dict.fromkeys(self._open(SINGLE_FILE).keys(), SINGLE_FILE)
        elif (self.folder / INDEX_FILE).is_file():
            index = read_json(self.folder / INDEX_FILE).get("weight_map")
            if not isinstance(index, dict):
                raise ModelError(f"{self.folder / INDEX_FILE}: has no weight_map.")
            self._file_of = {str(tensor): str(file) for tensor, file in index.items()}
        else:
            raise ModelError(
                f"{self.folder}: neither {SINGLE_FILE} nor {INDEX_FILE} is there. Weights are read from safetensors; "
                "convert others with transformers' save_pretrained."
            )

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def check(self, tensors: Iterable[str]) -> None:
        """Refuse a checkpoint whose tensors are not as its config.json says; see :func:`load_parameters`."""
        shapes = hf_table(ModelSpec.from_folder(self.folder))
        for name in sorted(tensors):
            if name not in self._file_of:
                raise ModelError(f"{self.folder}: there is no tensor {name}.{nearest(name, self._similar(name))}")
            stored = self._slice(name)
            if name not in shapes:
                raise ModelError(f"{self.folder}: config.json describes a model without {name}.")
            if tuple(stored.get_shape()) != shapes[name]:
                found, said = list(stored.get_shape()), list(shapes[name])
                raise ModelError(f"{self.folder}: {name} has shape {found}, config.json says {said}.")
            if stored.get_dtype() not in FLOAT_DTYPES:
                raise ModelError(
                    f"{self.folder}: {name} is stored as {stored.get_dtype()}; readable are {', '.join(FLOAT_DTYPES)}."
                )

    def read(self, box: Box) -> torch.Tensor:
        """The box's slice of its tensor, in the stored dtype: a view of the mapped file, read when copied."""
        with _readable(self.folder / self._file_of[box.tensor]):
            return self._slice(box.tensor)[slices(box.source)]

    def _slice(self, tensor: str) -> Any:
        file = self._file_of[tensor]
        with _readable(self.folder / file):
            return self._open(file).get_slice(tensor)

    def _open(self, file: str) -> Any:
        if file not in self._files:
            with _readable(self.folder / file):
                self._files[file] = self._stack.enter_context(safe_open(self.folder / file, framework="pt"))
        return self._files[file]

    def _similar(self, tensor: str) -> list[str]:
        """Tensors of the checkpoint with the same last words: the whole list would fill a screen."""
        tail = tensor.split(".")[-2:]
        return [name for name in self._file_of if name.split(".")[-2:] == tail][:5]


@torch.no_grad()
def export_folder(
    out: str | Path,
    spec: ModelSpec,
    source_folder: str | Path,
    parts: Iterable[Part],
    *,
    group: dist.ProcessGroup | None = None,
    tokenizer_folder: str | Path | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * 10**9,
) -> Path:
    """Write a Hugging Face folder: weights from local parameters, the rest from the folder the model came from.

    With a group all its ranks call, each with its own parts, and the group's first rank writes: it receives one tensor
    after the other, slice by slice, and holds one file's tensors at a time.

    Args:
        out: the new folder; it must not exist, or be empty.
        source_folder: where config.json, generation_config.json and the tokenizer's files are copied from.
        parts: (table, parameters) at hand; those of all ranks together have to hold every tensor whole.
        group: the ranks that hold the model; None means this process alone.
        tokenizer_folder: where the tokenizer's files are copied from instead.
        dtype: of the weights; None keeps the parameters' own.
        max_shard_bytes: largest weight file; a single tensor above it gets a file to itself.

    Returns:
        The folder's path.

    Raises:
        ModelError: a part of a tensor is held by no rank; names the tensor and the slice.
        CheckpointError: the folder exists, or cannot be written; names the path and the reason. Every rank of the group
            raises what went wrong on one.
    """
    out, source_folder = Path(out).absolute(), Path(source_folder)
    ranks = _Ranks(group)
    weights = _Weights(spec, parts, dtype, ranks)
    temporary = out.parent / f".{out.name}.{os.getpid()}.tmp"

    def begin() -> None:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise CheckpointError(f"{out}: exists already. Choose another folder, or remove it first.")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        _write_side_files(temporary, spec, source_folder, Path(tokenizer_folder or source_folder), weights.dtype)

    def finish() -> None:
        for path in [*sorted(temporary.rglob("*")), temporary]:
            _sync(path)
        os.replace(temporary, out)
        _sync(out.parent)

    with _writable(out, temporary):
        ranks.on_first(begin)
        _write_weights(temporary, weights, max_shard_bytes, ranks)
        ranks.on_first(finish)
    return out


class _Ranks:
    """The ranks that write a folder together."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank, self.size = (group.rank(), group.size()) if group is not None else (0, 1)

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, on every rank."""
        found = [value] * self.size
        if self.group is not None:
            dist.all_gather_object(found, value, group=self.group)
        return found

    def on_first(self, action: Callable[[], None]) -> None:
        """Do something on the first rank; every rank raises what it raises."""
        error: list[Exception | None] = [None]
        if self.rank == 0:
            try:
                action()
            except (OSError, SafetensorError, HybridFlowError) as caught:
                error = [caught]
        if self.group is not None:
            dist.broadcast_object_list(error, group_src=0, group=self.group)
        if error[0] is not None:
            raise error[0]


class _Holder(NamedTuple):
    """Who holds a slice: the rank, the number of its part, the parameter's name."""

    rank: int
    part: int
    name: str


class _Weights:
    """The checkpoint's tensors as they stand in the ranks' parameters, assembled one at a time.

    Building it checks that all of them can be assembled. Of several ranks that hold a slice, the first gives it.
    """

    def __init__(self, spec: ModelSpec, parts: Iterable[Part], dtype: torch.dtype | None, ranks: _Ranks) -> None:
        self.shapes, self.ranks = hf_table(spec), ranks
        self._parts = list(parts)
        self._device = next((p.device for _, parameters in self._parts for p in parameters.values()), "cpu")
        holders: dict[str, list[tuple[_Holder, Box]]] = {}
        dtype_of: dict[_Holder, torch.dtype] = {}
        for rank, described in enumerate(ranks.gather(self._described())):
            if isinstance(described, ModelError):
                raise described
            for number, (table, dtypes) in enumerate(described):
                for name, boxes in table.items():
                    holder = _Holder(rank, number, name)
                    dtype_of[holder] = dtypes[name]
                    for box in boxes.boxes:
                        holders.setdefault(box.tensor, []).append((holder, box))
        self._pieces: dict[str, list[Piece]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        for tensor, shape in self.shapes.items():
            pieces, missing = find(Box(tensor, whole(shape), whole(shape)), holders.get(tensor, []))
            if missing:
                ranges = ", ".join(f"{start}:{stop}" for start, stop in missing[0])
                raise ModelError(f"{tensor}[{ranges}]: no rank at hand holds it, so the checkpoint would not be whole.")
            self._pieces[tensor] = pieces
            self.dtypes[tensor] = dtype or dtype_of[pieces[0].key]  # type: ignore[index]

    def _described(self) -> list[Any] | ModelError:
        """This rank's tables with the dtypes of its parameters, or what is wrong with them."""
        try:
            for table, parameters in self._parts:
                _check_parameters(table, parameters)
        except ModelError as error:
            return error
        return [(table, {name: parameters[name].dtype for name in table}) for table, parameters in self._parts]

    @property
    def dtype(self) -> torch.dtype:
        """What config.json should say: the dtype of most of the weights, counted by tensors."""
        values = list(self.dtypes.values())
        return max(set(values), key=values.count)

    def num_bytes(self, tensor: str) -> int:
        return torch.Size(self.shapes[tensor]).numel() * self.dtypes[tensor].itemsize

    def assemble(self, tensor: str) -> torch.Tensor | None:
        """The whole tensor on the first rank, None on the others; all ranks ask for the same tensors in one order."""
        first, dtype = self.ranks.rank == 0, self.dtypes[tensor]
        whole_tensor = torch.empty(self.shapes[tensor], dtype=dtype) if first else None
        for piece in self._pieces[tensor]:
            holder: _Holder = piece.key  # type: ignore[assignment]
            value = None
            if holder.rank == self.ranks.rank:
                value = (
                    self._parts[holder.part][1][holder.name][slices(piece.source)]
                    .to(dtype)
                    .reshape(extents(piece.target))
                )
                if not first:
                    dist.send(value.contiguous(), group=self.ranks.group, group_dst=0)
            elif first:
                value = torch.empty(extents(piece.target), dtype=dtype, device=self._device)
                dist.recv(value, group=self.ranks.group, group_src=holder.rank)
            if whole_tensor is not None:
                whole_tensor[slices(piece.target)].copy_(value)  # type: ignore[arg-type]
        return whole_tensor


def _write_weights(folder: Path, weights: _Weights, max_shard_bytes: int, ranks: _Ranks) -> None:
    shards: list[list[str]] = [[]]
    filled = 0
    for tensor in weights.shapes:
        size = weights.num_bytes(tensor)
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += size
    names = [f"model-{n + 1:05d}-of-{len(shards):05d}.safetensors" for n in range(len(shards))]
    if len(shards) == 1:
        names = [SINGLE_FILE]
    mode = 0o666 & ~_umask()
    for name, tensors in zip(names, shards, strict=True):
        content = {tensor: weights.assemble(tensor) for tensor in tensors}

        def save(path: Path = folder / name, content: dict[str, Any] = content) -> None:
            save_file(content, path, metadata={"format": "pt"})
            path.chmod(mode)  # safetensors makes its files readable by their owner alone

        ranks.on_first(save)
    if len(shards) > 1:
        total = sum(weights.num_bytes(tensor) for tensor in weights.shapes)
        weight_map = {tensor: name for name, tensors in zip(names, shards, strict=True) for tensor in tensors}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        ranks.on_first(lambda: _write_json(folder / INDEX_FILE, index))


def _write_side_files(folder: Path, spec: ModelSpec, source: Path, tokenizer: Path, dtype: torch.dtype) -> None:
    """config.json with the dtype of the weights, and copies of whatever else the model needs."""
    key = "torch_dtype" if "torch_dtype" in spec.raw and "dtype" not in spec.raw else "dtype"
    _write_json(folder / "config.json", {**spec.raw, key: str(dtype).removeprefix("torch.")})
    for origin, patterns in ((source, MODEL_FILES), (tokenizer, TOKENIZER_FILES)):
        for path in sorted({path for pattern in patterns for path in origin.glob(pattern)}):
            copy = shutil.copytree if path.is_dir() else shutil.copyfile
            copy(path, folder / path.name)


def _check_parameters(table: Mapping[str, ParameterBoxes], parameters: Mapping[str, torch.Tensor]) -> None:
    for name in table:
        if name not in parameters:
            raise ModelError(f"{name}: stands in the table, but the model lacks it.{nearest(name, parameters)}")
        if tuple(parameters[name].shape) != table[name].shape:
            found, said = list(parameters[name].shape), list(table[name].shape)
            raise ModelError(f"{name}: the model's parameter is {found}, its table says {said}.")
    for name in parameters:
        if name not in table:
            raise ModelError(f"{name}: the model has it, but the table does not.{nearest(name, table)}")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _sync(path: Path) -> None:
    """Wait until a file's or folder's content is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    value = os.umask(0)
    os.umask(value)
    return value


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error


@contextmanager
def _writable(out: Path, temporary: Path) -> Iterator[None]:
    """Turn disk errors into CheckpointError, and leave nothing half-written."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{out}: cannot be written: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
