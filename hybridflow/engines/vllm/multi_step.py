"""Several tokens of each sequence in one step of vLLM's engine, on a CPU.

A step of vLLM schedules, prepares the model's input, runs the model, draws, and takes the tokens up. For a small model
on a CPU more than half of that is Python around the model. Here the model and the drawing run up to :data:`PASSES`
times in a step and the rest runs once, as vLLM has it for speculative tokens that are all accepted.

Invariants
- What a request yields is what one pass a step would yield. The draw of its n-th token depends on its seed and n alone.
- Keys and values of every pass have slots of their own: the scheduler sets room for ``PASSES`` - 1 more tokens aside.
- Tokens drawn after a stop id are dropped by the scheduler, and no sequence gets more tokens than it asks for.
- A step ends early where half of its sequences have ended, or one has and another request waits for its place.

On a GPU vLLM replays the model as a graph and schedules the next step meanwhile; none of this is used there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

PASSES = 32
"""Most tokens of a sequence in one step of the engine."""


class MultiStep:
    """Takes the place of an engine's sampling. Its requests have seeds, and neither penalties nor grammars.

    Args:
        engine: in this process, on a CPU, without chunked prefill: every sequence in a step yields a token.
        stop_token_ids: of all requests.
    """

    def __init__(self, engine: LLMEngine, stop_token_ids: Sequence[int]) -> None:
        self._scheduler: Any = engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]
        self._runner: Any = engine.model_executor.driver_worker.worker.model_runner  # type: ignore[union-attr]
        self._stop = torch.tensor(stop_token_ids, dtype=torch.int32)
        self._take_up = self._scheduler.update_from_output
        self._scheduler.num_lookahead_tokens = PASSES - 1
        self._scheduler.update_from_output = self._update_from_output
        self._runner._sample = self._sample

    def _update_from_output(self, scheduled: Any, output: Any) -> Any:
        """The scheduler has counted one token of each sequence; the keys and values of the others are there too."""
        for name, tokens in zip(output.req_ids, output.sampled_token_ids, strict=True):
            self._scheduler.requests[name].num_computed_tokens += len(tokens) - 1
        return self._take_up(scheduled, output)

    def _sample(self, logits: torch.Tensor, _: Any) -> SamplerOutput:
        """Draw from ``logits`` [sequences, vocabulary], and go on for some passes: token ids [sequences, passes]."""
        batch = self._runner.input_batch
        requests = [self._runner.requests[name] for name in batch.req_ids]
        before = np.array([len(request.output_token_ids) for request in requests])
        wanted = np.array([request.sampling_params.max_tokens for request in requests])
        free = self._runner.max_model_len - batch.num_tokens_no_spec[: len(requests)]
        passes = min(PASSES, int((wanted - before).min()), int(free.min()))
        seeds = token_seeds([request.sampling_params.seed for request in requests], before, passes)
        forward = _Forward(self._runner, len(requests), passes - 1)
        ended = torch.zeros(len(requests), dtype=torch.bool)
        drawn: list[tuple[torch.Tensor, torch.Tensor]] = []
        for number in range(passes):
            tokens, log_probs = draw(logits, batch.sampling_metadata, seeds[number])
            drawn.append((tokens, log_probs))
            ended |= (tokens[:, None] == self._stop).any(1)
            if number + 1 == passes or self._is_over(int(ended.sum()), len(requests)):
                break
            logits = forward(number, tokens)
        ids, log_probs = (torch.stack(column, 1) for column in zip(*drawn, strict=True))
        ranks = torch.zeros(ids.numel(), dtype=torch.int32)  # which nobody reads
        return SamplerOutput(ids, LogprobsTensors(ids.view(-1, 1), log_probs.view(-1, 1), ranks))

    def _is_over(self, ended: int, sequences: int) -> bool:
        _, waiting = self._scheduler.get_request_counts()
        return 2 * ended >= sequences or (ended > 0 and waiting > 0)


def draw(logits: torch.Tensor, sampling: SamplingMetadata, seeds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A token of each sequence, int32 [sequences], and its log-probability in what it was drawn from, float32.

    Args:
        logits: [sequences, vocabulary].
        sampling: temperatures, top-k and top-p of the sequences. At temperature 0 the likeliest token is taken, and its
            log-probability is that at temperature 1.
        seeds: of the draws, int64 [sequences].
    """
    logits, temperature = logits.float(), sampling.temperature
    if temperature is None:
        tokens = logits.argmax(-1)
    else:
        greedy = temperature == 0
        logits = logits / temperature.masked_fill(greedy, 1.0)[:, None]
        logits = apply_top_k_top_p(logits, sampling.top_k, sampling.top_p)
        tokens = torch.ops._C.fused_gumbel_argmax(logits, seeds)
        if not sampling.all_random:
            tokens = torch.where(greedy, logits.argmax(-1), tokens)
    log_probs = logits.log_softmax(-1).gather(-1, tokens.long()[:, None])[:, 0]
    return tokens.int(), log_probs


class _Forward:
    """The model on one token of each sequence, after the step's own pass."""

    def __init__(self, runner: Any, sequences: int, passes: int) -> None:
        self._runner, self._sequences = runner, sequences
        self._positions = runner.seq_lens[:sequences] + torch.arange(passes)[:, None]
        self._lengths = (self._positions + 1).int()
        self._longest = self._lengths.amax(1).tolist()
        self._starts = torch.arange(sequences + 1, dtype=torch.int32)
        self._groups = []
        for group, attention in enumerate(runner.attn_groups):
            table, size = runner.input_batch.block_table[group], runner.input_batch.block_table[group].block_size
            blocks = table.get_device_tensor(sequences)
            slots = blocks.gather(1, (self._positions // size).T).T * size + self._positions % size
            self._groups.append((attention, blocks, slots.contiguous()))

    def __call__(self, number: int, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [sequences, vocabulary] after ``tokens`` [sequences], which the pass of this number reads."""
        metadata, layer_slots = {}, {}
        for attention, blocks, slots in self._groups:
            common = CommonAttentionMetadata(
                query_start_loc=self._starts,
                query_start_loc_cpu=self._starts,
                seq_lens=self._lengths[number],
                num_reqs=self._sequences,
                num_actual_tokens=self._sequences,
                max_query_len=1,
                max_seq_len=self._longest[number],
                block_table_tensor=blocks,
                slot_mapping=slots[number],
            )
            for group in attention:
                built = group.get_metadata_builder().build(0, common)
                metadata |= dict.fromkeys(group.layer_names, built)
                layer_slots |= dict.fromkeys(group.layer_names, slots[number])
        config = self._runner.vllm_config
        with set_forward_context(metadata, config, num_tokens=self._sequences, slot_mapping=layer_slots):
            hidden = self._runner._model_forward(input_ids=tokens, positions=self._positions[number])
        return self._runner.model.compute_logits(hidden)


def token_seeds(seeds: Sequence[int], drawn: np.ndarray, passes: int) -> torch.Tensor:
    """Seeds of the next draws of each request: SplitMix64 of its seed, at the number of each token.

    Args:
        seeds: of the requests.
        drawn: tokens that each request has so far [requests].
        passes: how many seeds each one gets.

    Returns:
        int64 in [0, 2**31), as vLLM's kernel has it [passes, requests].
    """
    numbers = drawn.astype(np.uint64) + np.arange(1, passes + 1, dtype=np.uint64)[:, None]
    state = np.array(seeds, dtype=np.uint64) + numbers * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return torch.from_numpy(((state ^ (state >> np.uint64(31))) >> np.uint64(33)).astype(np.int64))
