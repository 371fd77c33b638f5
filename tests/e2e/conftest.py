"""The runs that the tests of this folder look at: each is made once, and several claims are tested on it.

A driver takes most of its time to import vLLM and to start Ray, so there are as few runs as the claims allow:

    sft (2 devices) -> grpo (2 devices, with reference; generates on tp2)   what every example leaves behind
    straight (1 device, 4 steps)                            what the runs below have to come to, bit by bit
    interrupted -> continued                                Ctrl-C in step 2, then resume by a driver of the user's own
    killed -> recovered                                     a device process killed in step 2, then resume
    dapo (1 device, 16 steps)                               dynamic sampling, a reward of two functions, learning
    apart, ahead (1 + 1 devices, 4 steps)                   a pool for generation: by turns, and one step ahead
    remax (1 device, 12 steps), distill (1 + 1 devices, 8 steps), dpo (1 device, 12 steps)      learning

Runs that do not need each other share the machine: sft and straight, continued and recovered, apart and ahead, dpo and
remax.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.e2e.drivers import DAPO, DISTILL, DPO, GRPO, ONE_STEP_OFF, REMAX, SFT, Driver, Ended, survivors, value_of

HERE = Path(__file__).parent
REWARD = HERE / "reward.py"
LONG_ROWS = 3


@dataclass(frozen=True)
class Finished:
    """A run of a driver that has ended, and the processes of it that were left behind."""

    run_dir: Path
    ended: Ended
    left: list[str]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model and data of the demo; the training data ends in prompts over every limit used here."""
    from hybridflow.data.demo import write_demo

    folder = tmp_path_factory.mktemp("e2e")
    write_demo(folder)
    row = {"messages": [{"role": "user", "content": "9" * 100}], "ground_truth": "9", "data_source": "additions"}
    with (folder / "train.jsonl").open("a") as file:
        file.write((json.dumps(row) + "\n") * LONG_ROWS)
    return folder


@pytest.fixture(scope="session")
def overrides(folder: Path) -> list[str]:
    """A run of seconds on one device, in which every step trains and saves."""
    return [
        f"model.path={folder / 'model'}",
        f"data.train={folder / 'train.jsonl'}",
        f"data.evaluate={folder / 'heldout.jsonl'}",
        f"runs_dir={folder / 'runs'}",
        "data.long_prompts=filter",
        "data.prompts_per_step=4",
        "rollout.max_tokens=6",
        "evaluate.size=16",
        "pools.train.devices=[1]",
        "actor.optimizer.schedule=constant",
        "actor.optimizer.lr=1e-3",
        "actor.optimizer.warmup_steps=10",
        "checkpoint.every=1",
        "checkpoint.keep=0",
    ]


@pytest.fixture(scope="session")
def four_steps(overrides: list[str]) -> list[str]:
    """GRPO with a reward file that fails on some answers and gives a signal on the rest."""
    return [*overrides, "steps=4", "rollout.n=4", f"reward.function={REWARD}:score", "reward.max_failed=0.9"]


@pytest.fixture(scope="session")
def start(folder: Path) -> Iterator[Callable[..., Driver]]:
    """Start a driver; the last of equal overrides wins. None outlives the session."""
    started: list[Driver] = []

    def start(script: Path, overrides: list[str], *more: str) -> Driver:
        printed = folder / "printed" / value_of([*overrides, *more], "name") / str(len(started))
        started.append(Driver(script, [*overrides, *more], printed))
        return started[-1]

    yield start
    for driver in started:
        driver.stop()


def to_its_end(driver: Driver) -> Finished:
    """The run of a driver that has to succeed."""
    ended = driver.wait()
    assert ended.code == 0, f"{ended.out}\n{ended.err}"
    return Finished(driver.run_dir, ended, [])


@pytest.fixture(scope="session")
def straight_driver(start: Callable[..., Driver], four_steps: list[str]) -> Driver:
    return start(GRPO, four_steps, "name=straight")


@pytest.fixture(scope="session")
def sft(start: Callable[..., Driver], overrides: list[str], straight_driver: Driver) -> Finished:
    return to_its_end(start(SFT, overrides, "name=sft", "steps=2", "pools.train.devices=[2]", "evaluate.every=2"))


@pytest.fixture(scope="session")
def grpo(start: Callable[..., Driver], overrides: list[str], sft: Finished) -> Finished:
    """Goes on from the model of the supervised run, with KL to the reference and off-policy correction; generates with
    tensor parallelism; training and generation take turns in memory."""
    given = [f"model.path={sft.run_dir / 'model'}", "placement=colocate_reference", "actor.loss.kl_coef=0.1"]
    given += ["algorithm.correction={level: token, reject: sequence}"]
    reward = [f"reward.function={REWARD}:score", "reward.max_failed=0.9"]
    more = ["name=grpo", "steps=2", "rollout.n=4", "pools.train.devices=[2]", "evaluate.every=2"]
    layout = ["roles.rollout.layout.tp=2"]
    memory = ["memory.offload=[gradients,optimizer,parameters,reference]", "memory.keep_rollout=false"]
    return to_its_end(start(GRPO, overrides, *given, *reward, *more, *layout, *memory))


