"""The paper's transition with real engines: megatron-core on 1-4-1, vLLM on 1-2-2, one torch.distributed world."""

import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hybridflow.config import RunConfig, SamplingConfig
from hybridflow.models.hf_io import load_parameters
from hybridflow.models.spec import ModelSpec
from hybridflow.models.tables import vllm_table
from hybridflow.resharding.guard import MODES
from hybridflow.resharding.layout import ParallelLayout
from tests.engines.megatron.parity import Case
from tests.ranks import run_ranks
from tests.workers.parity import Pair, compare_on_rank, save_model

pytest.importorskip("vllm")

TRAINING = ParallelLayout(tp=4)
GENERATION = TRAINING.generation(tp=2)
SAMPLING = SamplingConfig(temperature=0.9)


def tasks(prompts):
    """What each replica is asked: different numbers of calls, of requests and of tokens."""
    return [[(prompts[:3], 6)], [(prompts[3:], 30), (prompts[:1], 2), (prompts, 12)]]


def answer(engine, calls):
    from hybridflow.engines.vllm.engine import Request

    return [
        engine.generate([Request(p, 40 + i, limit) for i, p in enumerate(prompts)], SAMPLING)
        for prompts, limit in calls
    ]


def refusal(engine, requests) -> str:
    try:
        engine.generate(requests, SAMPLING)
    except RuntimeError as error:
        return str(error)
    return ""


def generate_apart(engine, rank: int, request) -> str:
    """The error of a rank whose peer goes on where it has ended; the peer, rank 3, is let go when rank 1 is gone."""
    from hybridflow.engines.vllm import groups

    groups.PATIENCE = timedelta(seconds=5)
    params = engine._params
    if rank == 3:
        engine._params = lambda request, sampling: params(replace(request, max_tokens=8), sampling)
    return refusal(engine, [request])


