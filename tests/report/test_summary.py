"""The summary of a run, from its metrics alone."""

import json
from pathlib import Path

import pytest

from hybridflow.errors import DataError
from hybridflow.report.summary import conclude, plot, read_metrics, render, summarize


def write(folder: Path, *rows: dict, tail: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
    return folder


def rows() -> list[dict]:
    found: list[dict] = [{"step": 0, "evaluate/accuracy": 0.1, "time/step": 50.0}]
    for step in range(1, 21):
        found.append(
            {
                "step": step,
                "reward/mean": step / 20,
                "time/step": 2.0 if step % 2 else 6.0,
                "time/generate": 1.0,
                "time/other": 0.5,
                "throughput/tokens_per_second": 300.0 if step % 2 else 100.0,
            }
        )
    found[-1]["evaluate/accuracy"] = 0.9
    return found


def test_the_numbers_of_a_summary(tmp_path: Path) -> None:
    s = summarize(write(tmp_path, *rows()))
    assert s.steps == 20
    assert s.accuracy == ((0, 0.1), (20, 0.9))
    assert s.reward == (pytest.approx((1 + 2) / 40), pytest.approx((19 + 20) / 40))
    assert s.seconds == 10 * 2.0 + 10 * 6.0
    # 10 steps of 2 s at 300 and 10 of 6 s at 100: tokens over seconds, not the mean of the rates (200).
    assert s.tokens_per_second == 12000 / 80
    assert s.times == [("generate", 20.0), ("other", 10.0)]


def test_a_summary_as_text(tmp_path: Path) -> None:
    text = render(summarize(write(tmp_path / "grpo-tiny", *rows())))
    assert text.splitlines()[:4] == [
        "run grpo-tiny: 20 steps, 80 s in training steps",
        "accuracy on held-out prompts: 0.100 (step 0) -> 0.900 (step 20)",
        "mean reward: 0.075 (first tenth of the steps) -> 0.975 (last tenth)",
        "tokens per second: 150 (prompts and responses, over whole steps)",
    ]
    assert "  generate                 20.0   25.0%" in text
    assert f"  metrics        {tmp_path}/grpo-tiny/metrics.jsonl" in text


def test_values_that_were_not_finite_are_left_out(tmp_path: Path) -> None:
    s = summarize(write(tmp_path, {"step": 1, "reward/mean": None}, {"step": 2, "reward/mean": 0.5}))
    assert s.reward == (0.5, 0.5)
    assert (s.accuracy, s.tokens_per_second, s.times) == (None, None, [])


def test_a_torn_last_line_is_left_out_and_another_one_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, {"step": 1}, tail='{"step": 2, "a') / "metrics.jsonl"
    assert read_metrics(path) == [{"step": 1}]
    path.write_text('{"step": 1}\nnonsense\n{"step": 3}\n')
    with pytest.raises(DataError, match="metrics.jsonl, line 2: not a row of metrics"):
        read_metrics(path)


def test_a_run_without_metrics_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="metrics.jsonl does not exist. Give the folder of a run"):
        summarize(tmp_path)
    with pytest.raises(DataError, match="has no row yet: the run ended before its first step"):
        summarize(write(tmp_path))


@pytest.mark.parametrize(
    "given",
    [rows(), [{"step": 1, "actor/loss": 2.0}, {"step": 2, "actor/loss": 1.0, "evaluate/accuracy": 0.5}]],
    ids=["rewards", "loss and accuracy"],
)
def test_a_plot_is_drawn(given: list[dict], tmp_path: Path) -> None:
    path = plot(write(tmp_path, *given))
    assert path == tmp_path / "reward.png"
    assert path.read_bytes().startswith(b"\x89PNG")


def test_nothing_to_draw_is_no_plot(tmp_path: Path) -> None:
    assert plot(write(tmp_path, {"step": 1, "time/step": 1.0})) is None


def test_the_end_of_a_run_never_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert conclude(write(tmp_path)) == [
        f"{tmp_path}/metrics.jsonl has no row yet: the run ended before its first step."
    ]
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    lines = conclude(write(tmp_path, *rows()))
    assert lines[-1].endswith("Install it with: pip install matplotlib")
    assert "mean reward: 0.075" in "\n".join(lines)
