"""The Megatron engine against transformers and torch.optim.AdamW, on one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
import torch.distributed as dist

from hybridflow.config import OptimizerConfig
from tests.engines.megatron.parity import (
    Case,
    Trained,
    build,
    cut,
    differences,
    oracle_log_probs,
    rows,
    score,
    settings,
    train,
    train_oracle,
)
from tests.ranks import run_ranks
from tests.tiny_models import VOCAB, save_tiny_model

pytestmark = pytest.mark.distributed

ARCHITECTURES = {
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {},
    "qwen3-tied": {"tie_word_embeddings": True},
    "llama-bias": {"attention_bias": True, "mlp_bias": True},
    "qwen3-bias": {"attention_bias": True},
    "qwen3_moe": {},
    "qwen3_moe-tied": {"tie_word_embeddings": True, "norm_topk_prob": False},
}


def score_on_rank(rank: int, folders: list[str], valid: int, chunk_bytes: int) -> list[tuple[torch.Tensor, float]]:
    """Of each model the answers for all rows, and for a token that is never drawn."""
    from hybridflow.engines.megatron import model

    model.LOGIT_CHUNK_BYTES = chunk_bytes
    found = []
    for folder in folders:
        case = Case({"tp": dist.get_world_size()}, dist.get_world_size())
        engine = build(folder, case, settings(case), valid=valid)
        never = ([torch.tensor([3])], [torch.tensor([valid])], [torch.ones(1, dtype=torch.bool)])
        found.append((score(engine, case, rows(below=valid)), float(score(engine, case, never)[0])))
        # A vocabulary shard of which nothing is drawn takes part in an update too.
        sums, stepped = engine.update(cut(engine, case, True, rows(below=valid)), lambda x, _, __: (x.sum(), {}))
        assert math.isfinite(sums["loss"]) and 0 < stepped["grad_norm"] < math.inf
    return found


@pytest.mark.parametrize(("valid", "chunk_bytes", "world"), [(VOCAB, 2**20, 1), (20, 4 * VOCAB * 3, 2)])
def test_log_probs_and_entropy_equal_transformers(tmp_path, valid, chunk_bytes, world):
    """All architectures in one process, one after another; also with the ids from 20 on made impossible, which are all
    of the second rank's, and with logits of three tokens at a time."""
    from transformers import AutoModelForCausalLM

    folders = [
        save_tiny_model(tmp_path / name, name.split("-")[0], **changes) for name, changes in ARCHITECTURES.items()
    ]
    prompts, responses, _ = rows(below=valid)
    for answers in run_ranks(score_on_rank, world, folders, valid, chunk_bytes):
        for folder, (found, never) in zip(folders, answers, strict=True):
            model = AutoModelForCausalLM.from_pretrained(folder)
            with torch.no_grad():
                expected = [oracle_log_probs(model, p, r, valid) for p, r in zip(prompts, responses, strict=True)]
            torch.testing.assert_close(found, torch.cat(expected, dim=1), rtol=0, atol=1e-5)
            assert never <= -1e29


