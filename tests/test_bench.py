"""Sweeps: which points there are, that they go on where they stopped, and what is measured of a run."""

import csv
import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pyarrow.parquet as parquet
import pytest

from hybridflow import bench
from hybridflow.bench import Settings, measure, points_of
from hybridflow.cli import main
from hybridflow.errors import ConfigError
from hybridflow.report.page import html
from tests.test_cli import code_of

# Writes what a run would, without training: `data.prompts_per_step` decides whether it fails.
DRIVER = """
import json
from pathlib import Path

import hybridflow
from hybridflow.config import GRPOConfig
from hybridflow.errors import ConfigError


@hybridflow.driver("grpo", GRPOConfig)
def main(config):
    if config.data.prompts_per_step == 13:
        raise ConfigError("data.prompts_per_step=13: bad luck.")
    with open({calls!r}, "a") as file:
        file.write(config.name + "\\n")
    folder = Path(config.runs_dir) / config.name
    rows = [
        {{"step": n, "time/step": 100.0 if n < 3 else 2.0, "time/generate": 1.5, "throughput/tokens_per_second": 40.0,
          "sync/bytes": 10.0, "phase/training/seconds": 0.25, "phase/generation/seconds": 0.5,
          "memory/actor_peak_gb": n / 4}}
        for n in range(1, config.steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
    written = {{"model": {{"path": {model!r}}}, "rollout": {{"n": 2}}, "data": {{"prompts_per_step": 4}},
               "pools": {{"train": {{"devices": [2]}}, "cpu": {{"devices": [1], "kind": "cpu"}}}},
               "roles": {{"actor": {{"pool": "train"}}, "rollout": {{"pool": "train"}}, "reference": None}},
               "actor": {{"epochs": 1, "loss": {{"old_log_probs": "log_probs"}}}}}}
    (folder / "config.yaml").write_text(json.dumps(written))


if __name__ == "__main__":
    main()
"""


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    from tests.assets import write_model

    path = tmp_path / "drive.py"
    path.write_text(DRIVER.format(calls=str(tmp_path / "calls"), model=str(write_model(tmp_path / "model"))))
    return path


def test_a_sweep_is_every_combination_in_order(driver: Path) -> None:
    given = ["placement=single,colocate", "pools.train.devices=[1],[2]", "steps=3", "data.train='a,b'"]
    points = points_of([str(driver)], given)
    assert [dict(point.chosen) for point in points] == [
        {"placement": "single", "pools.train.devices": "[1]"},
        {"placement": "single", "pools.train.devices": "[2]"},
        {"placement": "colocate", "pools.train.devices": "[1]"},
        {"placement": "colocate", "pools.train.devices": "[2]"},
    ]
    assert points[3].overrides == ("placement=colocate", "pools.train.devices=[2]", "steps=3", "data.train='a,b'")
    names = {point.name(Settings(Path("x"))) for point in points}
    assert len(names) == 4
    assert points[0].name(Settings(Path("x"))).startswith("drive-single-1_")
    assert points[0].name(Settings(Path("x"), steps=9)) not in names


def test_what_cannot_be_swept_is_told(driver: Path) -> None:
    with pytest.raises(ConfigError, match=r"only lists of values can be swept, such as lr=1,2"):
        points_of([str(driver)], ["lr=interval(0,1)"])
    with pytest.raises(ConfigError, match="no.py: no such file. Give drivers"):
        points_of(["no.py"], [])


