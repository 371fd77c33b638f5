"""What a run keeps: rows a step, samples, TensorBoard events, and what a resume leaves of them."""

import contextlib
import io
import json
import logging
import math
import resource
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hybridflow import compose
from hybridflow.config import GRPOConfig
from hybridflow.data.demo import byte_tokenizer
from hybridflow.errors import DataError, RunFolderError
from hybridflow.protocol.data import DataProto
from hybridflow.sinks import SINKS
from hybridflow.tracking import JsonLines, Tracker, console_line, mismatch_above, rollout_rows


class Run:
    """A run's folder and what it printed."""

    def __init__(self, tmp_path: Path, *overrides: str, terminal: bool = False) -> None:
        byte_tokenizer().save_pretrained(tmp_path / "model")
        given = [f"model.path={tmp_path / 'model'}", f"runs_dir={tmp_path}", "name=run", "steps=4"]
        self.config = compose.load("grpo", GRPOConfig, [*given, *overrides])
        self.folder = tmp_path / "run"
        self.printed = io.StringIO()
        self.console = Console(file=self.printed, force_terminal=terminal, width=300, highlight=False)

    def tracker(self, resumed_step: int = 0) -> Tracker:
        plan: Any = SimpleNamespace(run_dir=self.folder)
        return Tracker(self.config, plan, resumed_step, self.console)

    def rows(self, name: str = "metrics.jsonl") -> list[dict]:
        return [json.loads(line) for line in (self.folder / name).read_text("utf-8").splitlines()]

    def scalars(self, name: str) -> list[tuple[int, float]]:
        events = EventAccumulator(str(self.folder / "tensorboard"))
        events.Reload()
        return [(event.step, event.value) for event in events.Scalars(name)]


