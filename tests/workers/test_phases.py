"""Actor, reference and rollout by turns in one process: nothing changes but the memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hybridflow.config import LossConfig, MemoryConfig, ModelConfig, OptimizerConfig, RolloutConfig, RunConfig
from hybridflow.errors import HybridFlowError
from hybridflow.protocol.data import DataProto
from hybridflow.resharding.layout import ParallelLayout
from tests.ranks import run_ranks
from tests.tiny_models import VOCAB, save_tiny_model, save_tokenizer
from tests.workers.test_actor import call

pytest.importorskip("vllm")
pytestmark = pytest.mark.distributed

EVERYTHING = MemoryConfig(offload=["gradients", "optimizer", "parameters", "others"])
NOTHING = MemoryConfig(offload=[], keep_rollout=True)
SHARED = replace(NOTHING, share_weights=True)


def config_of(tmp_path, memory: MemoryConfig, dtype: str = "float32", kv_cache_gb: float = 0.01, **model) -> RunConfig:
    folder = tmp_path / "model"
    if not folder.exists():
        save_tiny_model(folder, "qwen3", **{"head_dim": 32, "tie_word_embeddings": True, **model})
        save_tokenizer(tmp_path / "words", VOCAB)
    config = RunConfig(
        name="test",
        model=ModelConfig(path=str(folder), tokenizer_path=str(tmp_path / "words"), dtype=dtype),
        rollout=RolloutConfig(max_prompt_tokens=16, max_tokens=16, kv_cache_gb=kv_cache_gb),
        memory=replace(memory, folder=str(tmp_path)),
    )
    return replace(
        config, actor=replace(config.actor, optimizer=OptimizerConfig(lr=1e-2), loss=LossConfig(kl_coef=0.1))
    )


class Roles:
    """All roles of one device process."""

    def __init__(self, rank: int, training: ParallelLayout, generation_tp: int, config: RunConfig) -> None:
        from hybridflow.platform import current
        from hybridflow.resharding.hybrid import Phases
        from hybridflow.workers.actor import ActorWorker
        from hybridflow.workers.base import WorkerContext
        from hybridflow.workers.reference import ReferenceWorker
        from hybridflow.workers.rollout import RolloutWorker

        self.peers: dict[str, Any] = {}
        self.phases = Phases(current().used, current().release_cache)
        for role, kind in (("actor", ActorWorker), ("reference", ReferenceWorker), ("rollout", RolloutWorker)):
            layout = training.generation(tp=generation_tp) if role == "rollout" else training
            context = WorkerContext(role, rank, layout, config, self.peers, "train", phases=self.phases)
            self.peers[role] = kind(context)
            self.peers[role].setup()
        self.actor, self.reference, self.rollout = self.peers["actor"], self.peers["reference"], self.peers["rollout"]

    def generate(self, step: int) -> DataProto:
        prompts = DataProto.jagged([torch.arange(2, 4 + i) for i in range(6)])
        return call(self.rollout, "generate", DataProto.from_dict({"prompts": prompts}, meta_info={"step": step}))

    def train(self, batch: DataProto) -> tuple[DataProto, dict[str, float]]:
        batch = batch.union(call(self.actor, "log_probs", batch)).union(call(self.reference, "log_probs", batch))
        rows = [torch.full((int(n),), i % 3 - 1.0) for i, n in enumerate(batch.lengths("responses"))]
        batch = batch.union(DataProto.from_dict({"advantages": DataProto.jagged(rows)}))
        return batch, call(self.actor, "update", batch)


def two_steps(rank: int, training: ParallelLayout, generation_tp: int, configs: list[RunConfig]) -> list[Any]:
    """Of each configuration what two steps and a generation after them gave, and the reports of the syncs."""
    found = []
    for config in configs:
        roles, columns, reports = Roles(rank, training, generation_tp, config), [], []
        for step in (1, 2):
            reports.append(roles.rollout.sync_weights(step - 1))
            batch, metrics = roles.train(roles.generate(step))
            keys = ("responses", "rollout_log_probs", "log_probs", "ref_log_probs")
            columns.append({key: batch.flat(key) for key in keys} | {"version": batch["weight_version"]})
            columns[-1] |= {name: torch.tensor(value) for name, value in metrics.items()}
        refused = ""
        try:
            columns.append({"unsynced": roles.generate(3)["weight_version"]})
        except HybridFlowError as error:
            refused = str(error)
        roles.rollout.sync_weights(2)
        last = roles.generate(3)
        columns.append({"responses": last.flat("responses"), "version": last["weight_version"]})
        found.append((columns, reports, refused))
        roles.rollout.close()
    return found


@pytest.mark.parametrize(
    ("training", "generation_tp", "dtype"),
    [
        (ParallelLayout(tp=2), 1, "float32"),  # the rollout holds all that a rank trains with; norms coincide
        (ParallelLayout(dp=2), 2, "bfloat16"),  # it holds half of it; the optimizer's state is shared out
    ],
)
def test_taking_turns_and_sharing_change_no_bit_of_the_results(tmp_path, training, generation_tp, dtype):
    configs = [config_of(tmp_path, memory, dtype) for memory in (EVERYTHING, NOTHING, SHARED)]
    for turns, kept, shared in run_ranks(two_steps, 2, training, generation_tp, configs):
        (first, second, last), (*kept_steps, unsynced, kept_last) = turns[0], kept[0]
        for found in (turns[0], shared[0]):
            for step, expected in zip(found, (*kept_steps, kept_last), strict=True):
                assert step.keys() == expected.keys()
                for name, values in expected.items():
                    assert torch.equal(step[name], values), name
        assert (first["log_probs"][:5] - second["log_probs"][:5]).abs().max() > 1e-3, "updates must show"
        assert last["version"].tolist() == [2] * 6
        # Weights that are kept may go on generating; weights that made room are not there any more, and of those that
        # lie in the actor's memory nobody knows the version.
        assert unsynced["unsynced"].tolist() == [1] * 6 and kept[2] == ""
        assert turns[2] == (
            "the actor was updated after its weights were synced as version 1, and the rollout's copy of them was "
            "dropped to make room: call run.sync_weights() before generating, or set memory.keep_rollout=true to go on "
            "generating with version 1."
        )
        assert shared[2] == (
            "the actor was updated after its weights were synced as version 1, and the rollout's weights lie in the "
            "actor's memory: call run.sync_weights() before generating, or set memory.share_weights=false to go on "
            "generating with version 1."
        )
        reports = turns[1] + kept[1] + shared[1]
        assert [report["sync/bytes_shared"] > 0 for report in reports] == [False] * 4 + [True] * 2
        assert {name for name in turns[1][1] if name.startswith("phase/generation/") and name.endswith("/gb")} == {
            f"phase/generation/{part}/gb"
            for part in (
                *("actor.gradients", "actor.optimizer", "actor.parameters", "reference.parameters"),
                *("rollout.weights", "rollout.kv_cache"),
            )
        }


def memory_of_steps(rank: int, configs: list[RunConfig]) -> list[dict[str, float]]:
    """Of each configuration the report of the sync after two steps: a whole step's changes of phase, from the first
    that has optimizer state on."""
    found = []
    for config in configs:
        roles = Roles(rank, ParallelLayout(), 1, config)
        for step in (1, 2):
            roles.rollout.sync_weights(step - 1)
            roles.train(roles.generate(step))
        found.append(roles.rollout.sync_weights(2))
        roles.rollout.close()
    return found


def test_what_is_away_is_not_in_the_resident_memory(tmp_path):
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "vocab_size": 8192}
    configs = [config_of(tmp_path, memory, kv_cache_gb=0.15, **shape) for memory in (EVERYTHING, NOTHING, SHARED)]
    [(turns, kept, shared)] = run_ranks(memory_of_steps, 1, configs)
    model = turns["sync/bytes"] / 2**30
    assert 0.08 < model < 0.15
    gone = {"actor.gradients": model, "actor.optimizer": 2 * model, "reference.parameters": model}
    for part, size in {**gone, "actor.parameters": model}.items():
        assert turns[f"phase/generation/{part}/gb"] == pytest.approx(-size, rel=0.1), part
        # Pages of gradients come with the backward that writes them.
        back = 0 if part == "actor.gradients" else size
        assert turns[f"phase/training/{part}/gb"] == pytest.approx(back, rel=0.1, abs=0.01), part
    # Its matrices are packed while it generates, which a restore does not see.
    for part, size, with_packed in (("rollout.weights", model, 2 * model), ("rollout.kv_cache", 0.15, 0.15)):
        assert turns[f"phase/generation/{part}/gb"] == pytest.approx(size, rel=0.1), part
        assert turns[f"phase/training/{part}/gb"] == pytest.approx(-with_packed, rel=0.1), part
    # While it generates, a process holds one copy of the weights, and of the rest of the trainer nothing. Where nothing
    # moves, memory that was freed may stay with the process too.
    saved = kept["memory/rss_gb"] - turns["memory/rss_gb"]
    assert saved > 0.8 * (sum(gone.values()) + model)
    assert {name for name in kept if name.endswith("/gb")} == {
        "phase/generation/rollout.weights/gb",
        "phase/training/rollout.weights/gb",
    }
    # One layout on both sides: only what vLLM orders otherwise, queries, keys and values, is there twice.
    qkv = 6 * 512 * (4 + 2 * 2) * 32 * 4
    assert (shared["sync/bytes"], shared["sync/bytes_shared"]) == (qkv, turns["sync/bytes"] - qkv)
