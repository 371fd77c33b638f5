"""A Megatron engine in any layout beside transformers and torch.optim.AdamW, on the same rows.

Both sides run the same updates: PPO's surrogate with an entropy bonus, masked tokens, warm-up, clipping. The oracle
takes rows one at a time, unpadded, in one process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from hybridflow.config import LossConfig, OptimizerConfig
from hybridflow.data.batching import micro_batches
from tests.tiny_models import VOCAB

TEMPERATURE = 0.8
LOSS = LossConfig(entropy_coef=0.01)
UPDATES = 4
LR, WARM_UP, CLIP = 1e-3, 2, 0.5
Rows = list[torch.Tensor]
Data = tuple[Rows, Rows, Rows]
"""Prompts, responses and masks."""


@dataclass(frozen=True)
class Case:
    """One training run to compare.

    Attributes:
        layout: degrees as :meth:`ParallelLayout.on` takes them; dp is what they leave of ``world``.
        options: of :class:`MegatronEngine`, such as ``recompute``.
        micro: rows of a micro-batch, or with ``tokens`` its token budget.
        tokens: whether ``micro`` counts tokens.
        distributed: the distributed optimizer, where there is more than one replica.
    """

    layout: Mapping[str, Any] = field(default_factory=dict)
    world: int = 1
    dtype: torch.dtype = torch.float32
    options: Mapping[str, Any] = field(default_factory=dict)
    micro: int = 3
    tokens: bool = False
    distributed: bool = True


@dataclass(frozen=True)
class Trained:
    """What a training run showed.

    Attributes:
        losses, norms: of each update; the losses are None off the last pipeline stage.
        log_probs: [2, N] of every response token after the last update, row by row; None likewise.
    """

    losses: list[float] | None
    norms: list[float]
    log_probs: torch.Tensor | None


def rows(count: int = 8, seed: int = 3, below: int = VOCAB) -> Data:
    """Rows of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randint(2, below, (n,), generator=generator)  # noqa: E731
    prompts = [draw(2 + i % 5) for i in range(count)]
    responses = [draw(1 + (3 * i) % 7) for i in range(count)]
    masks = [torch.rand(len(r), generator=generator) < 0.8 for r in responses]
    masks[0][:] = True
    return prompts, responses, masks


def ppo_columns(responses: Rows) -> tuple[Rows, Rows]:
    """Old log-probabilities and advantages."""
    generator = torch.Generator().manual_seed(9)
    old = [-3.0 + torch.rand(len(r), generator=generator) for r in responses]
    advantages = [torch.randn(1, generator=generator).expand(len(r)) for r in responses]
    return old, advantages


