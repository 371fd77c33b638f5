"""Every shipped algorithm makes a tiny problem better: its own configuration, the real actor, and exact measurements.

The problem: to each of four prompts write two tokens of a vocabulary of 13; an answer is right if both are below 6. It
is small enough to score every answer there is, so answers are drawn from the actor's own distribution without an
engine for generation, and the chance of a right answer and the KL to a teacher are sums, not estimates.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hybridflow.protocol.data import DataProto
from tests.assets import DRIVER_OF
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny_model, save_tokenizer
from tests.workers.test_actor import call

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).resolve().parents[2]
ALGORITHMS = sorted(path.stem for path in (ROOT / "configs" / "algorithm").glob("*.yaml"))
VOCAB, RIGHT, SAMPLES, STEPS = 13, 6, 16, 3
PROMPTS = torch.tensor([[7, 8], [9, 10], [11, 12], [8, 9]])


def rows(prompts: torch.Tensor, responses: torch.Tensor) -> DataProto:
    """Prompts [B, P] and responses [B, T] as a batch."""
    mask = torch.ones_like(responses, dtype=torch.bool)
    columns = {"prompts": prompts, "responses": responses, "response_mask": mask}
    return DataProto.from_dict({key: DataProto.jagged(list(column)) for key, column in columns.items()})


def every_answer() -> DataProto:
    """All 4 * 13 * 13 answers, in order."""
    pairs = torch.cartesian_prod(torch.arange(VOCAB), torch.arange(VOCAB))
    return rows(PROMPTS.repeat_interleave(len(pairs), dim=0), pairs.repeat(len(PROMPTS), 1))


def chances(worker: Any, column: str = "log_probs") -> torch.Tensor:
    """log p of each answer, [4, 169] float64."""
    return call(worker, "log_probs", every_answer()).flat(column).double().view(len(PROMPTS), VOCAB**2, 2).sum(dim=-1)


def is_right(responses: torch.Tensor) -> torch.Tensor:
    return (responses < RIGHT).all(dim=1)


def drawn(log_p: torch.Tensor, generator: torch.Generator) -> DataProto:
    """``SAMPLES`` answers to each prompt with what rollout, reward and the drivers add to them."""
    picked = torch.multinomial(log_p.exp(), SAMPLES, replacement=True, generator=generator).flatten()
    responses = torch.stack([picked // VOCAB, picked % VOCAB], dim=1)
    best = log_p.argmax(dim=1)
    greedy = is_right(torch.stack([best // VOCAB, best % VOCAB], dim=1)).float()
    groups = torch.arange(len(PROMPTS)).repeat_interleave(SAMPLES)
    more = {
        "group_ids": groups,
        "rewards": is_right(responses).float(),
        "baseline_rewards": greedy[groups],
        "step_scores": (responses < RIGHT).float(),
        "step_ids": DataProto.jagged(list(torch.tensor([[0, 1]]).repeat(len(picked), 1))),
    }
    return rows(PROMPTS[groups], responses).union(DataProto.from_dict(more))


def config_of(algorithm: str, given: list[str]) -> Any:
    """The configuration of an option of the group ``algorithm``, as its driver composes it."""
    from hybridflow import checks, compose
    from hybridflow.settings import SCHEMAS

    name = DRIVER_OF.get(algorithm, "grpo")
    schema = next(kind for kind in SCHEMAS.values() if kind.__name__.lower() == f"{name}config")
    teacher = [given[0].replace("model.path=", "teacher.path=").replace("student", "teacher")]
    config = compose.load(name, schema, [*given, f"algorithm={algorithm}", *(teacher if name == "distill" else [])])
    assert checks.check(config).updates == 2  # in the second one ratios are no longer 1, and losses differ
    return config


def trained_on_rank(rank: int, algorithms: list[str], given: list[str]) -> dict[str, dict[str, float]]:
    """What each algorithm makes of the problem."""
    from hybridflow.algorithms.step import compute_advantages
    from hybridflow.resharding.layout import ParallelLayout
    from hybridflow.workers.actor import ActorWorker
    from hybridflow.workers.base import WorkerContext
    from hybridflow.workers.teacher import TeacherWorker

    def worker(kind: Any, role: str, config: Any) -> Any:
        made = kind(WorkerContext(role, rank, ParallelLayout(), config, {}, "train"))
        made.setup()
        return made

    right = is_right(every_answer().to_padded("responses")[: VOCAB**2])
    teacher = worker(TeacherWorker, "teacher", config_of("distill", given))
    taught = chances(teacher, "teacher_log_probs")
    found = {}
    for algorithm in algorithms:
        config, generator = config_of(algorithm, given), torch.Generator().manual_seed(0)
        actor = worker(ActorWorker, "actor", config)
        log_p = first = chances(actor)
        for _ in range(STEPS):
            batch = drawn(log_p, generator)
            batch = batch.union(call(actor, "log_probs", batch)).union(call(teacher, "log_probs", batch))
            batch = batch.union(DataProto.from_dict({"rollout_log_probs": batch["log_probs"]}))
            batch = batch.union(compute_advantages(batch, config))
            metrics = call(actor, "update", batch)
            log_p = chances(actor)
        found[algorithm] = {
            "before": first.exp()[:, right].sum(dim=1).mean().item(),
            "after": log_p.exp()[:, right].sum(dim=1).mean().item(),
            "kl_before": (first.exp() * (first - taught)).sum(dim=1).mean().item(),
            "kl_after": (log_p.exp() * (log_p - taught)).sum(dim=1).mean().item(),
            "grad_norm": metrics["grad_norm"],
        }
    return found


def preferred_on_rank(rank: int, given: list[str]) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    """DPO on four pairs, in micro-batches of 8 rows and of 1: the margins before each update, and the weights after."""
    from hybridflow import compose
    from hybridflow.algorithms.preferences import dpo_advantages
    from hybridflow.config import DPOConfig
    from hybridflow.resharding.layout import ParallelLayout
    from hybridflow.workers.actor import ActorWorker
    from hybridflow.workers.base import WorkerContext
    from hybridflow.workers.reference import ReferenceWorker

    responses = torch.tensor([[1, 2], [11, 12], [3, 4], [9, 3], [5, 5], [12, 0], [0, 1], [7, 7]])
    pairs = rows(PROMPTS.repeat_interleave(2, dim=0), responses)
    pairs = pairs.union(DataProto.from_dict({"chosen": torch.tensor([True, False] * 4)}))
    found = []
    for size in (8, 1):
        # A large eps keeps rounding of near-zero gradients from being blown up to a whole Adam step.
        optimizer = ["actor.optimizer={lr: 0.003, eps: 1e-3, warmup_steps: 0}", f"actor.micro_batch_size={size}"]
        config = compose.load("dpo", DPOConfig, [*given, "rollout.n=2", "actor.epochs=1", *optimizer])
        context = ("actor", rank, ParallelLayout(), config, {}, "train")
        actor, reference = ActorWorker(WorkerContext(*context)), ReferenceWorker(WorkerContext(*context))
        actor.setup()
        reference.setup()
        margins = []
        for _ in range(4):
            batch = pairs.union(call(actor, "log_probs", pairs)).union(call(reference, "log_probs", pairs))
            advantages = dpo_advantages(batch, config.preference)
            margins.append(advantages.meta_info["metrics"]["preference/margin"])
            call(actor, "update", batch.union(advantages))
        found.append((margins, {name: p.clone() for name, p in actor.engine.parameters().items()}))
    return found


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A student, a teacher and settings of a run of seconds."""
    folder = tmp_path_factory.mktemp("algorithms")
    for name, seed in (("student", 0), ("teacher", 1)):
        path = save_tiny_model(folder / name, "qwen3", seed=seed, vocab_size=VOCAB, head_dim=32)
        save_tokenizer(Path(path), VOCAB)
    (folder / "rows.jsonl").write_text('{"prompt": "w1", "ground_truth": "w2"}\n')
    return [
        *(f"model.path={folder / 'student'}", f"data.train={folder / 'rows.jsonl'}", "data.evaluate=''"),
        *(f"runs_dir={folder / 'runs'}", f"rollout.n={SAMPLES}", "rollout.max_tokens=2", "data.prompts_per_step=4"),
        *(
            "actor.epochs=2",
            "actor.micro_batch_size=24",
            "actor.optimizer.lr=0.01",
            "actor.optimizer.schedule=constant",
        ),
    ]