def most_bytes(run: Callable[[], object]) -> int:
    """Bytes of the tensors that are there at once while ``run`` runs, beside those that were there before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))


def memory_on_rank(rank: int, folder: str, vocabulary: int) -> list[list[int]]:
    """With logits all at once and in chunks: what scoring 800 tokens and an update on them need."""
    from hybridflow.engines.megatron import model

    engine = build(folder, Case(), OptimizerConfig(), valid=vocabulary)
    ones = [torch.ones(100, dtype=torch.int64)] * 8
    micros = cut(engine, Case(micro=8), masked=True, data=(ones, ones, [row > 0 for row in ones]))

    def update() -> None:
        engine.update(micros, lambda log_probs, entropy, micro: (log_probs.sum() + entropy.sum(), {}))

    update()  # optimizer state that stays
    found = []
    for model.LOGIT_CHUNK_BYTES in (2**30, 2**20):
        found.append([most_bytes(lambda: engine.score(micros)), most_bytes(update)])
    return found


def test_float32_logits_of_all_tokens_are_never_there_at_once(tmp_path):
    vocabulary = 32768
    folder = save_tiny_model(tmp_path, "llama", vocab_size=vocabulary, max_position_embeddings=256)
    [(at_once, in_chunks)] = run_ranks(memory_on_rank, 1, folder, vocabulary)
    logits = 4 * 800 * vocabulary
    assert min(at_once) > 3 * logits and max(in_chunks) < logits / 4, (at_once, in_chunks)


def train_on_rank(rank: int, runs: list[tuple[str, Case, float, int]]) -> list[tuple[Trained, dict[str, torch.Tensor]]]:
    """Train each run with its clip and its size of chunks of logits; also gives the final weights."""
    from hybridflow.engines.megatron import model

    found = []
    for folder, case, clip, chunk_bytes in runs:
        model.LOGIT_CHUNK_BYTES = chunk_bytes
        engine = build(folder, case, settings(case, clip))
        trained = train(engine, case)
        found.append((trained, {name: p.clone() for name, p in engine.parameters().items()}))
    return found


@pytest.mark.parametrize("architecture", ["qwen3-tied", "qwen2", "qwen3_moe"])
def test_updates_equal_transformers_and_torch_adamw(tmp_path, architecture):
    """Loss and gradient norm to 1e-5 over 4 updates with warm-up, clipped and not; with any micro-batches, with logits
    of three tokens at a time, and with activations computed again in backward."""
    folder = save_tiny_model(tmp_path, architecture.split("-")[0], **ARCHITECTURES[architecture])
    whole, few = 2**20, 4 * VOCAB * 3
    one = Case(micro=1)
    runs = [
        (folder, one, 0.5, whole),
        (folder, replace(one, micro=3), 0.5, few),
        (folder, replace(one, micro=20, tokens=True), 0.5, whole),
        (folder, replace(one, options={"recompute": "full"}), 0.5, few),
        (folder, replace(one, options={"recompute": "selective"}), 0.5, whole),
        (folder, replace(one, micro=8), 0.0, whole),
    ]
    clipped, unclipped = (train_oracle(folder, clip=clip) for clip in (0.5, 0.0))
    assert clipped.norms[0] > 0.5, "the clip must bite"
    [answers] = run_ranks(train_on_rank, 1, runs)
    for (_, case, clip, _), (trained, _) in zip(runs, answers, strict=True):
        found = differences(trained, clipped if clip else unclipped)
        assert max(found.values()) < 1e-5, (case, clip, found)
    first = answers[0][1]
    for _, weights in answers[1:-1]:
        for name, weight in weights.items():
            torch.testing.assert_close(
                weight, first[name], rtol=0, atol=5e-6, msg=lambda text, name=name: f"{name}: {text}"
            )


def test_bfloat16_trains_near_float32(tmp_path):
    folder = save_tiny_model(tmp_path, "qwen3", dtype="bfloat16", initializer_range=0.02)
    [[(trained, weights)]] = run_ranks(train_on_rank, 1, [(folder, Case(dtype=torch.bfloat16), 0.5, 2**20)])
    assert all(w.dtype == torch.bfloat16 for w in weights.values())
    apart = differences(trained, train_oracle(folder))
    assert max(apart["loss"], apart["grad_norm"]) < 1e-2, apart


def poisoned_on_rank(rank: int, folder: str):
    engine = build(folder, Case(), OptimizerConfig(lr=1e-2))
    before = {name: p.clone() for name, p in engine.parameters().items()}
    micros = cut(engine, Case(), masked=False)
    _, stepped = engine.update(micros, lambda log_probs, entropy, micro: (log_probs.sum() * float("nan"), {}))
    return stepped, all(torch.equal(before[n], p) for n, p in engine.parameters().items())


def test_a_gradient_that_is_not_finite_never_reaches_the_weights(tmp_path):
    [(stepped, unchanged)] = run_ranks(poisoned_on_rank, 1, save_tiny_model(tmp_path, "qwen3"))
    assert math.isnan(stepped["grad_norm"])
    assert stepped["update_skipped"] == 1.0
    assert unchanged


def with_masked_row_on_rank(rank: int, folder: str):
    """Gradient norm and weights after one update on two rows, and with a third in between of which no token trains."""
    from hybridflow.engines.megatron.batch import make_micro_batch

    prompts, responses, masks = rows()
    masks[3][:] = False
    found = []
    for parts in ([[0], [1]], [[0], [3], [1]]):
        engine = build(folder, Case(), OptimizerConfig(lr=1e-2))
        micros = [make_micro_batch(prompts, responses, masks, part, engine.device) for part in parts]
        _, stepped = engine.update(micros, lambda log_probs, entropy, micro: (log_probs.sum(), {}))
        found.append((stepped["grad_norm"], {name: p.clone() for name, p in engine.parameters().items()}))
    return found


def test_a_micro_batch_without_a_trained_token_changes_nothing(tmp_path):
    [found] = run_ranks(with_masked_row_on_rank, 1, save_tiny_model(tmp_path, "qwen3"))
    (norm, weights), (other_norm, others) = found
    assert norm == other_norm > 0
    assert all(torch.equal(weights[name], others[name]) for name in weights)