def train_and_generate(rank: int, folder: str, settings, prompts):
    """Everything one device process does: replica 0 generates on ranks 0 and 2, replica 1 on ranks 1 and 3."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)
    from hybridflow.engines.megatron.engine import MegatronEngine
    from hybridflow.engines.vllm.engine import Request, RolloutEngine
    from hybridflow.workers.sync import WeightSync

    actor = MegatronEngine(folder, TRAINING, torch.float32, valid_vocab=200)
    rollout = RolloutEngine(folder, actor.spec, torch.float32, settings, 200, 160, layout=GENERATION)
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} & set(os.environ)
    config = RunConfig(rollout=replace(settings, sync_bucket_mb=5000 / 2**20))
    sync = WeightSync.within(GENERATION, rank, config, actor, rollout)
    report = sync.run(0)
    checked = {}
    for mode in MODES:
        other = replace(config, rollout=replace(config.rollout, check_sync=mode))
        checked[mode] = WeightSync.within(GENERATION, rank, other, actor, rollout).run(0)["sync/slices_checked"]
    weights = {name: p.clone() for name, p in rollout.parameters().items()}

    at = GENERATION.coordinates(rank)
    torch.rand(rank)  # ranks of a replica draw the same, whatever each has drawn for itself before
    half_way = [Request(prompt, 90 + i, 60) for i, prompt in enumerate(prompts)]
    rollout.begin(half_way, SAMPLING)
    found = answer(rollout, tasks(prompts)[at.dp])

    # Rank 3 has another seed than rank 1; replica 0 is not asked and does not notice.
    refused = refusal(rollout, [Request(prompts[0], rank, 2)]) if at.dp == 1 else ""

    for parameter in actor.parameters().values():
        parameter.mul_(1.5)
    sync.run(8)
    versions = {c.weight_version for c in answer(rollout, [(prompts[:2], 2)])[0]}
    finished = rollout.generate(half_way, SAMPLING)
    # Of vocabularies the rows from 72 on are padding on the second half of the ranks, which no sync writes.
    grown = all(torch.allclose(p[:72], 1.5 * weights[n][:72]) for n, p in rollout.parameters().items())

    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total, group=actor.parallel.tp_group)
    apart = generate_apart(rollout, rank, Request(prompts[0], 1, 2)) if at.dp == 1 else ""
    rollout.close()
    assert total.item() == 10 and dist.is_initialized()
    return {
        "apart": apart,
        "checked": checked,
        "answers": found,
        "weights": weights,
        "report": report,
        "group": sync.plan.group,
        "refused": refused,
        "versions": versions,
        "grown": grown,
        "half_way": finished,
    }


@pytest.fixture(scope="module")
def folder(make_model, tmp_path_factory) -> str:
    """As many kv heads as training ranks."""
    return make_model(tmp_path_factory.mktemp("four_heads"), seed=5, tied=False, num_kv_heads=4)


@pytest.fixture(scope="module")
def ranks(folder, settings, prompts):
    return run_ranks(train_and_generate, 4, folder, settings, prompts)


@pytest.mark.distributed
def test_each_rank_generates_with_its_slices_of_the_checkpoint(ranks, folder):
    for rank, found in enumerate(ranks):
        table = vllm_table(ModelSpec.from_folder(folder), 2, GENERATION.coordinates(rank).tp)
        expected = {name: torch.zeros(boxes.shape) for name, boxes in table.items()}
        load_parameters(Path(folder), table, expected)
        for name, tensor in expected.items():
            rows = 200 - 128 if tensor.shape[0] == 128 and rank > 1 else len(tensor)  # the rest is padding
            assert torch.equal(found["weights"][name][:rows], tensor[:rows]), (rank, name)


@pytest.mark.distributed
def test_weights_travel_between_neighbours_and_no_more_than_is_missing(ranks, folder):
    # A rank trains on a quarter of each matrix and generates with a half; norms are whole on both sides.
    spec = ModelSpec.from_folder(folder)
    matrices = 2 * spec.vocab_size * 64 + 2 * (4 * 64 * 128 + 3 * 64 * 96)
    received = [found["report"]["sync/bytes_received"] for found in ranks]
    assert [found["group"] for found in ranks] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert sum(received) == 4 * 4 * matrices // 4
    # What one of two neighbours receives the other has sent.
    sent = [found["report"]["sync/most_sent"] for found in ranks]
    assert received == [found["report"]["sync/most_received"] for found in ranks]
    assert sent == [received[rank ^ 1] for rank in range(4)]
    assert all(0 < found["report"]["sync/bytes_staged"] <= 5000 for found in ranks)


@pytest.mark.distributed
def test_the_setting_says_how_much_is_compared_after_a_sync(ranks):
    # Boxes of a rank: q, k, v, o, gate, up, down and 4 norms of 2 layers, two vocabularies and a norm. Of a sample also
    # the rows of other ranks' boxes that it holds.
    for found in ranks:
        assert found["checked"]["off"] == 0 and found["checked"]["full"] == 25
        assert found["checked"]["sample"] == found["report"]["sync/slices_checked"] >= 25, "the default"


@pytest.mark.distributed
def test_replicas_of_two_ranks_generate_what_one_rank_does(ranks, folder, settings, prompts):
    from hybridflow.engines.vllm.engine import RolloutEngine

    alone = RolloutEngine(folder, ModelSpec.from_folder(folder), torch.float32, settings, 200, 160, load_weights=True)
    for replica, calls in enumerate(tasks(prompts)):
        for expected, *found in zip(answer(alone, calls), *(r["answers"] for r in ranks[replica::2]), strict=True):
            for mine in found:
                assert [c.token_ids for c in mine] == [c.token_ids for c in expected]
                for a, b in zip(mine, expected, strict=True):
                    assert (torch.tensor(a.log_probs) - torch.tensor(b.log_probs)).abs().max() < 1e-5
    alone.close()


@pytest.mark.distributed
def test_ranks_of_a_replica_that_are_asked_for_different_responses_refuse(ranks):
    assert [found["refused"] for found in ranks[::2]] == ["", ""]
    for found in ranks[1::2]:
        assert found["refused"].startswith(
            "ranks [1, 3] generate together, but their requests differ: [1] and [3] each have their own."
        )


@pytest.mark.distributed
def test_ranks_of_a_replica_compute_the_same_log_probs_bit_for_bit(ranks):
    """Each decides alone when a response ends, from logits that it shares with the others."""
    for replica in (0, 1):
        first, second = (found["answers"] for found in ranks[replica::2])
        assert first == second


@pytest.mark.distributed
def test_a_rank_whose_peer_does_not_end_says_so(ranks):
    assert ranks[1]["apart"].startswith("rank 1 compared their responses with ranks [3], which generate together with")
    assert "They have failed, or go on where this rank has ended" in ranks[1]["apart"]
    assert ranks[3]["apart"], "the peer notices that it is alone"


@pytest.mark.distributed
def test_a_later_sync_brings_the_changed_weights(ranks):
    assert all(found["grown"] and found["versions"] == {8} for found in ranks)


def generate_with_experts(rank: int, folder: str, settings, prompts):
    """Experts trained whole on one rank each, generated with whole (ep 2) and in slices on both (ep 1)."""
    from hybridflow.engines.megatron.engine import MegatronEngine
    from hybridflow.engines.vllm.engine import RolloutEngine
    from hybridflow.workers.sync import WeightSync

    training = ParallelLayout(dp=2, ep=2)
    actor = MegatronEngine(folder, training, torch.float32, valid_vocab=200)
    found = []
    for ep in (1, 2):
        layout = training.generation(tp=2, ep=ep)
        rollout = RolloutEngine(folder, actor.spec, torch.float32, settings, 200, 160, layout=layout)
        WeightSync.within(layout, rank, RunConfig(rollout=settings), actor, rollout).run(0)
        found.append(answer(rollout, [(prompts, 12)])[0])
        rollout.close()
    return found


@pytest.mark.distributed
def test_experts_travel_to_whole_ones_and_to_slices(folders, settings, prompts, reference_log_probs):
    for found in run_ranks(generate_with_experts, 2, folders["experts"], settings, prompts):
        for completions in found:
            for prompt, got in zip(prompts, completions, strict=True):
                expected = reference_log_probs(folders["experts"], prompt, got.token_ids, SAMPLING.temperature)
                assert (torch.tensor(got.log_probs) - expected).abs().max() < 1e-5


PAIRS = [
    ("qwen3", Pair(Case({"tp": 2}, 2), tp=2)),
    ("qwen2", Pair(Case({"pp": 2}, 2), tp=2)),
    ("qwen3_moe", Pair(Case({"ep": 2}, 2), tp=2, ep=2)),
]


@pytest.mark.distributed
def test_rollout_and_trainer_agree_on_log_probs_before_and_after_updates(tmp_path):
    """A selection: ``python -m benchmarks.generation_parity`` runs the table of docs/layouts.md."""
    jobs = [(save_model(tmp_path / name, name), pair) for name, pair in PAIRS]
    answers = run_ranks(compare_on_rank, 2, jobs)
    for number, (name, pair) in enumerate(PAIRS):
        found = [answer[number] for answer in answers if answer[number]]
        assert len(found) == 2 // pair.training.layout.get("pp", 1)
        assert all(len(apart) == 2 and max(apart) < 1e-5 for apart in found), (name, pair, found)


@pytest.mark.distributed
def test_ranks_of_a_replica_go_on_half_way_together(ranks, folder, prompts, reference_log_probs):
    assert ranks[0]["half_way"] == ranks[2]["half_way"] and ranks[1]["half_way"] == ranks[3]["half_way"]
    for found in ranks[:2]:
        assert any(set(completion.token_versions) == {0, 8} for completion in found["half_way"])
        for prompt, completion in zip(prompts, found["half_way"], strict=True):
            expected = reference_log_probs(folder, prompt, completion.token_ids, temperature=0.9)
            away = (torch.tensor(completion.log_probs) - expected).abs()
            before = torch.tensor(completion.token_versions) == 0
            assert not before.any() or away[before].max() < 1e-4
            assert before.all() or away[~before].max() > 1e-3, "of the weights after the second sync"
