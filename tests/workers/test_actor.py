"""The actor on several ranks of a gloo world: how rows are shared and cut changes no result."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridflow.config import ActorConfig, LossConfig, ModelConfig, OneStepOffConfig, OptimizerConfig, RunConfig
from hybridflow.errors import DataError
from hybridflow.protocol.data import DataProto
from hybridflow.protocol.transfer import Call, transfer_protocol
from hybridflow.resharding.layout import ParallelLayout
from hybridflow.workers.actor import ActorWorker
from hybridflow.workers.base import WorkerContext, registrations
from hybridflow.workers.trained import TrainedWorker
from tests.ranks import run_ranks
from tests.tiny_models import VOCAB, save_tiny_model, save_tokenizer

pytestmark = pytest.mark.distributed

# 7 rows in updates of 3, 3 and 1: rows do not divide among two ranks, and in the last update one rank has none.
TRAINING = {
    "mini_batch_size": 3,
    "epochs": 2,
    "shuffle": True,
    # A large eps keeps rounding of near-zero gradients from being blown up to a whole Adam step.
    "optimizer": OptimizerConfig(lr=0.002, eps=1e-3),
    "loss": LossConfig(kl_coef=0.1, aggregation="seq-mean-token-mean"),
}


def batch_of(num_rows: int) -> DataProto:
    """What an update reads, of rows with very different lengths."""
    generator = torch.Generator().manual_seed(5)

    def column(make: Any) -> torch.Tensor:
        return DataProto.jagged([make(1 + (5 * i) % 11) for i in range(num_rows)])

    def noise(n: int) -> torch.Tensor:
        return torch.randn(n, generator=generator)

    tokens = {
        "prompts": DataProto.jagged(
            [torch.randint(2, VOCAB, (1 + i % 3,), generator=generator) for i in range(num_rows)]
        ),
        "responses": column(lambda n: torch.randint(2, VOCAB, (n,), generator=generator)),
    }
    numbers = {
        # The first token always counts: an update without any token would be left out.
        "response_mask": column(lambda n: (torch.rand(n, generator=generator) < 0.8) | (torch.arange(n) == 0)),
        "log_probs": column(lambda n: noise(n) - 4),
        "ref_log_probs": column(lambda n: noise(n) - 4),
        "advantages": column(noise),
        "rollout_log_probs": column(lambda n: noise(n) - 4),
        "high_covariance": column(lambda n: noise(n) > 0.5),
        "loss_weights": column(lambda n: noise(n).abs()),
        "loss_mask": column(lambda n: torch.rand(n, generator=generator).index_fill(0, torch.tensor(0), 0.0) < 0.7),
    }
    return DataProto.from_dict({**tokens, **numbers}, meta_info={"step": 2, "temperature": 0.9})


def call(worker: Any, name: str, batch: DataProto) -> Any:
    """What the driver's group does with a method, on every rank: the answers of all are gathered and collected."""
    import torch.distributed as dist

    registration, context = registrations(type(worker))[name], worker.context
    if registration.unless is not None and registration.unless(context.config):
        return DataProto()
    protocol = transfer_protocol(registration.protocol)
    batch = batch if registration.prepare is None else registration.prepare(batch)
    spread_by = registration.spread
    spread = None if spread_by is None else lambda rows, parts: spread_by(rows, parts, context.config)
    asked = Call((batch,), where=name, uneven=registration.uneven, spread=spread)
    dispatch = protocol.distribute(context.layout, asked)
    args, kwargs = dispatch.payloads[context.rank]
    answers: list[Any] = [None] * context.world_size
    dist.all_gather_object(answers, getattr(worker, name)(*args, **kwargs))
    return protocol.collect(context.layout, asked, dispatch, answers)


