"""The Megatron engine against transformers and torch.optim.AdamW, on one and on two data-parallel ranks."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from hybridflow.config import LossConfig, OptimizerConfig
from tests.ranks import run_ranks
from tests.tiny_models import VOCAB, save_tiny_model

pytestmark = pytest.mark.distributed

TEMPERATURE = 0.8
LOSS = LossConfig(entropy_coef=0.01)
STEPS = 3
LR = 1e-3


def rows(
    count: int = 8, seed: int = 3, below: int = VOCAB
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Prompts, responses and masks of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randint(2, below, (n,), generator=generator)  # noqa: E731
    prompts = [draw(2 + i % 5) for i in range(count)]
    responses = [draw(1 + (3 * i) % 7) for i in range(count)]
    masks = [torch.rand(len(r), generator=generator) < 0.8 for r in responses]
    masks[0][:] = True
    return prompts, responses, masks


def oracle(
    model, prompt: torch.Tensor, response: torch.Tensor, valid: int = VOCAB
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability and entropy of each response token by transformers: one row, no padding, ids below ``valid``."""
    logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1].float() / TEMPERATURE
    log_p = F.log_softmax(logits[:, :valid], dim=-1)
    return log_p.gather(1, response[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def build(folder: str, world: int, dtype=torch.float32, valid: int = VOCAB, optimizer=None, updates: int = STEPS):
    from hybridflow.engines.megatron.engine import MegatronEngine
    from hybridflow.resharding.layout import ParallelLayout

    return MegatronEngine(folder, ParallelLayout(dp=world), dtype, valid, optimizer, updates)


def score_on_rank(rank: int, folders: list[str], valid: int) -> list[list[torch.Tensor]]:
    from hybridflow.engines.megatron.batch import make_micro_batch

    prompts, responses, _ = rows(below=valid)
    found = []
    for folder in folders:
        engine = build(folder, world=1, valid=valid)
        micros = [
            make_micro_batch(prompts, responses, None, part, torch.device("cpu"))
            for part in ([0, 5, 2], [1, 3, 4, 6, 7])
        ]
        flat: list[torch.Tensor] = [torch.empty(0)] * len(prompts)
        for micro, answer in zip(micros, engine.log_probs(micros, TEMPERATURE), strict=True):
            for row, values in zip(micro.rows, answer.split(micro.mask.sum(1).tolist(), dim=1), strict=True):
                flat[row] = values
        found.append(flat)
    return found


CASES = {
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {},
    "qwen3-tied": {"tie_word_embeddings": True},
}


@pytest.mark.parametrize("valid", [VOCAB, 52])
def test_log_probs_and_entropy_equal_transformers(tmp_path, valid):
    """All architectures in one process, one after another; also with the ids from 52 on made impossible."""
    from transformers import AutoModelForCausalLM

    folders = [save_tiny_model(tmp_path / name, name.split("-")[0], **changes) for name, changes in CASES.items()]
    [answers] = run_ranks(score_on_rank, 1, folders, valid)
    for folder, flat in zip(folders, answers, strict=True):
        model = AutoModelForCausalLM.from_pretrained(folder)
        for prompt, response, (log_probs, entropy) in zip(*rows(below=valid)[:2], flat, strict=True):
            with torch.no_grad():
                expected = oracle(model, prompt, response, valid)
            torch.testing.assert_close(log_probs, expected[0], rtol=0, atol=1e-5)
            torch.testing.assert_close(entropy, expected[1], rtol=0, atol=1e-5)


def ppo_columns(responses: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(9)
    old = [-3.0 + torch.rand(len(r), generator=generator) for r in responses]
    advantages = [torch.randn(1, generator=generator).expand(len(r)) for r in responses]
    return old, advantages


def train_on_rank(rank: int, world: int, folder: str, micro_rows: int, dtype: torch.dtype, clip: float):
    """Three updates on this rank's half of the rows; returns losses, gradient norms and final weights."""
    from torch.nn.utils.rnn import pad_sequence

    from hybridflow.algorithms.losses import objective
    from hybridflow.engines.megatron.batch import make_micro_batch

    engine = build(folder, world, dtype, optimizer=OptimizerConfig(lr=LR, warmup_steps=2, clip_grad=clip))
    prompts, responses, masks = rows()
    old, advantages = ppo_columns(responses)
    mine = list(range(len(prompts)))[rank * len(prompts) // world :][: len(prompts) // world]
    counts = engine.sum_over_replicas(
        [sum(float(masks[i].sum()) for i in mine), sum(float(masks[i].any()) for i in mine)]
    )

    def loss_of(log_probs, entropy, micro):
        pad = lambda column: pad_sequence([column[i] for i in micro.rows], batch_first=True)  # noqa: E731
        columns = {"log_probs": pad(old), "advantages": pad(advantages)}
        return objective(log_probs, entropy, columns, micro.mask, LOSS, *counts)

    losses, norms = [], []
    for _ in range(STEPS):
        parts = [mine[i : i + micro_rows] for i in range(0, len(mine), micro_rows)]
        micros = [make_micro_batch(prompts, responses, masks, part, torch.device("cpu")) for part in parts]
        sums, stepped = engine.update(micros, loss_of, TEMPERATURE, with_entropy=True)
        losses += engine.sum_over_replicas([float(sums["loss"])])
        norms.append(stepped["grad_norm"])
    return losses, norms, {name: p.clone() for name, p in engine.parameters().items()}


def train_oracle(folder: str, clip: float):
    """The same updates by transformers and torch.optim.AdamW: rows one at a time, nothing padded."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    prompts, responses, masks = rows()
    old, advantages = ppo_columns(responses)
    tokens = sum(float(m.sum()) for m in masks)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = LR * min(1.0, (step + 1) / 2)
        optimizer.zero_grad()
        total = torch.zeros(())
        for prompt, response, mask, o, a in zip(prompts, responses, masks, old, advantages, strict=True):
            log_probs, entropy = oracle(model, prompt, response)
            ratio = (log_probs - o).exp()
            loss = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2)) - 0.01 * entropy
            total = total + loss[mask].sum() / tokens
        total.backward()
        losses.append(total.item())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf).item())
        optimizer.step()
    return losses, norms, model


def train_many_on_rank(rank: int, world: int, cases: list[tuple[str, int, torch.dtype, float]]):
    return [train_on_rank(rank, world, *case) for case in cases]


@pytest.mark.parametrize("architecture", ["qwen3-tied", "qwen2"])
def test_updates_equal_transformers_and_torch_adamw(tmp_path, architecture):
    """Loss and gradient norm to 1e-5 over 3 updates with warm-up, clipped and not, on 1 rank and on 2.

    The weights do not depend on how rows were cut into micro-batches, nor on the number of ranks.
    """
    folder = save_tiny_model(tmp_path, architecture.split("-")[0], **CASES[architecture])
    clips = [0.5, 0.5, 0.0]
    expected = [train_oracle(folder, clip)[:2] for clip in clips]
    assert expected[0][1][0] > 0.5, "the clip must bite"
    weights = []
    for world, cuts in ((1, (8, 1, 3)), (2, (4, 3, 1))):
        cases = [(folder, rows, torch.float32, clip) for rows, clip in zip(cuts, clips, strict=True)]
        for answers in run_ranks(train_many_on_rank, world, world, cases):
            for (losses, norms), (found_losses, found_norms, _) in zip(expected, answers, strict=True):
                assert found_losses == pytest.approx(losses, rel=1e-5, abs=1e-5)
                assert found_norms == pytest.approx(norms, rel=1e-5)
            weights += [answer[2] for answer in answers[:2]]
    for other in weights[1:]:
        for name, weight in other.items():
            torch.testing.assert_close(
                weight, weights[0][name], rtol=0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
            )


def test_bfloat16_trains_near_float32(tmp_path):
    folder = save_tiny_model(tmp_path, "qwen3")
    losses, norms, _ = train_oracle(folder, 1.0)
    [(found_losses, found_norms, weights)] = run_ranks(train_on_rank, 1, 1, folder, 4, torch.bfloat16, 1.0)
    assert all(w.dtype == torch.bfloat16 for w in weights.values())
    assert found_losses == pytest.approx(losses, abs=5e-2)
    assert found_norms == pytest.approx(norms, rel=1e-1)  # 8 bits of mantissa, three updates apart


def poisoned_on_rank(rank: int, folder: str):
    from hybridflow.engines.megatron.batch import make_micro_batch

    engine = build(folder, 1, optimizer=OptimizerConfig(lr=1e-2))
    before = {name: p.clone() for name, p in engine.parameters().items()}
    prompts, responses, _ = rows()
    micros = [make_micro_batch(prompts, responses, None, [0, 1], torch.device("cpu"))]
    _, stepped = engine.update(micros, lambda log_probs, entropy, micro: (log_probs.sum() * float("nan"), {}))
    return stepped, all(torch.equal(before[n], p) for n, p in engine.parameters().items())


def test_a_gradient_that_is_not_finite_never_reaches_the_weights(tmp_path):
    [(stepped, unchanged)] = run_ranks(poisoned_on_rank, 1, save_tiny_model(tmp_path, "qwen3"))
    assert math.isnan(stepped["grad_norm"])
    assert stepped["update_skipped"] == 1.0
    assert unchanged
