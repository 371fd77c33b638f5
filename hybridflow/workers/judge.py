"""The roles reward and cost with a judge: a language model on vLLM says what it thinks of each answer.

Where it stands: in place of :class:`hybridflow.workers.reward.RewardWorker` where the role's settings name a
``judge.path``. The judge's verdicts become a column that the functions of the reward read, so deadlines, failures and
components are those of any reward. Invariants: verdicts are greedy, so that equal answers are judged alike; a question
that is too long costs its own answer the reward, never the batch; the judge's weights and KV cache stay in memory in
both phases, because other roles of the pool take no turns with it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from hybridflow.config import SamplingConfig
from hybridflow.data.chat import decode, encode, prompt_text, with_system_prompt
from hybridflow.models.spec import ModelSpec
from hybridflow.models.tokenizer import load_tokenizer, vocabulary_size
from hybridflow.protocol.data import DataProto
from hybridflow.protocol.meta import Max, Sum
from hybridflow.protocol.transfer import Protocol
from hybridflow.resharding.layout import generation_of
from hybridflow.rewards.judge import question_of
from hybridflow.workers.base import register
from hybridflow.workers.reward import RewardWorker

if TYPE_CHECKING:
    from hybridflow.engines.vllm.engine import RolloutEngine

GREEDY = SamplingConfig(temperature=0.0)


class JudgeWorker(RewardWorker):
    """Scores answers by functions that read a judge's verdicts. The ranks of a replica ask it together."""

    engine: RolloutEngine

    def setup(self) -> None:
        from hybridflow.engines.vllm.engine import RolloutEngine

        super().setup()
        config, judge = self.context.config, self.settings.judge
        self.judge_tokenizer = load_tokenizer(judge.path)
        spec = ModelSpec.from_folder(judge.path)
        self.engine = RolloutEngine(
            folder=judge.path,
            spec=spec,
            dtype=getattr(torch, config.model.dtype),
            config=judge,
            valid_vocab=vocabulary_size(judge.path, spec.vocab_size),
            max_model_len=judge.max_prompt_tokens + judge.max_tokens,
            layout=generation_of(self.context.layout),
            load_weights=True,
            where=f"{self.context.role}.judge",
        )

    @register(Protocol.THREE_D_ALL_MICRO_DP, uneven="balance")
    def score(self, batch: DataProto) -> DataProto:
        """As :meth:`RewardWorker.score`.

        Returns:
            Its columns, and ``verdict`` (of the role ``cost``: ``cost_verdict``), what the judge has said of each
            answer; "" where the question was too long. ``meta_info["metrics"]`` also has, as ``<role>/<name>``,
            ``judge_tokens`` (of all verdicts), ``judge_cut`` (share of them that met ``judge.max_tokens``) and
            ``judge_seconds``.
        """
        return super().score(batch)

    def further(
        self, messages: Sequence[Any], texts: Sequence[str], ground_truth: Sequence[Any]
    ) -> tuple[dict[str, Sequence[Any]], dict[int, str], dict[str, float]]:
        from hybridflow.engines.vllm.engine import Request

        started = time.perf_counter()
        judge, role = self.settings.judge, self.context.role
        questions = []
        for prompt, text, truth in zip(messages, texts, ground_truth, strict=True):
            question = {"role": "user", "content": question_of(judge.question, prompt, text, truth)}
            asked = with_system_prompt([question], judge.system_prompt)
            questions.append(prompt_text(self.judge_tokenizer, asked, f"{role}.judge"))
        prompts = encode(self.judge_tokenizer, questions)
        limit = f"{role}.judge.max_prompt_tokens={judge.max_prompt_tokens}"
        failed = {
            i: f"the judge's question has {len(prompt)} tokens, more than {limit}"
            for i, prompt in enumerate(prompts)
            if len(prompt) > judge.max_prompt_tokens
        }
        rows = [i for i in range(len(prompts)) if i not in failed]
        found = self.engine.generate([Request(prompts[i], 0, judge.max_tokens) for i in rows], GREEDY)
        verdicts = [""] * len(prompts)
        for row, text in zip(rows, decode(self.judge_tokenizer, [answer.token_ids for answer in found]), strict=True):
            verdicts[row] = text
        metrics = {
            "judge_tokens": Sum(sum(len(answer.token_ids) for answer in found)),
            "judge_cut": sum(answer.finish_reason == "length" for answer in found) / max(1, len(found)),
            "judge_seconds": Max(time.perf_counter() - started),
        }
        return {"verdict": verdicts}, failed, metrics

    def close(self) -> None:
        super().close()
        if hasattr(self, "engine"):
            self.engine.close()
