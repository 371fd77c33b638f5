"""An interrupted or killed run goes on as if nothing had happened; its model folder says what the engine said."""

from __future__ import annotations

import filecmp
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridflow.checkpoint import verify
from hybridflow.protocol.data import DataProto
from tests.e2e.conftest import Finished, Killed
from tests.e2e.drivers import metrics_of, rows_of

# A test that comes first for a run waits for it, and for the runs before it.
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

# What a resumed step has to repeat to the last bit: everything but clocks and the sync of the start.
REPEATED = ("actor/", "reference/", "reward/mean", "reward/failed", "reward/solved", "response/")
REPEATED += ("rollout_vs_trainer/", "evaluate/")


def repeated(run: Finished) -> dict[int, dict[str, float]]:
    rows = metrics_of(run.run_dir)
    return {
        step: {name: value for name, value in row.items() if name.startswith(REPEATED)} for step, row in rows.items()
    }


def files_of(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_ctrl_c_finishes_the_step_saves_it_and_says_how_to_go_on(interrupted: Finished) -> None:
    saved = interrupted.run_dir / "checkpoints" / "step_000002"
    assert interrupted.ended.code == 0
    assert interrupted.ended.err == ""
    assert "Finishing this step, then saving. Press Ctrl-C again to stop at once." in interrupted.ended.out
    assert (
        f"Interrupted after step 2 of 4; the checkpoint is {saved}. Go on with the same command and "
        "checkpoint.resume=auto." in interrupted.ended.out
    )
    assert interrupted.left == []
    assert verify(saved).step == 2


@pytest.mark.parametrize(("name", "resumed_at"), [("continued", 2), ("recovered", 1)])
def test_a_resumed_run_is_the_run_that_was_never_stopped(
    name: str, resumed_at: int, straight: Finished, resumed: dict[str, Finished]
) -> None:
    run = resumed[name]
    assert f"step_{resumed_at:06d}: step {resumed_at} is done" in run.ended.out
    assert list(repeated(run)) == [0, 1, 2, 3, 4]
    assert repeated(run) == repeated(straight)
    assert all(repeated(straight)[step]["actor/grad_norm"] > 0 for step in (1, 2, 3, 4))
    assert rows_of(run.run_dir / "rollouts.jsonl") == rows_of(straight.run_dir / "rollouts.jsonl")
    for step in range(resumed_at, 5):
        ours, theirs = (r.run_dir / "checkpoints" / f"step_{step:06d}" for r in (run, straight))
        names = [name for name in files_of(theirs) if name not in ("manifest.json", "config.yaml")]  # name, resume
        assert files_of(ours) == files_of(theirs)
        assert filecmp.cmpfiles(ours, theirs, names, shallow=False) == (names, [], [])


def test_a_reference_that_follows_is_the_actor_of_two_steps_ago_and_part_of_a_checkpoint(
    straight: Finished, resumed: dict[str, Finished], two_pools: dict[str, Finished]
) -> None:
    from safetensors.torch import load_file

    for run in (straight, *resumed.values(), two_pools["apart"]):
        saved = [run.run_dir / "checkpoints" / f"step_{step:06d}" for step in (1, 2, 3, 4)]
        assert [(folder / "reference").is_dir() for folder in saved] == [False, True, True, True]
        for held, taken in ((1, 1), (2, 1), (3, 3)):  # in the checkpoints of steps 2, 3 and 4
            ours, theirs = (
                load_file(saved[step] / part / "model.safetensors")
                for step, part in ((held, "reference/model"), (taken, "model"))
            )
            assert all(ours[name].equal(theirs[name]) for name in theirs)
        rows = metrics_of(run.run_dir)
        # KL to itself at steps 1 and 3, to the policy of a step before at 2 and 4.
        assert [rows[step]["actor/kl"] > 1e-8 for step in (1, 2, 3, 4)] == [False, True, False, True]
        assert [rows[step].get("reference/version") for step in (1, 2, 3, 4)] == [None, 2, None, 4]


def test_a_killed_process_ends_the_run_and_is_named(killed: Killed) -> None:
    assert killed.ended.code == 1
    assert killed.seconds < 30
    assert "Traceback" not in killed.ended.err
    # Which method it is depends on how far step 2 has come.
    named = (
        rf"error: (rollout|actor)\.[a-z_]+ failed on rank 0 in step 2: the process is gone \(pid {killed.pid} on node "
    )
    assert re.match(named, killed.ended.err)
    assert "a word (Ray's SYSTEM_ERROR, end of file); its log: /" in killed.ended.err
    assert "The last checkpoint is of step 1. Go on with the same command and" in killed.ended.err
    assert killed.ended.err.count("\n") <= 2 and "(raylet)" not in killed.ended.out
    assert killed.left == []
    assert verify(killed.run_dir / "checkpoints" / "step_000001").step == 1


def test_the_model_folder_says_what_the_engine_said_after_its_last_sync(continued: Finished) -> None:
    from transformers import AutoModelForCausalLM

    answers = DataProto.load_from_disk(continued.run_dir / "greedy")
    model: Any = AutoModelForCausalLM.from_pretrained(continued.run_dir / "model", dtype=torch.float32).eval()
    prompts, responses, log_probs = (
        answers.flat(key).split(answers.lengths(key).tolist()) for key in ("prompts", "responses", "rollout_log_probs")
    )
    assert answers["weight_version"].tolist() == [4] * 16
    for prompt, response, found in zip(prompts, responses, log_probs, strict=True):
        with torch.no_grad():
            said = model.generate(prompt[None], attention_mask=torch.ones_like(prompt[None]), max_new_tokens=6)
            logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        assert said[0, len(prompt) :].tolist() == response.tolist()
        wanted = logits.log_softmax(-1).gather(1, response[:, None])[:, 0]
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


def test_the_trained_model_is_not_the_one_it_started_from(continued: Finished, folder: Path) -> None:
    from safetensors.torch import load_file

    trained, first = (load_file(at / "model.safetensors") for at in (continued.run_dir / "model", folder / "model"))
    assert trained.keys() == first.keys()
    assert all(not torch.equal(trained[name], first[name]) for name in first if "norm" not in name)
