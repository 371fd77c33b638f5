"""The README checker finds what is not there and leaves alone what is."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load() -> ModuleType:
    """Tools are scripts, not a package: load this one from its file."""
    spec = importlib.util.spec_from_file_location("check_readme", ROOT / "tools" / "check_readme.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check_readme = load()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small repository for the checker to look into."""
    for name in ("examples/grpo.py", "configs/grpo.yaml", "configs/placement/colocate.yaml", "docs/guide.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("# A heading, twice\n")
    (tmp_path / "Makefile").write_text(".PHONY: test\nX := 1\ntest: setup ## run\n\tfalse:\nsetup:\n")
    monkeypatch.setattr(check_readme, "ROOT", tmp_path)
    check_readme.make_targets.cache_clear()
    check_readme.anchors.cache_clear()
    yield tmp_path
    check_readme.make_targets.cache_clear()
    check_readme.anchors.cache_clear()


def faults(repository: Path, text: str) -> list[str]:
    """What the checker says about a README of this text."""
    readme = repository / "README.md"
    readme.write_text(text)
    return check_readme.check_file(readme)[0]


@pytest.mark.parametrize(
    "text",
    [
        "```bash\nmake setup test ARGS='-k x'   # both\n```",
        "```bash\n$ python examples/grpo.py --config-name grpo \\\n    placement=colocate rollout.n=4\n```",
        "```bash\ncd . && A=1 python -m pytest -q | cat\npython -m pip install -e .\n```",
        "```python\nmake nothing\n```",
        "Type `make test`, read [it](docs/guide.md#a-heading-twice), [up](#here) and [far](https://x.org/y).\n# Here",
    ],
)
def test_what_exists_passes(repository: Path, text: str):
    assert faults(repository, text) == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("\n```bash\nmake tset\n```", "README.md:3: the Makefile has no target `tset`; it has .PHONY, setup, test"),
        ("```bash\nmake test && python examples/ppo.py\n```", "README.md:2: examples/ppo.py does not exist"),
        ("```bash\npython examples/grpo.py -cn ppo\n```", "README.md:2: configs/ppo.yaml does not exist"),
        (
            "```bash\npython examples/grpo.py \\\n  placement=split\n```",
            "README.md:2: configs/placement/split.yaml does not exist; there are colocate",
        ),
        ("```bash\npip install -r requirements/gpu.txt\n```", "README.md:2: requirements/gpu.txt does not exist"),
        ("```sh\npython -m hybridflow.nothing\n```", "README.md:2: no module `hybridflow.nothing` to run"),
        ("```sh\nno-such-program-here x\n```", "README.md:2: no program `no-such-program-here`"),
        ("Type `make nothing`.", "README.md:1: the Makefile has no target `nothing`; it has .PHONY, setup, test"),
        ("See [it](docs/none.md).", "README.md:1: the link `docs/none.md` leads nowhere"),
        ("See [it](docs/guide.md#other).", "README.md:1: docs/guide.md has no heading for `#other`"),
        ("[out](../secret.md)", "README.md:1: the link `../secret.md` leads nowhere"),
    ],
)
def test_what_does_not_exist_is_named_with_its_line(repository: Path, text: str, fault: str):
    assert faults(repository, text) == [fault]
