"""DAPO's run: which groups its steps keep, how prompts count, what is said of them, and that it learns."""

from __future__ import annotations

import json
import re

import pytest

from tests.e2e.conftest import Finished
from tests.e2e.drivers import metrics_of, rows_of
from tests.e2e.reward import expected

# A test that comes first for a run waits for it.
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

STEPS, PROMPTS, N = 16, 4, 4


def sampling(run: Finished) -> list[dict[str, float]]:
    """What each step says of its sampling."""
    rows = metrics_of(run.run_dir)
    head = "sampling/"
    return [
        {name.removeprefix(head): x for name, x in rows[step].items() if name.startswith(head)}
        for step in range(1, STEPS + 1)
    ]


def test_every_step_trains_on_whole_groups_and_no_prompt_twice(dapo: Finished) -> None:
    rows = [row for row in rows_of(dapo.run_dir / "rollouts.jsonl") if row["tag"] == "train"]
    steps = [[row["group"] for row in rows if row["step"] == step] for step in range(1, STEPS + 1)]
    assert all(groups == [g for g in dict.fromkeys(groups) for _ in range(N)] for groups in steps)
    assert [len(groups) for groups in steps] == [PROMPTS * N] * STEPS
    found = [sorted(set(groups)) for groups in steps]
    places = [sum(int(s["prompts"]) for s in sampling(dapo)[:step]) for step in range(STEPS + 1)]
    # A step's groups lie between the prompts that earlier steps have used up and those that it has.
    assert all(start <= g[0] and g[-1] < end for start, end, g in zip(places[:-1], places[1:], found, strict=True))


def test_a_checkpoint_keeps_the_place_in_the_data(dapo: Finished) -> None:
    saved = json.loads((dapo.run_dir / "checkpoints" / "step_000016" / "run.json").read_text())
    assert saved["position"] == sum(s["prompts"] for s in sampling(dapo))


def test_groups_without_a_signal_are_replaced_or_it_is_said(dapo: Finished) -> None:
    found = sampling(dapo)
    assert max(s["tries"] for s in found) == 3 and min(s["tries"] for s in found) == 1
    rows = [row for row in rows_of(dapo.run_dir / "rollouts.jsonl") if row["tag"] == "train"]
    told = re.findall(r"step (\d+): (\d) of 4 groups have a signal after 3 tries", dapo.ended.err)
    for step, counts in enumerate(found, 1):
        groups: dict[int, set[bool]] = {}
        for row in rows:
            if row["step"] == step:
                groups.setdefault(row["group"], set()).add(row["solved"])
        with_signal = sum(len(solved) == 2 for solved in groups.values())
        assert counts["filled"] == PROMPTS - with_signal
        assert ((str(step), str(with_signal)) in told) == (counts["filled"] > 0)


def test_the_reward_is_the_functions_and_components_are_kept_beside_it(dapo: Finished) -> None:
    rows = rows_of(dapo.run_dir / "rollouts.jsonl")
    for row in rows:
        assert row["reward"] == pytest.approx(expected(row["response"]))
        assert row["solved"] == (expected(row["response"]) >= 0.6)
        assert row["reward_components"] == {"score": pytest.approx(row["reward"]), "size": len(row["response"])}
    assert metrics_of(dapo.run_dir)[STEPS]["reward/size"] > 0


def test_it_learns(dapo: Finished) -> None:
    solved = [s["solved"] for s in sampling(dapo)]  # of all answers, those of the groups left out too
    assert sum(solved[-4:]) / 4 > sum(solved[:4]) / 4 + 0.15