@pytest.fixture(scope="session")
def dapo(start: Callable[..., Driver], overrides: list[str]) -> Finished:
    """From random weights, with a reward that such a model learns, and solved so rarely that groups have no signal."""
    reward = [f"reward.function={REWARD}:even", "reward.solved_at=0.6", "actor.optimizer.lr=2e-3"]
    size = f"reward.components={{size: {{function: '{REWARD}:size', weight: 0.0}}}}"
    more = ["name=dapo", "steps=16", "rollout.n=4", "dynamic_sampling.max_tries=3", "actor.optimizer.warmup_steps=0"]
    return to_its_end(start(DAPO, overrides, *reward, size, *more, "checkpoint.every=16"))


LEARNING = ["actor.optimizer.lr=2e-3", "actor.optimizer.warmup_steps=0", "checkpoint.every=0", "evaluate.size=4"]


@pytest.fixture(scope="session")
def dpo_driver(start: Callable[..., Driver], overrides: list[str], folder: Path) -> Driver:
    """On pairs, without rollout and reward."""
    alone = ["roles.rollout=null", "roles.reward=null", "~pools.cpu", "placement=colocate"]
    pairs = [f"data.train={folder / 'pairs.jsonl'}", "data.prompts_per_step=16"]
    return start(DPO, overrides, *LEARNING, *alone, *pairs, "name=dpo", "steps=12", "actor.optimizer.lr=1e-3")


@pytest.fixture(scope="session")
def remax(start: Callable[..., Driver], overrides: list[str], dpo_driver: Driver) -> Finished:
    """From random weights, with a reward that such a model learns."""
    reward = [f"reward.function={REWARD}:even", "data.prompts_per_step=16"]
    return to_its_end(start(REMAX, overrides, *LEARNING, *reward, "name=remax", "steps=12"))


@pytest.fixture(scope="session")
def dpo(dpo_driver: Driver) -> Finished:
    return to_its_end(dpo_driver)


@pytest.fixture(scope="session")
def distill(start: Callable[..., Driver], overrides: list[str], folder: Path) -> Finished:
    """Random weights learn from others, which a larger output layer makes sure of what they say."""
    from safetensors.torch import load_file, save_file

    from hybridflow.data.demo import write_model

    write_model(folder / "teacher", seed=1)
    weights = load_file(folder / "teacher" / "model.safetensors")
    weights["lm_head.weight"] *= 10
    save_file(weights, folder / "teacher" / "model.safetensors", metadata={"format": "pt"})
    teacher = [f"teacher.path={folder / 'teacher'}", "data.prompts_per_step=8"]
    return to_its_end(start(DISTILL, overrides, *LEARNING, *teacher, "name=distill", "steps=8"))


@pytest.fixture(scope="session")
def straight(straight_driver: Driver) -> Finished:
    return to_its_end(straight_driver)


@pytest.fixture(scope="session")
def two_pools(start: Callable[..., Driver], four_steps: list[str]) -> dict[str, Finished]:
    """Training and generation on a device each: step after step, and side by side."""
    drivers = {
        "apart": start(GRPO, four_steps, "name=apart", "placement=disaggregate"),
        "ahead": start(ONE_STEP_OFF, four_steps, "name=ahead"),
    }
    return {name: to_its_end(driver) for name, driver in drivers.items()}


@pytest.fixture(scope="session")
def interrupted(start: Callable[..., Driver], four_steps: list[str]) -> Finished:
    """Ctrl-C while step 2 is scored, which takes more than a second."""
    driver = start(GRPO, four_steps, "name=interrupted", "reward.options={seconds: 0.1}")
    driver.wait_for_step(1)
    processes = driver.descendants()
    driver.interrupt()
    ended = driver.wait(timeout=60)
    return Finished(driver.run_dir, ended, survivors(processes))


@dataclass(frozen=True)
class Killed(Finished):
    """A run of which one device process was killed, and the seconds it took to end after that."""

    pid: int
    seconds: float


@pytest.fixture(scope="session")
def killed(start: Callable[..., Driver], four_steps: list[str]) -> Killed:
    """SIGKILL for a device process while step 2 is scored."""
    driver = start(GRPO, four_steps, "name=killed", "reward.options={seconds: 0.1}")
    driver.wait_for_step(1)
    processes = driver.descendants()
    victim = device_process(processes)
    started = time.monotonic()
    victim.kill()
    ended = driver.wait(timeout=60)
    seconds = time.monotonic() - started
    return Killed(driver.run_dir, ended, survivors(processes), victim.pid, seconds)


@pytest.fixture(scope="session")
def resumed(
    start: Callable[..., Driver], four_steps: list[str], interrupted: Finished, killed: Killed
) -> dict[str, Finished]:
    """Both go on at once: the interrupted run by a driver of the user's own, the killed one by its example."""
    auto = [*four_steps, "checkpoint.resume=auto"]
    drivers = {
        "continued": start(HERE / "greedy.py", auto, "name=interrupted"),
        "recovered": start(GRPO, auto, "name=killed"),
    }
    return {name: to_its_end(driver) for name, driver in drivers.items()}


@pytest.fixture(scope="session")
def continued(resumed: dict[str, Finished]) -> Finished:
    return resumed["continued"]


def device_process(processes: list[psutil.Process]) -> psutil.Process:
    """The process with the engines; the reward's is a device process too, but a small one."""
    named = [process for process in processes if process.cmdline()[:1] and "ray::DeviceProcess" in process.cmdline()[0]]
    assert len(named) == 2, [process.cmdline() for process in processes]
    return max(named, key=lambda process: process.memory_info().rss)
