"""Settings of data: where prompts come from, and how answers are scored."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from hybridflow.config.base import Settings


@dataclass
class DataConfig(Settings):
    """Where prompts come from.

    Attributes:
        train: a file (.jsonl, .json, .parquet), a ``datasets`` folder, or ``reasoning_gym:<task>[,<task>]``.
        evaluate: the same for held-out prompts; empty means a seeded split of ``train``.
        evaluate_share: share of ``train`` held out where ``evaluate`` is empty.
        options: settings of a procedural task (passed to its generator), and ``size``.
        prompts_per_step: prompts of one training step.
        shuffle: new order in each epoch, by the run's seed.
        long_prompts: ``error`` or ``filter`` (dropped and counted) for prompts over ``rollout.max_prompt_tokens``.
        system_prompt: put before rows that have no system message.
        prompt_key, answer_key: columns of plain files that hold the prompt and the ground truth.
        chosen_key, rejected_key: columns that hold the two answers of a pair, for drivers on preferences.
    """

    train: str = MISSING
    evaluate: str = ""
    evaluate_share: float = 0.1
    options: dict[str, Any] = field(default_factory=dict)
    prompts_per_step: int = 16
    shuffle: bool = True
    long_prompts: str = "error"
    system_prompt: str = ""
    prompt_key: str = "prompt"
    answer_key: str = "ground_truth"
    chosen_key: str = "chosen"
    rejected_key: str = "rejected"


@dataclass
class RewardComponentConfig(Settings):
    """A further function whose value is added to the reward.

    Attributes:
        function: as ``reward.function``.
        options: keyword arguments passed to the function at each call.
        weight: what its value is multiplied by.
    """

    function: str = MISSING
    options: dict[str, Any] = field(default_factory=dict)
    weight: float = 1.0


@dataclass
class EngineConfig(Settings):
    """What a vLLM engine may take.

    Attributes:
        max_prompt_tokens: longest prompt.
        max_tokens: longest answer.
        stop_token_ids: ids that end an answer besides the model's end-of-sequence ids.
        kv_cache_gb: memory for keys and values per device, in GiB.
        max_sequences: most sequences in one engine step.
        enforce_eager: no compilation of the model.
    """

    max_prompt_tokens: int = 256
    max_tokens: int = 256
    stop_token_ids: list[int] = field(default_factory=list)
    kv_cache_gb: float = 0.5
    max_sequences: int = 128
    enforce_eager: bool = True


@dataclass
class JudgeConfig(EngineConfig):
    """A language model that is asked about each answer, greedily; what it says, its verdict, is what the functions of
    the reward read.

    Attributes:
        path: its Hugging Face folder, with a tokenizer and a chat template of its own; the role then needs a pool of
            kind ``device``. Empty means no judge. Its weights are in ``model.dtype``.
        question: what it is asked: a text in which ``{prompt}``, ``{response}`` and ``{ground_truth}`` are replaced.
        system_prompt: put before the question.
        max_prompt_tokens: longest question, as the chat template writes it; an answer with a longer one has no reward.
        max_tokens: longest verdict.
    """

    path: str = ""
    question: str = (
        "Question:\n{prompt}\n\nRight answer:\n{ground_truth}\n\nAnswer to judge:\n{response}\n\n"
        "How good is the answer to judge? End with a line 'Score: N', where N is from 0 (useless) to 10 (perfect)."
    )
    system_prompt: str = ""
    max_prompt_tokens: int = 1024
    max_tokens: int = 128


@dataclass
class RewardConfig(Settings):
    """How answers are scored.

    Attributes:
        function: ``package.module:name`` or ``path/file.py:name``; the built-in ones stand in ``hybridflow/rewards``.
        options: keyword arguments passed to the function at each call.
        components: further functions by name: reward = function + sum of weight * component. Each is logged as
            ``reward/<name>``, the function's own value as ``reward/score``.
        timeout: seconds one answer may take, all functions together.
        solved_at: an answer is solved if the function's own value is at least this, where the function does not say.
        processes: processes that score per device of the reward's pool.
        in_flight: answers that an async function has in flight in each process.
        step_end: text that ends a step of an answer, such as a line end. Where it is given, the function says
            ``steps``, a score for each step in order, and ``algorithm.estimator=grpo_stepwise`` can be used.
        max_failed: largest share of failed answers in a batch (error, deadline, wrong value) that a run accepts.
        path: Hugging Face folder of a reward model, a classifier with one label: its score of the whole text replaces
            the functions; the role then needs a pool of kind ``device``. Empty means functions.
        judge: a language model whose verdicts the functions read, as the column ``verdict``.
    """

    function: str = "hybridflow.rewards.verifiers:exact_match"
    options: dict[str, Any] = field(default_factory=dict)
    components: dict[str, RewardComponentConfig | None] = field(default_factory=dict)
    timeout: float = 10.0
    solved_at: float = 1.0
    processes: int = 1
    in_flight: int = 64
    step_end: str = ""
    max_failed: float = 0.5
    path: str = ""
    judge: JudgeConfig = field(default_factory=JudgeConfig)
