"""Checkpoints are whole or absent: interrupted, failing and damaged ones never pass for whole ones."""

import itertools
import json
import logging
import multiprocessing
import os
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybridflow.checkpoint import MANIFEST, CheckpointStore, resume_from, verify
from hybridflow.errors import CheckpointError, WorkerError


def write(store: CheckpointStore, step: int, text: str = "weights") -> Path:
    with store.writing(step) as folder:
        (folder / "actor").mkdir()
        (folder / "actor" / "model.bin").write_text(text)
        store.write_json(folder / "run.json", {"step": step})
    return store.folder(step)


def test_a_checkpoint_appears_under_its_name_with_all_files(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    assert store.latest() is None
    folder = write(store, 3)
    assert folder == tmp_path / "checkpoints" / "step_000003"
    assert store.latest() == (3, folder)
    assert (store.root / "latest").read_text() == "step_000003\n"
    assert store.read_json(folder / "run.json") == {"step": 3}
    assert set(verify(folder).files) == {"actor/model.bin", "run.json"}
    assert sorted(p.name for p in store.root.iterdir()) == ["latest", "step_000003"]


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (10, 20, 30):
        write(store, step)
    assert [step for step, _ in store.checkpoints()] == [20, 30]
    assert not store.folder(10).exists()


def test_the_best_is_kept_beside_the_newest_until_another_is_better(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    write(store, 1)
    store.call_best(1)
    for step in (2, 3):
        write(store, step)
    assert [step for step, _ in store.checkpoints()] == [1, 3]
    assert store.latest() == (3, store.folder(3)) and (store.root / "best").read_text() == "step_000001\n"
    store.call_best(3)
    assert [step for step, _ in store.checkpoints()] == [3]


def test_keep_zero_keeps_all(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=0)
    for step in (1, 2, 3, 4):
        write(store, step)
    assert [step for step, _ in store.checkpoints()] == [1, 2, 3, 4]


def test_the_old_ones_are_still_there_while_the_new_one_is_written(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    write(store, 1)
    with store.writing(2) as folder:
        (folder / "x").write_text("x")
        assert store.latest() == (1, store.folder(1))
    assert store.latest() == (2, store.folder(2))
    assert not store.folder(1).exists()


def test_after_going_back_the_newly_written_one_is_the_newest(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (10, 20):
        write(store, step)
    write(store, 15)  # a run that was resumed from step 10
    assert store.latest() == (15, store.folder(15))
    assert [step for step, _ in store.checkpoints()] == [20, 15]


def test_the_same_step_can_be_written_again(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    write(store, 5, "old")
    write(store, 5, "new")
    assert (store.folder(5) / "actor" / "model.bin").read_text() == "new"
    assert sorted(p.name for p in store.root.iterdir()) == ["latest", "step_000005"]


def die(target: Callable[[Path], None], root: Path) -> None:
    """Run a function that kills its process."""
    child = multiprocessing.get_context("fork").Process(target=target, args=(root,))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL


def _die_while_replacing(root: Path) -> None:
    rename = Path.rename

    def last(path: Path, target: Path) -> None:
        rename(path, target)
        os.kill(os.getpid(), signal.SIGKILL)

    Path.rename = last  # type: ignore[assignment,method-assign]
    write(CheckpointStore(root, keep=1), 5, "new")


def test_a_run_that_dies_while_a_step_is_replaced_loses_neither(tmp_path: Path) -> None:
    """The old folder has lost its name and the new one has not got it yet."""
    store = CheckpointStore(tmp_path, keep=1)
    write(store, 5, "old")
    die(_die_while_replacing, tmp_path)
    assert not store.folder(5).exists()
    step, folder = store.latest() or (0, tmp_path)
    assert (step, (folder / "actor" / "model.bin").read_text()) == (5, "old")
    assert resume_from("auto", store) == (5, folder)
    write(store, 6)
    assert sorted(p.name for p in store.root.iterdir()) == ["latest", "step_000006"]


def corrupt(path: Path) -> None:
    """Flip one bit of the byte in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: corrupt(folder / "actor" / "model.bin"), "model.bin has other contents than were written"),
        (lambda folder: (folder / "actor" / "model.bin").unlink(), "model.bin is missing"),
        (lambda folder: os.truncate(folder / "actor" / "model.bin", 3), "model.bin has 3 bytes, it was written with 7"),
        (lambda folder: (folder / "run.json").unlink(), "run.json is missing"),
        (lambda folder: (folder / MANIFEST).unlink(), "manifest.json cannot be read: No such file or directory"),
        (lambda folder: (folder / MANIFEST).write_text("{"), "manifest.json is damaged: it is not JSON"),
        (lambda folder: (folder / MANIFEST).write_text("{}"), "manifest.json is damaged"),
    ],
)
def test_a_damaged_checkpoint_is_skipped_by_name_and_the_one_before_is_taken(damage, reason, tmp_path, caplog) -> None:
    store = CheckpointStore(tmp_path)
    write(store, 1)
    damage(write(store, 2))
    with caplog.at_level(logging.WARNING):
        assert store.latest() == (1, store.folder(1))
    assert "step_000002 is skipped" in caplog.text
    assert reason in caplog.text
    with pytest.raises(CheckpointError, match="step_000002.* is no whole checkpoint"):
        resume_from(str(store.folder(2)), store)


def test_sizes_alone_do_not_see_changed_contents(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    corrupt(write(store, 1) / "actor" / "model.bin")
    assert store.latest(contents=False) == (1, store.folder(1))
    assert store.latest(contents=True) is None


def test_a_failing_block_leaves_nothing_and_says_what_is_intact(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    write(store, 1)
    with pytest.raises(WorkerError) as caught:
        with store.writing(2) as folder:
            (folder / "x").write_text("x")
            raise WorkerError("actor", 0, "save", 2, "RuntimeError: no")
    assert "step 2 was not written" in caught.value.__notes__[0]
    assert f"{store.folder(1)} (step 1) is intact" in caught.value.__notes__[0]
    assert sorted(p.name for p in store.root.iterdir()) == ["latest", "step_000001"]


def test_a_timeout_is_not_taken_for_a_full_disk(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError) as caught:
        with CheckpointStore(tmp_path).writing(1):
            raise TimeoutError("no answer")
    assert "There is no earlier checkpoint." in caught.value.__notes__[0]


def test_a_write_that_the_system_refuses_names_path_reason_and_what_is_intact(tmp_path: Path) -> None:
    """The limit on a file's size makes the kernel refuse the write, as a full disk does."""
    store = CheckpointStore(tmp_path)
    write(store, 1)
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(CheckpointError) as caught:
            write(store, 2, "x" * 10000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    text = str(caught.value)
    assert text.startswith("the checkpoint of step 2 could not be written: ")
    assert os.strerror(27) in text  # EFBIG
    assert f"The checkpoint {store.folder(1)} (step 1) is intact." in text
    assert store.latest() == (1, store.folder(1))


def test_a_store_below_a_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file.*: Not a directory\. There is no earlier checkpoint\."):
        write(CheckpointStore(tmp_path / "file" / "checkpoints"), 1)


def _write_and_die(root: Path) -> None:
    with CheckpointStore(root).writing(2) as folder:
        (folder / "model.bin").write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_writer_leaves_the_earlier_checkpoint_and_its_remains_are_removed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    write(store, 1)
    die(_write_and_die, tmp_path)
    assert (tmp_path / "unfinished_step_000002").is_dir()
    assert store.latest() == (1, store.folder(1))
    write(store, 3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_000001", "step_000003"]


def _write_and_die_at(call: int, step: int, root: Path) -> None:
    """Write a checkpoint, but die before files are moved, deleted or brought to the disk for the ``call``-th time."""
    left = itertools.count(call, -1)

    def dying(function: Callable) -> Callable:
        def or_die(*args, **kwargs):
            if next(left) == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return or_die

    os.fsync, shutil.rmtree = dying(os.fsync), dying(shutil.rmtree)
    Path.rename = dying(Path.rename)  # type: ignore[assignment,method-assign]
    write(CheckpointStore(root, keep=1), step, "new")


@pytest.mark.parametrize(("step", "calls"), [(1, 13), (2, 11)])
def test_at_every_moment_there_is_a_whole_checkpoint(tmp_path: Path, step: int, calls: int) -> None:
    """With one kept, while that one is written again and while the next one is."""
    found = []
    for call in range(calls + 1):
        store = CheckpointStore(tmp_path / str(call), keep=1)
        write(store, 1, "old")
        child = multiprocessing.get_context("fork").Process(target=_write_and_die_at, args=(call, step, store.root))
        child.start()
        child.join()
        assert child.exitcode == (-signal.SIGKILL if call < calls else 0), call
        which, folder = store.latest() or (0, store.root)
        found.append((which, (folder / "actor" / "model.bin").read_text()))
        if step == 2:
            verify(store.root / (store.root / "latest").read_text().strip())
    assert found[0] == (1, "old") and found[-1] == (step, "new") and set(found) == {found[0], found[-1]}


def test_never_refuses_a_run_that_has_a_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    assert resume_from("never", store) is None
    write(store, 7)
    with pytest.raises(CheckpointError, match=r"already has a checkpoint, step_000007\. Set checkpoint\.resume=auto"):
        resume_from("never", store)


def test_auto_takes_the_newest_whole_one_or_starts_anew(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    assert resume_from("auto", store) is None
    write(store, 7)
    assert resume_from("auto", store) == (7, store.folder(7))


def test_auto_refuses_a_run_whose_checkpoints_are_all_damaged(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    corrupt(write(store, 7) / "run.json")
    with pytest.raises(CheckpointError, match="every checkpoint in .* is damaged"):
        resume_from("auto", store)


def test_a_folder_names_the_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        write(store, step)
    assert resume_from(str(store.folder(1)), store) == (1, store.folder(1))
    with pytest.raises(CheckpointError, match="checkpoint.resume='no/where' is neither 'never', 'auto' nor a folder"):
        resume_from("no/where", store)


def test_the_manifest_is_readable_json(tmp_path: Path) -> None:
    manifest = json.loads((write(CheckpointStore(tmp_path), 1) / MANIFEST).read_text())
    assert manifest["step"] == 1
    assert manifest["files"]["actor/model.bin"][0] == len("weights")


def test_never_also_refuses_to_start_over_a_damaged_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    with store.writing(2) as folder:
        (folder / "weights").write_text("1")
    (store.folder(2) / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match="already has a checkpoint, step_000002"):
        resume_from("never", store)


def test_a_manifest_that_says_another_step_is_damaged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = CheckpointStore(tmp_path)
    older, newer = write(store, 1), write(store, 2)
    path = newer / MANIFEST
    path.write_text(path.read_text().replace('"step": 2', '"step": 3'))
    assert store.latest() == (1, older)
    assert f"{path} is damaged (ValueError: it has other contents than were written)" in caplog.text


def test_a_manifest_without_a_checksum_of_its_own_is_taken(tmp_path: Path) -> None:
    folder = write(CheckpointStore(tmp_path), 1)
    manifest = json.loads((folder / MANIFEST).read_text())
    del manifest["checksum"]
    (folder / MANIFEST).write_text(json.dumps(manifest))
    assert verify(folder).step == 1


def test_a_file_that_the_disk_no_longer_gives_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path)
    older, newer = write(store, 1), write(store, 2)
    opened = Path.open

    def failing(path: Path, *args: Any, **options: Any) -> Any:
        if path == newer / "run.json":
            raise OSError(5, "Input/output error")
        return opened(path, *args, **options)

    monkeypatch.setattr(Path, "open", failing)
    with pytest.raises(CheckpointError, match=r"run\.json cannot be read: Input/output error"):
        verify(newer)
    assert store.latest() == (1, older)


def test_a_folder_of_checkpoints_names_the_newest_to_resume_from(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    folder = write(store, 1)
    for given in (store.root, tmp_path / "run"):
        with pytest.raises(CheckpointError, match=f"Give one of the folders in it, such as {folder}"):
            resume_from(str(given), store)
    with pytest.raises(CheckpointError, match="checkpoint.resume='' is neither 'never', 'auto' nor a folder"):
        resume_from("", store)
