"""The rollout worker: columns, seeds and the sync of weights, on one real vLLM engine."""

import math
import types
from typing import Any

import pytest
import torch

from hybridflow.config import ModelConfig, OneStepOffConfig, RolloutConfig, RunConfig, SamplingConfig
from hybridflow.errors import ConfigError, DataError
from hybridflow.models.hf_io import load_parameters
from hybridflow.models.spec import ModelSpec
from hybridflow.models.tables import hf_table, megatron_table, padded_vocab_size
from hybridflow.protocol.data import DataProto
from hybridflow.resharding.hybrid import TRAINING
from hybridflow.resharding.layout import ParallelLayout
from hybridflow.workers.base import WorkerContext, registrations
from hybridflow.workers.rollout import RolloutWorker, add_sample_ids, row_seed
from tests.tiny_models import save_tokenizer

pytest.importorskip("vllm")

KNOWN_IDS = 170  # of the tokenizer; the models have 200
PROMPTS = [[7, 8, 9], [10] * 40, [11, 12], [13, 14, 15, 16]]


class Trained:
    """What the rollout reads of an actor's engine: Megatron-shaped weights in this process."""

    def __init__(self, folder: str) -> None:
        self.spec = ModelSpec.from_folder(folder)
        layout = ParallelLayout()
        self.table = megatron_table(self.spec, layout, layout.coordinates(0), padded_vocab_size(self.spec, 1))
        self.dtype, self.changes = torch.float32, 0
        self._parameters = {name: torch.empty(boxes.shape) for name, boxes in self.table.items()}
        self.take(folder)

    def parameters(self) -> dict[str, torch.Tensor]:
        return self._parameters

    def take(self, folder: str) -> None:
        self.changes += 1
        load_parameters(folder, self.table, self._parameters)


def train(worker, folder: str) -> None:
    """What an update or a checkpoint does: new weights for the actor, in the phase that has them in memory."""
    worker.context.phases.enter(TRAINING)
    worker.context.peers["actor"].engine.take(folder)


@pytest.fixture(scope="module")
def settings(folders, tmp_path_factory) -> dict[str, Any]:
    return {
        "name": "test",
        "seed": 11,
        "model": ModelConfig(
            path=folders["tied"], tokenizer_path=save_tokenizer(tmp_path_factory.mktemp("words"), KNOWN_IDS)
        ),
        "rollout": RolloutConfig(max_prompt_tokens=64, max_tokens=12, kv_cache_gb=0.05),
    }


@pytest.fixture(scope="module")
def worker(folders, settings):
    peers: Any = {"actor": types.SimpleNamespace(engine=Trained(folders["tied"]))}
    made = RolloutWorker(WorkerContext("rollout", 0, ParallelLayout(), RunConfig(**settings), peers, "train"))
    made.setup()
    yield made
    made.close()


@pytest.fixture
def synced(worker, folders):
    """The worker with the weights of the folder ``tied`` as version 0."""
    train(worker, folders["tied"])
    worker.sync_weights(0)
    return worker