def train_on_rank(
    rank: int, world: int, model: ModelConfig, runs: list[tuple[int, dict[str, Any]]]
) -> list[tuple[dict[str, torch.Tensor], torch.Tensor, dict[str, float]]]:
    """Of each run (number of rows, settings): the weights after two steps, log_probs then, and the last metrics."""
    from hybridflow.workers.actor import ActorWorker
    from hybridflow.workers.base import WorkerContext

    found = []
    for num_rows, settings in runs:
        batch, config = batch_of(num_rows), RunConfig(model=model, actor=ActorConfig(**{**TRAINING, **settings}))
        worker = ActorWorker(WorkerContext("actor", rank, ParallelLayout(dp=world), config, {}, "train"))
        worker.setup()
        for _ in range(2):
            metrics = call(worker, "update", batch)
        scored = call(worker, "log_probs", batch).flat("log_probs")
        found.append(({name: p.clone() for name, p in worker.engine.parameters().items()}, scored, metrics))
    return found


# Losses and averages that know of rows, and columns of other kinds.
LOSSES = [
    LossConfig(name="gspo", aggregation="seq-mean-token-mean", old_log_probs="rollout_log_probs"),
    LossConfig(name="gmpo", aggregation="seq-mean-token-sum-norm", scale=8.0),
    LossConfig(name="kl_cov", aggregation="seq-mean-token-sum", entropy_coef=0.01),
]


def test_results_do_not_depend_on_how_rows_are_shared_and_cut(tmp_path: Path):
    model = ModelConfig(
        path=save_tiny_model(tmp_path / "model", "qwen3"), tokenizer_path=save_tokenizer(tmp_path / "words", VOCAB)
    )
    whole = {"micro_batch_size": 8}
    [[(start, _, _), seven, one, *by_loss]] = run_ranks(
        train_on_rank,
        1,
        1,
        model,
        [(7, {"epochs": 0}), (7, whole), (1, {}), *((7, {**whole, "loss": loss}) for loss in LOSSES)],
    )
    for weights, _, metrics in (seven, *by_loss):
        assert max((weights[name] - start[name]).abs().max().item() for name in weights) > 0.005
        assert metrics["updates"] == 6
    runs = {
        (7, "balance=True micro_batch_size=2"): (seven, {"balance": True, "micro_batch_size": 2}),
        (7, "balance=False micro_batch_size=1"): (seven, {"balance": False, "micro_batch_size": 1}),
        (7, "balance=True micro_batch_tokens=16"): (seven, {"balance": True, "micro_batch_tokens": 16}),
        # One rank has nothing but padding: it takes part in every collective and changes nothing.
        (1, "one row"): (one, {}),
        **{
            (7, loss.name): (expected, {"micro_batch_size": 2, "loss": loss})
            for expected, loss in zip(by_loss, LOSSES, strict=True)
        },
    }
    asked = [(rows, settings) for (rows, _), (_, settings) in runs.items()]
    for answers in run_ranks(train_on_rank, 2, 2, model, asked):
        for (run, (expected, _)), (found, scored, numbers) in zip(runs.items(), answers, strict=True):
            weights, log_probs, metrics = expected
            for name, weight in weights.items():
                torch.testing.assert_close(found[name], weight, rtol=0, atol=2e-6, msg=f"{run}: {name}")
            torch.testing.assert_close(scored, log_probs, rtol=0, atol=2e-5)
            assert numbers == pytest.approx(metrics, rel=1e-4, abs=1e-6), run


def own_on_rank(rank: int, world: int, model: ModelConfig) -> list[tuple[dict[str, torch.Tensor], dict[str, float]]]:
    """Weights and metrics of a step with the old log_probs of a pass of their own, then with the update's."""
    from hybridflow.algorithms.metrics import batch_metrics
    from hybridflow.workers.actor import ActorWorker
    from hybridflow.workers.base import WorkerContext

    found = []
    for old in ("log_probs", "own"):
        loss, optimizer = LossConfig(old_log_probs=old), OptimizerConfig(lr=0.002, eps=1e-3)
        actor = ActorConfig(micro_batch_size=2, optimizer=optimizer, loss=loss)
        context = WorkerContext(
            "actor", rank, ParallelLayout(dp=world), RunConfig(model=model, actor=actor), {}, "train"
        )
        worker = ActorWorker(context)
        worker.setup()
        batch = batch_of(5).select(["prompts", "responses", "advantages", "log_probs"], [])
        batch = batch.rename("log_probs", "rollout_log_probs")
        everything = DataProto.jagged([torch.ones(n, dtype=torch.bool) for n in batch.lengths("responses").tolist()])
        batch = batch.union(DataProto.from_dict({"response_mask": everything}))
        batch = batch.union(call(worker, "log_probs", batch))
        metrics = batch_metrics(batch) | call(worker, "update", batch)
        found.append(({name: p.clone() for name, p in worker.engine.parameters().items()}, metrics))
    return found


