"""How much memory each device needs, by role and by what is in memory at one time.

A pool whose devices train and generate is looked at in three situations, in the order of a step's second half:

    update      the actor computes gradients and steps its optimizer; what only generation needs is away
    sync        weights go from trainer to rollout: both are there, what ``memory.offload`` names is away
    generate    the rollout generates; what only training needs is away

Parameters are counted from the same tables by which weights are loaded, so they are exact. Activations follow from the
tensors that backward keeps in our layers, counted as Korthikanti et al. (2022, arXiv 2205.05198, sections 4 and 5)
count those of GPT, for the longest rows that the settings allow: an upper bound. Each function states its formula.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from hybridflow.config import RunConfig
from hybridflow.models.spec import ModelSpec
from hybridflow.models.tables import megatron_table, padded_vocab_size, vllm_table
from hybridflow.resharding.layout import Coordinates, GenerationLayout, Layout, ParallelLayout, training_of
from hybridflow.resharding.plan import Table, coinciding

SITUATIONS = ("update", "sync", "generate")
TRAINED, FROZEN, ROLLOUT = ("actor", "critic", "cost_critic"), ("reference", "teacher", "reward", "cost"), "rollout"
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}

LOGIT_CHUNK_BYTES = 256 * 2**20
"""Of float32 logits at a time; engines/megatron/model.py."""
BATCHED_TOKENS = 8192
"""Most tokens of one step of a rollout engine that are not its own minimum; engines/vllm/engine.py."""
GIB = 2**30


@dataclass(frozen=True)
class Part:
    """Something a device holds.

    Attributes:
        name: ``<role>.<what>``.
        update, sync, generate: bytes in each situation.
        bound: an upper bound, reached by the longest rows only; else it is taken for certain.
    """

    name: str
    update: int = 0
    sync: int = 0
    generate: int = 0
    bound: bool = False


@dataclass(frozen=True)
class DeviceMemory:
    """What the fullest device of a pool holds.

    Attributes:
        rank: that device's rank in the pool.
        parts: ordered by role.
    """

    pool: str
    rank: int
    parts: tuple[Part, ...]

    def total(self, situation: str, *, bounds: bool = True) -> int:
        """Bytes in a situation.

        Args:
            bounds: also count what is an upper bound.
        """
        return sum(getattr(part, situation) for part in self.parts if bounds or not part.bound)

    def most(self, *, bounds: bool = True) -> tuple[str, int]:
        """The fullest situation and its bytes."""
        return max(((s, self.total(s, bounds=bounds)) for s in SITUATIONS), key=lambda item: item[1])


def estimate(
    config: RunConfig,
    specs: Mapping[str, ModelSpec],
    layouts: dict[str, Layout],
    process_bytes: int,
    *,
    packs: bool = False,
) -> list[DeviceMemory]:
    """The fullest device of each pool that has a role with a model.

    Args:
        specs: of the placed roles that have a model.
        layouts: of the placed roles.
        process_bytes: what a process holds before any model, libraries and their buffers.
        packs: whether engines keep a second copy of their matrices for generation, as on a CPU.

    Raises:
        ConfigError, ModelError: a layout does not divide the model.
    """
    found = []
    for pool in dict.fromkeys(at.pool for at in config.roles.values() if at is not None):
        here = {role: layout for role, layout in layouts.items() if _pool_of(config, role) == pool}
        models = {role: here[role] for role in (*TRAINED, *FROZEN, ROLLOUT) if role in here and role in specs}
        if not models:
            continue
        device = _Device(config, specs, models, packs)
        size = next(iter(models.values())).world_size
        # Ranks of the same stages hold the same amounts.
        stages = {device.stages(rank): rank for rank in reversed(range(size))}
        choices = [
            DeviceMemory(pool, rank, (_everywhere("process", process_bytes), *device.parts(rank)))
            for rank in sorted(stages.values())
        ]
        found.append(max(choices, key=lambda choice: choice.most()[1]))
    return found


class _Device:
    """The roles of one pool; its methods give the parts of one rank."""

    def __init__(
        self, config: RunConfig, specs: Mapping[str, ModelSpec], models: dict[str, Layout], packs: bool
    ) -> None:
        self.config, self.specs, self.models, self.packs = config, specs, models, packs
        self.item = DTYPE_BYTES[config.model.dtype]
        self.takes_turns = ROLLOUT in models and "actor" in models
        self._tables: dict[tuple[str, Coordinates], Table] = {}

    def stages(self, rank: int) -> tuple[int, ...]:
        """What decides how much a rank holds."""
        return tuple(layout.coordinates(rank).pp for layout in self.models.values())

    def parts(self, rank: int) -> Iterator[Part]:
        for role, layout in self.models.items():
            if isinstance(layout, GenerationLayout):
                yield from self._rollout(layout, rank) if role == ROLLOUT else self._judge(role, layout)
            else:
                training = training_of(layout)
                at = training.coordinates(rank)
                yield from self._trained(role, training, at) if role in TRAINED else self._frozen(role, training, at)

    def _trained(self, role: str, layout: ParallelLayout, at: Coordinates) -> Iterator[Part]:
        sizes = {name: _size(p.shape) for name, p in self._table(role, layout, at).items()}
        expert = sum(size for name, size in sizes.items() if ".experts." in name)
        dense = sum(sizes.values()) - expert
        distributed = getattr(self.config, role).optimizer.distributed
        weights, is_actor = (dense + expert) * self.item, role == "actor"
        yield self._part(f"{role}.parameters", weights, "parameters" if is_actor else "others", in_sync=is_actor)
        yield self._part(f"{role}.gradients", gradient_bytes(dense + expert), "gradients")
        state = optimizer_bytes(dense, expert, layout, self.item, distributed)
        yield self._part(f"{role}.optimizer", state, "optimizer")
        # Micro-batches are the actor's in every role.
        settings, spec, longest = self.config.actor, self.specs[role], self.longest
        tokens = min(
            settings.micro_batch_tokens or settings.micro_batch_size * longest,
            self._rows_of_an_update(layout.dp, settings.mini_batch_size) * longest,
        )
        kept = activation_bytes(spec, layout, at.pp, tokens, self.item, settings.recompute, settings.sequence_parallel)
        yield Part(f"{role}.activations", update=kept, bound=True)
        yield Part(f"{role}.workspace", update=workspace_bytes(max(sizes.values())), bound=True)
        if at.pp == layout.pp - 1 and not spec.scores:
            wanted = tokens * self.config.rollout.max_tokens // longest
            yield Part(f"{role}.logits", update=logit_bytes(spec, layout.tp, wanted), bound=True)

    def _frozen(self, role: str, layout: ParallelLayout, at: Coordinates) -> Iterator[Part]:
        elements = sum(_size(p.shape) for p in self._table(role, layout, at).values())
        yield self._part(f"{role}.parameters", elements * self.item, "others")

    def _rollout(self, layout: GenerationLayout, rank: int) -> Iterator[Part]:
        limits, spec = self.config.rollout, self.specs[ROLLOUT]
        away = self.takes_turns and not self.config.memory.keep_rollout
        table = vllm_table(spec, layout.tp, layout.coordinates(rank).tp, layout.ep)
        weights = sum(_size(p.shape) for p in table.values()) * self.item
        own = weights - self._shared(table, rank)
        yield Part("rollout.weights", 0 if away else own, own, own)
        packed = self._packed(table)
        yield Part("rollout.packed", *((0, 0, packed) if away else (packed, packed, packed)))
        cache = int(limits.kv_cache_gb * GIB)
        yield Part("rollout.kv_cache", *((0, 0, cache) if away else (cache, cache, cache)))
        received = int(max(layout.received_share(rank) for rank in range(layout.world_size)) * weights * layout.tp)
        if self.takes_turns and received:
            staged = min(2 * int(limits.sync_bucket_mb * 2**20), received)
            yield Part("rollout.sync_buckets", sync=staged, bound=True)
        working = generation_bytes(spec, layout.tp, self.longest, limits.max_sequences, self.item)
        yield Part("rollout.activations", generate=working, bound=True)

    def _judge(self, role: str, layout: GenerationLayout) -> Iterator[Part]:
        """An engine that stays in memory; its weights come from a folder."""
        limits, spec = getattr(self.config, role).judge, self.specs[role]
        table = vllm_table(spec, layout.tp, 0, layout.ep)
        yield _everywhere(f"{role}.weights", sum(_size(p.shape) for p in table.values()) * self.item)
        yield _everywhere(f"{role}.packed", self._packed(table))
        yield _everywhere(f"{role}.kv_cache", int(limits.kv_cache_gb * GIB))
        longest = limits.max_prompt_tokens + limits.max_tokens
        working = generation_bytes(spec, layout.tp, longest, limits.max_sequences, self.item)
        yield Part(f"{role}.activations", generate=working, bound=True)

    def _rows_of_an_update(self, dp: int, mini_batch_size: int) -> int:
        rows = mini_batch_size or self.config.data.prompts_per_step * self.config.rollout.n
        return -(-rows // dp)

    @cached_property
    def longest(self) -> int:
        return self.config.rollout.max_prompt_tokens + self.config.rollout.max_tokens

    def _part(self, name: str, size: int, kind: str, in_sync: bool = False) -> Part:
        """A part of training; ``kind`` is its name in ``memory.offload``."""
        away = self.takes_turns and kind in self.config.memory.offload
        return Part(name, size, 0 if away and not in_sync else size, 0 if away else size)

    def _shared(self, table: Table, rank: int) -> int:
        """Bytes of the rollout's parameters that use the actor's memory."""
        if not (self.takes_turns and self.config.memory.share_weights):
            return 0
        training = training_of(self.models["actor"])
        actor = self._table("actor", training, training.coordinates(rank))
        return sum(_size(table[name].shape) for name in coinciding(actor, table)) * self.item

    def _packed(self, table: Table) -> int:
        """Bytes of the copies that an engine makes of its matrices; of the embedding only where it is the head too."""
        if not self.packs:
            return 0
        only_read = {"model.embed_tokens.weight"} if "lm_head.weight" in table else set()
        matrices = [p for name, p in table.items() if len(p.shape) == 2 and name not in only_read]
        return sum(_size(p.shape) for p in matrices) * self.item

    def _table(self, role: str, layout: ParallelLayout, at: Coordinates) -> Table:
        """The parameters of a rank."""
        if (role, at) not in self._tables:
            spec = self.specs[role]
            self._tables[role, at] = megatron_table(spec, layout, at, padded_vocab_size(spec, layout.tp))
        return self._tables[role, at]


def gradient_bytes(parameters: int) -> int:
    """4 bytes a parameter: gradients are accumulated and summed over replicas in float32."""
    return 4 * parameters


def workspace_bytes(largest: int) -> int:
    """Three float32 tensors of a rank's largest parameter.

    In backward that is the gradient of a tied embedding from each of its ends and their sum, before it is added to the
    buffer of gradients; in the optimizer's step the denominator, the update and the decayed weight.
    """
    return 3 * 4 * largest


def optimizer_bytes(dense: int, expert: int, layout: ParallelLayout, item: int, distributed: bool) -> int:
    """AdamW's state of one rank: two float32 moments, and a float32 main copy where parameters are of another dtype.

    8 (float32) or 12 bytes a parameter, divided by the replicas that share it where ``distributed``: K of Rajbhandari
    et al. (2020, arXiv 1910.02054), section 3.1, less the gradients, and P_os of section 5.1.

    Args:
        dense, expert: parameters of the rank outside of experts and in experts.
        item: bytes of a parameter.
    """
    each = 8 if item == 4 else 12
    if not distributed:
        return each * (dense + expert)
    replicas = layout.dp * layout.cp
    expert_replicas = replicas * layout.tp // (layout.ep * layout.etp)
    return each * dense // replicas + each * expert // max(1, expert_replicas)


def activation_bytes(
    spec: ModelSpec,
    layout: ParallelLayout,
    stage: int,
    tokens: int,
    item: int,
    recompute: str = "none",
    sequence_parallel: bool = True,
) -> int:
    """What backward keeps of a stage's layers, for micro-batches of ``tokens`` tokens.

    With h the hidden size, q and k the widths of all query and of all kv heads, f the MLP's width, t and c the tensor-
    and context-parallel sizes, one layer keeps per token, in elements:

        4h         what enters and leaves each of its two norms; / t with sequence parallelism
        3q + 2k    queries, keys, values and answers as attention takes and gives them, and the output projection's
                   input; q + k more with norms on queries and keys; / t
        4f         gate, up, silu(gate) and their product, of each expert that computes the token; / t

    ``selective`` recomputation does without one q; ``full`` keeps the layer's input (h) of every layer and the above of
    one. The first stages of a pipeline keep ``pp - stage`` micro-batches (1F1B), times ``1 + (pp - 1) / (pp * vpp)``
    where it is interleaved (section 4.2 there).
    """
    h, q, k = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    split = layout.tp if sequence_parallel else 1
    attention = (2 if recompute == "selective" else 3) * q + 2 * k + (q + k if spec.qk_norm else 0)
    mlp = 4 * spec.ffn_size * max(1, spec.experts_per_token)
    layer = 4 * h / split + (attention + mlp) / layout.tp
    layers = spec.num_layers // layout.pp
    each = layers * h / split + layer if recompute == "full" else layers * layer
    in_flight = (layout.pp - stage) * (1 + (layout.pp - 1) / (layout.pp * layout.vpp) if layout.vpp > 1 else 1)
    return int(each * item * in_flight * -(-tokens // layout.cp))


def logit_bytes(spec: ModelSpec, tp: int, tokens: int) -> int:
    """Working memory of the last stage's log-probabilities: six float32 tensors of a chunk of logits.

    Logits, shifted logits, their exponentials, and in backward the gradient of each; a chunk has at most
    ``LOGIT_CHUNK_BYTES`` (our own implementation: ``engines/megatron/model.py`` and ``log_probs.py``).
    """
    return 6 * min(4 * tokens * padded_vocab_size(spec, tp) // tp, LOGIT_CHUNK_BYTES)


def generation_bytes(spec: ModelSpec, tp: int, longest: int, max_sequences: int, item: int) -> int:
    """Working memory of one engine step: the widest layer's tensors for all tokens of a step, and the logits of all
    sequences.

    A layer's 2h + (q + 2k + 3f) / t elements are freed after it; of the logits four float32 copies live at once (raw,
    processed, log-probabilities, noise for sampling).
    """
    q, k = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    tokens = max(BATCHED_TOKENS, longest + max_sequences)
    mlp = 3 * spec.ffn_size * max(1, spec.experts_per_token)
    layer = 2 * spec.hidden_size + (q + 2 * k + mlp) // tp
    return tokens * layer * item + 4 * 4 * max_sequences * padded_vocab_size(spec, tp)


def table(devices: list[DeviceMemory]) -> list[tuple[str, ...]]:
    """The estimate as rows of text in GiB, a header first, a total last for each pool."""
    rows: list[tuple[str, ...]] = [("pool", "memory of a device, GiB", *SITUATIONS)]
    for device in devices:
        for part in device.parts:
            name = f"{part.name} (at most)" if part.bound else part.name
            rows.append((device.pool, name, *(_gib(getattr(part, s)) for s in SITUATIONS)))
        rows.append((device.pool, "together (at most)", *(_gib(device.total(s)) for s in SITUATIONS)))
    return rows


def _gib(size: int) -> str:
    return f"{size / GIB:.3f}" if size else "-"


def _everywhere(name: str, size: int) -> Part:
    return Part(name, size, size, size)


def _pool_of(config: RunConfig, role: str) -> str:
    at = config.roles[role]
    assert at is not None
    return at.pool


def _size(shape: tuple[int, ...]) -> int:
    total = 1
    for extent in shape:
        total *= extent
    return total
