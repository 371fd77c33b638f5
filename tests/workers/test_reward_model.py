"""Reward models: scores of whole texts and training on pairs, against transformers and torch.optim.AdamW."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hybridflow.config import ActorConfig, ModelConfig, OptimizerConfig, PPOConfig, RewardConfig, RewardModelConfig
from hybridflow.protocol.data import DataProto
from hybridflow.resharding.layout import ParallelLayout
from tests.ranks import run_ranks
from tests.tiny_models import VOCAB, save_tiny_classifier, save_tiny_model, save_tokenizer
from tests.workers.test_actor import call

pytestmark = pytest.mark.distributed

LR, UPDATES = 5e-3, 3


def pairs() -> DataProto:
    """Eight answers, two to each of four prompts, of different lengths; one is empty."""
    generator = torch.Generator().manual_seed(3)
    draw = lambda n: torch.randint(2, VOCAB, (n,), generator=generator)  # noqa: E731
    prompts = [draw(2 + i // 2) for i in range(8)]
    responses = [draw((3 * i) % 7) for i in range(8)]
    return DataProto.from_dict(
        {
            "prompts": DataProto.jagged(prompts),
            "responses": DataProto.jagged(responses, dtype=torch.int64),
            "chosen": torch.tensor([True, False] * 4),
        }
    )


def texts(batch: DataProto) -> list[torch.Tensor]:
    columns = (batch.flat(key).split(batch.lengths(key).tolist()) for key in ("prompts", "responses"))
    return [torch.cat(parts) for parts in zip(*columns, strict=True)]


def oracle_scores(folder: str) -> torch.Tensor:
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        return torch.stack([model(text[None]).logits[0, 0] for text in texts(pairs())])


def train_oracle(folder: str) -> tuple[list[float], torch.Tensor]:
    """Losses of the updates and the scores after them; the head begins with zeros."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    torch.nn.init.zeros_(model.score.weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=1e-4, weight_decay=0.0)
    losses = []
    for _ in range(UPDATES):
        scores = torch.stack([model(text[None]).logits[0, 0] for text in texts(pairs())])
        loss = -F.logsigmoid(scores[0::2] - scores[1::2]).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        return losses, torch.stack([model(text[None]).logits[0, 0] for text in texts(pairs())])


def on_rank(rank: int, world: int, layout: dict[str, Any], classifier: str, model: ModelConfig, out: str) -> Any:
    """What a reward role says, as rewards and as costs; a training's losses and scores; the trained model's rewards."""
    from hybridflow.algorithms.preferences import bradley_terry_weights
    from hybridflow.workers.base import WorkerContext
    from hybridflow.workers.reward_model import RewardModelTrainer, RewardModelWorker

    where = ParallelLayout.on(world, **layout)

    def role(name: str, path: str) -> Any:
        config = PPOConfig(
            model=model, reward=RewardConfig(path=path, solved_at=0.0), actor=ActorConfig(micro_batch_size=3)
        )
        worker = RewardModelWorker(WorkerContext(name, rank, where, config, {}, "train"))
        worker.setup()
        return worker

    scored = call(role("reward", classifier), "score", pairs())
    actor = ActorConfig(micro_batch_size=3, optimizer=OptimizerConfig(lr=LR, eps=1e-4))
    config = RewardModelConfig(model=model, actor=actor)
    trainer = RewardModelTrainer(WorkerContext("actor", rank, where, config, {}, "train"))
    trainer.setup()
    losses, batch = [], pairs()
    for _ in range(UPDATES):
        given = batch.union(call(trainer, "scores", batch))
        given = given.union(bradley_terry_weights(given))
        losses.append(given.meta_info["metrics"]["preference/loss"])
        call(trainer, "update", given)
    trained = call(trainer, "scores", batch)["scores"]
    trainer.save(out)
    again = call(role("reward", f"{out}/model"), "score", batch)
    return scored, losses, trained, again["rewards"]


@pytest.mark.parametrize(("world", "layout"), [(1, {}), (2, {"pp": 2}), (2, {})])
def test_scores_and_training_on_pairs_equal_transformers(tmp_path: Path, world: int, layout: dict[str, int]) -> None:
    classifier = save_tiny_classifier(tmp_path / "classifier", "llama", "ForSequenceClassification")
    path, words = save_tiny_model(tmp_path / "model", "qwen3"), save_tokenizer(tmp_path / "words", VOCAB)
    model, out = ModelConfig(path=path, tokenizer_path=words), str(tmp_path / "out")
    expected_losses, expected_scores = train_oracle(path)
    assert expected_losses[0] == pytest.approx(0.6931, abs=1e-4)
    assert expected_losses[-1] < 0.68
    for scored, losses, trained, again in run_ranks(on_rank, world, world, layout, classifier, model, out):
        expected = oracle_scores(classifier)
        torch.testing.assert_close(scored["rewards"], expected, rtol=0, atol=1e-5)
        assert scored["solved"].tolist() == (expected >= 0).tolist()
        assert list(scored["reward_error"]) == [None] * 8
        assert scored["response_text"][1] == " ".join(f"w{i}" for i in texts(pairs())[1][2:].tolist())
        assert losses == pytest.approx(expected_losses, rel=1e-5)
        torch.testing.assert_close(trained, expected_scores, rtol=0, atol=1e-5)
        torch.testing.assert_close(again, trained, rtol=0, atol=1e-6)
    assert oracle_scores(f"{out}/model").tolist() == pytest.approx(expected_scores.tolist(), abs=1e-5)