def test_a_failing_point_is_recorded_and_the_rest_goes_on_from_where_it_stopped(
    driver: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    command = ["bench", str(driver), "--out", str(tmp_path / "out"), "--steps", "4", "--peak-tflops", "0.001"]
    main([*command, "data.prompts_per_step=13,4"])
    printed = capsys.readouterr().out
    assert "failed: exit code 2: error: data.prompts_per_step=13: bad luck.\n" in printed
    assert printed.endswith(f"2 points, 1 failed: {tmp_path}/out/results.csv, {tmp_path}/out/report.html\n")
    with (tmp_path / "out" / "results.csv").open() as file:
        rows = {row["data.prompts_per_step"]: row for row in csv.DictReader(file)}
    assert rows["13"]["status"] == "failed" and rows["4"]["status"] == "done"
    assert float(rows["4"]["tokens_per_second"]) == 40.0
    table = parquet.read_table(tmp_path / "out" / "results.parquet").to_pylist()
    config = json.loads(next(row["config"] for row in table if row["status"] == "done"))
    assert config["pools"]["train"]["devices"] == [2]
    assert (tmp_path / "out" / "report.html").read_text().startswith("<!DOCTYPE html>")

    main([*command, "data.prompts_per_step=13,4,5", "--retry"])
    assert [name.partition("_")[0] for name in (tmp_path / "calls").read_text().split()] == ["drive-4", "drive-5"]


def test_a_point_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(600)\n")
    (point,) = points_of([str(tmp_path / "slow.py")], [])
    row = bench.run_point(point, Settings(tmp_path / "out", timeout=1.0))
    assert row["status"] == "failed"
    assert row["error"].startswith("no end within 1 s: ")
    assert row["wall_seconds"] < 60


def test_a_sweep_that_is_ended_takes_its_run_along(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import os, time, hybridflow\nfrom hybridflow.config import GRPOConfig\n"
        '@hybridflow.driver("grpo", GRPOConfig)\ndef main(config):\n'
        f"    open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n    time.sleep(600)\n"
        'if __name__ == "__main__":\n    main()\n'
    )
    command = [sys.executable, "-m", "hybridflow.cli", "bench", str(tmp_path / "slow.py"), "--out", str(tmp_path / "o")]
    sweep = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (tmp_path / "pid").is_file() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    sweep.terminate()
    assert sweep.wait(90) == 143
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))
    assert list((tmp_path / "o" / "points").glob("*.json")) == []


def test_the_numbers_of_a_point_are_those_after_its_warm_up(driver: Path, tmp_path: Path) -> None:
    settings = Settings(tmp_path / "out", steps=4, warm_up=2, peak_tflops=0.001)
    (point,) = points_of([str(driver)], ["data.prompts_per_step=4"])
    row = bench.run_point(point, settings)
    assert row["status"] == "done", row
    assert (row["devices"], row["step_seconds"], row["seconds/generate"]) == (2, 2.0, 1.5)
    assert (row["tokens_per_second"], row["tokens_per_second_per_device"]) == (40.0, 20.0)
    assert (row["sync_bytes"], row["transition_seconds"], row["peak_gb/actor"]) == (10.0, 0.75, 1.5)
    # 4 steps of 80 tokens in 4 * 4 * 2 rows: 10 tokens a row. Of tests.assets.CONFIG: h 128, f 384, q 128, k 64.
    weights = 2 * (128 * (128 + 2 * 64) + 128 * 128 + 3 * 128 * 384) + 262 * 128
    forward = 320 * (2 * weights + 2 * 2 * 10 * 128)
    # Generation, old log-probabilities, and a forward and a backward of the update.
    assert row["mfu"] == pytest.approx(forward * 5 / (8.0 * 2 * 1e9))
    assert (
        measure(tmp_path / "out" / "runs" / row["point"], Settings(tmp_path / "out", warm_up=5))["step_seconds"] == 2.0
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0", "examples/grpo.py"], "--steps 0: has to be at least 1."),
        (["examples/grpo.py", "rollout.nn=1,2"], "there is no setting 'rollout.nn': 'nn' is unknown in 'rollout'."),
        (["examples/grpo.py", "rollout.n=1,many"], "rollout.n=many has the wrong type: expected integer."),
        (["tests/assets.py", "rollout.n=1,2"], "tests/assets.py has no driver: put @hybridflow.driver"),
        (["rollout.n=1,2"], "name a driver: hybridflow bench examples/grpo.py --out runs/bench rollout.n=4,8."),
    ],
)
def test_wrong_use_is_told(arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert code_of("bench", "--out", str(tmp_path), *arguments) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [], "no point has been run"


def test_the_page_of_a_sweep_asks_for_nothing() -> None:
    text = html({"title": "x", "rows": [], "timelines": {}}, "bench.js")
    assert "fetch(" not in text and "http:" not in text.replace("http://www.w3.org/2000/svg", "")
