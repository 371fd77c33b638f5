"""What holds for every test: no network, no usage statistics, fast tests first, the same examples every time."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

# Before any library is imported: they read these at import.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")
# Where other processes keep the cores busy, threads that wait for each other slow tiny sums down fifty times.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

# The same examples every time, and no deadline: the machine may be busy.
settings.register_profile("hybridflow", deadline=None, derandomize=True, database=None)
settings.load_profile("hybridflow")

SLOW_MARKERS = ("ray", "distributed", "e2e")
SHARED_RUNS = [f"tests/e2e/test_{name}.py" for name in ("examples", "placement", "resume")]


def speed(item: pytest.Item) -> int:
    """0 for a test without a marker, then by the slowest marker it carries."""
    return max((1 + i for i, name in enumerate(SLOW_MARKERS) if item.get_closest_marker(name)), default=0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast tests first: a broken function is reported before minutes of whole runs. Stable within one speed."""
    items.sort(key=speed)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files share their fixtures on one worker, as with ``--dist loadfile``; files that share whole runs are one."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return SHARED_RUNS[0] if file in SHARED_RUNS else file

    return Scheduling(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    """Ray's token is there before two workers start Ray at once: each would write one of its own."""
    if not (Path.home() / ".ray" / "auth_token").exists():
        ray = Path(sys.executable).parent / "ray"
        subprocess.run([str(ray), "get-auth-token", "--generate"], check=True, capture_output=True)
