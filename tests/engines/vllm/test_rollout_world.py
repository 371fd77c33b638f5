"""Engines of several ranks in one torch.distributed world: the paper's strided groups, and replicas on their own."""

import os

import pytest
import torch
import torch.distributed as dist

from hybridflow.config import SamplingConfig
from hybridflow.resharding.layout import ParallelLayout
from tests.ranks import run_ranks

pytest.importorskip("vllm")

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


def generate(rank: int, folder: str, settings, prompts):
    """Trains on 1-4-1 and generates on 1-2-2: replica 0 is ranks 0 and 2, replica 1 is ranks 1 and 3."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)
    from hybridflow.engines.megatron.parallel import ModelParallel
    from hybridflow.engines.vllm.engine import Request, RolloutEngine
    from hybridflow.models.spec import ModelSpec

    training = ParallelLayout(tp=4)
    trainer = ModelParallel(training)
    layout = training.generation(tp=2)
    spec = ModelSpec.from_folder(folder)
    engine = RolloutEngine(folder, spec, torch.float32, settings, 200, 160, layout=layout, load_weights=True)
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} & set(os.environ)
    embedding = engine.parameters()["model.embed_tokens.weight"]
    at = layout.coordinates(rank)
    torch.rand(rank)  # ranks of a replica draw the same, whatever each has drawn for itself before
    found = answer(engine, tasks(prompts)[at.dp])
    # Each replica has its own weights: a change in replica 1 is not seen in replica 0.
    if at.dp == 1:
        engine.parameters()["model.norm.weight"].mul_(1.5)
        engine.weights_changed(8)
    versions = {c.weight_version for calls in answer(engine, [(prompts[:2], 2)]) for c in calls}
    refused = ""
    try:
        engine.generate([Request(prompts[0], 1 + rank // 3, 2)], SAMPLING)  # rank 3 has another seed than rank 1
    except RuntimeError as error:
        refused = str(error)
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total, group=trainer.tp_group)
    engine.close()
    dist.all_reduce(total, group=trainer.tp_group)
    assert total.item() == 40 and dist.is_initialized()
    return found, versions, refused, list(embedding.shape)


@pytest.mark.distributed
def test_replicas_of_two_strided_ranks_generate_what_one_rank_does(engine, folders, settings, prompts):
    found = run_ranks(generate, 4, folders["tied"], settings, prompts)
    for rank, (answers, versions, refused, rows) in enumerate(found):
        replica = rank % 2
        assert rows == [128, 64], "half of 200 ids, padded to 256"
        assert versions == {8 if replica else 0}
        assert refused.startswith("ranks [1, 3] generate together, but their requests differ: [1] and [3]") == bool(
            replica
        )
        for mine, alone in zip(answers, answer(engine, tasks(prompts)[replica]), strict=True):
            assert [c.token_ids for c in mine] == [c.token_ids for c in alone]
            for a, b in zip(mine, alone, strict=True):
                assert (torch.tensor(a.log_probs) - torch.tensor(b.log_probs)).abs().max() < 1e-5
