"""The demo's model folder and data, written once."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridflow.data.demo import write_demo


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``model/``, ``train.jsonl``, ``heldout.jsonl``."""
    folder = tmp_path_factory.mktemp("demo")
    write_demo(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(demo: Path):
    from hybridflow.data.chat import load_tokenizer

    return load_tokenizer(demo / "model")
