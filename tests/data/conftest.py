"""The demo's model folder and data, written once."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridflow.data.demo import write_demo
from hybridflow.models.tokenizer import load_tokenizer


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``model/``, ``train.jsonl``, ``heldout.jsonl``."""
    folder = tmp_path_factory.mktemp("demo")
    write_demo(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(demo: Path):
    return load_tokenizer(str(demo / "model"))