def test_an_update_with_its_own_log_probs_is_the_update_without_the_pass(tmp_path: Path):
    model = ModelConfig(
        path=save_tiny_model(tmp_path / "model", "qwen3"), tokenizer_path=save_tokenizer(tmp_path / "words", VOCAB)
    )
    for (weights, metrics), (own_weights, own_metrics) in run_ranks(own_on_rank, 2, 2, model):
        for name, expected in weights.items():
            torch.testing.assert_close(own_weights[name], expected, rtol=0, atol=1e-6, msg=name)
        # The panel of rollout against trainer is the one that the pass gives; the entropy is an estimate.
        panel = {name: value for name, value in metrics.items() if name.startswith("rollout_vs_trainer/")}
        assert len(panel) >= 4
        assert {name: own_metrics[name] for name in panel} == pytest.approx(panel, rel=1e-4)
        assert own_metrics["loss"] == pytest.approx(metrics["loss"], rel=1e-4)
        assert own_metrics["entropy"] > 0 and "entropy" not in metrics


def cuts_on_rank(rank: int, model: ModelConfig) -> list[list[int]]:
    """Rows of each micro-batch of 16 tokens; the ranks have rows of 10, 10, 6 and 6 tokens, and of 4 and 4."""
    from hybridflow.workers.actor import ActorWorker
    from hybridflow.workers.base import WorkerContext

    config = RunConfig(model=model, actor=ActorConfig(micro_batch_tokens=16))
    worker = ActorWorker(WorkerContext("actor", rank, ParallelLayout(dp=2), config, {}, "train"))
    worker.setup()
    lengths = ((10, 10, 6, 6), (4, 4))[rank]
    prompts = [torch.zeros(2, dtype=torch.int64) for _ in lengths]
    responses = [torch.zeros(length - 2, dtype=torch.int64) for length in lengths]
    micros, _ = worker.cut(prompts, responses, None, range(len(lengths)))
    return [micro.rows for micro in micros]


def test_a_token_budget_gives_every_replica_the_same_number_of_micro_batches(tmp_path: Path):
    # 10 | 10 + 6 | 6 are three; 4 + 4 fit in one, which is halved, and one without rows makes it three.
    model = ModelConfig(
        path=save_tiny_model(tmp_path / "model", "qwen3"), tokenizer_path=save_tokenizer(tmp_path / "words", VOCAB)
    )
    assert run_ranks(cuts_on_rank, 2, model) == [[[0], [1, 2], [3]], [[0], [1], []]]


def exchanged_on_rank(rank: int, model: ModelConfig) -> tuple[list[str], list[tuple[dict[str, float], torch.Tensor]]]:
    """The collectives of an update beside the engine's own, and what replicas of 3 and 1, and of 2 and 0 tokens, know
    of one another's."""
    import torch.distributed as dist

    from hybridflow.workers.actor import ActorWorker
    from hybridflow.workers.base import WorkerContext

    actor = ActorConfig(micro_batch_size=1, loss=LossConfig(old_log_probs="own"))
    worker = ActorWorker(
        WorkerContext("actor", rank, ParallelLayout(dp=2), RunConfig(model=model, actor=actor), {}, "")
    )
    worker.setup()
    calls: list[str] = []

    def counted(name: str) -> Any:
        function = getattr(dist, name)
        return lambda *args, **kwargs: (calls.append(name), function(*args, **kwargs))[1]

    for name in ("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast"):
        setattr(dist, name, counted(name))
    update = worker.engine.update

    def uncounted(*args: Any) -> Any:
        before = len(calls)
        found = update(*args)
        del calls[before:]
        return found

    worker.engine.update = uncounted  # type: ignore[method-assign]
    call(worker, "update", batch_of(5))
    exchanged, found = list(calls), []
    first, second, third = torch.tensor([[-1.0, -2.0], [-1.0, -2.5]]), torch.tensor([[-3.0], [-3.0]]), torch.ones(2, 0)
    lone = torch.tensor([[-4.0], [-3.0]])
    unknown = torch.tensor([[-1.0, -1.0], [-1.0, torch.nan]])
    for mine, num_tokens in (([[first, second], [lone]], [3, 1]), ([[unknown], [third, third]], [2, 0])):
        worker.aside = mine[rank]
        totals, aside = worker._over_replicas({"loss": torch.tensor([0.5, 0.25][rank])}, num_tokens)
        found.append((worker.metrics(totals, aside), aside))
    return exchanged, found


