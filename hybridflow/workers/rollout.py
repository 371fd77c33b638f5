"""Generation: prompts in, responses with their log-probabilities out; and the sync of weights from the actor.

Where it stands: between the driver's batch and :class:`hybridflow.engines.vllm.engine.RolloutEngine`, in the same
pool as the actor whose weights it takes. The ranks of a generation replica are given the same rows and generate them
together.

Invariants: the random draws of a row depend on the run's seed, the step, its ``sample_ids`` and the tag alone, so that
the same run gives the same responses on any number of devices; a prompt is never cut; a sync of version v makes every
later token carry v in ``token_versions``, until the next sync; no response begins under weights that are more than
``max_staleness`` versions older than those that are to learn from it, so that none of its tokens is. Weights and KV
cache are in memory only in the phase that generates, which :meth:`RolloutWorker.sync_weights` and
:meth:`RolloutWorker.generate` enter.
"""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING

import numpy as np
import torch

from hybridflow.config import SamplingConfig
from hybridflow.errors import ConfigError, DataError, HybridFlowError
from hybridflow.models.spec import ModelSpec
from hybridflow.models.tokenizer import vocabulary_size
from hybridflow.protocol.data import DataProto
from hybridflow.protocol.meta import Max, Sum
from hybridflow.protocol.transfer import Protocol
from hybridflow.resharding.hybrid import GENERATION, TRAINING, Part, Slot
from hybridflow.resharding.layout import GenerationLayout, ParallelLayout, generation_of
from hybridflow.workers.base import Worker, register
from hybridflow.workers.sync import WeightSync

if TYPE_CHECKING:
    from hybridflow.engines.vllm.engine import Completion, Request, RolloutEngine


def add_sample_ids(batch: DataProto) -> DataProto:
    """The batch with ``sample_ids``: the number of each row in the driver's batch, int64 [B]."""
    numbered = batch.select()
    numbered.batch["sample_ids"] = torch.arange(len(batch))
    return numbered


