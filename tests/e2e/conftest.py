"""The runs that the tests of this folder look at: each is made once, and several claims are tested on it.

A driver takes most of its time to import vLLM and to start Ray, so there are as few runs as the claims allow:

    sft (2 devices, a judge) -> grpo (2 devices, with reference; generates on tp2)   what every example leaves behind
    straight (1 device, 4 steps)                            what the runs below have to come to, bit by bit
    interrupted -> continued                                Ctrl-C in step 2, then resume by a driver of the user's own
    killed -> recovered                                     a device process killed in step 2, then resume
    dapo (1 device, 16 steps)                               dynamic sampling, a reward of two functions, learning
    apart, ahead (1 + 1 devices, 4 steps)                   a pool for generation: by turns, and one step ahead
    half_way (1 + 1 devices, 8 steps)                       answers that go on over several updates; ended twice
    remax (1 device, 12 steps), distill (1 + 1 devices, 14 steps), dpo (1 device, 12 steps)      learning
    ppo (2 devices, 14 steps), pieces (3 of its steps)      a critic, its warm-up, learning; other micro-batches
    split (1 + 1), standalone (1 + 1 + 1 + 1)               pieces again, with roles on pools of their own
    reward_model (1 device) -> safe (1 device, 12 steps)    pairs told apart; the model as reward, costs that fall

Runs that do not need each other share the machine: sft and straight, continued and recovered, apart and ahead, dpo and
remax, split and standalone. Of two pytest workers each makes the runs of its own files;
the root's conftest.py keeps files that look at the same runs on one.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.e2e.drivers import (
    ASYNC_GRPO,
    DAPO,
    DISTILL,
    DPO,
    GRPO,
    ONE_STEP_OFF,
    PPO,
    REMAX,
    REWARD_MODEL,
    SAFE_RLHF,
    SFT,
    Driver,
    Ended,
    survivors,
    value_of,
)

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
    """GRPO with a reward file that fails on some answers and gives a signal on the rest, and with a reference that
    follows the actor."""
    reference = ["roles.reference={pool: train}", "reference.update_every=2", "actor.loss.kl_coef=0.1"]
    return [
        *overrides,
        *reference,
        "steps=4",
        "rollout.n=4",
        f"reward.function={REWARD}:score",
        "reward.max_failed=0.9",
    ]


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
def sft(start: Callable[..., Driver], overrides: list[str], folder: Path, straight_driver: Driver) -> Finished:
    """Its evaluations are judged by the untrained model, on the devices that train and generate."""
    judge = ["roles.reward.pool=train", "reward.judge={max_prompt_tokens: 60, max_tokens: 4, question: '{response}'}"]
    judge += ["reward.judge.kv_cache_gb=0.05", f"reward.judge.path={folder / 'model'}"]
    judge += [f"reward.components={{said: {{function: '{REWARD}:said', weight: 0.0}}}}"]
    more = ["name=sft", "steps=2", "pools.train.devices=[2]", "evaluate.every=2"]
    return to_its_end(start(SFT, overrides, *judge, *more))


@pytest.fixture(scope="session")
def grpo(start: Callable[..., Driver], overrides: list[str], sft: Finished) -> Finished:
    """Goes on from the model of the supervised run, with KL to the reference and off-policy correction; generates with
    tensor parallelism; training and generation take turns in memory."""
    given = [f"model.path={sft.run_dir / 'model'}", "placement=colocate_reference", "actor.loss.kl_coef=0.1"]
    given += ["algorithm.correction={level: token, reject: sequence}"]
    reward = [f"reward.function={REWARD}:score", "reward.max_failed=0.9"]
    more = ["name=grpo", "steps=2", "rollout.n=4", "pools.train.devices=[2]", "evaluate.every=2"]
    layout = ["roles.rollout.layout.tp=2"]
    memory = ["memory.offload=[gradients,optimizer,parameters,others]", "memory.keep_rollout=false"]
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
    pairs = [f"data.train={folder / 'pairs.jsonl'}", "data.prompts_per_step=32", "preference.beta=0.5"]
    return start(DPO, overrides, *LEARNING, *alone, *pairs, "name=dpo", "steps=12")


@pytest.fixture(scope="session")
def remax(start: Callable[..., Driver], overrides: list[str], dpo_driver: Driver) -> Finished:
    """From random weights, with a reward that such a model learns."""
    reward = [f"reward.function={REWARD}:even", "data.prompts_per_step=64"]
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
    teacher = [f"teacher.path={folder / 'teacher'}", "data.prompts_per_step=32", "actor.optimizer.lr=4e-3"]
    return to_its_end(start(DISTILL, overrides, *LEARNING, *teacher, "name=distill", "steps=14"))


@pytest.fixture(scope="session")
def ppo_given(overrides: list[str]) -> list[str]:
    """From random weights, with a reward that such a model learns, less a KL to the reference."""
    reward = [f"reward.function={REWARD}:even", "reward.solved_at=0.6", "algorithm.kl_coef=0.01"]
    learning = ["actor.optimizer.lr=2e-3", "actor.optimizer.warmup_steps=0", "critic.optimizer.lr=2e-3"]
    # Rounding of near-zero gradients is not to become a whole step of Adam.
    learning += ["actor.optimizer.eps=1e-4", "critic.optimizer.eps=1e-4", "critic.warmup_steps=2"]
    return [*overrides, *reward, *learning, "rollout.n=4", "actor.mini_batch_size=8", "evaluate.at_start=false"]


SHORT_PPO = ["steps=3", "actor.micro_batch_size=3"]
WITH_REFERENCE = "roles.reference={pool: train}"


@pytest.fixture(scope="session")
def ppo_runs(start: Callable[..., Driver], ppo_given: list[str]) -> tuple[Finished, Finished]:
    """The first steps again in other micro-batches, on one device."""
    given = [*ppo_given, WITH_REFERENCE]
    ppo = start(PPO, given, "name=ppo", "steps=14", "pools.train.devices=[2]", "actor.micro_batch_size=8")
    pieces = start(PPO, given, "name=pieces", *SHORT_PPO)
    return to_its_end(ppo), to_its_end(pieces)


@pytest.fixture(scope="session")
def placements(start: Callable[..., Driver], ppo_given: list[str]) -> dict[str, Finished]:
    """The short run of PPO with roles on several pools of one device each."""
    own = [text for text in ppo_given if not text.startswith("pools.")]
    drivers = {
        "split": start(PPO, own, "name=split", "placement=split", *SHORT_PPO),
        "standalone": start(PPO, own, "name=standalone", "placement=standalone_critic", *SHORT_PPO),
    }
    return {name: to_its_end(driver) for name, driver in drivers.items()}


@pytest.fixture(scope="session")
def reward_model(start: Callable[..., Driver], overrides: list[str], folder: Path) -> Finished:
    """Of pairs that are told apart by their letters, a fifth of them held out."""
    rows = [
        {"prompt": f"{a}+{a + 13}=", "chosen": str(2 * a + 13), "rejected": f"{chr(97 + a % 26)}{a % 7}x"}
        for a in range(10, 210)
    ]
    (folder / "letters.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = [f"data.train={folder / 'letters.jsonl'}", "data.evaluate=''", "data.evaluate_share=0.2"]
    more = ["name=reward-model", "steps=12", "evaluate.every=4", "data.prompts_per_step=16", "actor.micro_batch_size=5"]
    learning = ["actor.optimizer.warmup_steps=0", "actor.optimizer.lr=2e-3", "checkpoint.every=12"]
    return to_its_end(start(REWARD_MODEL, overrides, *data, *more, *learning))


@pytest.fixture(scope="session")
def safe(start: Callable[..., Driver], overrides: list[str], reward_model: Finished) -> Finished:
    """The reward model scores, on the devices; what answers cost are their even characters, and too much at first."""
    model = reward_model.run_dir / "model"
    given = [f"reward.path={model}", f"critic.path={model}", "roles.reward.pool=train", "reward.solved_at=0"]
    costs = [f"cost.function={REWARD}:even", "cost.options={}", "safety.cost_limit=0.1", "safety.multiplier=4"]
    learning = [*LEARNING, "critic.optimizer.lr=2e-3", "actor.optimizer.lr=4e-3", "actor.mini_batch_size=16"]
    learning += ["data.prompts_per_step=8", "rollout.n=4", "checkpoint.every=1"]
    return to_its_end(start(SAFE_RLHF, overrides, *given, *costs, *learning, "name=safe", "steps=12"))


@pytest.fixture(scope="session")
def ppo(ppo_runs: tuple[Finished, Finished]) -> Finished:
    return ppo_runs[0]


@pytest.fixture(scope="session")
def straight(straight_driver: Driver) -> Finished:
    return to_its_end(straight_driver)


@pytest.fixture(scope="session")
def two_pools(start: Callable[..., Driver], four_steps: list[str]) -> dict[str, Finished]:
    """Training and generation on a device each: step after step, and side by side."""
    drivers = {
        "apart": start(GRPO, four_steps, "name=apart", "placement=disaggregate", "roles.reference.pool=rollout"),
        "ahead": start(ONE_STEP_OFF, four_steps, "name=ahead"),
    }
    return {name: to_its_end(driver) for name, driver in drivers.items()}


@pytest.fixture(scope="session")
def half_way(start: Callable[..., Driver], four_steps: list[str]) -> Finished:
    """Answers of three steps at once, of which less than two steps' are generated at a time. While some are half-way it
    is interrupted, goes on, loses the rollout's process, and goes on. Many tokens end an answer, so that random ones
    have many lengths."""
    lengths = ["rollout.max_tokens=24", f"rollout.stop_token_ids={[*range(100, 126)]}", "rollout.max_sequences=24"]
    given = [*four_steps, *lengths, "name=half-way", "steps=8", "actor.optimizer.warmup_steps=0"]
    first = start(ASYNC_GRPO, given)
    first.wait_for_step(2)
    first.interrupt()
    assert first.wait(timeout=60).code == 0
    second = start(ASYNC_GRPO, given, "checkpoint.resume=auto")
    second.wait_for_step(5)
    rollout_process(second.descendants()).kill()
    ended = second.wait(timeout=60)
    # Of a call to it, or of rows that it had made.
    assert ended.code == 1 and re.search("the process (that made it )?is gone", ended.err), ended.err
    return to_its_end(start(ASYNC_GRPO, given, "checkpoint.resume=auto"))


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
    victim = rollout_process(processes)
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


def rollout_process(processes: list[psutil.Process]) -> psutil.Process:
    """The device process with the rollout, and the actor where both share a pool: the largest one."""
    named = [process for process in processes if process.cmdline()[:1] and "ray::DeviceProcess" in process.cmdline()[0]]
    return max(named, key=lambda process: process.memory_info().rss)
