"""Two engines in one torch.distributed world: no lockstep between them, same results as one engine alone."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from hybridflow.config import SamplingConfig

pytest.importorskip("vllm")

SAMPLING = SamplingConfig(temperature=0.9)


def tasks(prompts):
    """What each rank is asked: different numbers of calls, of requests and of tokens."""
    return {0: [(prompts[:3], 6)], 1: [(prompts[3:], 30), (prompts[:1], 2), (prompts, 12)]}


def answer(engine, calls):
    from hybridflow.engines.vllm.engine import Request

    return [
        [c.token_ids for c in engine.generate([Request(p, 40 + i, limit) for i, p in enumerate(prompts)], SAMPLING)]
        for prompts, limit in calls
    ]


def rank_main(rank: int, store: str, folder: str, settings, prompts, out: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mine = dist.new_group([0, 1])  # stands for the trainer's groups, made before the engine's
    from hybridflow.engines.vllm.engine import RolloutEngine
    from hybridflow.models.spec import ModelSpec

    spec = ModelSpec.from_folder(folder)
    engine = RolloutEngine(folder, spec, torch.float32, settings, 200, 160, load_weights=True)
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} & set(os.environ)
    torch.save(answer(engine, tasks(prompts)[rank]), f"{out}/{rank}.pt")
    # Each engine has its own weights: a change on rank 1 is not seen on rank 0.
    if rank == 1:
        engine.parameters()["model.norm.weight"].mul_(1.5)
        engine.weights_changed(8)
    versions = {c.weight_version for c in engine.generate([], SAMPLING)} | {engine.weight_version}
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total, group=mine)
    assert total.item() == 3 and versions == {8 if rank else 0}
    engine.close()
    dist.all_reduce(total, group=mine)
    assert total.item() == 6 and dist.is_initialized()
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.distributed
def test_engines_of_one_world_are_independent(engine, folders, settings, prompts, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    arguments = (str(tmp_path / "store"), folders["tied"], settings, prompts, str(tmp_path))
    mp.spawn(rank_main, args=arguments, nprocs=2)
    for rank, calls in tasks(prompts).items():
        assert torch.load(tmp_path / f"{rank}.pt") == answer(engine, calls)
