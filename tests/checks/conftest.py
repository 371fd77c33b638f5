"""What the tests of rules share: the demo's configuration, checked with overrides, and the message of a refusal."""

from collections.abc import Callable
from pathlib import Path

import pytest

from hybridflow import compose
from hybridflow.checks import Plan, check
from hybridflow.config import DAPOConfig, DPOConfig, GRPOConfig, SFTConfig
from hybridflow.errors import ConfigError
from tests.assets import overrides_for

DRIVERS = {"grpo": GRPOConfig, "dapo": DAPOConfig, "sft": SFTConfig, "dpo": DPOConfig}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("assets")


@pytest.fixture(scope="module")
def given(folder: Path) -> list[str]:
    return overrides_for(folder)


@pytest.fixture
def checked(given: list[str]) -> Callable[..., Plan]:
    def run(*overrides: str, name: str = "grpo") -> Plan:
        return check(compose.load(name, DRIVERS[name], [*given, *overrides]))

    return run


@pytest.fixture
def refused(checked: Callable[..., Plan]) -> Callable[..., str]:
    def run(*overrides: str, name: str = "grpo") -> str:
        with pytest.raises(ConfigError) as caught:
            checked(*overrides, name=name)
        return str(caught.value)

    return run
