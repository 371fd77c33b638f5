"""The critic on several ranks of a gloo world: columns by role, what an update reports, and taking turns in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hybridflow.config import ActorConfig, CriticConfig, MemoryConfig, ModelConfig, OptimizerConfig, PPOConfig
from hybridflow.errors import DataError
from hybridflow.resharding.layout import ParallelLayout
from tests.ranks import run_ranks
from tests.tiny_models import VOCAB, save_tiny_model, save_tokenizer
from tests.workers.test_actor import batch_of, call

pytestmark = pytest.mark.distributed

ROWS = 7
# AdamW makes steps of lr * g / (|g| + eps), so it magnifies roundings of small gradients by lr / eps: by 10, and values
# after twelve updates are 2.2e-5 apart on two tensor-parallel ranks; by 1 as here, and they are 4e-6 apart.
CRITIC = CriticConfig(clip=0.2, optimizer=OptimizerConfig(lr=0.1, eps=0.1))


def config_of(model: ModelConfig, micro: int = 8, memory: MemoryConfig | None = None, path: str = "") -> PPOConfig:
    actor = ActorConfig(mini_batch_size=3, epochs=2, shuffle=True, micro_batch_size=micro)
    critic = CriticConfig(path=path, clip=CRITIC.clip, optimizer=CRITIC.optimizer)
    return PPOConfig(model=model, actor=actor, critic=critic, memory=memory or MemoryConfig())


def critic_on(rank: int, layout: ParallelLayout, config: PPOConfig) -> Any:
    from hybridflow.workers.base import WorkerContext
    from hybridflow.workers.critic import CriticWorker

    worker = CriticWorker(WorkerContext("critic", rank, layout, config, {}, "train"))
    worker.setup()
    return worker


def two_steps(worker: Any) -> dict[str, Any]:
    """Values before and after two steps, the columns of the last one, and its metrics."""
    batch, metrics = batch_of(ROWS).rename("advantages", "returns"), {}
    first = call(worker, "values", batch).flat("values")
    for _ in range(2):
        given = batch.union(call(worker, "values", batch))
        metrics = call(worker, "update", given)
    return {"first": first, "last": call(worker, "values", batch).flat("values"), "given": given, "metrics": metrics}


def layouts_on_rank(rank: int, runs: list[tuple[ParallelLayout, PPOConfig]]) -> list[dict[str, Any]]:
    return [two_steps(critic_on(rank, *run)) for run in runs]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = tmp_path_factory.mktemp("model")
    return ModelConfig(
        path=save_tiny_model(folder / "model", "qwen3", tie_word_embeddings=True),
        tokenizer_path=save_tokenizer(folder / "words", VOCAB),
    )


def test_values_and_updates_do_not_depend_on_layout_and_micro_batches(model: ModelConfig) -> None:
    [[whole]] = run_ranks(layouts_on_rank, 1, [(ParallelLayout(), config_of(model))])
    assert not whole["first"].any(), "a new head begins with zeros"
    assert whole["last"].abs().max() > 0.1
    metrics = whole["metrics"]
    assert metrics["critic/updates"] == 6 and metrics["critic/grad_norm"] > 0 and metrics["critic/loss"] > 0
    runs = [
        (ParallelLayout(dp=2), config_of(model, micro=1)),
        (ParallelLayout(tp=2), config_of(model, micro=2)),
        (ParallelLayout(pp=2), config_of(model, micro=3)),
    ]
    for answers in run_ranks(layouts_on_rank, 2, runs):
        for run, found in zip(runs, answers, strict=True):
            apart = (found["last"] - whole["last"]).abs().max().item()
            assert apart < 2e-5, (run[0], apart)
            assert found["metrics"] == pytest.approx(metrics, rel=1e-4, abs=1e-5), run[0]


def rates_on_rank(rank: int, config: PPOConfig) -> dict[str, list[float]]:
    """Learning rates of the run's steps, of actor and critic, as the driver calls them."""
    from hybridflow.workers.actor import ActorWorker
    from hybridflow.workers.base import WorkerContext

    workers: dict[str, Any] = {"critic": critic_on(rank, ParallelLayout(), config)}
    workers["actor"] = ActorWorker(WorkerContext("actor", rank, ParallelLayout(), config, {}, "train"))
    workers["actor"].setup()
    batch, found = batch_of(ROWS), {role: [] for role in workers}
    batch = batch.union(call(workers["critic"], "values", batch))
    batch = batch.union(batch.select("advantages").rename("advantages", "returns"))
    for step in range(1, config.steps + 1):
        found["critic"].append(call(workers["critic"], "update", batch)["critic/lr"])
        if step > config.critic.warmup_steps:
            found["actor"].append(call(workers["actor"], "update", batch)["lr"])
    return found