def row_seed(seed: int, step: int, sample_id: int, tag: str) -> int:
    """Seed of one response, 0 <= seed < 2**63: the same on every machine and in every process."""
    digest = hashlib.blake2b(f"{seed}/{step}/{sample_id}/{tag}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class RolloutWorker(Worker):
    """One vLLM engine in each generation replica, with a part in each of its device processes."""

    engine: RolloutEngine

    def setup(self) -> None:
        from hybridflow.engines.vllm.engine import RolloutEngine

        config, phases = self.context.config, self.context.phases
        spec = ModelSpec.from_folder(config.model.path)
        phases.enter(GENERATION)  # the actor makes room while the engine is built
        self.engine = RolloutEngine(
            folder=config.model.path,
            spec=spec,
            dtype=getattr(torch, config.model.dtype),
            config=config.rollout,
            valid_vocab=vocabulary_size(config.model.tokenizer_path or config.model.path, spec.vocab_size),
            max_model_len=config.rollout.max_prompt_tokens + config.rollout.max_tokens,
            layout=self.layout,
            releasable=not config.memory.keep_rollout,
        )
        self._sync: WeightSync | None = None
        # What the engine should hold, and what it holds: the version, and the actor's count of changes then.
        self._wanted: tuple[int, int] | None = None
        self._held: tuple[int, int] | None = None
        self._report: dict[str, float] = {}
        if "actor" in self.context.peers:
            actor = self.context.peers["actor"].engine  # type: ignore[attr-defined]
            self._sync = WeightSync.within(self.layout, self.context.rank, config, actor, self.engine)
            self._add_parts(self._sync)
        phases.enter(TRAINING)

    def _add_parts(self, sync: WeightSync) -> None:
        """The engine and the actor take turns in memory."""
        phases, role, memory = self.context.phases, self.context.role, self.context.config.memory
        release = None if memory.keep_rollout else self._release_weights
        phases.add(Part(f"{role}.weights", Slot.ROLLOUT_WEIGHTS, release, self._restore_weights))
        if not memory.keep_rollout:
            cache = self.engine.memory
            phases.add(Part(f"{role}.kv_cache", Slot.KV_CACHE, cache.release_kv_cache, cache.restore_kv_cache))
        if "parameters" in memory.offload:
            parameters = sync.offload_parameters(self.engine, memory.folder)
            phases.add(Part("actor.parameters", Slot.PARAMETERS, parameters.release, parameters.restore))

    def _release_weights(self) -> None:
        self._held = None
        self.engine.release_weights()

    def _restore_weights(self) -> None:
        """Make place for the weights and take them from the actor; collective, as all ranks of a pool change phase at
        the same calls."""
        self.engine.memory.restore_weights()
        if self._wanted is None:
            return
        assert self._sync is not None and self._sync.actor is not None
        version, changes = self._wanted
        changed = self._sync.actor.changes != changes
        if self._held == self._wanted and not (changed and self._sync.shares):
            return
        if changed:
            where, setting = "copy of them was dropped to make room", "keep_rollout=true"
            if self._sync.shares:
                where, setting = "weights lie in the actor's memory", "share_weights=false"
            raise HybridFlowError(
                f"the actor was updated after its weights were synced as version {version}, and the rollout's {where}: "
                f"call run.sync_weights() before generating, or set memory.{setting} to go on generating with version "
                f"{version}."
            )
        self._report = self._sync.run(version)
        self._held = self._wanted

    @property
    def layout(self) -> GenerationLayout:
        return generation_of(self.context.layout)

    def close(self) -> None:
        if hasattr(self, "engine"):
            self.engine.close()

    @register(Protocol.THREE_D_ALL_MICRO_DP, prepare=add_sample_ids, uneven="balance")
    def generate(self, batch: DataProto, sampling: SamplingConfig | None = None, tag: str = "train") -> DataProto:
        """One response for each row; those that :meth:`begin` has begun are gone on with.

        Args:
            batch: jagged int64 ``prompts``; ``meta_info["step"]`` (0 if absent) enters the seeds.
            sampling: other than ``rollout.sampling``. With ``top_p`` or ``top_k`` the ``rollout_log_probs`` are those
                of the truncated distribution, from which the trainer's differ by construction.
            tag: enters the seeds, so that an evaluation does not draw what training draws.

        Returns:
            The batch and, of each response: jagged ``responses`` int64, ``response_mask`` bool, ``rollout_log_probs``
            float32, ``token_versions`` int64; ``weight_version`` int64 [B], of the oldest token; ``finish_reason``.
            ``meta_info["temperature"]`` is what the trainer divides logits by (1 after greedy generation).
            ``meta_info["metrics"]``, all of this device's rows:
            ``generate/tokens`` and ``generate/prompt_tokens`` (sums), ``generate/seconds`` (the slowest device's),
            ``generate/response_length`` (mean) and ``generate/truncated`` (share that met ``rollout.max_tokens``).

        Raises:
            DataError: a prompt is longer than ``rollout.max_prompt_tokens``; or a response would be too old, see
                :meth:`begin`.
        """
        self.context.phases.enter(GENERATION)
        sampling = sampling or self.context.config.rollout.sampling
        requests = self._requests(batch, tag)
        started = time.perf_counter()
        completions = self.engine.generate(requests, sampling)
        seconds = time.perf_counter() - started
        answer = batch.union(_columns(completions))
        answer.meta_info["temperature"] = float(sampling.temperature) or 1.0
        answer.meta_info["metrics"] = _metrics(completions, len(batch.flat("prompts")), seconds)
        return answer

    @register(Protocol.THREE_D_ALL_MICRO_DP, prepare=add_sample_ids, uneven="balance")
    def begin(self, batch: DataProto) -> None:
        """Begin one response for each row, and return at once.

        They are generated while :meth:`generate` runs, for other rows, in the places that these leave free; a sync in
        between finds them half-way, and they go on with the new weights. A later :meth:`generate` of the same batch
        gives them back.

        Args:
            batch: as for :meth:`generate` with its defaults.

        Raises:
            ConfigError: the actor shares the pool: it could not train while responses are half-way.
            DataError: the batch's step is more than ``max_staleness`` steps ahead of the weights; or as
                :meth:`generate`.
        """
        if "actor" in self.context.peers:
            raise ConfigError(
                f"roles.{self.context.role}.pool={self.context.pool}: responses that go on while the actor trains need "
                f"the memory that it takes turns on. Give the rollout a pool of its own (placement=disaggregate)."
            )
        self.engine.begin(self._requests(batch, "train"), self.context.config.rollout.sampling)

    def _requests(self, batch: DataProto, tag: str) -> list[Request]:
        from hybridflow.engines.vllm.engine import Request

        config, step, version = self.context.config, int(batch.meta_info.get("step", 0)), self.engine.weight_version
        allowed = getattr(config, "max_staleness", None)
        if allowed is not None and version is not None and step - 1 - version > allowed:
            raise DataError(
                f"responses of step {step} would begin with the weights of version {version}, but the step trains "
                f"version {step - 1}: {step - 1 - version} updates older, and max_staleness={allowed}. Begin them "
                f"later (run.steps with ahead={allowed}), after a sync in each step, or raise max_staleness."
            )
        return [
            Request(prompt.tolist(), row_seed(config.seed, step, sample, tag), config.rollout.max_tokens)
            for prompt, sample in zip(
                batch.flat("prompts").split(batch.lengths("prompts").tolist()),
                batch.batch["sample_ids"].tolist(),
                strict=True,
            )
        ]

    @register(Protocol.ONE_TO_ALL)
    def join_actor(self, training: ParallelLayout, address: tuple[str, int]) -> None:
        """Take weights from an actor on a pool of its own, which does ``join_receiver`` at the same time.

        Args:
            training: the actor's layout.
            address: of the actor's store.
        """
        rank = training.world_size + self.context.rank
        self._sync = WeightSync.between(
            self.context.role, training, self.layout, rank, address, self.context.config, receiver=self.engine
        )

    @register(Protocol.ONE_TO_ALL)
    def sync_weights(self, version: int) -> dict[str, float]:
        """Take the weights of the actor and call them ``version``.

        An actor on a pool of its own does ``send_weights`` at the same time.

        Returns:
            What :meth:`hybridflow.workers.sync.WeightSync.run` says; the changes of phase since the last call as
            :meth:`hybridflow.resharding.hybrid.Phases.drain` says; and the memory of this process as
            ``memory/<kind>_gb`` in GiB (see :meth:`hybridflow.platform.Platform.memory`).
        """
        phases = self.context.phases
        if self._sync is None:
            raise ConfigError(
                f"roles.{self.context.role}.pool={self.context.pool}: the role has no actor to take weights from. Put "
                f"it on the actor's pool, or let both join first."
            )
        if self._sync.actor is None:
            self._report = self._sync.run(version)
        else:
            self._wanted = (version, self._sync.actor.changes)
            if self._held != self._wanted:
                phases.enter(TRAINING)
            phases.enter(GENERATION)
        return {
            **self._report,
            **{name: Max(value) for name, value in phases.drain().items()},
            **{f"memory/{kind}_gb": Max(used / 2**30) for kind, used in self.context.platform.memory().items()},
        }


def _columns(completions: list[Completion]) -> DataProto:
    responses = [torch.tensor(c.token_ids, dtype=torch.int64) for c in completions]
    return DataProto.from_dict(
        tensors={
            "responses": DataProto.jagged(responses),
            "response_mask": DataProto.jagged([torch.ones(len(row), dtype=torch.bool) for row in responses]),
            "rollout_log_probs": DataProto.jagged([torch.tensor(c.log_probs) for c in completions]),
            "token_versions": DataProto.jagged([torch.tensor(c.token_versions) for c in completions]),
            "weight_version": torch.tensor([c.weight_version for c in completions]),
        },
        non_tensors={"finish_reason": np.array([c.finish_reason for c in completions], dtype=object)},
    )


def _metrics(completions: list[Completion], prompt_tokens: int, seconds: float) -> dict[str, float]:
    lengths = [len(c.token_ids) for c in completions]
    return {
        "generate/tokens": Sum(sum(lengths)),
        "generate/prompt_tokens": Sum(prompt_tokens),
        "generate/seconds": Max(seconds),
        "generate/response_length": sum(lengths) / len(lengths),
        "generate/truncated": sum(c.finish_reason == "length" for c in completions) / len(lengths),
    }
