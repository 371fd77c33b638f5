"""The run handle: what a checkpoint remembers beside the model, and the placement in words."""

from __future__ import annotations

import io
import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from hybridflow import compose
from hybridflow.checkpoint import CheckpointStore, verify
from hybridflow.checks import check
from hybridflow.config import GRPOConfig
from hybridflow.controller.placement import ROLE_ORDER, AbsentRole
from hybridflow.controller.pool import ResourcePool
from hybridflow.controller.run import Run
from hybridflow.data.demo import byte_tokenizer
from hybridflow.data.prompts import PromptSource
from hybridflow.data.stream import PromptStream
from hybridflow.errors import ConfigError
from hybridflow.protocol.data import DataProto
from hybridflow.protocol.meta import Max, Sum
from hybridflow.tracking import Tracker
from tests.assets import overrides_for
from tests.controller.conftest import group_on


def run_of(folder: Path, *overrides: str, groups: dict[str, Any] | None = None) -> tuple[Run, io.StringIO]:
    """A run whose roles are not placed, unless given; and what it prints."""
    at = overrides_for(folder) if not (folder / "model").exists() else []
    given = at or [f"model.path={folder}/model", f"data.train={folder}/train.jsonl", f"runs_dir={folder}/runs"]
    more = ["data.evaluate=", "name=test", "tracking.trackers=[]", *overrides]
    config = compose.load("grpo", GRPOConfig, [*given, *more])
    plan, printed = check(config), io.StringIO()
    tracker = Tracker(config, plan, resumed_step=1, console=Console(file=printed, width=400))
    store = CheckpointStore(plan.run_dir / "checkpoints")
    placed = {role: AbsentRole(role) for role in ROLE_ORDER} | (groups or {})
    no_prompts: Any = None  # neither saving nor resuming reads any
    return Run(config, plan, placed, no_prompts, tracker, store), printed


@pytest.mark.parametrize(
    ("resumed_with", "warned"),
    [
        (["actor.optimizer.schedule=cosine", "steps=20"], True),
        # Half the rows an update are twice the updates a step: 10 steps of 2 updates.
        (["actor.optimizer.schedule=linear", "actor.mini_batch_size=128"], True),
        (["actor.optimizer.schedule=cosine"], False),
        (["actor.optimizer.schedule=cosine", "actor.optimizer.decay_steps=10", "steps=20"], False),
        (["actor.optimizer.schedule=constant", "steps=20"], False),
    ],
)
def test_a_decaying_schedule_that_a_resume_rescales_is_warned_of(
    tmp_path: Path, resumed_with: list[str], warned: bool
) -> None:
    run, _ = run_of(tmp_path, "actor.optimizer.schedule=cosine", "steps=10")
    assert run.plan.updates == 1 and run.plan.rows == 256
    run.step = 1
    with run.timer("save"):
        saved = run.save()
    run._log({})
    run.tracker.settle()
    resumed, printed = run_of(tmp_path, "steps=10", "checkpoint.resume=auto", *resumed_with)
    resumed.restore(saved)
    assert resumed.step == 1
    schedule = resumed.config.actor.optimizer.schedule
    warning = (
        f"warning: the {schedule} schedule of the learning rate now ends at update 20 (steps={resumed.config.steps}); "
        "where the run was saved it ended at update 10 (steps=10), so the learning rate jumps. Set "
        "actor.optimizer.decay_steps=10 to go on along the old one.\n"
    )
    assert (warning in printed.getvalue()) is warned
    assert ("warning" in printed.getvalue()) is warned


@pytest.mark.parametrize(("trainer", "ends"), [(-1.25, False), (-1.75, True), (math.nan, True)])
def test_a_rollout_that_is_too_far_from_its_trainer_ends_the_run_if_wanted(
    tmp_path: Path, trainer: float, ends: bool
) -> None:
    every = ["checkpoint.every=0", "evaluate.every=0", "tracking.rollouts_every=0"]
    run, _ = run_of(tmp_path, "tracking.mismatch_stop=0.5", *every)
    columns = {"rollout_log_probs": [-1.0, -2.0], "log_probs": [trainer, -2.0]}
    batch = {name: DataProto.jagged([torch.tensor(row)]) for name, row in columns.items()}
    tokens = {name: DataProto.jagged([torch.tensor([2, 3])]) for name in ("prompts", "responses")}
    run.finish_step({}, DataProto.from_dict({**batch, **tokens}))
    reason = "the rollout's log_probs differ from the trainer's by up to {}, more than 0.5 (tracking.mismatch_stop)"
    assert run.stop_reason == (reason.format(f"{abs(trainer + 1):g}") if ends else "")


