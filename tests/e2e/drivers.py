"""A driver as a child process: started with overrides, watched through the files of its run, interrupted or waited for.

Everything a test knows of a run comes from here, as a user would see it: exit code, what was printed, files, processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
SFT, GRPO, DAPO, ONE_STEP_OFF, ASYNC_GRPO, REMAX, DISTILL, DPO, PPO, SAFE_RLHF, REWARD_MODEL = (
    ROOT / "examples" / f"{name}.py"
    for name in (
        *("sft", "grpo", "dapo", "one_step_off", "async_grpo", "remax", "distill", "dpo"),
        *("ppo", "safe_rlhf", "reward_model"),
    )
)


@dataclass(frozen=True)
class Ended:
    """A driver that has ended.

    Attributes:
        code: exit code.
        out, err: what it printed.
        seconds: of processor time that it took itself, without Ray and the device processes.
    """

    code: int
    out: str
    err: str
    seconds: float


class Driver:
    """A running driver.

    Args:
        script: the driver's file.
        overrides: its arguments.
        folder: where its output is kept.
    """

    def __init__(self, script: Path, overrides: list[str], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._out, self._err = folder / "out.txt", folder / "err.txt"
        with self._out.open("w") as out, self._err.open("w") as err:
            self._process = subprocess.Popen(
                [sys.executable, str(script), *overrides],
                cwd=ROOT,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                stdout=out,
                stderr=err,
                start_new_session=True,  # as a shell does: Ctrl-C reaches the driver and all its children
            )
        self.run_dir = Path(value_of(overrides, "runs_dir")) / value_of(overrides, "name")

    def wait(self, timeout: float = 240.0) -> Ended:
        """Wait for the end; one that does not come is ended and fails the test."""
        self._until(self._ended, timeout, "it ends")
        usage = self._usage
        return Ended(
            os.waitstatus_to_exitcode(self._status),
            self._out.read_text(),
            self._err.read_text(),
            usage.ru_utime + usage.ru_stime,
        )

    def wait_for_step(self, step: int, timeout: float = 240.0) -> None:
        """Wait until a step has its row in ``metrics.jsonl``."""
        path = self.run_dir / "metrics.jsonl"

        def reported() -> bool:
            assert not self._ended(), f"ended before step {step}:\n{self._tail()}"
            return path.is_file() and f'"step":{step},' in path.read_text()

        self._until(reported, timeout, f"step {step} is reported")

    def interrupt(self) -> None:
        """What Ctrl-C in a terminal does: SIGINT for the driver and for what it has started."""
        os.killpg(self._process.pid, signal.SIGINT)

    def descendants(self) -> list[psutil.Process]:
        """Every process below the driver: Ray's own, device processes and what those have started."""
        return psutil.Process(self._process.pid).children(recursive=True)

    def stop(self) -> None:
        """Kill the driver and everything below it; nothing where it has ended."""
        if self._ended():
            return
        for process in [*self.descendants(), psutil.Process(self._process.pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._until(self._ended, 10, "it is killed")

    def _ended(self) -> bool:
        if self._process.returncode is None:
            pid, status, usage = os.wait4(self._process.pid, os.WNOHANG)
            if pid:
                self._process.returncode, self._status, self._usage = status, status, usage
        return self._process.returncode is not None

    def _until(self, condition: Callable[[], bool], timeout: float, what: str) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline:
                self.stop()
                raise AssertionError(f"not within {timeout:.0f} s: {what}\n{self._tail()}")
            time.sleep(0.05)

    def _tail(self) -> str:
        return f"{self._out.read_text()[-3000:]}\n--- stderr\n{self._err.read_text()[-3000:]}"


def value_of(overrides: list[str], key: str) -> str:
    """The value that the last override of a setting gives."""
    return [text.removeprefix(f"{key}=") for text in overrides if text.startswith(f"{key}=")][-1]


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def metrics_of(run_dir: Path) -> dict[int, dict[str, Any]]:
    """The rows of ``metrics.jsonl`` by step."""
    rows = rows_of(run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == sorted({row["step"] for row in rows}), "a step has one row, in order"
    return {row["step"]: row for row in rows}


def survivors(processes: list[psutil.Process], within: float = 15.0) -> list[str]:
    """The command lines of the processes that are still there after some seconds."""
    _, alive = psutil.wait_procs(processes, timeout=within)
    found = []
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline())[:200])
    return found