@contextlib.contextmanager
def small_files(most: int) -> Iterator[None]:
    """No file may grow beyond so many bytes, as on a full disk: not even the one that the test's own output goes to."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def batch() -> DataProto:
    tokenizer = byte_tokenizer()
    ids = [torch.tensor(tokenizer.encode(text)) for text in ("1+1=", "2<|end|>", "12+3=", "fünf")]
    return DataProto.from_dict(
        tensors={
            "prompts": DataProto.jagged([ids[0], ids[2]]),
            "responses": DataProto.jagged([ids[1], ids[3]]),
            "rollout_log_probs": DataProto.jagged([torch.tensor([-0.1, -1.5]), torch.tensor([-0.25] * len(ids[3]))]),
            "rewards": torch.tensor([1.0, math.nan]),
            "solved": torch.tensor([True, False]),
            "uid": torch.tensor([7, 9]),
            "group_ids": torch.tensor([0, 1]),
            "weight_version": torch.tensor([3, 1]),
            "token_versions": DataProto.jagged([torch.tensor([3, 3]), torch.tensor([1] * (len(ids[3]) - 1) + [3])]),
        },
        non_tensors={
            "response_text": ["2", "fünf"],
            "finish_reason": ["stop", "length"],
            "ground_truth": ["2", {"sum": 15}],
            "reward_error": [None, "ValueError: no number"],
        },
    )


def written(data: DataProto, tmp_path: Path) -> list[dict]:
    """What a run's file has of a batch's rows."""
    run = Run(tmp_path)
    with run.tracker() as tracker:
        tracker.log_rollouts(1, data)
    rows = run.rows("rollouts.jsonl")
    assert [(row.pop("step"), row.pop("tag")) for row in rows] == [(1, "train")] * len(data)
    return rows


def test_a_step_is_one_row_written_at_once(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with run.tracker() as tracker:
        tracker.log(0, {"evaluate/accuracy": 0.25})
        tracker.log(1, {"reward/mean": torch.tensor(0.5), "time/step": 2})
        rows = run.rows()
    assert [row.pop("timestamp") > 1.7e9 for row in rows] == [True, True]
    assert rows == [{"step": 0, "evaluate/accuracy": 0.25}, {"step": 1, "reward/mean": 0.5, "time/step": 2.0}]


def test_a_second_report_of_a_step_adds_to_its_row(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with run.tracker() as tracker:
        tracker.log(1, {"a": 1, "bad": math.nan})
        tracker.log(1, {"b": 2, "worse": math.inf})
        tracker.log(2, {"a": 3})
    rows = run.rows()
    assert [row["step"] for row in rows] == [1, 2]
    assert (rows[0]["a"], rows[0]["b"], rows[0]["not_finite"]) == (1.0, 2.0, ["bad", "worse"])


def test_a_resumed_run_knows_what_was_reported_of_its_last_step(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with run.tracker() as tracker:
        assert tracker.reported(1) == {}
        tracker.log(1, {"evaluate/accuracy": 0.5})
        tracker.log(2, {"reward/mean": 1})
    with run.tracker(resumed_step=1) as tracker:
        assert tracker.reported(1)["evaluate/accuracy"] == 0.5
        assert tracker.reported(2) == {}, "its row was dropped"


def test_numbers_that_are_not_finite_are_null_and_named(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with run.tracker() as tracker:
        tracker.log(1, {"actor/loss": math.nan, "actor/grad_norm": -math.inf, "reward/mean": 1.0})
    row = run.rows()[0]
    assert row["actor/loss"] is row["actor/grad_norm"] is None
    assert row["not_finite"] == ["actor/loss", "actor/grad_norm"]
    assert "loss nan" in run.printed.getvalue()
    assert math.isnan(run.scalars("actor/loss")[0][1])


def test_a_value_that_is_no_number_is_refused_by_name(tmp_path: Path) -> None:
    with Run(tmp_path).tracker() as tracker:
        with pytest.raises(DataError, match=r"metric 'actor/loss' is \[1, 2\], not a number"):
            tracker.log(1, {"actor/loss": [1, 2]})


def test_steps_do_not_go_back(tmp_path: Path) -> None:
    with Run(tmp_path).tracker() as tracker:
        tracker.log(2, {})
        with pytest.raises(DataError, match="step 1 is reported after step 2"):
            tracker.log(1, {})


def test_a_resume_drops_what_is_to_come_from_every_file(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with run.tracker() as tracker:
        for step in range(4):
            tracker.log(step, {"reward/mean": step, "only/then": 1}, batch())
    with run.tracker(resumed_step=1) as tracker:
        assert [row["step"] for row in run.rows()] == [0, 1]
        assert [row["step"] for row in run.rows("rollouts.jsonl")] == [0, 0, 1, 1]
        tracker.log(2, {"reward/mean": 20}, batch())
    assert [(row["step"], row["reward/mean"]) for row in run.rows()] == [(0, 0), (1, 1), (2, 20)]
    assert [row["step"] for row in run.rows("rollouts.jsonl")] == [0, 0, 1, 1, 2, 2]
    assert run.scalars("reward/mean") == [(0, 0), (1, 1), (2, 20)]
    assert run.scalars("only/then") == [(0, 1), (1, 1)]


def test_a_resume_adds_to_the_row_of_its_own_step(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with run.tracker() as tracker:
        tracker.log(1, {"a": 1})
    with run.tracker(resumed_step=1) as tracker:
        tracker.log(1, {"evaluate/accuracy": 0.5})
    rows = run.rows()
    assert len(rows) == 1
    assert (rows[0]["a"], rows[0]["evaluate/accuracy"]) == (1.0, 0.5)


def test_a_torn_last_line_is_dropped_on_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "a"')
    lines = JsonLines(path, resumed_step=3)
    lines.write_step(4, {"a": 1})
    lines.close()
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step":4,"a":1}\n'


def test_a_new_run_replaces_what_an_earlier_one_left_and_says_so(tmp_path: Path, caplog) -> None:
    run = Run(tmp_path)
    with run.tracker() as tracker:
        tracker.log(1, {"a": 1})
    with caplog.at_level(logging.WARNING), run.tracker() as tracker:
        tracker.log(1, {"b": 1})
    assert "metrics.jsonl of an earlier run is replaced" in caplog.text
    assert [("a" in row, "b" in row) for row in run.rows()] == [(False, True)]
    assert run.scalars("b") == [(1, 1)]


def test_the_saved_configuration_composes_to_itself(tmp_path: Path) -> None:
    run = Run(tmp_path, "data.options={size: 5}", "reward.options={a: [1, x]}")
    run.tracker().close()
    assert compose.load("config", GRPOConfig, config_dir=run.folder) == run.config


def test_half_a_surrogate_pair_in_what_a_function_says_is_written_and_read_again(tmp_path: Path) -> None:
    run, said = Run(tmp_path), batch()
    said.non_tensor_batch["reward_error"] = ["ValueError: \ud83d", "ü"]
    with run.tracker() as tracker:
        tracker.log(1, {}, said)
    assert [row["reward_error"] for row in run.rows("rollouts.jsonl")] == ["ValueError: \ud83d", "ü"]


def test_samples_hold_texts_ids_and_scores(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with run.tracker() as tracker:
        tracker.log(5, {}, batch())
    first, second = run.rows("rollouts.jsonl")
    assert first == {
        "step": 5,
        "tag": "train",
        "uid": 7,
        "group": 0,
        "prompt": "1+1=",
        "response": "2",
        "reward": 1.0,
        "solved": True,
        "ground_truth": "2",
        "finish_reason": "stop",
        "reward_error": None,
        "version": 3,
        "prompt_ids": list(b"1+1="),
        "response_ids": [ord("2"), 260],
        "log_probs": [-0.1, -1.5],
    }
    assert (second["reward"], second["solved"], second["reward_error"]) == (None, False, "ValueError: no number")
    assert second["response"] == "fünf"
    assert (second["version"], second["versions"]) == (1, [1, 1, 1, 1, 3])
    assert second["ground_truth"] == {"sum": 15}


def test_columns_that_a_batch_lacks_are_left_out() -> None:
    rows = list(rollout_rows(batch().select(["prompts", "responses"], []), byte_tokenizer()))
    assert [set(row) for row in rows] == [{"prompt", "response", "prompt_ids", "response_ids"}] * 2
    assert rows[0]["response"] == "2<|end|>"


def test_log_probs_in_samples_are_exact_in_float32(tmp_path: Path) -> None:
    value = torch.tensor([-1 / 3])
    row = written(DataProto.from_dict(tensors={"rollout_log_probs": DataProto.jagged([value])}), tmp_path)[0]
    assert row["log_probs"] == [-0.33333334]
    assert torch.equal(torch.tensor(row["log_probs"]), value)


def test_advantages_and_masks_are_written_as_short_as_they_are(tmp_path: Path) -> None:
    rows = {
        "advantages": DataProto.jagged([torch.tensor([0.5, 0.5]), torch.tensor([0.5, -1.0]), torch.tensor([])]),
        "loss_mask": DataProto.jagged([torch.tensor([True, True]), torch.tensor([False, True]), torch.ones(0).bool()]),
        "log_probs": DataProto.jagged([torch.tensor([-1.0, -2.0]), torch.tensor([-3.0, -0.5]), torch.tensor([])]),
    }
    assert written(DataProto.from_dict(tensors=rows), tmp_path) == [
        {"advantages": 0.5, "trainer_log_probs": [-1.0, -2.0]},
        {"advantages": [0.5, -1.0], "trainer_log_probs": [-3.0, -0.5], "mask": [0, 1]},
        {"advantages": [], "trainer_log_probs": []},
    ]


def test_numbers_in_samples_that_are_not_finite_are_null(tmp_path: Path) -> None:
    data = batch().select(["rollout_log_probs"], ["ground_truth", "reward_error"])
    data.non_tensor_batch["ground_truth"] = [{"sum": math.inf}, math.nan]
    data.batch["rollout_log_probs"] = DataProto.jagged([torch.tensor([-0.1, math.nan]), torch.tensor([-math.inf])])
    rows = written(data, tmp_path)
    assert [row["log_probs"] for row in rows] == [[-0.1, None], [None]]
    assert [row["ground_truth"] for row in rows] == [{"sum": None}, None]
    data.non_tensor_batch["reward_error"] = ["\ud83d", 2**64]  # which is not written by the quick way
    assert written(data, tmp_path) == [
        {**row, "reward_error": error} for row, error in zip(rows, ["\ud83d", 2**64], strict=True)
    ]


@pytest.mark.parametrize(("every", "steps"), [(0, []), (1, [1, 2, 3, 4]), (2, [2, 4])])
def test_samples_are_kept_by_schedule(every: int, steps: list[int], tmp_path: Path) -> None:
    run = Run(tmp_path, f"tracking.rollouts_every={every}")
    with run.tracker() as tracker:
        for step in (1, 2, 3, 4):
            tracker.log(step, {}, batch())
    assert [row["step"] for row in run.rows("rollouts.jsonl")[::2]] == steps


@pytest.mark.parametrize("where", ["the next step", "the end"])
def test_samples_that_cannot_be_written_end_the_run(where: str, tmp_path: Path) -> None:
    run = Run(tmp_path, "steps=2")
    unreadable = batch()
    unreadable.non_tensor_batch["ground_truth"][0] = {(1, 2): 3}  # JSON has no such keys
    tracker = run.tracker()
    tracker.log(1, {"reward/mean": 1}, unreadable)
    with pytest.raises(TypeError, match="keys must be str"):
        tracker.log(2, {}, batch()) if where == "the next step" else tracker.finish()
    tracker.close()
    assert [row["step"] for row in run.rows()] == ([1, 2] if where == "the next step" else [1])


def test_samples_that_cannot_be_written_do_not_hide_the_error_that_ends_the_run(tmp_path: Path) -> None:
    unreadable = batch()
    unreadable.non_tensor_batch["ground_truth"][0] = {(1, 2): 3}
    run = Run(tmp_path)
    with pytest.raises(RuntimeError, match="a process is gone"), contextlib.ExitStack() as stack:
        tracker = stack.enter_context(run.tracker())
        stack.push(tracker.settle)
        tracker.log(1, {"reward/mean": 1}, unreadable)
        raise RuntimeError("a process is gone")
    assert (
        "warning: the samples or the timeline of the last step are not whole: keys must be str"
        in run.printed.getvalue()
    )
    assert [row["step"] for row in run.rows()] == [1]


@pytest.mark.parametrize("file", ["metrics.jsonl", "rollouts.jsonl"])
def test_a_full_disk_ends_the_run_with_the_file_and_the_reason(file: str, tmp_path: Path) -> None:
    run = Run(tmp_path, "steps=99", "tracking.trackers=[]")
    rows, metrics = (batch(), {}) if file == "rollouts.jsonl" else (None, {f"m{i}": 1.0 for i in range(50)})
    with pytest.raises(RunFolderError) as caught:
        with run.tracker() as tracker, small_files(3000):
            for step in range(1, 60):
                tracker.log(step, metrics, rows)
    assert f"{run.folder}/{file}" in str(caught.value)
    assert " cannot be written: File too large. Free space or choose another runs_dir" in str(caught.value)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_is_named_where_tensorboard_finds_it_first(tmp_path: Path) -> None:
    sink = SINKS["tensorboard"].make(Run(tmp_path).config, tmp_path, [])
    with pytest.raises(RunFolderError) as caught, small_files(3000):
        for step in range(60):
            sink.log((step, 0.0, {f"m{i}": 1.0 for i in range(50)}))
    assert f"{tmp_path}/tensorboard" in str(caught.value)
    assert " cannot be written: File too large. Free space or choose another runs_dir" in str(caught.value)


def test_a_run_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.folder = Path("/proc/no/where")  # the one folder that root cannot write to either
    with pytest.raises(RunFolderError, match="/proc/no.* cannot be written: No such file or directory"):
        run.tracker()


def test_a_console_line_has_at_most_ten_fields() -> None:
    from hybridflow.tracking import FIELDS

    line = console_line(3, 20, {name: 1.0 for _, name, _ in FIELDS})
    assert line.startswith("step 3/20  reward 1.000  solved 1.00  failed 1.00  accuracy 1.000  preferred 1.00")
    assert len(line.split("  ")) == 10


def test_a_console_line_says_what_failed_and_the_loss_that_means_something() -> None:
    assert console_line(1, 2, {"reward/failed": 0.0, "actor/loss": -0.5}) == "step 1/2  loss -0.5000"
    both = {"reward/failed": 0.25, "preference/loss": 0.693, "actor/loss": -0.5}
    assert console_line(1, 2, both) == "step 1/2  failed 0.25  loss 0.6930"


def test_without_a_terminal_there_are_plain_lines_with_the_time_left(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with run.tracker() as tracker:
        tracker.log(0, {"evaluate/accuracy": 0.5})
        tracker.log(1, {"reward/mean": 0.25})
    lines = run.printed.getvalue().splitlines()
    assert lines[0].startswith(f"run folder: {run.folder}")
    assert lines[1] == "step 0/4  accuracy 0.500"
    assert lines[2] == "step 1/4  reward 0.250  eta 0:00:00"
    assert "\x1b" not in run.printed.getvalue()


def test_on_a_terminal_there_is_a_bar_below_the_lines(tmp_path: Path) -> None:
    run = Run(tmp_path, terminal=True)
    with run.tracker() as tracker:
        for step in (1, 2, 3, 4):
            tracker.log(step, {"reward/mean": 0.25})
    text = run.printed.getvalue()
    assert text.count("reward 0.250") == 4
    assert "4/4" in text


def test_a_mismatch_of_rollout_and_trainer_is_warned_of_nan_included(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with run.tracker() as tracker:
        for step, value in enumerate((1e-5, 2e-3, math.nan), 1):
            tracker.log(step, {"rollout_vs_trainer/max_diff": value})
    warnings = [line for line in run.printed.getvalue().splitlines() if line.startswith("warning")]
    assert warnings == [
        f"warning: step {step}: the rollout's log_probs differ from the trainer's by up to {shown}, more than 0.001 "
        "(tracking.mismatch_limit)."
        for step, shown in ((2, "0.002"), (3, "nan"))
    ]


def test_ten_steps_without_a_signal_are_warned_of_once(tmp_path: Path) -> None:
    run = Run(tmp_path, "steps=99")
    with run.tracker() as tracker:
        for step, share in enumerate([1.0] * 9 + [0.9] + [1.0] * 12, 1):
            tracker.log(step, {"reward/groups_without_signal": share})
            warned = "teaches nothing" in run.printed.getvalue()
            assert warned == (step >= 20)
    assert run.printed.getvalue().count("for 10 steps all samples of each prompt had the same reward") == 1


def test_equal_rewards_are_fine_where_samples_are_not_compared(tmp_path: Path) -> None:
    run = Run(tmp_path, "steps=99", "algorithm=reinforce_plus_plus")
    with run.tracker() as tracker:
        for step in range(1, 20):
            tracker.log(step, {"reward/groups_without_signal": 1.0})
    assert "teaches nothing" not in run.printed.getvalue()


def test_a_mismatch_above_a_limit_has_words_nan_included() -> None:
    words = [
        mismatch_above(limit, "tracking.mismatch_stop", {"rollout_vs_trainer/max_diff": found})
        for limit, found in ((0.0, 9.0), (0.5, 0.5), (0.5, 0.75), (0.5, math.nan))
    ]
    above = "the rollout's log_probs differ from the trainer's by up to {}, more than 0.5 (tracking.mismatch_stop)"
    assert words == ["", "", above.format("0.75"), above.format("nan")]
    assert mismatch_above(0.5, "", {"actor/loss": 1.0}) == "", "supervised steps have no rollout"


def test_finish_prints_the_summary_and_draws_the_plot(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with run.tracker() as tracker:
        tracker.log(0, {"evaluate/accuracy": 0.25})
        tracker.log(1, {"reward/mean": 0.5, "time/step": 2.0, "time/generate": 1.5, "evaluate/accuracy": 0.75})
        tracker.finish()
    assert "accuracy on held-out prompts: 0.250 (step 0) -> 0.750 (step 1)" in run.printed.getvalue()
    assert (run.folder / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_wandb_works_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = Run(tmp_path, "tracking.trackers=[wandb]")
    with run.tracker() as tracker:
        tracker.log(1, {"reward/mean": 0.5})
    name = (run.folder / "wandb_id").read_text().strip()
    assert list((run.folder / "wandb").glob(f"offline-run-*-{name}/run-{name}.wandb"))


def test_mlflow_works_without_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    run = Run(tmp_path, "tracking.trackers=[mlflow]")
    with run.tracker() as tracker:
        tracker.log(1, {"reward/mean": 0.5})
    with run.tracker(resumed_step=1) as tracker:
        tracker.log(2, {"reward/mean": 0.75})
    client = mlflow.MlflowClient(f"sqlite:///{run.folder / 'mlflow.db'}")
    history = client.get_metric_history((run.folder / "mlflow_id").read_text().strip(), "reward/mean")
    assert [(m.step, m.value) for m in history] == [(1, 0.5), (2, 0.75)]
    assert list((run.folder / "mlflow").rglob("config.yaml"))
    assert list(elsewhere.iterdir()) == []