def test_a_resume_tells_which_settings_have_changed_since(tmp_path: Path) -> None:
    run, _ = run_of(tmp_path, "steps=10")
    saved = run.save()
    resumed, printed = run_of(tmp_path, "checkpoint.resume=auto", "name=other", "steps=20", "actor.optimizer.lr=1e-5")
    resumed.restore(saved)
    assert printed.getvalue().endswith(
        "settings that differ from those it was saved with: steps=20 (was 10), actor.optimizer.lr=1e-05 (was 0.0006)\n"
    )
    same, printed = run_of(tmp_path, "steps=10", "checkpoint.resume=auto", "tracking.rollouts_every=7")
    same.restore(saved)
    assert "settings that differ" not in printed.getvalue()


def test_a_checkpoint_holds_a_configuration_that_can_be_run_again(tmp_path: Path) -> None:
    run, _ = run_of(tmp_path, "steps=10")
    run.step = 3
    saved = run.save()
    assert set(verify(saved).files) == {"run.json", "config.yaml"}
    assert compose.load("config", GRPOConfig, [], saved) == run.config


def test_sigterm_ends_the_run_after_its_step_and_saves_it(tmp_path: Path) -> None:
    run, printed = run_of(tmp_path, "steps=4", "data.prompts_per_step=2", "tracking.rollouts_every=0")
    rows = [json.dumps({"prompt": f"{i}+1=", "ground_truth": str(i + 1)}) for i in range(3)]
    (tmp_path / "train.jsonl").write_text("\n".join(rows))
    run.source = PromptSource(run.config.data, byte_tokenizer(), run.config.rollout, seed=0)
    run.stream = PromptStream(run.source)
    before = signal.getsignal(signal.SIGTERM)
    for prompts in run.steps():
        if run.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        responses = DataProto.jagged([torch.tensor([1, 2])] * 2)
        run.finish_step({}, prompts.union(DataProto.from_dict({"responses": responses})))
    assert run.store.latest() == (2, run.store.folder(2))
    assert run.store.read_json(run.store.folder(2) / "run.json")["position"] == 4
    assert "Interrupted after step 2 of 4" in printed.getvalue()
    assert signal.getsignal(signal.SIGTERM) is before


class Answers:
    """A rollout and a reward in one: every held-out prompt is answered, and right as often as is said."""

    def __init__(self) -> None:
        self.accuracy: list[float] = []

    def __bool__(self) -> bool:
        return True

    def sync_weights(self, version: int) -> dict[str, float]:
        return {}

    def generate(self, prompts: DataProto, **_: Any) -> DataProto:
        return prompts.union(DataProto.from_dict({"responses": DataProto.jagged([[1]] * len(prompts))}))

    def score(self, batch: DataProto) -> DataProto:
        solved = torch.arange(len(batch)) < round(self.accuracy.pop(0) * len(batch))
        return DataProto.from_dict({"solved": solved, "rewards": solved.float()})


class HeldOut:
    """Ten held-out prompts, and as many others as are asked for."""

    def batch(self, start: int, count: int) -> DataProto:
        return DataProto.from_dict({"prompts": DataProto.jagged([[1]] * count)})

    def held_out(self) -> DataProto:
        prompts = DataProto.jagged([[2, 3]] * 10)
        return DataProto.from_dict({"prompts": prompts, "group_ids": torch.arange(10)}, {"data_source": ["a"] * 10})


def evaluated(folder: Path, accuracy: list[float], *overrides: str) -> tuple[Run, int]:
    """A run that is evaluated in each step until it stops, or as often as there is an accuracy; and the last step."""
    answers = Answers()
    answers.accuracy = list(accuracy)
    every = ["checkpoint.every=0", "checkpoint.keep=1", "tracking.rollouts_every=0"]
    run, _ = run_of(folder, *every, *overrides, groups={"rollout": answers, "reward": answers})
    _streamed(run)
    while answers.accuracy and not run.stop_reason:
        run.tracker.log(run.step, run.evaluate())
        run.step += 1
    return run, run.step - 1


def test_a_run_that_gets_no_better_ends_after_its_patience(tmp_path: Path) -> None:
    run, last = evaluated(tmp_path / "a", [0.2, 0.5, 0.5, 0.3, 0.6], "evaluate.patience=2")
    assert last == 3
    assert run.stop_reason == (
        "evaluate/accuracy has not got better than 0.5 (step 1) in 2 evaluations (evaluate.patience)"
    )
    run, last = evaluated(tmp_path / "b", [0.2, 0.5, 0.5, 0.6, 0.4], "evaluate.patience=2")
    assert (last, run.stop_reason) == (4, "")
    lower = ["evaluate.patience=1", "evaluate.metric=evaluate/reward", "evaluate.mode=min"]
    assert evaluated(tmp_path / "c", [0.5, 0.4, 0.4, 0.3], *lower)[1] == 2


