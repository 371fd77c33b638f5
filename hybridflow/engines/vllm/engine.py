"""Generation by vLLM inside the calling process: token ids in, token ids and log-probabilities out.

Where it stands: ``workers/rollout.py`` builds one :class:`RolloutEngine` per device process and drives it; weights come
from the trainer through :meth:`RolloutEngine.parameters`, written in place, followed by
:meth:`RolloutEngine.weights_changed`. The loop over vLLM's ``add_request`` and ``step`` is here, so nobody else decides
when a step happens.

Invariants
- What a request yields depends on its prompt, its seed and the weights: not on the other requests, their order, nor the
  process's random state, which a call leaves as it was. (Floating-point sums may still differ in the last bit between
  batch sizes, which can flip a token where two are equally likely.)
- log_probs are those of the distribution that the token was drawn from: log_softmax(logits / temperature) over the ids
  below ``valid_vocab``. Greedy tokens (temperature 0) carry log_softmax(logits), as at temperature 1. With ``top_p``
  below 1 or ``top_k`` above 0 they are renormalised over the kept tokens, which a trainer cannot reproduce.
- A request outlives a call only where :meth:`RolloutEngine.begin` took it in, until :meth:`RolloutEngine.generate` asks
  for it. Whatever is raised in a call, no request outlives it.
- Each token carries the version of the weights that drew it, also where these changed in the middle of its response:
  keys and values of the tokens before it are then computed again, so that it is drawn as that version alone would.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import random
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist

from hybridflow import platform
from hybridflow.config import EngineConfig, SamplingConfig
from hybridflow.engines.vllm import cpu, environment
from hybridflow.errors import ConfigError, DataError, ModelError
from hybridflow.models.spec import ModelSpec
from hybridflow.models.tables import check_vllm
from hybridflow.resharding.layout import GenerationLayout, ParallelLayout

environment.prepare()
cpu.install()

from vllm import EngineArgs, SamplingParams  # noqa: E402  (after the environment)
from vllm.inputs.engine import tokens_input  # noqa: E402
from vllm.logprobs import FlatLogprobs  # noqa: E402
from vllm.outputs import RequestOutput  # noqa: E402
from vllm.sampling_params import RequestOutputKind  # noqa: E402
from vllm.v1.engine.llm_engine import LLMEngine  # noqa: E402

from hybridflow.engines.vllm import groups  # noqa: E402
from hybridflow.engines.vllm.memory import EngineMemory  # noqa: E402
from hybridflow.engines.vllm.multi_step import MultiStep  # noqa: E402

MIN_TEMPERATURE = 0.01
"""vLLM raises lower temperatures to this one; :class:`RolloutEngine` refuses them instead."""

_BATCHED_TOKENS = 8192
_GPU_BLOCK_TOKENS = 16  # vLLM's default


@dataclass(frozen=True)
class Request:
    """One response to generate.

    Attributes:
        prompt_ids: token ids of the prompt.
        seed: of this response's random draws, 0 <= seed < 2**63.
        max_tokens: longest response.
    """

    prompt_ids: Sequence[int]
    seed: int
    max_tokens: int

    def key(self, sampling: SamplingConfig) -> tuple[object, ...]:
        """Equal for equal requests."""
        return (tuple(self.prompt_ids), self.seed, self.max_tokens, *astuple(sampling))


@dataclass(frozen=True)
class Completion:
    """One response.

    Attributes:
        token_ids: generated ids, a stop id included.
        log_probs: of those ids, see the module.
        finish_reason: ``stop`` (a stop id) or ``length``.
        token_versions: version of the weights that drew each id; never falling.
    """

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: str
    token_versions: list[int]

    @property
    def weight_version(self) -> int:
        """The oldest weights that had a part in it."""
        return self.token_versions[0]


class RolloutEngine:
    """A vLLM engine in this process. Building one is collective over the process's torch.distributed world.

    The ranks of one replica of the layout generate together: each calls :meth:`generate` with the same requests in the
    same order. Replicas do not run in lockstep. Where torch.distributed is not initialised, a world of this one process
    is made, and stays.

    Args:
        folder: Hugging Face folder; ``config.json`` is enough where weights come from a trainer.
        spec: the same model, read.
        dtype: of weights, activations and the KV cache.
        config: limits and memory. ``kv_cache_gb=0`` on a GPU leaves the size to vLLM.
        valid_vocab: ids at or above are never sampled, and have probability 0 in log_probs.
        max_model_len: longest prompt plus response, in tokens.
        layout: how the ranks of the world share replicas; None makes each rank a replica of its own.
        load_weights: read the weights of ``folder`` as version 0; else there are none before :meth:`weights_changed`.
        releasable: on a GPU, weights and KV cache lie where :attr:`memory` can release them.
        where: name of the settings ``config``, for messages.

    Attributes:
        memory: gives weights and KV cache back and takes them anew; see :meth:`release_weights`.

    Raises:
        ConfigError, ModelError: a limit cannot be met, or the model not be run, before anything is built.
    """

    def __init__(
        self,
        folder: str,
        spec: ModelSpec,
        dtype: torch.dtype,
        config: EngineConfig,
        valid_vocab: int,
        max_model_len: int,
        *,
        layout: GenerationLayout | None = None,
        load_weights: bool = False,
        releasable: bool = False,
        where: str = "rollout",
    ) -> None:
        self.where = where
        self.spec, self.dtype, self.config, self.max_model_len = spec, dtype, config, max_model_len
        environment.ensure_world()
        self.layout = layout or ParallelLayout(dp=dist.get_world_size()).generation(tp=1)
        self.valid_vocab = min(valid_vocab, spec.vocab_size)
        self._stop_token_ids = sorted({*config.stop_token_ids, *spec.eos_token_ids})
        self._check_limits()
        args = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            generation_config="vllm",
            load_format="auto" if load_weights else "dummy",
            use_tqdm_on_load=False,
            dtype=cast(Any, str(dtype).removeprefix("torch.")),
            distributed_executor_backend="external_launcher",
            tensor_parallel_size=self.layout.tp,
            enable_expert_parallel=self.layout.ep > 1,
            max_model_len=max_model_len,
            max_num_seqs=config.max_sequences,
            max_num_batched_tokens=max(_BATCHED_TOKENS, max_model_len + config.max_sequences),
            kv_cache_memory_bytes=int(config.kv_cache_gb * 2**30) or None,
            enable_prefix_caching=True,
            enforce_eager=config.enforce_eager,
            enable_sleep_mode=releasable and platform.current().is_cuda,
            logprobs_mode="processed_logprobs",
            disable_log_stats=True,
            seed=0,
            **cpu.engine_options(),
        )
        with environment.launched(), cpu.constructing(not config.enforce_eager), _random_state_kept():
            groups.make(self.layout)
            self._engine = LLMEngine.from_engine_args(args)
            self._engine.renderer.get_eos_token_id()  # warns once that there is no tokenizer, as wanted
        # At garbage collection or at exit it would destroy the process's torch.distributed, the trainer's groups too.
        cast(Any, self._engine.engine_core)._finalizer.detach()
        weakref.finalize(self, gc.unfreeze)  # the other half of its work: vLLM froze the process's objects
        self._model: Any = self._engine.model_executor.driver_worker.worker.model_runner.model
        self.memory = EngineMemory(self._engine)
        self._mask_vocabulary()
        if not platform.current().is_cuda:
            self._multi_step = MultiStep(self._engine, self._stop_token_ids)
        self._version: int | None = None
        self._ids, self._running, self._done = itertools.count(), set[str](), dict[str, Completion]()
        self._begun: dict[tuple[object, ...], str] = {}  # ids of requests that no call waits for yet
        if load_weights:
            self.weights_changed(0)

    def _check_limits(self) -> None:
        spec, config, layout = self.spec, self.config, self.layout
        cpu.check_head_dim(spec.head_dim)
        check_vllm(spec, layout.tp, layout.ep)
        if layout.pp > 1:
            raise ConfigError(
                f"{self.where} layout {layout}: an engine has no pipeline stages. Set pp to 1 and use tp."
            )
        if self.max_model_len > spec.max_positions:
            raise ConfigError(
                f"prompt and response of up to {self.max_model_len} tokens ({self.where}.max_prompt_tokens "
                f"+ {self.where}.max_tokens = {config.max_prompt_tokens} + {config.max_tokens}) exceed the model's "
                f"{spec.max_positions} positions. Lower one of the two."
            )
        if config.kv_cache_gb <= 0 and not platform.current().is_cuda:
            raise ConfigError(f"{self.where}.kv_cache_gb={config.kv_cache_gb}: on a CPU give a size above 0, in GiB.")
        block_tokens = _GPU_BLOCK_TOKENS if platform.current().is_cuda else cpu.BLOCK_TOKENS
        blocks = math.ceil(self.max_model_len / block_tokens)
        kv_heads = max(1, spec.num_kv_heads // layout.tp)
        per_token = 2 * spec.num_layers * kv_heads * spec.head_dim * self.dtype.itemsize
        # One block more than a sequence fills: vLLM keeps one for itself.
        needed = (blocks + 1) * block_tokens * per_token
        if 0 < config.kv_cache_gb * 2**30 < needed:
            raise ConfigError(
                f"{self.where}.kv_cache_gb={config.kv_cache_gb} cannot hold one sequence of {self.max_model_len} "
                f"tokens: {blocks + 1} blocks of {block_tokens} tokens * (2 * {spec.num_layers} layers * {kv_heads} "
                f"KV heads * {spec.head_dim} * {self.dtype.itemsize} bytes) = {needed} bytes. Set "
                f"{self.where}.kv_cache_gb to at least {needed / 2**30:.3f}, or lower {self.where}.max_prompt_tokens "
                f"or {self.where}.max_tokens."
            )

    def _mask_vocabulary(self) -> None:
        """Ids that no tokenizer produces get logit -inf before anything else reads the logits."""
        compute_logits, valid = self._model.compute_logits, self.valid_vocab
        if valid == self.spec.vocab_size:
            return

        def masked(*args: object, **kwargs: object) -> torch.Tensor | None:
            logits = compute_logits(*args, **kwargs)
            if logits is not None:
                logits[..., valid:] = float("-inf")
            return logits

        self._model.compute_logits = masked

    def parameters(self) -> dict[str, torch.Tensor]:
        """The model's own parameters by vLLM's names. Write into them or replace their ``data``, then call
        :meth:`weights_changed`."""
        return dict(self._model.named_parameters())

    @property
    def weight_version(self) -> int | None:
        """Version of the weights; None before there are any."""
        return self._version

    def release_weights(self) -> None:
        """Drop the weights, after the KV cache; without a version of them nothing is generated."""
        self._version = None
        self.memory.release_weights()
        cpu.forget_packed(self._model)

    def weights_changed(self, version: int) -> None:
        """Drop keys and values that other weights computed, and stamp what is generated from now on.

        Responses that are half-way (:meth:`begin`) keep their tokens; what the new weights make of these is computed
        before the next one is drawn.

        Raises:
            RuntimeError: where vLLM did not drop its prefix cache.
        """
        if not self._engine.reset_prefix_cache(reset_running_requests=bool(self._begun)):
            raise RuntimeError(
                f"vLLM refused to drop its prefix cache for weight version {version}: a request still holds blocks "
                f"({self._engine.get_num_unfinished_requests()} unfinished requests)."
            )
        cpu.forget_packed(self._model)
        self._engine.set_weight_version(str(version))
        self._version = version

    def close(self) -> None:
        """Give back weights and KV cache; the engine is of no use afterwards. Process groups stay."""
        self._engine.model_executor.shutdown()
        self._version = None
        del self._engine, self._model, self.memory
        platform.current().release_cache()

    def begin(self, requests: Sequence[Request], sampling: SamplingConfig) -> None:
        """Take requests in and return: they are generated whenever :meth:`generate` runs, in the places that its own
        requests leave free, and go on under other weights where these change meanwhile.

        Raises:
            DataError: as :meth:`generate`; or a request has begun already.
        """
        groups.require_agreement("the requests they begin", (requests, sampling))
        self._check(requests, sampling)
        keys = {request.key(sampling): request for request in requests}
        if len(keys) < len(requests) or not keys.keys().isdisjoint(self._begun):
            raise DataError(
                "a request is begun that has begun already and was not asked for since, or twice in one call: begin "
                "each one once, then generate it."
            )
        with self._dropped_on_error():
            for key, request in keys.items():
                self._begun[key] = self._add(request, sampling)

    def generate(self, requests: Sequence[Request], sampling: SamplingConfig) -> list[Completion]:
        """Generate one response per request; go on with those that have begun.

        Args:
            requests: any number; at most ``rollout.max_sequences`` run at once.
            sampling: temperature (0 is greedy), top_p, top_k of all of them.

        Returns:
            Completions in the order of the requests.

        Raises:
            DataError: a prompt is empty, too long, or has an id outside of the vocabulary; nothing has been generated.
            ModelError: the weights yield log-probabilities that are not finite.
        """
        groups.require_agreement("their requests", (requests, sampling))
        self._check(requests, sampling)
        self.memory.require()
        with self._dropped_on_error():
            ids = [self._begun.pop(request.key(sampling), None) if self._begun else None for request in requests]
            ids = [found or self._add(request, sampling) for found, request in zip(ids, requests, strict=True)]
            while not self._running.isdisjoint(ids):
                if not self._engine.has_unfinished_requests():
                    lost = [i for i, request_id in enumerate(ids) if request_id in self._running]
                    raise RuntimeError(f"vLLM lost {len(lost)} of {len(ids)} requests, the first is request {lost[0]}.")
                for output in self._engine.step():
                    self._done[output.request_id] = self._completion(cast(RequestOutput, output))
                    self._running.discard(output.request_id)
            completions = [self._done.pop(request_id) for request_id in ids]
        # A rank that drew another token went on with its own: what the others computed with it is then wrong as well.
        responses = [completion.token_ids for completion in completions]
        groups.require_agreement("their responses", responses, groups.PATIENCE)
        return completions

    def _add(self, request: Request, sampling: SamplingConfig) -> str:
        name = str(next(self._ids))
        self._running.add(name)
        self._engine.add_request(name, tokens_input(list(request.prompt_ids)), self._params(request, sampling))
        return name

    def _check(self, requests: Sequence[Request], sampling: SamplingConfig) -> None:
        if self._version is None:
            raise RuntimeError("the engine has no weights yet: write into parameters(), then call weights_changed().")
        if 0 < sampling.temperature < MIN_TEMPERATURE:
            raise ConfigError(
                f"sampling.temperature={sampling.temperature}: vLLM would raise it to {MIN_TEMPERATURE}. "
                f"Give 0 (greedy) or at least {MIN_TEMPERATURE}."
            )
        limit, setting = min(
            (self.config.max_prompt_tokens, f"{self.where}.max_prompt_tokens={self.config.max_prompt_tokens}"),
            (self.max_model_len - 1, f"one less than the engine's max_model_len={self.max_model_len}"),
        )
        for index, request in enumerate(requests):
            length = len(request.prompt_ids)
            if not 0 < length <= limit:
                raise DataError(
                    f"prompt {index} has {length} tokens; allowed are 1 to {limit} ({setting}). Nothing was cut. "
                    f"Raise the setting, or drop such prompts with data.long_prompts=filter."
                )
            if request.max_tokens < 1:
                raise DataError(f"request {index}: max_tokens={request.max_tokens}, it has to be at least 1.")
            low, high = min(request.prompt_ids), max(request.prompt_ids)
            if low < 0 or high >= self.spec.vocab_size:
                raise DataError(
                    f"prompt {index} has the token id {low if low < 0 else high}, outside of the model's vocabulary of "
                    f"{self.spec.vocab_size} ids. Is this tokenizer the model's?"
                )

    def _params(self, request: Request, sampling: SamplingConfig) -> SamplingParams:
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=request.seed,
            max_tokens=request.max_tokens,
            stop_token_ids=self._stop_token_ids,
            logprobs=0,  # of the drawn token only
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _completion(self, output: RequestOutput) -> Completion:
        [answer] = output.outputs
        assert isinstance(answer.logprobs, FlatLogprobs) and answer.weight_versions and answer.finish_reason
        token_ids, log_probs = list(answer.token_ids), list(answer.logprobs.logprobs)
        if len(token_ids) != len(log_probs):
            raise RuntimeError(f"vLLM returned {len(token_ids)} tokens with {len(log_probs)} log-probabilities.")
        if not math.isfinite(sum(log_probs)):
            bad = next(t for t, log_prob in enumerate(log_probs) if not math.isfinite(log_prob))
            raise ModelError(
                f"request {output.request_id}: the log-probability of response token {bad} is {log_probs[bad]}: the "
                f"weights of version {self._version} are not finite or overflow. Look at the last update's loss and "
                f"grad_norm."
            )
        versions = [int(span.version) for span in answer.weight_versions for _ in range(span.start, span.end)]
        assert len(versions) == len(token_ids), (answer.weight_versions, len(token_ids))
        return Completion(token_ids, log_probs, answer.finish_reason, versions)

    @contextlib.contextmanager
    def _dropped_on_error(self) -> Iterator[None]:
        """Where the block raises, take all requests out of the engine, so that the next call starts clean."""
        try:
            yield
        except BaseException:
            self._engine.abort_request([*self._running])
            for requests in (self._running, self._begun, self._done):
                requests.clear()
            # vLLM knows a block by its tokens from when it is scheduled, so also one that the step did not compute.
            self._engine.reset_prefix_cache()
            raise


@contextlib.contextmanager
def _random_state_kept() -> Iterator[None]:
    """vLLM seeds Python's, NumPy's and torch's generators of the process; give them back as they were."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
