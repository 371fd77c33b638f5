"""Memory of a trainer that comes and goes: gradients, optimizer state, parameters.

Storages are emptied and filled again in place, so that every view of them (parameters, ``main_grad``, megatron-core's
buckets, optimizer state) is whole again afterwards and nothing has to be built anew. What has to be kept goes to the
next slower memory: pinned host memory from a GPU, a file from a CPU.

Invariant: between :meth:`Offload.release` and :meth:`Offload.restore` nobody touches the tensors; their shapes are
still there, but no memory stands behind them. ``resharding/hybrid`` sees to that.
"""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import IO, TYPE_CHECKING, Any

import torch

from hybridflow.platform import current

if TYPE_CHECKING:
    from hybridflow.engines.megatron.engine import MegatronEngine


class Offload:
    """The memory behind some tensors. After an error both methods go on with what is left.

    Args:
        tensors: called at each release, since optimizer state appears with the first update.
        kept: whether the contents come back; else they are undefined.
        version: of contents that seldom change, such as a frozen model's: what was written serves every release until
            the number it returns is another one. None writes at each.
        folder: where files of a CPU go; "" is the system's folder for temporary files.
    """

    def __init__(
        self,
        tensors: Callable[[], Iterable[torch.Tensor]],
        *,
        kept: bool,
        version: Callable[[], int] | None = None,
        folder: str = "",
    ) -> None:
        self._tensors, self._kept, self._version, self._folder = tensors, kept, version, folder
        self._written: int | None = None  # version of what lies in the places
        self._away: list[tuple[torch.UntypedStorage, int, Any]] = []
        self._places: dict[int, Any] = {}  # pinned memory, or where in the file
        self._file: IO[bytes] | None = None

    def release(self) -> None:
        if self._version is not None and not self._away and self._written != self._version():
            self._close()
            self._written = self._version()
        for storage in storages(self._tensors()):
            size = storage.nbytes()
            place = self._save(storage) if self._kept else None
            storage.resize_(0)
            self._away.append((storage, size, place))

    def restore(self) -> None:
        while self._away:
            storage, size, place = self._away[-1]
            storage.resize_(size)
            if self._kept:
                self._load(storage, place)
            self._away.pop()
        if self._version is None and self._file is not None:
            self._close()

    def _close(self) -> None:
        """Forget what was written."""
        if self._file is not None:
            self._file.close()
        self._file, self._places = None, {}

    def _save(self, storage: torch.UntypedStorage) -> Any:
        content, place = _bytes(storage), self._places.get(storage._cdata)
        if self._version is not None and place is not None:
            return place
        if current().is_cuda:
            # Pinning takes longer than copying, so the memory is kept for the next time.
            if place is None or place.numel() != content.numel():
                place = torch.empty_like(content, device="cpu", pin_memory=True)
            place.copy_(content)
        else:
            if self._file is None:
                # Without a name from the start, so that no end of the process leaves it behind.
                self._file = tempfile.TemporaryFile(dir=self._folder or None, buffering=0)  # noqa: SIM115
            place = self._file.seek(0, 2)
            _all_of(self._file.write, content)
        self._places[storage._cdata] = place
        return place

    def _load(self, storage: torch.UntypedStorage, place: Any) -> None:
        content = _bytes(storage)
        if current().is_cuda:
            content.copy_(place)
        else:
            assert self._file is not None
            self._file.seek(place)
            _all_of(self._file.readinto, content)  # type: ignore[attr-defined]


def gradients(engine: MegatronEngine) -> Iterator[torch.Tensor]:
    """The buffers that all gradients are views of."""
    for model in engine.models:
        for buffer in [*model.buffers, *model.expert_parallel_buffers]:  # type: ignore[union-attr]
            yield buffer.grad_data


def optimizer_state(engine: MegatronEngine) -> Iterator[torch.Tensor]:
    """Moments that exist already, and float32 main copies where the parameters are of another dtype."""
    assert engine.optimizer is not None
    own = {storage._cdata for storage in storages(parameters(engine))}
    for part in engine.optimizer.inner.chained_optimizers:
        for state in part.optimizer.state.values():
            # Adam's step is one number, which it reads to tell how far the schedule is.
            yield from (value for value in state.values() if isinstance(value, torch.Tensor) and value.dim())
        for group in part.optimizer.param_groups:
            yield from (main for main in group["params"] if main.untyped_storage()._cdata not in own)


def parameters(engine: MegatronEngine) -> Iterator[torch.Tensor]:
    yield from engine.parameters().values()


def storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """The memory behind tensors, each once, without what is empty."""
    found = {storage._cdata: storage for tensor in tensors for storage in [tensor.untyped_storage()]}
    return [storage for storage in found.values() if storage.nbytes()]


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _all_of(move: Callable[[Any], int | None], content: torch.Tensor) -> None:
    """Write or read all bytes; one call moves 2 GiB at most."""
    # Not by numpy(), after which torch refuses to resize the memory.
    rest = memoryview((ctypes.c_char * content.numel()).from_address(content.data_ptr())).cast("B")
    while rest:
        moved = move(rest)
        if not moved:
            raise OSError(f"{len(rest)} bytes of a file with offloaded memory are missing")
        rest = rest[moved:]