def test_the_best_evaluations_checkpoint_is_kept(tmp_path: Path) -> None:
    run, _ = evaluated(tmp_path, [0.9, 0.2, 1.0, 0.3, 1.0], "checkpoint.keep_best=true")
    # The first of equal ones, and never step 0, which is the model that the run began from.
    assert (run.store.root / "best").read_text() == "step_000002\n"
    assert (run.tracker.run_dir / "best").readlink() == Path("checkpoints/step_000002/model")
    run.step = 4
    run.save()
    assert [step for step, _ in run.store.checkpoints()] == [2, 4]


@pytest.mark.parametrize("row", [None, {}, {"evaluate/accuracy": 0.25}])
@pytest.mark.parametrize("every", [1, 2])
def test_what_a_killed_run_did_not_report_of_its_saved_step_is_evaluated_or_warned_of(
    tmp_path: Path, row: dict[str, float] | None, every: int
) -> None:
    run, _ = run_of(tmp_path, "steps=10")
    run.step = 1
    saved = run.save()
    if row is not None:
        run.tracker.log(1, {"actor/loss": 3.0, **row})
    if row:
        run.tracker.trace(1, [("save", 1.0, 2.0)], [])
        run.tracker.settle()
    answers = Answers()
    answers.accuracy = [0.5]
    given = [f"evaluate.every={every}", "checkpoint.every=0", "tracking.rollouts_every=0", "data.prompts_per_step=1"]
    placed = {"rollout": answers, "reward": answers}
    resumed, printed = run_of(tmp_path, "steps=10", "checkpoint.resume=auto", *given, groups=placed)
    resumed.restore(saved)
    next(iter(_streamed(resumed).steps()))
    warning = "warning: the run was killed after step 1 had been saved and before it was reported: its metrics, "
    assert (warning in printed.getvalue()) is (row is None)
    warning = "warning: the run was killed while it wrote the samples of step 1, which it had saved: some may be"
    assert (warning in printed.getvalue()) is (row == {})
    late = every == 1 and not row
    assert answers.accuracy == ([] if late else [0.5])
    assert resumed.tracker.history("evaluate/accuracy") == ({1: 0.5} if late else {1: 0.25} if row else {})
    assert resumed.tracker.history("actor/loss") == ({} if row is None else {1: 3.0})


def test_a_step_whose_sync_or_evaluation_fails_is_reported_before_the_error(tmp_path: Path) -> None:
    answers = Answers()
    quiet = ["checkpoint.every=1", "evaluate.every=1", "tracking.rollouts_every=1"]
    run, _ = run_of(tmp_path, *quiet, groups={"rollout": answers, "reward": answers})
    byte_tokenizer().save_pretrained(tmp_path / "model")
    tokens = {name: DataProto.jagged([torch.tensor([2, 3])]) for name in ("prompts", "responses")}
    _streamed(run)._begin(1)
    with pytest.raises(IndexError):  # there is no more accuracy
        run.finish_step({"loss": 2.0}, DataProto.from_dict(tokens))
    run.tracker.close()
    assert run.store.latest() == (1, run.store.folder(1))
    assert run.tracker.history("actor/loss") == {1: 2.0}
    samples = (run.tracker.run_dir / "rollouts.jsonl").read_text().splitlines()
    assert [json.loads(line)["response_ids"] for line in samples] == [[2, 3]]


def test_what_one_of_two_pools_reports_of_a_sync_is_kept_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Side:
        """One pool of two processes."""

        def __init__(self, *reports: dict[str, float]) -> None:
            self.reports = reports

        def give(self, *_: Any, blocking: bool) -> tuple[dict[str, float], ...]:
            assert not blocking
            return self.reports

        send_weights = sync_weights = give

    sent = Side({"sync/bytes": Sum(0), "sync/seconds": Max(2.0)}, {"sync/bytes": Sum(0), "sync/seconds": Max(1.0)})
    taken = Side(*({"sync/bytes": Sum(8), "sync/seconds": Max(1.5), "memory/rss_gb": Max(gb)} for gb in (3.0, 4.0)))
    run, _ = run_of(tmp_path, groups={"actor": sent, "rollout": taken})
    run._apart["rollout"] = True
    monkeypatch.setattr("hybridflow.controller.run.together", lambda *sides: list(sides))
    assert run.sync_weights() == {"sync/bytes": 16, "sync/seconds": 2.0, "memory/rss_gb": 4.0}


