"""What a rollout says of the tokens it draws beside what its trainer says of them, in pairs of layouts.

Both engines share each process, weights travel by the reshard plan, and prompts are spread over the rollout's replicas.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridflow.config import ModelConfig, RolloutConfig, RunConfig, SamplingConfig
from hybridflow.resharding.layout import GenerationLayout
from tests.engines.megatron.parity import TEMPERATURE, Case, build, score, settings, train
from tests.tiny_models import save_tiny_model

VOCAB, MAX_TOKENS, UPDATES = 200, 12, 3
SAMPLING = SamplingConfig(temperature=TEMPERATURE)
ROLLOUT = RolloutConfig(max_prompt_tokens=48, max_tokens=MAX_TOKENS, kv_cache_gb=0.02, max_sequences=8)


@dataclass(frozen=True)
class Pair:
    """A training run and the layout of the rollout beside it, on the same ranks.

    Attributes:
        training: the world, and how it trains.
        tp, ep: of a generation replica.
    """

    training: Case
    tp: int = 1
    ep: int = 1


def save_model(folder: Path, architecture: str, **changes: Any) -> str:
    """A random model of four layers that both engines can split over four ranks; returns its path."""
    sizes = {"hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 4, "num_key_value_heads": 4}
    changes = {**sizes, "initializer_range": 0.1, "vocab_size": VOCAB, **changes}
    if architecture != "qwen2":
        changes["head_dim"] = 32
    return save_tiny_model(folder, architecture, **changes)


def prompts() -> list[list[int]]:
    """Eight prompts of 3 to 38 tokens."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(2, VOCAB, (3 + 5 * k,), generator=generator).tolist() for k in range(8)]


def generate(rollout: Any, layout: GenerationLayout, rank: int, version: int) -> list[Any]:
    """A completion of each prompt, on every rank; each replica generates every n-th."""
    from hybridflow.engines.vllm.engine import Request

    asked = prompts()
    mine = range(layout.coordinates(rank).dp, len(asked), layout.dp)
    requests = [Request(asked[k], 100 * version + k, MAX_TOKENS) for k in mine]
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, dict(zip(mine, rollout.generate(requests, SAMPLING), strict=True)))
    found = {k: completion for part in everyones for k, completion in part.items()}
    assert {completion.weight_version for completion in found.values()} == {version}
    return [found[k] for k in range(len(asked))]


def compare(rank: int, folder: str, pair: Pair, engines: dict[Any, Any]) -> list[float]:
    """Largest |rollout log_prob - trainer log_prob|, before and after the updates; on ranks of the last stage.

    Args:
        engines: rollouts that exist already, by what they are made from.
    """
    from hybridflow.engines.vllm.engine import RolloutEngine
    from hybridflow.workers.sync import WeightSync

    case = pair.training
    actor = build(folder, case, settings(case), valid=VOCAB)
    layout = actor.layout.generation(tp=pair.tp, ep=pair.ep)
    made_from = folder, pair.tp, pair.ep
    if made_from not in engines:
        engines[made_from] = RolloutEngine(folder, actor.spec, case.dtype, ROLLOUT, VOCAB, 64, layout=layout)
    rollout = engines[made_from]
    config = RunConfig(model=ModelConfig(dtype=str(case.dtype).removeprefix("torch.")), rollout=ROLLOUT)
    sync, found = WeightSync.within(layout, rank, config, actor, rollout), []
    for version in (0, UPDATES):
        if version:
            train(actor, case, UPDATES)
        sync.run(version)
        completions = generate(rollout, layout, rank, version)
        responses = [torch.tensor(completion.token_ids) for completion in completions]
        everything = [torch.ones(len(response), dtype=torch.bool) for response in responses]
        trainer = score(actor, case, ([torch.tensor(p) for p in prompts()], responses, everything))
        if trainer is not None:
            said = torch.tensor([x for completion in completions for x in completion.log_probs])
            found.append((trainer[0] - said).abs().max().item())
    return found


def compare_on_rank(rank: int, pairs: list[tuple[str, Pair]]) -> list[list[float]]:
    """Each pair in turn, in one world; all generate in the same groups, as vLLM keeps one set of them."""
    engines: dict[Any, Any] = {}
    return [compare(rank, folder, pair, engines) for folder, pair in pairs]
