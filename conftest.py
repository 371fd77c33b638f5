"""What holds for every test: no network, no usage statistics, fast tests first, the same examples every time."""

import os

# Before any library is imported: they read these at import.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the other worker has a core to itself too

import pytest
from hypothesis import settings

# The same examples every time, and no deadline: the machine may be busy.
settings.register_profile("hybridflow", deadline=None, derandomize=True, database=None)
settings.load_profile("hybridflow")

SLOW_MARKERS = ("ray", "distributed", "e2e")


def speed(item: pytest.Item) -> int:
    """0 for a test without a marker, then by the slowest marker it carries."""
    return max((1 + i for i, name in enumerate(SLOW_MARKERS) if item.get_closest_marker(name)), default=0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast tests first: a broken function is reported before minutes of whole runs. Stable within one speed."""
    items.sort(key=speed)
