"""Checkpoints as folders that are whole or not there.

    <store>/step_000120/...            what the run wrote, plus manifest.json: sizes and checksums of all files
    <store>/latest                     the name of the newest whole folder, for people and other tools
    <store>/best                       the name of the folder that was called the best, where one was
    <store>/unfinished_step_000130/    being written, or left by a run that died; removed before the next is written
    <store>/step_000120_replaced/      the same step written earlier, while the newer one takes its name

Where it stands: the run writes into a folder that :meth:`CheckpointStore.writing` gives it; the roles' own files lie in
it. Invariants: a folder gets its final name only when every byte of it is on disk; an older checkpoint is deleted only
after that; reading skips what is damaged, names it, and takes the one before.

"Newest" is by order of writing, not by step: after going back to an older step, its successors are the newer ones.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.errors import CheckpointError

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
LATEST, BEST = "latest", "best"
RESUME_MODES = ("never", "auto")
_PREFIX, _UNFINISHED, _REPLACED = "step_", "unfinished_", "_replaced"


@dataclass(frozen=True)
class Manifest:
    """What a whole checkpoint folder holds.

    Attributes:
        step: training step.
        sequence: how many checkpoints were written to the store before this one.
        files: relative path -> (bytes, CRC-32).
    """

    step: int
    sequence: int
    files: dict[str, tuple[int, int]]


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        folder: made at the first write.
        keep: newest checkpoints kept, and the best one; 0 keeps all.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 0) -> None:
        # Absolute: device processes write into it too, and may have another working directory.
        self.root, self.keep = Path(folder).absolute(), keep

    def folder(self, step: int) -> Path:
        """Where the checkpoint of a step lies once it is whole."""
        return self.root / f"{_PREFIX}{step:06d}"

    @contextlib.contextmanager
    def writing(self, step: int) -> Iterator[Path]:
        """Give a folder to write into; at the end of the block make it the checkpoint of ``step``.

        A failing block leaves no trace. An exception that is not an OSError passes, with a note on what is still there.

        Raises:
            CheckpointError: something cannot be written (disk full, no permission): the path, the system's reason, and
                which checkpoint is intact.
        """
        unfinished = self.root / f"{_UNFINISHED}{self.folder(step).name}"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            for old in self.root.glob(f"{_UNFINISHED}*"):
                shutil.rmtree(old) if old.is_dir() else old.unlink()
            unfinished.mkdir()
            yield unfinished
            self._finish(step, unfinished)
        except BaseException as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            # Timeouts and lost connections are OSErrors too, but not the system's word on a file.
            if not isinstance(error, OSError) or error.errno is None:
                error.add_note(f"The checkpoint of step {step} was not written. {self._intact()}")
                raise
            where = error.filename or unfinished
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written: {where}: {error.strerror or error}. "
                f"{self._intact()} Free space or choose another runs_dir, then continue with checkpoint.resume=auto."
            ) from error

    def checkpoints(self) -> list[tuple[int, Path]]:
        """(step, folder) of all checkpoints with a readable manifest, oldest first; files are not looked at."""
        found = []
        for path in self.root.glob(f"{_PREFIX}*"):
            with contextlib.suppress(CheckpointError):
                manifest = read_manifest(path)
                found.append((manifest.sequence, manifest.step, path))
        return [(step, path) for _, step, path in sorted(found)]

    def latest(self, contents: bool = True) -> tuple[int, Path] | None:
        """Step and folder of the newest whole checkpoint, None where there is none; damaged ones are skipped loudly.

        Args:
            contents: compare checksums too, not only sizes.
        """
        readable = self.checkpoints()
        unreadable = set(self.root.glob(f"{_PREFIX}*")) - {path for _, path in readable}
        for path in [*sorted(unreadable), *(path for _, path in reversed(readable))]:
            try:
                return verify(path, contents).step, path
            except CheckpointError as error:
                log.warning("checkpoint %s is skipped: %s", path, error)
        return None

    def write_json(self, path: Path, data: Any) -> None:
        """Write a small file of the driver's own state into a checkpoint."""
        path.write_text(json.dumps(data, indent=2) + "\n", "utf-8")

    def read_json(self, path: Path) -> Any:
        """Read what :meth:`write_json` wrote; CheckpointError where it cannot be read."""
        return _read_json(path)

    def _finish(self, step: int, unfinished: Path) -> None:
        files = {}
        for path in sorted(p for p in unfinished.rglob("*") if p.is_file()):
            _fsync(path)
            files[str(path.relative_to(unfinished))] = (path.stat().st_size, _checksum(path))
        earlier = self.checkpoints()
        sequence = read_manifest(earlier[-1][1]).sequence + 1 if earlier else 0
        manifest = unfinished / MANIFEST
        contents = {"step": step, "sequence": sequence, "files": files}
        self.write_json(manifest, {**contents, "checksum": _checksum_of(contents)})
        _fsync(manifest)
        for path in [p for p in unfinished.rglob("*") if p.is_dir()] + [unfinished]:
            _fsync(path)
        final = self.folder(step)
        if final.exists():
            # The same step again: a folder cannot be replaced in one go, so the old one steps aside first, under a
            # name by which it is found should the run die between the two.
            aside = self.root / f"{final.name}{_REPLACED}"
            shutil.rmtree(aside, ignore_errors=True)
            final.rename(aside)
        unfinished.rename(final)
        _fsync(self.root)
        self._point(LATEST, final)
        for path in self.root.glob(f"{_PREFIX}*{_REPLACED}"):
            shutil.rmtree(path)
        self._prune()

    def call_best(self, step: int) -> None:
        """Keep the checkpoint of a step until another one is called the best."""
        self._point(BEST, self.folder(step))
        self._prune()

    def _point(self, name: str, folder: Path) -> None:
        """Write a folder's name into the small file ``name``, in one go."""
        fresh = self.root / f"{_UNFINISHED}{name}"
        fresh.write_text(folder.name + "\n", "utf-8")
        _fsync(fresh)
        fresh.rename(self.root / name)

    def _prune(self) -> None:
        """Delete what is neither among the newest nor the best."""
        best = (self.root / BEST).read_text("utf-8").strip() if (self.root / BEST).is_file() else ""
        for _, path in self.checkpoints()[: -self.keep] if self.keep else []:
            if path.name != best:
                shutil.rmtree(path)
        _fsync(self.root)

    def _intact(self) -> str:
        last = self.latest(contents=False)
        return f"The checkpoint {last[1]} (step {last[0]}) is intact." if last else "There is no earlier checkpoint."


