"""A pool of its own for the rollout: the same numbers; generation ahead; answers that go on over updates."""

from __future__ import annotations

import json
import re

import pytest

from tests.e2e.conftest import Finished
from tests.e2e.drivers import metrics_of, rows_of

# A test that comes first for a run waits for it.
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

STEPS = (1, 2, 3, 4)


def test_a_pool_of_its_own_for_the_rollout_changes_no_answer_and_no_update(
    straight: Finished, two_pools: dict[str, Finished]
) -> None:
    apart = two_pools["apart"]
    assert rows_of(apart.run_dir / "rollouts.jsonl") == rows_of(straight.run_dir / "rollouts.jsonl")
    found, expected = metrics_of(apart.run_dir), metrics_of(straight.run_dir)
    assert not any("not_finite" in row for row in found.values())
    for name in ("actor/loss", "actor/grad_norm", "reward/mean", "rollout_vs_trainer/max_diff"):
        assert [found[step][name] for step in STEPS] == [expected[step][name] for step in STEPS], name
    assert all(found[step]["actor/grad_norm"] > 0 and found[step]["rollout/staleness_max"] == 0 for step in STEPS)
    # One device generates with the whole model, all of which comes from the other pool.
    assert found[1]["sync/bytes_received"] == found[1]["sync/bytes"] == expected[1]["sync/bytes"]
    assert expected[1]["sync/bytes_received"] == 0


def test_generation_ahead_is_one_step_behind_the_trainer_and_says_so(
    straight: Finished, two_pools: dict[str, Finished]
) -> None:
    ahead = two_pools["ahead"]
    found = metrics_of(ahead.run_dir)
    assert [found[step]["rollout/staleness_max"] for step in STEPS] == [0, 1, 1, 1]
    rows = [row for row in rows_of(ahead.run_dir / "rollouts.jsonl") if row["tag"] == "train"]
    assert {(row["step"], row["version"]) for row in rows} == {(1, 0), (2, 0), (3, 1), (4, 2)}
    # The first step's answers and the second's prompts are those of the run that waits.
    first = [row for row in rows_of(straight.run_dir / "rollouts.jsonl") if row["tag"] == "train"]
    size = len(first) // len(STEPS)
    assert rows[:size] == first[:size]
    assert [row["prompt"] for row in rows] == [row["prompt"] for row in first]
    # What the trainer has learned since is not taken for a mismatch of the engines.
    assert found[1]["rollout_vs_trainer/max_diff"] < 1e-4 < found[3]["off_policy/max_diff"]
    assert "rollout_vs_trainer/max_diff" not in found[3]
    assert not re.search(r"warning: step \d", ahead.ended.out)


def test_a_step_that_was_only_started_comes_again_after_a_resume(two_pools: dict[str, Finished]) -> None:
    for step in STEPS:
        saved = two_pools["ahead"].run_dir / "checkpoints" / f"step_{step:06d}" / "run.json"
        assert json.loads(saved.read_text())["position"] == 4 * step


def test_answers_go_on_over_updates_and_none_is_older_than_the_bound(half_way: Finished) -> None:
    found = metrics_of(half_way.run_dir)
    bound = 2
    behind = [found[step]["rollout/staleness_max"] for step in range(1, 9)]
    assert behind[0] == 0 and max(behind) == bound
    assert any(found[step].get("rollout/mixed", 0) > 0 for step in range(2, 9))
    rows = [row for row in rows_of(half_way.run_dir / "rollouts.jsonl") if row["tag"] == "train"]
    mixed = [row for row in rows if "versions" in row]
    assert mixed and all(row["version"] == min(row["versions"]) for row in mixed)
    # A token of the very policy that trains on it has that policy's log-probability, after tokens of older ones too.
    fresh = stale = 0
    for row in rows:
        versions = row.get("versions", [row["version"]] * len(row["response_ids"]))
        assert row["step"] - 1 - bound <= min(versions) <= max(versions) <= row["step"] - 1
        for version, drawn, trainer in zip(versions, row["log_probs"], row["trainer_log_probs"], strict=True):
            if version == row["step"] - 1:
                assert abs(drawn - trainer) < 1e-4
                fresh += 1
            stale = max(stale, abs(drawn - trainer))
    assert fresh and stale > 1e-3
    assert not re.search(r"warning: step \d", half_way.ended.out)


def test_half_way_answers_of_a_run_that_ends_come_again_and_no_prompt_twice(half_way: Finished) -> None:
    rows = [row for row in rows_of(half_way.run_dir / "rollouts.jsonl") if row["tag"] == "train"]
    assert [row["step"] for row in rows] == [step for step in range(1, 9) for _ in range(16)]
    uids = [row["uid"] for row in rows[::4]]
    assert len(set(uids)) == 4 * 8 and [row["uid"] for row in rows] == [uid for uid in uids for _ in range(4)]
    # The first answers after an interruption, and after a process was killed, begin anew with the weights that were
    # saved; all others had begun before the step before them was trained on.
    versions = {step: {row["version"] for row in rows if row["step"] == step} for step in range(1, 9)}
    _, interrupted, killed = (step - 1 for step in versions if versions[step] == {step - 1})
    assert 2 <= interrupted < 5 <= killed == int(re.findall(r"step (\d) is done", half_way.ended.out)[0])