def test_a_metric_of_a_data_source_that_is_not_there_is_told_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'evaluate/reward/books': an evaluation has .*Known: .*evaluate/reward"):
        evaluated(tmp_path, [0.5], "evaluate.patience=1", "evaluate.metric=evaluate/reward/books")


def test_an_adapted_kl_goes_on_where_it_was(tmp_path: Path) -> None:
    adaptive = ["algorithm.kl_coef=0.1", "algorithm.kl_target=0.5", "algorithm.kl_horizon=100"]
    given = [*adaptive, "roles.reference={pool: train}", "evaluate.every=0", "tracking.rollouts_every=0"]
    run, _ = run_of(tmp_path, *given, "checkpoint.every=1")
    tokens = {name: DataProto.jagged([torch.tensor([2, 3])]) for name in ("prompts", "responses")}
    run.step = 1
    run.finish_step({}, DataProto.from_dict(tokens, meta_info={"metrics": {"reward/kl": 5.0}}))
    resumed, _ = run_of(tmp_path, *given, "checkpoint.resume=auto")
    resumed.restore(run.store.folder(1))
    prompts = next(iter(_streamed(resumed).steps()))
    # One response with a KL far above the target: 0.1 * (1 + 0.2 * 1 / 100).
    assert prompts.meta_info == {"kl_coef": pytest.approx(0.1002), "step": 2}


def _streamed(run: Run) -> Run:
    source: Any = HeldOut()
    run.source = run.stream.source = source
    return run


def test_answers_begin_steps_ahead_and_are_asked_for_one_step_ahead(tmp_path: Path) -> None:
    quiet = ["evaluate.at_start=false", "evaluate.every=0", "tracking.rollouts_every=0", "checkpoint.every=1"]
    run, _ = run_of(tmp_path, *quiet, "steps=5", "data.prompts_per_step=2", "checkpoint.keep=0")
    called: list[str] = []
    begun, given = [], []

    def begin(prompts: DataProto) -> int:
        begun.append(prompts.meta_info["step"])
        called.append(f"begin {begun[-1]}")
        return begun[-1]

    def start(step: int) -> int:
        called.append(f"start {step}")
        return step

    responses = DataProto.from_dict({name: DataProto.jagged([[1]]) for name in ("prompts", "responses")})
    for step in _streamed(run).steps(start, ahead=2, begin=begin):
        given.append(step)
        called.append(f"step {step}")
        run.finish_step({}, responses)
        # What has only been begun or started comes again after a resume: two prompts for each finished step are used.
        assert run.store.read_json(run.store.folder(step) / "run.json")["position"] == 2 * step
    assert begun == given == [1, 2, 3, 4, 5]
    # fmt: off
    assert called == [
        "begin 1", "begin 2", "begin 3", "start 1", "start 2", "step 1",
        "begin 4", "start 3", "step 2", "begin 5", "start 4", "step 3", "start 5", "step 4", "step 5",
    ]
    # fmt: on


@pytest.mark.ray
@pytest.mark.distributed
def test_describe_shows_the_placement_with_the_nodes_and_what_is_absent(pool: ResourcePool, tmp_path: Path) -> None:
    with ResourcePool("cpu", [1], kind="cpu", cores_per_device=0.5) as cpu:
        groups = {"actor": pool, "rollout": pool, "reward": cpu}
        run, _ = run_of(
            tmp_path,
            "pools={main: {devices: [2]}}",
            "roles.actor.pool=main",
            "roles.rollout.pool=main",
            groups={role: group_on(at, role) for role, at in groups.items()},
        )
        node = pool.places[0].node
        lines = run.describe().splitlines()
    assert lines[0].split() == ["pool", "devices", "role", "layout", "nodes"]
    assert lines[2].split() == ["main", "[2]", "device", "actor", "tp1", "pp1", "cp1", "dp2", node, "x", "2"]
    assert lines[4].split() == ["cpu", "[1]", "cpu", "reward", "tp1", "pp1", "cp1", "dp1", node, "x", "1"]
    assert lines[-1] == "not placed: reference"


def test_a_checkpoint_keeps_what_the_driver_adapts(tmp_path: Path) -> None:
    run, _ = run_of(tmp_path)
    run.state["multiplier"] = 2.5
    saved = run.save()
    resumed, _ = run_of(tmp_path, "checkpoint.resume=auto")
    assert resumed.state == {}
    resumed.restore(saved)
    assert resumed.state == {"multiplier": 2.5}
