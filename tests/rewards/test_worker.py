"""The reward role on a batch of token ids, in this process and in a device process of Ray."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from hybridflow.config import ModelConfig, RewardComponentConfig, RewardConfig, RunConfig
from hybridflow.data.demo import byte_tokenizer
from hybridflow.errors import RewardError
from hybridflow.protocol.data import DataProto
from hybridflow.resharding.layout import ParallelLayout
from hybridflow.workers.base import WorkerContext
from hybridflow.workers.reward import RewardWorker

END = 260


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save_pretrained(folder)
    reward = RewardConfig(function="tests.rewards.hostile:obey", timeout=1.0)
    return RunConfig(name="test", model=ModelConfig(path=str(folder)), reward=reward)


def answers(*texts: str, truth: str = "68") -> DataProto:
    return DataProto.from_dict(
        tensors={"responses": DataProto.jagged([torch.tensor([*text.encode(), END]) for text in texts])},
        non_tensors={
            "messages": [[{"role": "user", "content": "23+45="}]] * len(texts),
            "ground_truth": [truth] * len(texts),
            "data_source": ["additions"] * len(texts),
            "extra_info": [{}] * len(texts),
        },
    )


def check(scored: DataProto) -> None:
    assert scored["rewards"].dtype == torch.float32 and scored["solved"].dtype == torch.bool
    assert scored["rewards"][[0, 1, 3]].tolist() == [1.0, 0.0, 0.5] and scored["rewards"][2].isnan()
    assert scored["solved"].tolist() == [True, False, False, True]
    assert list(scored["response_text"]) == ["68", "86", "sleep", "dict"]
    assert list(scored["reward_error"]) == [None, None, "timeout after 1 s", None]


def test_token_ids_become_texts_and_rewards(config: RunConfig):
    peers: dict = {}
    peers["reward"] = worker = RewardWorker(WorkerContext("reward", 0, ParallelLayout(), config, peers, "cpu"))
    worker.setup()
    scored = worker.score(answers("68", "86", "sleep", "dict"))
    worker.close()
    check(scored)
    assert scored.meta_info["metrics"]["reward/length"] == 3.0
    assert set(scored.meta_info["metrics"]) == {"reward/length", "reward/seconds"}


def test_components_give_a_column_of_scores_before_weights(config: RunConfig):
    part = RewardComponentConfig("tests.rewards.hostile:length", weight=-0.5)
    reward = RewardConfig(function="tests.rewards.hostile:obey_later", timeout=1.0, components={"size": part})
    with_parts = dataclasses.replace(config, reward=reward)
    worker = RewardWorker(WorkerContext("reward", 0, ParallelLayout(), with_parts, {}, "cpu"))
    worker.setup()
    scored = worker.score(answers("68", "wait"))
    worker.close()
    assert scored["rewards"][0] == 0.0 and scored["rewards"][1].isnan() and scored["solved"].tolist() == [True, False]
    assert list(scored["reward_components"]) == [{"score": 1.0, "size": 2.0}, None]
    assert scored.meta_info["metrics"]["reward/size"] == 2.0 and scored.meta_info["metrics"]["reward/score"] == 1.0


LINES = """
def lines(prompts, responses, ground_truth):
    given = [[float(len(line)) for line in response.split("|")] for response in responses]
    return [{"score": sum(steps), "steps": steps[:2]} for steps in given]


def silent(prompts, responses, ground_truth):
    return [1.0]


def wrong(prompts, responses, ground_truth):
    return [{"score": 1.0, "steps": 3}]
"""


def stepped(config: RunConfig, folder: Path, function: str, *texts: str) -> DataProto:
    """The answers, scored with a ``|`` at the end of each step."""
    (folder / "steps.py").write_text(LINES)
    reward = RewardConfig(function=f"{folder / 'steps.py'}:{function}", step_end="|", max_failed=1.0)
    context = WorkerContext("reward", 0, ParallelLayout(), dataclasses.replace(config, reward=reward), {}, "cpu")
    worker = RewardWorker(context)
    worker.setup()
    try:
        return answers(*texts).union(worker.score(answers(*texts)))
    finally:
        worker.close()


def test_steps_have_scores_and_tokens_have_steps(config: RunConfig, tmp_path: Path):
    scored = stepped(config, tmp_path, "lines", "ab|c", "a|bc|d", "")
    assert scored.lengths("step_scores").tolist() == [2, 2, 1]
    assert scored.flat("step_scores").tolist() == [2.0, 1.0, 1.0, 2.0, 0.0]
    # The end of the turn belongs to the last step; the third step of the second answer has no score.
    assert scored.flat("step_ids").tolist() == [0, 0, 0, 1, 1, 0, 0, 1, 1, 1, -1, -1, 0]


def test_advantages_of_steps_are_taken_from_what_the_reward_role_gives(config: RunConfig, tmp_path: Path):
    from hybridflow.algorithms.step import compute_advantages
    from hybridflow.config import AlgorithmConfig, GRPOConfig

    scored = stepped(config, tmp_path, "lines", "ab|c", "a|bcd", "abc")
    mask = DataProto.jagged([torch.ones(n, dtype=torch.bool) for n in scored.lengths("responses").tolist()])
    batch = scored.union(DataProto.from_dict({"response_mask": mask, "group_ids": torch.tensor([0, 0, 0])}))
    settings = GRPOConfig(name="x", algorithm=AlgorithmConfig(estimator="grpo_stepwise", normalize_std=False))
    # First steps 2, 1, 3; second steps 1 and 3; the mean of each is 2.
    found = compute_advantages(batch, settings).to_padded("advantages").tolist()
    assert found == [[0, 0, 0, -1, -1, 0], [-1, -1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]


def test_a_function_that_gives_no_steps_is_told_so(config: RunConfig, tmp_path: Path):
    with pytest.raises(RewardError, match=r"step_end='\|', but .*steps\.py:silent returned no 'steps'\. Return"):
        stepped(config, tmp_path, "silent", "a")
    failed = stepped(config, tmp_path, "wrong", "a|b")
    assert list(failed["reward_error"]) == ["returned int 3 for 'steps'; a list of numbers is wanted"]
    assert failed.flat("step_ids").tolist() == [-1] * 4 and failed.lengths("step_scores").tolist() == [0]


@pytest.mark.ray
def test_a_device_process_of_ray_scores_its_rows(config: RunConfig, ray_session: str):
    from hybridflow.controller.group import WorkerGroup
    from hybridflow.controller.pool import ResourcePool

    with ResourcePool("cpu", [2], kind="cpu", cores_per_device=0.5) as pool:
        group = WorkerGroup(pool, "reward", RewardWorker, ParallelLayout.on(2), config)
        group.setup()
        check(group.score(answers("68", "86", "sleep", "dict")))
        pid = int(group.score(answers("pid", "68"))["rewards"][0])
        assert Path(f"/proc/{pid}").exists()
    assert not Path(f"/proc/{pid}").exists()
