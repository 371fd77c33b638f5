"""What the tests of rules share: the demo's configuration, checked with overrides, and the message of a refusal."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridflow import compose
from hybridflow.checks import Plan, check
from hybridflow.errors import ConfigError
from hybridflow.settings import SCHEMAS
from tests.assets import overrides_for

CONFIGS = Path(__file__).parents[2] / "configs"
DRIVERS = {
    path.stem: SCHEMAS[re.findall(r"schema/(\w+)", path.read_text())[0]] for path in sorted(CONFIGS.glob("*.yaml"))
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("assets")


@pytest.fixture(scope="module")
def given(folder: Path) -> list[str]:
    return overrides_for(folder)


@pytest.fixture
def checked(given: list[str]) -> Callable[..., Plan]:
    def run(*overrides: str, name: str = "grpo") -> Plan:
        teacher = [next(text for text in given if text.startswith("model.path=")).replace("model", "teacher", 1)]
        more = teacher if name == "distill" else []
        return check(compose.load(name, DRIVERS[name], [*given, *more, *overrides]))

    return run


@pytest.fixture
def refused(checked: Callable[..., Plan]) -> Callable[..., str]:
    def run(*overrides: str, name: str = "grpo") -> str:
        with pytest.raises(ConfigError) as caught:
            checked(*overrides, name=name)
        return str(caught.value)

    return run
