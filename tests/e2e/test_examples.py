"""What a run of each example leaves behind, and what its numbers say about rollout, trainer and reference."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybridflow.checkpoint import read_manifest, verify
from hybridflow.trace import read_trace
from tests.e2e import reward
from tests.e2e.conftest import LONG_ROWS, Finished
from tests.e2e.drivers import metrics_of, rows_of

# A test that comes first for a run waits for it, and for the runs before it.
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

TRAINING = {"actor/loss", "actor/grad_norm", "actor/lr", "time/update_actor", "time/save", "time/other", "time/step"}
SAMPLING = {
    "reward/mean",
    "reward/failed",
    "reward/solved",
    "response/length",
    "actor/entropy",
    "actor/kl",
    "rollout_vs_trainer/max_diff",
    "sync/bytes",
    "sync/seconds",
    "throughput/tokens_per_second",
    *(f"time/{name}" for name in ("generate", "reward", "log_probs", "ref_log_probs", "advantage", "sync_weights")),
}
EVALUATED = {"evaluate/accuracy", "evaluate/reward", "evaluate/length", "evaluate/failed", "time/evaluate"}
KEYS = {"step", "tag", "uid", "group", "prompt", "response", "reward", "solved", "ground_truth", "finish_reason"}
KEYS |= {"reward_error", "version", "prompt_ids", "response_ids", "log_probs"}


@pytest.fixture(params=["sft", "grpo"])
def run(request: pytest.FixtureRequest) -> Finished:
    return request.getfixturevalue(request.param)


def test_a_run_leaves_its_configuration(run: Finished) -> None:
    saved = yaml.safe_load((run.run_dir / "config.yaml").read_text())
    assert saved["name"] == run.run_dir.name
    assert (saved["steps"], saved["pools"]["train"]["devices"], saved["evaluate"]["size"]) == (2, [2], 16)


def test_every_step_has_one_row_of_finite_metrics(run: Finished) -> None:
    rows = metrics_of(run.run_dir)
    assert list(rows) == [0, 1, 2]
    for row in rows.values():
        assert "not_finite" not in row
        assert all(math.isfinite(value) for value in row.values())
    wanted = TRAINING | (SAMPLING if run.run_dir.name == "grpo" else set())
    assert wanted - set(rows[1]) == set()
    assert (wanted | EVALUATED) - set(rows[2]) == set()
    assert EVALUATED - set(rows[0]) == set()
    assert all(rows[step]["actor/grad_norm"] > 0 for step in (1, 2))
    assert all(rows[step]["time/step"] > 0 for step in (1, 2))


def test_supervised_steps_raise_the_likelihood_of_the_answers(sft: Finished) -> None:
    rows = metrics_of(sft.run_dir)
    assert rows[1]["actor/loss"] == pytest.approx(math.log(262), abs=0.3)  # random weights: 262 tokens, all alike
    assert rows[2]["actor/loss"] < rows[1]["actor/loss"]


def test_a_run_leaves_whole_checkpoints_and_a_link_to_the_last_model(run: Finished) -> None:
    checkpoints = run.run_dir / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["latest", "step_000001", "step_000002"]
    assert (checkpoints / "latest").read_text() == "step_000002\n"
    for step in (1, 2):
        manifest = verify(checkpoints / f"step_{step:06d}")
        assert manifest.step == step
        assert {"run.json", "model/config.json", "model/model.safetensors", "optimizer/state.json"} <= set(
            manifest.files
        )
    link = run.run_dir / "model"
    assert link.is_symlink() and not link.readlink().is_absolute()
    assert link.resolve() == (checkpoints / "step_000002" / "model").resolve()


def test_a_run_leaves_tensorboard_events_that_say_what_the_metrics_say(run: Finished) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.run_dir / "tensorboard"))
    events.Reload()
    rows = metrics_of(run.run_dir)
    for name in ("actor/loss", "evaluate/accuracy", "time/step"):
        written = {event.step: event.value for event in events.Scalars(name)}
        assert written == pytest.approx({step: row[name] for step, row in rows.items() if name in row})


def test_a_run_draws_its_plot(run: Finished) -> None:
    from PIL import Image

    with Image.open(run.run_dir / "reward.png") as image:
        assert image.format == "PNG"
        assert image.size == (840, 480)


def test_the_console_shows_the_placement_the_steps_and_the_summary(run: Finished) -> None:
    out, name = run.ended.out, run.run_dir.name
    assert out.startswith(
        "pool   devices     role       layout\n" if name == "grpo" else "pool   devices     role     layout\n"
    )
    assert re.search(r"^train  \[2\] device  actor +tp1 pp1 cp1 dp2$", out, re.M)
    scored = (
        r"^cpu    \[1\] cpu     reward +tp1 pp1 cp1 dp1$"
        if name == "grpo"
        else r"^train  \[2\] device  reward +tp1 .* dp2"
    )
    assert re.search(scored, out, re.M)
    assert [line.split("  ")[0] for line in out.splitlines() if re.match(r"step \d+/2", line)] == [
        "step 0/2",
        "step 1/2",
        "step 2/2",
    ]
    assert f"\nrun {name}: 2 steps, " in out
    assert re.search(r"^accuracy on held-out prompts: \d\.\d{3} \(step 0\) -> \d\.\d{3} \(step 2\)$", out, re.M)
    assert f"  checkpoints    {run.run_dir / 'checkpoints'}\n" in out


def test_a_run_prints_nothing_beside_its_report(run: Finished) -> None:
    assert run.ended.err == ""


def test_long_prompts_are_dropped_and_counted(run: Finished) -> None:
    assert f"7290 prompts from {run.run_dir.parents[1] / 'train.jsonl'}" in run.ended.out
    assert f"; dropped as too long: {LONG_ROWS} of train\n" in run.ended.out


def test_samples_are_kept_with_what_made_them(grpo: Finished) -> None:
    every = rows_of(grpo.run_dir / "rollouts.jsonl")
    assert [(row["step"], row["tag"]) for row in every[::16]] == [
        (0, "evaluate"),
        (1, "train"),
        (2, "evaluate"),
        (2, "train"),
    ]
    rows = [row for row in every if row["tag"] == "train"]
    assert len(rows) == 32
    for row in every:
        assert set(row) - {"mask"} == KEYS | ({"trainer_log_probs", "advantages"} if row["tag"] == "train" else set())
        assert row["version"] == row["step"] - (row["tag"] == "train")
        assert re.fullmatch(r"<\|user\|>\d\d\+\d\d=<\|end\|><\|assistant\|>", row["prompt"])
        assert len(row["prompt_ids"]) == 9
        assert 1 <= len(row["response_ids"]) <= 6
        assert len(row["log_probs"]) == len(row["response_ids"])
        assert all(-30 < value <= 0 for value in row["log_probs"])
        assert all(0 <= token < 262 for token in row["response_ids"])
        assert row["finish_reason"] == ("stop" if row["response_ids"][-1] == 260 else "length")
        a, b = re.findall(r"\d\d", row["prompt"])
        assert row["ground_truth"] == str(int(a) + int(b))
    for row in rows:
        pairs = zip(row["log_probs"], row["trainer_log_probs"], strict=True)
        assert all(abs(ours - theirs) < 1e-3 for ours, theirs in pairs)
    assert [row["group"] for row in rows[:16]] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4


def test_the_samples_of_an_evaluation_are_those_that_its_accuracy_counts(run: Finished) -> None:
    rows = [row for row in rows_of(run.run_dir / "rollouts.jsonl") if row["tag"] == "evaluate"]
    found = {step: row["evaluate/accuracy"] for step, row in metrics_of(run.run_dir).items() if step != 1}
    assert {step: sum(row["solved"] for row in rows if row["step"] == step) / 16 for step in (0, 2)} == found


def test_supervised_runs_dump_their_answers(sft: Finished) -> None:
    rows = [row for row in rows_of(sft.run_dir / "rollouts.jsonl") if row["tag"] == "train"]
    assert [row["step"] for row in rows] == [1] * 4 + [2] * 4
    assert all(row["response"] == row["ground_truth"] + "<|end|>" for row in rows)


def test_a_judge_beside_actor_and_rollout_says_what_transformers_says(sft: Finished, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    rows = [row for row in rows_of(sft.run_dir / "rollouts.jsonl") if row["tag"] == "evaluate"]
    assert len(rows) == 2 * 16
    for row in rows[:4] + rows[-4:]:
        question = f"<|user|>{row['response']}<|end|><|assistant|>"
        prompt = torch.tensor([tokenizer(question, add_special_tokens=False)["input_ids"]])
        said = model.generate(prompt, max_new_tokens=4, do_sample=False)[0, prompt.shape[1] :]
        assert row["verdict"] == tokenizer.decode(said, skip_special_tokens=True)
        assert row["reward_components"]["said"] == len(row["verdict"])


def test_the_rollout_gives_the_log_probs_of_the_trainer(grpo: Finished, straight: Finished) -> None:
    rows = [row for run in (grpo, straight) for step, row in metrics_of(run.run_dir).items() if step > 0]
    assert len(rows) == 6
    # Written so that NaN or null is no pass.
    assert [row["rollout_vs_trainer/max_diff"] <= 1e-4 for row in rows] == [True] * 6
    assert all(row["rollout_vs_trainer/max_diff"] >= row["rollout_vs_trainer/mean_diff"] > 0 for row in rows)
    for row in list(metrics_of(grpo.run_dir).values())[1:]:
        assert row["correction/weight_mean"] == pytest.approx(1, abs=1e-4)
        assert row["correction/rejected"] == row["correction/dropped"] == 0


def test_before_the_first_update_the_actor_is_its_reference_and_after_it_no_longer(grpo: Finished) -> None:
    rows = metrics_of(grpo.run_dir)
    assert rows[1]["actor/kl"] == pytest.approx(0, abs=1e-6)
    assert rows[1]["actor/ratio"] == 1
    assert rows[2]["actor/kl"] > 1e-6


def test_an_answer_without_a_reward_is_kept_with_its_reason_and_counted(straight: Finished) -> None:
    metrics = metrics_of(straight.run_dir)
    rows = rows_of(straight.run_dir / "rollouts.jsonl")
    seen = set()
    for row in rows:
        answer = row["response"]
        reason = reward.REASONS.get(reward.kind(answer))
        if reason is None:
            assert row["reward_error"] is None
            assert row["reward"] == pytest.approx(reward.expected(answer))
        else:
            assert row["reward"] is None and row["solved"] is False
            assert row["reward_error"].startswith(reason)
            seen.add(reason)
    assert seen == set(reward.REASONS.values())
    for step in (1, 2, 3, 4):
        rewards = [row["reward"] for row in rows if row["step"] == step and row["tag"] == "train"]
        valid = [value for value in rewards if value is not None]
        assert metrics[step]["reward/failed"] == pytest.approx(1 - len(valid) / 16)
        assert metrics[step]["reward/mean"] == pytest.approx(sum(valid) / len(valid))
        assert math.isfinite(metrics[step]["actor/loss"]) and metrics[step]["actor/grad_norm"] > 0


def test_checkpoints_are_numbered_in_the_order_of_writing(straight: Finished) -> None:
    folders: list[Path] = sorted((straight.run_dir / "checkpoints").glob("step_*"))
    assert [read_manifest(path).sequence for path in folders] == [0, 1, 2, 3]


def test_the_timeline_has_every_call_on_every_rank_inside_of_the_drivers_timers(grpo: Finished) -> None:
    events = [event for event in read_trace(grpo.run_dir / "trace.json") if event["step"] == 1]
    ranks = {"pool train rank 0", "pool train rank 1"}
    for method, timer in (
        ("rollout.generate", "generate"),
        ("actor.log_probs", "log_probs"),
        ("actor.update", "update_actor"),
    ):
        (waited,) = [event for event in events if event["process"] == "driver" and event["name"] == timer]
        inside = [
            e for e in events if e["name"] == method and waited["begin"] <= e["begin"] <= e["end"] <= waited["end"]
        ]
        assert {event["process"] for event in inside} == ranks
        assert all(event["peak_gb"] == 0 or 0.1 < event["peak_gb"] < 100 for event in inside)
        assert any(event["peak_gb"] for event in inside)
    assert grpo.run_dir.joinpath("trace.json").read_bytes().startswith(b"[\n{")