@pytest.fixture(scope="module")
def trained(given: list[str]) -> dict[str, dict[str, float]]:
    [found] = run_ranks(trained_on_rank, 1, ALGORITHMS, given)
    return found


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name != "distill"])
def test_right_answers_become_likelier(algorithm: str, trained: dict[str, dict[str, float]]) -> None:
    found = trained[algorithm]
    assert found["grad_norm"] > 0
    assert 0.1 < found["before"] < 0.4
    assert found["after"] > found["before"] + 0.15


def test_a_student_comes_closer_to_its_teacher(trained: dict[str, dict[str, float]]) -> None:
    found = trained["distill"]
    assert found["kl_before"] > 0.1
    assert found["kl_after"] < 0.5 * found["kl_before"]


def test_dpo_prefers_the_chosen_answers_whatever_the_micro_batches(given: list[str]) -> None:
    [((margins, weights), (other_margins, other_weights))] = run_ranks(preferred_on_rank, 1, given)
    assert margins[0] == pytest.approx(0, abs=1e-6)
    assert margins == sorted(margins) and margins[-1] > 0.1
    assert other_margins == pytest.approx(margins, abs=1e-5)
    for name, weight in weights.items():
        torch.testing.assert_close(other_weights[name], weight, rtol=0, atol=1e-6, msg=name)
