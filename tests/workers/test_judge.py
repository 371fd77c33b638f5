"""A judge on vLLM as the reward: what it is asked, and what becomes of its verdicts, alone and beside a rollout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hybridflow.config import JudgeConfig, ModelConfig, RewardConfig, RolloutConfig, RunConfig, SamplingConfig
from hybridflow.data.demo import byte_tokenizer
from hybridflow.models.spec import ModelSpec
from hybridflow.protocol.data import DataProto
from hybridflow.resharding.layout import ParallelLayout
from hybridflow.workers.base import WorkerContext
from tests.rewards.test_worker import answers
from tests.tiny_models import save_tiny_model

pytest.importorskip("vllm")

END, IDS, TOKENS = 260, 262, 10
READ = """
def read(prompts, responses, ground_truth, verdict):
    return [None if len(verdict[0]) % 2 else {"score": float(len(verdict[0])), "first": ord(verdict[0][0])}]
"""


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("judge")
    shape = {"vocab_size": IDS, "head_dim": 32, "eos_token_id": END}
    save_tiny_model(folder, "qwen3", seed=3, **shape)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def said_by(folder: str, text: str) -> str:
    """What transformers says to a question, greedily."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = torch.tensor([byte_tokenizer()(text, add_special_tokens=False)["input_ids"]])
    with torch.no_grad():
        ids = model.generate(prompt, max_new_tokens=TOKENS, do_sample=False, pad_token_id=END)
    return byte_tokenizer().decode(ids[0, prompt.shape[1] :], skip_special_tokens=True)


def worker_of(judge: str, role: str, folder: Path) -> Any:
    from hybridflow.workers.judge import JudgeWorker

    (folder / "read.py").write_text(READ)
    asked = JudgeConfig(
        path=judge, question="{prompt}{response}?", max_prompt_tokens=40, max_tokens=TOKENS, kv_cache_gb=0.05
    )
    reward = RewardConfig(function=f"{folder / 'read.py'}:read", max_failed=1.0, judge=asked)
    config = RunConfig(name="test", model=ModelConfig(path=judge), reward=reward)
    worker = JudgeWorker(WorkerContext(role, 0, ParallelLayout(), config, {}, "train"))
    worker.setup()
    return worker


def test_verdicts_are_the_judges_own_words_and_those_that_cannot_be_read_give_no_reward(
    judge: str, tmp_path: Path
) -> None:
    texts = ["68", "86", "7", "a longer answer: six", "x" * 60, "12", "13", "14"]
    worker = worker_of(judge, "reward", tmp_path)
    scored: DataProto = worker.score(answers(*texts))
    again: DataProto = worker.score(answers("7"))
    worker.close()
    said = [said_by(judge, f"<|user|>23+45={text}?<|end|><|assistant|>") for text in texts]
    said[4] = ""  # a question of 60 + 10 tokens
    assert list(scored["verdict"]) == said
    assert len(set(said)) > 4, "the judge looks at the answer"
    readable = [len(verdict) % 2 == 0 and i != 4 for i, verdict in enumerate(said)]
    assert 2 <= sum(readable) <= 6, said
    assert scored["rewards"].isfinite().tolist() == readable
    for i, verdict in enumerate(said):
        if readable[i]:
            assert scored["rewards"][i] == len(verdict) and scored["reward_error"][i] is None
        elif i != 4:
            assert scored["reward_error"][i] == "returned None"
    assert scored["reward_error"][4] == (
        "the judge's question has 70 tokens, more than reward.judge.max_prompt_tokens=40"
    )
    assert list(scored["response_text"]) == texts
    metrics = scored.meta_info["metrics"]
    assert metrics["reward/judge_tokens"] <= 7 * TOKENS and metrics["reward/judge_seconds"] > 0
    assert 0 < metrics["reward/judge_cut"] <= 1
    firsts = [ord(verdict[0]) for verdict, has in zip(said, readable, strict=True) if has]
    assert metrics["reward/first"] == pytest.approx(sum(firsts) / len(firsts))
    assert list(again["verdict"]) == said[2:3]


def test_a_judge_and_a_rollout_share_a_process(judge: str, folders: dict[str, str], tmp_path: Path) -> None:
    from hybridflow.engines.vllm.engine import Request, RolloutEngine

    settings = RolloutConfig(max_prompt_tokens=32, max_tokens=8, kv_cache_gb=0.05)
    spec = ModelSpec.from_folder(folders["tied"])
    rollout = RolloutEngine(folders["tied"], spec, torch.float32, settings, 200, 40, load_weights=True)
    requests, sampling = [Request([7, 8, 9 + i], i, 8) for i in range(4)], SamplingConfig()
    alone = rollout.generate(requests, sampling)
    worker = worker_of(judge, "reward", tmp_path)
    first = list(worker.score(answers("68", "7"))["verdict"])
    assert rollout.generate(requests, sampling) == alone
    rollout.memory.release_kv_cache()
    rollout.release_weights()
    assert list(worker.score(answers("68", "7"))["verdict"]) == first
    worker.close()
    rollout.close()
    assert first == [said_by(judge, f"<|user|>23+45={text}?<|end|><|assistant|>") for text in ("68", "7")]