def resume_from(resume: str, store: CheckpointStore, contents: bool = True) -> tuple[int, Path] | None:
    """The checkpoint that ``checkpoint.resume`` asks for, as (step, folder); None starts a new run.

    Args:
        resume: ``never``, ``auto`` or a checkpoint folder.
        contents: compare checksums too, not only sizes.

    Raises:
        CheckpointError: ``never`` while the run's folder has a checkpoint; a folder that is no whole checkpoint;
            ``auto`` where there are checkpoints but all are damaged.
    """
    if resume == "never":
        # By name, not by manifest: also a damaged checkpoint is one that a new run must not start over.
        present = sorted(path.name for path in store.root.glob(f"{_PREFIX}*"))
        if present:
            raise CheckpointError(
                f"checkpoint.resume='never', but {store.root} already has a checkpoint, {present[-1]}. "
                "Set checkpoint.resume=auto to continue that run, or give this one another name."
            )
        return None
    if resume == "auto":
        found = store.latest(contents)
        if found is None and any(store.root.glob(f"{_PREFIX}*")):
            raise CheckpointError(
                f"checkpoint.resume='auto', but every checkpoint in {store.root} is damaged (see the warnings). "
                "Remove them to start anew."
            )
        return found
    path = Path(resume)
    if not resume or not path.is_dir():
        raise CheckpointError(f"checkpoint.resume={resume!r} is neither 'never', 'auto' nor a folder.")
    try:
        return verify(path, contents).step, path
    except CheckpointError as error:
        inside = [*CheckpointStore(path).checkpoints(), *CheckpointStore(path / "checkpoints").checkpoints()]
        hint = f" Give one of the folders in it, such as {inside[-1][1]}." if inside else ""
        raise CheckpointError(f"checkpoint.resume={resume!r} is no whole checkpoint: {error}{hint}") from error


def verify(folder: Path, contents: bool = True) -> Manifest:
    """Compare a checkpoint with its manifest.

    Raises:
        CheckpointError: names the first file that is missing, of another size, or (``contents``) of other contents.
    """
    manifest = read_manifest(folder)
    for name, (size, checksum) in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing.")
        if path.stat().st_size != size:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes, it was written with {size}.")
        try:
            same = not contents or _checksum(path) == checksum
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
        if not same:
            raise CheckpointError(f"{path} has other contents than were written: it is damaged.")
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """A checkpoint's manifest; CheckpointError where there is none or it is damaged."""
    data = _read_json(folder / MANIFEST)
    try:
        stated = data.pop("checksum", None)  # older checkpoints have none
        if stated not in (None, _checksum_of(data)):
            raise ValueError("it has other contents than were written")
        files = {name: (int(size), int(checksum)) for name, (size, checksum) in data["files"].items()}
        return Manifest(int(data["step"]), int(data["sequence"]), files)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder / MANIFEST} is damaged ({type(error).__name__}: {error}).") from error


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: it is not JSON ({error}).") from error


def _checksum_of(data: Any) -> int:
    return zlib.crc32(json.dumps(data, sort_keys=True).encode())


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            value = zlib.crc32(block, value)
    return value


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