def batch_of(prompts=PROMPTS, step=3) -> DataProto:
    rows = [torch.tensor(row) for row in prompts]
    return DataProto.from_dict(
        {"prompts": DataProto.jagged(rows), "group_ids": torch.arange(len(rows)) // 2},
        {"ground_truth": [str(i) for i in range(len(rows))]},
        {"step": step},
    )


def rows(batch: DataProto, key: str) -> list[list]:
    return [row.tolist() for row in batch.flat(key).split(batch.lengths(key).tolist())]


def generate(worker, batch, **arguments) -> DataProto:
    return worker.generate(registrations(RolloutWorker)["generate"].prepare(batch), **arguments)


def test_rows_are_numbered_before_they_are_spread():
    batch = batch_of()
    numbered = add_sample_ids(batch)
    assert numbered.batch["sample_ids"].tolist() == [0, 1, 2, 3] and "sample_ids" not in batch
    assert add_sample_ids(numbered[[2, 0]]).batch["sample_ids"].tolist() == [0, 1]
    assert numbered.meta_info == {"step": 3} and rows(numbered, "prompts") == PROMPTS


def test_seeds_are_stable_and_all_different():
    assert row_seed(11, 3, 0, "train") == 6971959906420691686
    seeds = {
        row_seed(s, t, i, tag) for s in (0, 1) for t in range(9) for i in range(50) for tag in ("train", "evaluate")
    }
    assert len(seeds) == 2 * 9 * 50 * 2 and all(0 <= seed < 2**63 for seed in seeds)


def test_a_batch_gains_its_columns(synced, folders, reference_log_probs):
    batch = batch_of()
    done = generate(synced, batch)
    assert set(done.keys()) - set(batch.keys()) == {
        "sample_ids", "responses", "response_mask", "rollout_log_probs", "token_versions", "weight_version",
        "finish_reason",
    }  # fmt: skip
    assert "responses" not in batch and done.meta_info["step"] == 3 and done.meta_info["temperature"] == 1.0
    assert done.batch["responses"].dtype == torch.int64 and done.batch["rollout_log_probs"].dtype == torch.float32
    assert done.batch["weight_version"].tolist() == [0] * 4
    responses = rows(done, "responses")
    assert rows(done, "response_mask") == [[True] * len(row) for row in responses]
    assert all(x < KNOWN_IDS for row in responses for x in row)
    for prompt, response, log_probs in zip(PROMPTS, responses, rows(done, "rollout_log_probs"), strict=True):
        exact = reference_log_probs(folders["tied"], prompt, response, valid_vocab=KNOWN_IDS)
        assert float((torch.tensor(log_probs) - exact).abs().max()) < 1e-5
    metrics = done.meta_info["metrics"]
    total = sum(map(len, responses))
    assert metrics["generate/tokens"] == total and metrics["generate/prompt_tokens"] == 49
    assert metrics["generate/response_length"] == total / 4 and metrics["generate/seconds"] > 0
    assert metrics["generate/truncated"] == sum(r == "length" for r in done.non_tensor_batch["finish_reason"]) / 4


def test_a_row_draws_the_same_wherever_it_is_generated(synced):
    batch = add_sample_ids(batch_of())
    whole = rows(synced.generate(batch), "responses")
    assert rows(synced.generate(batch[[3, 1]]), "responses") == [whole[3], whole[1]]
    assert rows(synced.generate(batch), "responses") == whole


def test_seeds_change_with_the_step_the_row_and_the_tag(synced):
    copies = [PROMPTS[0]] * 6
    first = rows(generate(synced, batch_of(copies, step=1)), "responses")
    assert len(set(map(tuple, first))) == 6
    assert rows(generate(synced, batch_of(copies, step=2)), "responses") != first
    assert rows(generate(synced, batch_of(copies, step=1), tag="evaluate"), "responses") != first


def test_greedy_evaluation_reports_temperature_one(synced):
    done = generate(synced, batch_of(), sampling=SamplingConfig(temperature=0.0), tag="evaluate")
    again = generate(synced, batch_of(step=9), sampling=SamplingConfig(temperature=0.0))
    assert rows(done, "responses") == rows(again, "responses") and done.meta_info["temperature"] == 1.0
    assert generate(synced, batch_of(), sampling=SamplingConfig(temperature=0.5)).meta_info["temperature"] == 0.5


def test_a_sync_brings_the_actors_weights_and_its_version(synced, folders, reference_greedy):
    greedy = SamplingConfig(temperature=0.0)
    for version, name in ((0, "tied"), (4, "other"), (5, "tied")):
        train(synced, folders[name])
        report = synced.sync_weights(version)
        weights = sum(math.prod(shape) for shape in hf_table(synced.engine.spec).values())
        assert report["sync/bytes"] == 4 * weights and report["sync/seconds"] > 0
        done = generate(synced, batch_of(), sampling=greedy)
        assert done.batch["weight_version"].tolist() == [version] * 4
        assert done.flat("token_versions").unique().tolist() == [version]
        assert rows(done, "responses") == [
            reference_greedy(folders[name], prompt, 12, valid_vocab=KNOWN_IDS) for prompt in PROMPTS
        ]


def test_a_long_prompt_is_refused_and_named(synced):
    with pytest.raises(
        DataError, match=r"prompt 2 has 65 tokens; allowed are 1 to 64 \(rollout.max_prompt_tokens=64\)"
    ):
        generate(synced, batch_of([[7], [8], [9] * 65]))


def test_no_response_begins_that_would_be_too_old(settings):
    config = OneStepOffConfig(**settings, max_staleness=2)
    alone = RolloutWorker(WorkerContext("rollout", 0, ParallelLayout(), config, {}, "rollout"))
    alone.setup()
    try:
        alone.engine.weights_changed(0)  # of no model: what matters is who drew which token
        first, third, fourth = (add_sample_ids(batch_of(step=step)) for step in (1, 3, 4))
        alone.begin(third)
        too_early = (
            r"responses of step 4 would begin with the weights of version 0, but the step trains version 3: 3 updates "
            r"older, and max_staleness=2. Begin them later \(run.steps with ahead=2\), after a sync in each step, or"
        )
        for method in (alone.begin, alone.generate):
            with pytest.raises(DataError, match=too_early):
                method(fourth)
        assert alone.generate(first)["weight_version"].tolist() == [0] * 4
        alone.engine.weights_changed(1)
        alone.begin(fourth)
        # All of it was drawn while the first step's was, or is drawn now; nothing is older than the step may use.
        done = alone.generate(third)
        assert done["weight_version"].tolist() == [min(row) for row in rows(done, "token_versions")] == [0] * 4
        assert alone.generate(fourth)["weight_version"].tolist() == [1] * 4
        assert not alone.engine._engine.has_unfinished_requests()
    finally:
        alone.close()


def test_a_pool_that_trains_too_begins_nothing(synced):
    with pytest.raises(ConfigError, match=r"roles.rollout.pool=train: .*Give the rollout a pool of its own"):
        synced.begin(add_sample_ids(batch_of()))
    assert not synced.engine._engine.has_unfinished_requests()