def oracle_log_probs(model: Any, prompt: torch.Tensor, response: torch.Tensor, valid: int = VOCAB) -> torch.Tensor:
    """[2, T]: log-probability and entropy of each response token by transformers; ids from ``valid`` on impossible."""
    logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1].float() / TEMPERATURE
    log_p = F.log_softmax(logits[:, :valid], dim=-1)
    return torch.stack([log_p.gather(1, response[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)])


def train_oracle(
    folder: str, updates: int = UPDATES, clip: float = CLIP, dtype: torch.dtype = torch.float32
) -> Trained:
    """The updates by transformers and torch.optim.AdamW; ``dtype`` computes, gradients are summed and weights are kept
    in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    parameters = list(model.parameters())
    mains = [parameter.detach().float().clone() for parameter in parameters]
    optimizer = torch.optim.AdamW(mains, lr=LR, weight_decay=0.0)
    prompts, responses, masks = rows()
    old, advantages = ppo_columns(responses)
    tokens = sum(float(m.sum()) for m in masks)
    losses, norms = [], []
    for update in range(updates):
        optimizer.param_groups[0]["lr"] = LR * min(1.0, (update + 1) / WARM_UP)
        for main in mains:
            main.grad = torch.zeros_like(main)
        losses.append(0.0)
        for prompt, response, mask, o, a in zip(prompts, responses, masks, old, advantages, strict=True):
            log_probs, entropy = oracle_log_probs(model, prompt, response)
            ratio = (log_probs - o).exp()
            by_token = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2)) - 0.01 * entropy
            loss = by_token[mask].sum() / tokens
            losses[-1] += loss.item()
            for main, gradient in zip(mains, torch.autograd.grad(loss, parameters), strict=True):
                main.grad += gradient
        norms.append(torch.nn.utils.clip_grad_norm_(mains, clip or torch.inf).item())
        optimizer.step()
        with torch.no_grad():
            for parameter, main in zip(parameters, mains, strict=True):
                parameter.copy_(main)
    with torch.no_grad():
        scored = [oracle_log_probs(model, p, r) for p, r in zip(prompts, responses, strict=True)]
    return Trained(losses, norms, torch.cat(scored, dim=1))


def build(folder: str, case: Case, optimizer: OptimizerConfig | None = None, valid: int = VOCAB):
    """The engine of a case, with the oracle's hyper-parameters unless given others."""
    from hybridflow.engines.megatron.engine import MegatronEngine
    from hybridflow.resharding.layout import ParallelLayout

    layout = ParallelLayout.on(case.world, **case.layout)
    return MegatronEngine(folder, layout, case.dtype, valid, optimizer, total_updates=UPDATES, **case.options)


def settings(case: Case, clip: float = CLIP) -> OptimizerConfig:
    return OptimizerConfig(lr=LR, warmup_steps=WARM_UP, clip_grad=clip, distributed=case.distributed)


def cut(engine: Any, case: Case, masked: bool, data: Data | None = None) -> list[Any]:
    """The micro-batches of this rank's data-parallel part of the rows, those of :func:`rows` unless given others."""
    from hybridflow.engines.megatron.batch import make_micro_batch

    prompts, responses, masks = data or rows()
    share = len(prompts) // engine.layout.dp
    mine = range(engine.parallel.coordinates.dp * share, (engine.parallel.coordinates.dp + 1) * share)
    lengths = [len(prompts[i]) + len(responses[i]) for i in mine]
    parts = micro_batches(lengths, case.micro, case.micro if case.tokens else 0)
    return [
        make_micro_batch(
            prompts,
            responses,
            masks if masked else None,
            [mine[i] for i in part],
            engine.device,
            engine.token_multiple,
        )
        for part in parts
    ]


def score(engine: Any, case: Case, data: Data | None = None) -> torch.Tensor | None:
    """[2, N]: log-probability and entropy of the response tokens of all rows, on ranks of the last stage."""
    import torch.distributed as dist

    micros = cut(engine, case, masked=False, data=data)
    answers = engine.score(micros, TEMPERATURE)
    found: dict[int, torch.Tensor] = {}
    for micro, answer in zip(micros, answers, strict=False):
        for row, values in zip(micro.rows, answer.split(micro.mask.sum(1).tolist(), dim=1), strict=True):
            found[row] = values
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, found)
    if not answers:
        return None
    merged = {row: values for part in everyones for row, values in part.items()} | found
    return torch.cat([merged[row] for row in sorted(merged)], dim=1)


def train(engine: Any, case: Case, updates: int = UPDATES) -> Trained:
    """The oracle's updates on an engine."""
    from torch.nn.utils.rnn import pad_sequence

    from hybridflow.algorithms.objective import objective

    _, responses, masks = rows()
    old, advantages = ppo_columns(responses)
    tokens, sequences = sum(float(m.sum()) for m in masks), sum(float(m.any()) for m in masks)

    def loss_of(log_probs: torch.Tensor, entropy: torch.Tensor, micro: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        columns = {
            key: pad_sequence([column[i] for i in micro.rows], batch_first=True) if micro.rows else torch.zeros(0, 0)
            for key, column in (("log_probs", old), ("advantages", advantages))
        }
        return objective(log_probs, entropy, columns, micro.mask, LOSS, tokens, sequences)

    losses, norms = [], []
    for _ in range(updates):
        sums, stepped = engine.update(cut(engine, case, masked=True), loss_of, TEMPERATURE, with_entropy=True)
        if sums:
            losses.append(engine.gather_over_replicas([float(sums["loss"])]).sum().item())
        norms.append(stepped["grad_norm"])
    return Trained(losses or None, norms, score(engine, case))


def train_on_rank(rank: int, cases: list[tuple[str, Case]]) -> list[Trained]:
    """Each case in turn, in one world."""
    return [train(build(folder, case, settings(case)), case) for folder, case in cases]


def differences(found: Trained, expected: Trained) -> dict[str, float]:
    """Largest differences: relative ones of losses and norms, absolute ones of log-probabilities and entropies."""
    relative = lambda a, b: max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))  # noqa: E731
    answer = {"grad_norm": relative(found.norms, expected.norms)}
    if found.losses is not None and found.log_probs is not None and expected.log_probs is not None:
        answer["loss"] = relative(found.losses, expected.losses)
        answer["log_probs"] = (found.log_probs - expected.log_probs).abs().max().item()
    return answer
