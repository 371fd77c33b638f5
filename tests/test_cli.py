"""The command ``hybridflow``: what it prints and its exit codes."""

import json
from pathlib import Path

import pytest

from hybridflow import __version__
from hybridflow.cli import main
from tests.assets import overrides_for


def code_of(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return int(caught.value.code or 0)


def test_check_prints_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    main(["check", "--config-name", "sft", *overrides_for(tmp_path)])
    printed = capsys.readouterr().out
    assert printed.startswith("pool   devices     role     layout")
    assert "every setting is fine; nothing was started." in printed


def test_check_of_a_wrong_setting_ends_with_code_2(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert code_of("check", "--config-name", "grpo", "steps=0", *overrides_for(tmp_path)) == 2
    assert capsys.readouterr().err == "error: steps=0: has to be at least 1.\n"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["check"], 2, "hybridflow check --config-name grpo"),
        (["check", "--config-name", "nope"], 2, "there is no config file 'nope'"),
        (["chekc"], 2, "invalid choice"),
        ([], 2, "COMMAND"),
        (["summary", "no/where"], 1, "no/where/metrics.jsonl does not exist"),
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
