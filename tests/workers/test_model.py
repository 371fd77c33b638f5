"""Actor and reference in layouts of their own, called as the driver calls them, against the same roles on one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybridflow.config import ActorConfig, LossConfig, ModelConfig, OptimizerConfig, RunConfig
from hybridflow.resharding.layout import ParallelLayout
from tests.ranks import run_ranks
from tests.tiny_models import VOCAB, save_tiny_model, save_tokenizer
from tests.workers.test_actor import batch_of, call

pytestmark = pytest.mark.distributed

ROWS = 7
LAYOUTS = {"actor": ParallelLayout(tp=2, dp=2), "reference": ParallelLayout(pp=2, cp=2)}
ALONE = {"actor": ParallelLayout(), "reference": ParallelLayout()}


def on_rank(rank: int, layouts: dict[str, ParallelLayout], config: RunConfig, out: str) -> list[dict[str, Any]]:
    """What the driver sees of each role: scores, an update, scores again; scores after the reference has taken the
    actor's weights, and of a reference that goes on from its checkpoint."""
    from hybridflow.workers.actor import ActorWorker
    from hybridflow.workers.base import WorkerContext
    from hybridflow.workers.reference import ReferenceWorker

    kinds = {"actor": ActorWorker, "reference": ReferenceWorker}
    workers: dict[str, Any] = {}
    for role, layout in layouts.items():
        workers[role] = kinds[role](WorkerContext(role, rank, layout, config, workers, "train"))
    for worker in workers.values():
        worker.setup()
    batch = batch_of(ROWS)

    def scores() -> dict[str, Any]:
        actors, references = call(workers["actor"], "log_probs", batch), call(workers["reference"], "log_probs", batch)
        return {
            "log_probs": actors.flat("log_probs"),
            "entropy": actors.flat("entropy"),
            "ref_log_probs": references.flat("ref_log_probs"),
        }

    before = scores()
    metrics = call(workers["actor"], "update", batch)
    after = scores()
    report = workers["reference"].sync_weights(1)
    taken = scores()
    call(workers["actor"], "update", batch)
    workers["reference"].save(out)
    resumed = ReferenceWorker(WorkerContext("reference", rank, layouts["reference"], config, {}, "train"))
    resumed.setup()
    resumed.load(out)
    again = call(resumed, "log_probs", batch).flat("ref_log_probs")
    return [before, metrics, after, taken, {"ref_log_probs": again, "report": report}]


def test_roles_in_layouts_of_their_own_answer_as_on_one_rank(tmp_path):
    folder = save_tiny_model(tmp_path / "model", "qwen3", tie_word_embeddings=True)
    config = RunConfig(
        name="test",
        model=ModelConfig(path=folder, tokenizer_path=save_tokenizer(tmp_path / "words", VOCAB)),
        actor=ActorConfig(
            micro_batch_tokens=24,
            recompute="selective",
            optimizer=OptimizerConfig(lr=1e-2),
            loss=LossConfig(entropy_coef=0.01, kl_coef=0.1),
        ),
    )
    out = str(tmp_path / "reference")
    [(before, metrics, after, _, alone)] = run_ranks(on_rank, 1, ALONE, config, f"{out}1")
    assert alone["report"]["sync/bytes_received"] == 0
    assert metrics.keys() >= {"loss", "kl", "entropy", "clip_fraction", "grad_norm"}
    assert (after["log_probs"] - before["log_probs"]).abs().max() > 0.1, "the update must show"
    for found in run_ranks(on_rank, 4, LAYOUTS, config, f"{out}4"):
        assert found[1] == pytest.approx(metrics, rel=1e-4, abs=1e-6)
        for scores, expected in ((found[0], before), (found[2], after)):
            for name, values in expected.items():
                assert len(values) == len(before["log_probs"])
                torch.testing.assert_close(scores[name], values, rtol=0, atol=1e-4, msg=name)
        assert torch.equal(found[0]["ref_log_probs"], found[2]["ref_log_probs"])
        taken, resumed = found[3], found[4]
        assert resumed["report"]["sync/bytes_received"] > 0 and resumed["report"]["sync/slices_checked"] > 10
        torch.testing.assert_close(taken["ref_log_probs"], taken["log_probs"], rtol=0, atol=1e-5)
        assert (taken["ref_log_probs"] - before["ref_log_probs"]).abs().max() > 0.1
        assert torch.equal(resumed["ref_log_probs"], taken["ref_log_probs"])
