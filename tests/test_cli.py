"""The command ``hybridflow``: what it prints and its exit codes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hybridflow import __version__
from hybridflow.cli import main
from hybridflow.data.demo import write_demo
from tests.assets import write_model


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides that name the demo's model and data."""
    folder = tmp_path_factory.mktemp("demo")
    write_demo(folder)
    data = [f"data.train={folder}/train.jsonl", f"data.evaluate={folder}/heldout.jsonl"]
    return [f"model.path={folder}/model", *data, f"runs_dir={folder}/runs"]


def code_of(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return int(caught.value.code or 0)


def test_check_prints_the_plan(given: list[str], capsys: pytest.CaptureFixture) -> None:
    main(["check", "--config-name", "sft", *given])
    printed = capsys.readouterr().out
    assert printed.startswith("pool   devices     role     layout")
    assert "every setting is fine; nothing was started." in printed


def test_check_of_a_wrong_setting_ends_with_code_2(given: list[str], capsys: pytest.CaptureFixture) -> None:
    assert code_of("check", "--config-name", "grpo", "steps=0", *given) == 2
    assert capsys.readouterr().err == "error: steps=0: has to be at least 1.\n"


def test_check_reads_the_model_folder(given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    model = write_model(tmp_path / "model")
    assert code_of("check", "--config-name", "grpo", *given, f"model.path={model}") == 1
    assert f"error: model.path='{model}': {model}/model.safetensors: cannot be read" in capsys.readouterr().err


OWN_DRIVER = """
from dataclasses import dataclass, field

import hybridflow
from hybridflow.config import AlgorithmConfig, RunConfig, Settings

{before}

@dataclass
class MineConfig(RunConfig):
    patience: int = 3


@hybridflow.driver("mine", MineConfig)
def main(config: MineConfig) -> None:
    raise AssertionError("a check runs nothing")


if __name__ == "__main__":
    main()
"""


@pytest.fixture
def own_driver(tmp_path: Path) -> Path:
    """A driver with a schema and a config file of its own, as a user would write it."""
    (tmp_path / "drive.py").write_text(OWN_DRIVER.format(before="from beside import WORD"))
    (tmp_path / "beside.py").write_text("WORD = 1\n")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "mine.yaml").write_text(
        "defaults: [schema/MineConfig, {model: tiny}, {placement: colocate}, {data: addition}, _self_]\nname: mine\n"
    )
    return tmp_path / "drive.py"


def test_check_of_a_driver_knows_its_schema_and_runs_nothing(
    own_driver: Path, given: list[str], capsys: pytest.CaptureFixture
) -> None:
    arguments = ["check", str(own_driver), "--config-dir", str(own_driver.parent / "configs"), *given]
    main([*arguments, "patience=5"])
    assert "every setting is fine; nothing was started." in capsys.readouterr().out
    assert code_of(*arguments, "patienc=5") == 2
    assert "there is no setting 'patienc': 'patienc' is unknown. Did you mean 'patience'?" in capsys.readouterr().err
    main([*arguments, "--cfg", "patience=5"])
    assert "patience: 5\n" in capsys.readouterr().out


def test_check_of_an_example_takes_the_examples_arguments(given: list[str], capsys: pytest.CaptureFixture) -> None:
    grpo = str(Path(__file__).resolve().parents[1] / "examples" / "grpo.py")
    main(["check", grpo, "placement=colocate", *given])
    assert "every setting is fine" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "script", "message"),
    [
        (None, "no.py", "there is no file {}/no.py. Known: drive.py"),
        ("import nothing_here", "drive.py", "importing {}/drive.py failed: ModuleNotFoundError: No module named"),
        ("x = 1", "drive.py", "no driver: put @hybridflow.driver(config_name, Schema) above its main(config)."),
        ("from tests.e2e.greedy import main", "drive.py", "no driver"),
        (OWN_DRIVER.format(before="") + "second = main", "drive.py", "name a driver, as in {}/drive.py:NAME."),
        (OWN_DRIVER.format(before=""), "drive.py:man", "name a driver, as in {}/drive.py:NAME. Did you mean 'main'?"),
    ],
)
def test_check_of_a_file_that_is_no_driver_is_told(
    text: str | None, script: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "drive.py").write_text(text or "")
    assert code_of("check", str(tmp_path / script)) == 2
    assert message.format(tmp_path) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["check"], 2, "hybridflow check examples/grpo.py (a driver), or hybridflow check --config-name grpo"),
        (["check", "--config-name", "nope"], 2, "there is no config file 'nope'"),
        (["chekc"], 2, "invalid choice"),
        ([], 2, "COMMAND"),
        (["summary", "no/where"], 1, "no/where/metrics.jsonl does not exist"),
        (
            ["report", "tests"],
            1,
            "tests/metrics.jsonl does not exist. Give the folder of a run, such as runs/grpo-tiny.",
        ),
        (["report", "README.md"], 1, "README.md/metrics.jsonl does not exist. Give the folder of a run"),
    ],
)
def test_wrong_use_is_told(arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture) -> None:
    assert code_of(*arguments) == code
    assert message in capsys.readouterr().err


def test_check_cfg_prints_the_configuration(capsys: pytest.CaptureFixture) -> None:
    main(["check", "--config-name", "grpo", "--cfg", "steps=9"])
    assert "steps: 9\n" in capsys.readouterr().out


def test_summary_prints_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward/mean": 0.5, "time/step": 1.0}) + "\n")
    main(["summary", str(tmp_path)])
    assert capsys.readouterr().out.startswith(f"run {tmp_path.name}: 1 steps, 1 s in training steps\n")
    assert (tmp_path / "reward.png").exists()


def test_version(capsys: pytest.CaptureFixture) -> None:
    assert code_of("--version") == 0
    assert capsys.readouterr().out == f"hybridflow {__version__}\n"


def test_report_writes_a_page_and_prints_where(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward/mean": 0.5, "time/step": 1.0}) + "\n")
    main(["report", str(tmp_path)])
    assert capsys.readouterr().out == f"{tmp_path / 'report.html'}\n"
    assert (tmp_path / "report.html").read_text().startswith("<!DOCTYPE html>")
    main(["report", str(tmp_path), "--out", str(tmp_path / "other.html")])
    assert (tmp_path / "other.html").exists()


def test_a_wrong_setting_is_told_before_torch_and_ray_are_loaded(given: list[str]) -> None:
    arguments = ["check", "--config-name", "grpo", "steps=0", *given]
    program = (
        "import sys; from hybridflow.cli import main\n"
        f"try: main({arguments!r})\n"
        "except SystemExit as end: assert end.code == 2, end\n"
        "loaded = {'torch', 'ray', 'transformers', 'vllm'} & set(sys.modules)\n"
        "assert not loaded, loaded"
    )
    before = os.times()
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    after = os.times()
    assert (child.returncode, child.stderr) == (0, "error: steps=0: has to be at least 1.\n")
    # Of a processor: on a machine that does nothing else these are the seconds that a user waits.
    assert after.children_user + after.children_system - before.children_user - before.children_system < 5
