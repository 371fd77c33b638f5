"""What a driver says to wrong input: one message, an exit code, no traceback, and nothing started or written."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from hybridflow.checkpoint import verify
from tests.e2e.drivers import GRPO, SFT, Driver, Ended

# A test that comes first for a run waits for it, and for the runs before it.
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

# One of each kind; tests/checks, tests/data and tests/rewards have the others.
# Name: driver, overrides ("{}" is the folder of `inputs`), exit code, parts of the message.
CASES: dict[str, tuple[Path, list[str], int, list[str]]] = {
    "unknown key": (
        GRPO,
        ["rollout.max_token=6"],
        2,
        ["there is no setting 'rollout.max_token'", "Did you mean 'max_tokens'?"],
    ),
    "batch that does not divide": (
        GRPO,
        ["data.prompts_per_step=5", "rollout.n=2", "actor.mini_batch_size=4"],
        2,
        [
            "actor.mini_batch_size=4 does not divide data.prompts_per_step * rollout.n = 5 * 2 = 10 rows.",
            "Set it to one of 1, 2, 5, 10, or to 0 for the whole batch.",
        ],
    ),
    "pool that the machine cannot hold": (
        GRPO,
        ["pools.train.devices=[999]"],
        2,
        ["pools.train.devices=[999]: pools ask for 999 (train) + 1 (cpu) devices", "cores in all; the cluster has"],
    ),
    "row without a prompt": (
        GRPO,
        ["data.train={}/no_prompt.jsonl"],
        1,
        ["{}/no_prompt.jsonl", "line 2", "data.prompt_key"],
    ),
    "long prompts": (
        GRPO,
        ["data.long_prompts=error"],
        1,
        ["3 of 7293 rows are too long", "rollout.max_prompt_tokens=32", "or set data.long_prompts=filter"],
    ),
    "no reward module": (
        GRPO,
        ["reward.function=no_such_module:score"],
        2,
        ["reward.function='no_such_module:score'", "no_such_module"],
    ),
    "reward file that fails": (
        SFT,
        ["reward.function={}/broken.py:score"],
        2,
        ["reward.function='{}/broken.py:score'", "ZeroDivisionError", "broken.py, line 1"],
    ),
    "pad token that is text": (
        GRPO,
        ["model.tokenizer_path={}/text_pad"],
        1,
        ["tokenizer at {}/text_pad: pad_token is 'a' (id 97), which ordinary text is made of", "Set pad_token in"],
    ),
}


@pytest.fixture(scope="module")
def inputs(folder: Path) -> Path:
    """Files and folders with something wrong."""
    at = folder / "inputs"
    at.mkdir()
    rows = [{"prompt": "1+1=", "ground_truth": "2"}, {"ground_truth": "3"}]
    (at / "no_prompt.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (at / "broken.py").write_text("x = 1 / 0\n\n\ndef score(prompts, responses, ground_truth):\n    return [x]\n")
    (at / "text_pad").mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(folder / "model" / file, at / "text_pad" / file)
    settings = at / "text_pad" / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "pad_token": "a"}))
    return at


@pytest.fixture(scope="module")
def refused(inputs: Path, overrides: list[str], start: Callable[..., Driver]) -> Iterator[dict[str, Future]]:
    """All the drivers of this module, two at a time: each waits for its own imports most of the time."""

    def run(name: str) -> tuple[Driver, Ended]:
        script, more, _, _ = CASES[name]
        driver = start(
            script, overrides, f"name={name.replace(' ', '_')}", *(t.replace("{}", str(inputs)) for t in more)
        )
        return driver, driver.wait()

    with ThreadPoolExecutor(2) as threads:
        yield {name: threads.submit(run, name) for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_wrong_input_is_refused_in_seconds_with_what_is_wrong_and_the_fix(
    name: str, refused: dict[str, Future], inputs: Path
) -> None:
    _, _, code, parts = CASES[name]
    driver, ended = refused[name].result()
    assert ended.code == code, ended.err
    assert ended.err.startswith("error: ")
    assert [part for part in parts if part.replace("{}", str(inputs)) not in ended.err] == [], ended.err
    assert "Traceback" not in ended.err + ended.out
    assert ended.err.count("\n") <= 2
    # The run's folder is made before Ray is started: neither was.
    assert not driver.run_dir.exists()
    assert ended.seconds < 15


@pytest.fixture
def small_disk(folder: Path) -> Iterator[Path]:
    """A disk with room for one checkpoint of the demo's model (5.6 MB) and not for two."""
    at = folder / "small_disk"
    at.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=9m", "tmpfs", str(at)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    yield at
    subprocess.run(["umount", str(at)], check=True)


def test_a_full_disk_ends_the_run_with_path_and_reason_and_leaves_the_checkpoint_before(
    small_disk: Path, four_steps: list[str], start: Callable[..., Driver]
) -> None:
    ended = start(GRPO, four_steps, "name=full", f"runs_dir={small_disk}").wait()
    checkpoints = small_disk / "full" / "checkpoints"
    assert ended.code == 1, ended.err
    assert ended.err.startswith("error: actor.save failed on rank 0 in step 2: CheckpointError: ")
    assert f"{checkpoints}/unfinished_step_000002/" in ended.err
    assert "No space left on device" in ended.err
    assert (
        f"The checkpoint of step 2 was not written. The checkpoint {checkpoints / 'step_000001'} (step 1) is intact."
        in ended.err
    )
    assert sorted(path.name for path in checkpoints.iterdir()) == ["latest", "step_000001"]
    assert verify(checkpoints / "step_000001").step == 1