def test_replicas_exchange_numbers_twice_an_update_and_compare_the_tokens_of_all(tmp_path: Path):
    model = ModelConfig(
        path=save_tiny_model(tmp_path / "model", "qwen3"), tokenizer_path=save_tokenizer(tmp_path / "words", VOCAB)
    )
    for calls, [(metrics, aside), (unknown, of_one)] in run_ranks(exchanged_on_rank, 2, model):
        # Before the update and after it; the last one is how this test gathers the answers.
        assert calls == ["all_gather", "all_gather", "all_gather_object"]
        assert aside.tolist() == [[-1.0, -2.0, -3.0, -4.0], [-1.0, -2.5, -3.0, -3.0]]
        assert metrics["loss"] == 0.75
        assert metrics["rollout_vs_trainer/max_diff"] == 1.0
        assert metrics["rollout_vs_trainer/mean_diff"] == (0.5 + 1.0) / 4
        assert of_one.shape == (2, 2)
        assert math.isnan(unknown["rollout_vs_trainer/max_diff"]) and math.isnan(unknown["rollout_vs_trainer/ess"])


def masked_on_rank(rank: int, model: ModelConfig) -> tuple[bool, dict[str, float]]:
    """Whether an update of rows without a trained token has left the weights as they were, and its metrics."""
    from hybridflow.workers.actor import ActorWorker
    from hybridflow.workers.base import WorkerContext

    full = batch_of(4)
    batch = full.select([key for key in full.keys() if key != "loss_mask"])  # noqa: SIM118
    nothing = DataProto.jagged([torch.zeros(n, dtype=torch.bool) for n in full.lengths("responses").tolist()])
    batch = batch.union(DataProto.from_dict({"loss_mask": nothing}))
    config = RunConfig(model=model, actor=ActorConfig(**{**TRAINING, "mini_batch_size": 0}))
    worker = ActorWorker(WorkerContext("actor", rank, ParallelLayout(dp=1), config, {}, "train"))
    worker.setup()
    before = {name: p.clone() for name, p in worker.engine.parameters().items()}
    metrics = call(worker, "update", batch)
    return all(torch.equal(before[name], p) for name, p in worker.engine.parameters().items()), metrics


def test_an_update_whose_tokens_are_all_masked_is_skipped_and_counted(tmp_path: Path):
    model = ModelConfig(
        path=save_tiny_model(tmp_path / "model", "qwen3"), tokenizer_path=save_tokenizer(tmp_path / "words", VOCAB)
    )
    [(unchanged, metrics)] = run_ranks(masked_on_rank, 1, model)
    assert unchanged
    assert metrics == {"loss": 0.0, "update_skipped": 1.0, "updates": 0.0}


@pytest.mark.parametrize(("oldest", "refused"), [(5, False), (3, False), (2, True)])
def test_no_answer_is_trained_on_that_is_older_than_the_bound(oldest: int, refused: bool, monkeypatch) -> None:
    trained: list[int] = []
    monkeypatch.setattr(TrainedWorker, "update", lambda self, batch: trained.append(len(batch)))
    config = OneStepOffConfig(name="test", max_staleness=2)
    worker = ActorWorker(WorkerContext("actor", 0, ParallelLayout(), config, {}, "train"))
    worker._version = 5
    batch = DataProto.from_dict({"weight_version": torch.tensor([5, oldest, 4])})
    if refused:
        message = (
            "begun with the weights of version 2, and these are of version 5: 3 updates newer, and max_staleness=2"
        )
        with pytest.raises(DataError, match=message):
            worker.update(batch)
    else:
        worker.update(batch)
    assert trained == ([] if refused else [3])
