"""The parts of a GRPO step done bare, in the same device processes: what a step cannot be cheaper than.

Plain ``vllm.LLM.generate``, and a transformers model with torch's DDP and AdamW: nothing of HybridFlow but the process
it runs in, the same rows, and the same cut into micro-batches. And the actor's own megatron-core model in a plain loop.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from hybridflow.data.batching import micro_batches
from hybridflow.protocol.data import DataProto
from hybridflow.protocol.meta import Max
from hybridflow.protocol.transfer import Protocol
from hybridflow.workers.base import Worker, register
from hybridflow.workers.model import rows_of


@contextlib.contextmanager
def _clock(seconds: dict[str, float], part: str) -> Iterator[None]:
    """Adds the seconds of the block under ``part``; all ranks begin together, and the slowest one counts."""
    dist.barrier()
    start = time.perf_counter()
    yield
    seconds[part] = Max(time.perf_counter() - start)


class BareWorker(Worker):
    """Runs the same rows through plain libraries and says how long each part took."""

    def setup(self) -> None:
        from torch.nn.parallel import DistributedDataParallel
        from transformers import AutoModelForCausalLM

        import hybridflow.engines.vllm.engine  # noqa: F401  (the process's environment and CPU kernels, as for ours)
        from hybridflow.engines.vllm.environment import launched

        config = self.context.config
        from vllm import LLM

        with launched():
            self.llm = LLM(
                config.model.path,
                skip_tokenizer_init=True,
                distributed_executor_backend="external_launcher",
                enforce_eager=True,
                dtype=config.model.dtype,
                max_num_seqs=config.rollout.max_sequences,
                max_model_len=config.rollout.max_prompt_tokens + config.rollout.max_tokens,
                kv_cache_memory_bytes=int(config.rollout.kv_cache_gb * 2**30),
                logprobs_mode="processed_logprobs",
                generation_config="vllm",
                enable_chunked_prefill=False,
                max_num_batched_tokens=8192,
            )
        # What implements an operator is said for the whole process, by the engine built last; here each has its own.
        self.operators = self.llm.llm_engine.vllm_config.kernel_config.ir_op_priority
        ours: Any = self.context.peers["rollout"]
        ours.engine._engine.vllm_config.kernel_config.ir_op_priority.set_default()
        dtype = getattr(torch, config.model.dtype)
        self.model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=dtype)
        self.ddp = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, weight_decay=0.0)

    @register(Protocol.THREE_D)
    def run_parts(self, batch: DataProto) -> dict[str, float]:
        """Seconds of generation, of one forward for log-probabilities, and of one update: those of the slowest rank."""
        from vllm import SamplingParams

        settings = self.context.config
        prompts = [row.tolist() for row in rows_of(batch, "prompts")]
        limits = batch.lengths("responses").tolist()
        # As many tokens for each row as HybridFlow's rollout drew: the same work.
        sampling: list[Any] = [
            SamplingParams(temperature=1.0, seed=i, max_tokens=n, ignore_eos=True, logprobs=0, detokenize=False)
            for i, n in enumerate(limits)
        ]
        seconds: dict[str, float] = {}
        with _clock(seconds, "generate"), self.operators.set_priority():
            self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)

        responses = rows_of(batch, "responses")
        lengths = [len(p) + len(r) for p, r in zip(prompts, responses, strict=True)]
        cuts = micro_batches(lengths, settings.actor.micro_batch_size, settings.actor.micro_batch_tokens)
        micros = [
            self._pad([prompts[i] + responses[i].tolist() for i in rows], [len(prompts[i]) for i in rows])
            for rows in cuts
        ]
        with _clock(seconds, "log_probs"), torch.no_grad():
            for micro in micros:
                self._log_probs(self.model, *micro)
        with _clock(seconds, "update"):
            self.optimizer.zero_grad()
            for k, micro in enumerate(micros):
                with self.ddp.no_sync() if k < len(micros) - 1 else torch.enable_grad():
                    (-self._log_probs(self.ddp, *micro).sum() / sum(limits)).backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
        self._megatron(batch, cuts, sum(limits), seconds)
        return seconds

    def _megatron(self, batch: DataProto, cuts: list[list[int]], num_tokens: int, seconds: dict[str, float]) -> None:
        """The same by a plain loop over the actor's megatron-core model, which gives entropies too, as the actor does.

        The loss is nothing, so that no weight learns.
        """
        from megatron.core.distributed import finalize_model_grads

        from hybridflow.engines.megatron.batch import make_micro_batch
        from hybridflow.engines.megatron.packing import pack

        engine: Any = self.context.peers["actor"].engine  # type: ignore[attr-defined]
        [model] = engine.models
        prompts, responses = rows_of(batch, "prompts"), rows_of(batch, "responses")

        def forward(rows: list[int], with_entropy: bool) -> torch.Tensor:
            micro = make_micro_batch(prompts, responses, None, rows, engine.device, engine.token_multiple)
            packing = pack(micro.lengths, 1, 0, engine.device)
            return model(micro.input_ids, micro.position_ids, micro.targets, packing, 1.0, with_entropy)[0]

        with engine.parallel:
            with _clock(seconds, "megatron_log_probs"), torch.no_grad():
                for rows in cuts:
                    forward(rows, with_entropy=True)
            with _clock(seconds, "megatron_update"):
                engine.optimizer.zero_grad()
                for k, rows in enumerate(cuts):
                    with model.no_sync() if k < len(cuts) - 1 else torch.enable_grad():
                        (forward(rows, with_entropy=False).sum() * 0.0 / num_tokens).backward()
                finalize_model_grads(engine.models, None)
                engine.optimizer.step()

    @staticmethod
    def _pad(rows: list[list[int]], prompts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Right-padded ids [b, s] and the mask [b, s - 1] of positions that predict a response token."""
        width = max(map(len, rows))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        wanted = torch.tensor(
            [[p - 1 <= i < len(row) - 1 for i in range(width - 1)] for row, p in zip(rows, prompts, strict=True)]
        )
        return ids, wanted

    @staticmethod
    def _log_probs(model: torch.nn.Module, ids: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        logits = model(ids[:, :-1], use_cache=False).logits[wanted].float()
        return -F.cross_entropy(logits, ids[:, 1:][wanted], reduction="none")