def test_each_schedule_ends_with_the_run_though_the_actors_begins_after_the_critics_warm_up(model: ModelConfig) -> None:
    falling = OptimizerConfig(lr=0.01, schedule="linear")
    config = PPOConfig(
        model=model,
        steps=4,
        actor=ActorConfig(optimizer=falling),
        critic=CriticConfig(warmup_steps=2, optimizer=falling),
    )
    [rates] = run_ranks(rates_on_rank, 1, config)
    assert rates["actor"] == pytest.approx([0.01, 0.005])
    assert rates["critic"] == pytest.approx([0.01, 0.0075, 0.005, 0.0025])


def reported_on_rank(rank: int, config: PPOConfig) -> tuple[dict[str, Any], str]:
    """One update on a whole batch, and what is said of a batch without returns."""
    worker = critic_on(rank, ParallelLayout(), config)
    batch = batch_of(ROWS).rename("advantages", "returns")
    batch = batch.union(call(worker, "values", batch))
    metrics = call(worker, "update", batch)
    try:
        call(worker, "update", batch.rename("returns", "advantages"))
    except DataError as error:
        return {"batch": batch, "metrics": metrics}, str(error)
    return {}, ""


def test_an_update_reports_what_the_critic_knew_of_the_returns(model: ModelConfig, tmp_path: Path) -> None:
    from tests.tiny_models import save_tiny_classifier

    path = save_tiny_classifier(tmp_path / "critic", "llama", "ForSequenceClassification")
    config = config_of(model, path=path)
    config = PPOConfig(model=model, critic=config.critic, actor=ActorConfig())
    [(found, refused)] = run_ranks(reported_on_rank, 1, config)
    batch, metrics = found["batch"], found["metrics"]
    mask = batch.flat("loss_mask")
    values, returns = batch.flat("values")[mask].double(), batch.flat("returns")[mask].double()
    assert values.std() > 0.1, "a classifier brings its head"
    explained = 1 - (returns - values).var(correction=0) / returns.var(correction=0)
    assert metrics["critic/explained_variance"] == pytest.approx(explained.item(), rel=1e-4)
    assert metrics["critic/value"] == pytest.approx(values.mean().item(), rel=1e-4)
    assert metrics["critic/return"] == pytest.approx(returns.mean().item(), rel=1e-4)
    # Before the update values are the old ones: nothing is clipped.
    assert metrics["critic/loss"] == pytest.approx(((values - returns) ** 2).mean().item() / 2, rel=1e-4)
    assert metrics["critic/clip_fraction"] == 0
    assert refused.startswith("critic.update reads the column 'returns', which the batch lacks. It has ")


def turns_on_rank(rank: int, configs: list[PPOConfig], out: str) -> list[Any]:
    """Of each configuration two steps with a generation in between, and the parts that left for it; then the steps of a
    critic that goes on from the first one's checkpoint."""
    from hybridflow.resharding.hybrid import GENERATION

    found = []
    for number, config in enumerate(configs):
        worker = critic_on(rank, ParallelLayout(), config)
        two_steps(worker)
        if number == 0:
            worker.save(out)
        worker.context.phases.enter(GENERATION)
        sizes = [p.untyped_storage().nbytes() for p in worker.engine.parameters().values()]
        found.append((two_steps(worker), sorted(worker.context.phases.drain()), sum(sizes)))
    worker = critic_on(rank, ParallelLayout(), configs[1])
    worker.load(out)
    found.append((two_steps(worker), [], 0))
    return found


def test_a_critic_leaves_the_memory_and_a_checkpoint_as_it_was(model: ModelConfig, tmp_path: Path) -> None:
    everything = MemoryConfig(offload=["gradients", "optimizer", "others"], folder=str(tmp_path))
    configs = [config_of(model, memory=memory) for memory in (everything, MemoryConfig())]
    [[turns, kept, resumed]] = run_ranks(turns_on_rank, 1, configs, str(tmp_path / "critic"))
    assert turns[2] == 0 < kept[2]
    away = [{name.split("/")[2] for name in found[1] if name.endswith("/gb")} for found in (turns, kept)]
    # By default only what needs no place elsewhere.
    assert away == [{"critic.gradients", "critic.optimizer", "critic.parameters"}, {"critic.gradients"}]
    for other in (kept, resumed):
        assert torch.equal(turns[0]["last"], other[0]["last"])
        assert turns[0]["metrics"] == other[0]["metrics"]
