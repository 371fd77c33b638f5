"""The weights' way from training to generation between real processes, measured: bytes, memory and seconds.

    python benchmarks/transition.py                          # seven transitions of a 100 M model on 4 processes
    python benchmarks/transition.py --dtype bfloat16 --bucket-mb 16
    python benchmarks/transition.py 1-4-1:1-2 2-2-1:1-1      # p-t-d : p_g-t_g

For each transition, of the rank that has most of it:

- received: bytes that a rank receives, matrices and norms apart. The mean over the ranks is asserted to be HybridFlow's
  formula, (tp - t_g p_g) / (t_g p_g tp) M with M the model's matrices. Single ranks may receive more or less where a
  pipeline's first and last stage hold the vocabulary's matrices and the others do not.
- peak: bytes of tensors that a transition adds at most while the rollout's parameters are allocated and filled, summed
  over every allocation, beside its limit: the generation shard plus one bucket. That is asserted to the byte.
- resident: the same as the kernel measured it (highest resident size, minus the size before). It is asserted to be no
  more than that of the generation shard, measured alone in the same way, plus one bucket, as sharply as the kernel
  counts: see ``RESOLUTION``.
- seconds: the median over the repeats.
- copy: the time of a plain memory copy of a rank's generation shard, on all ranks at once. ratio = seconds / copy.
- gather: the usual way, beside it: every parameter is gathered whole on every rank, tensor by tensor, then cut.

Every parameter that arrives is compared with the value that its place in the model has.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.profiler import ProfilerActivity, profile

from hybridflow.models.spec import ModelSpec
from hybridflow.models.tables import hf_table
from hybridflow.models.transition import generation_tables, to_generation, training_tables
from hybridflow.platform import current
from hybridflow.resharding.boxes import slices
from hybridflow.resharding.layout import GenerationLayout, ParallelLayout
from hybridflow.resharding.plan import Copy, Table, plan_transfers
from hybridflow.resharding.transport import Traffic, make_group, reshard

TRANSITIONS = ("1-4-1:1-2", "1-4-1:1-1", "2-2-1:1-2", "2-2-1:1-1", "1-2-2:1-1", "1-1-4:1-1", "4-1-1:1-1")
SPEC = ModelSpec.from_config(
    {
        "model_type": "llama",
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 16384,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "eos_token_id": 1,
    }
)
CPUS = os.cpu_count() or 1
RESOLUTION = CPUS * max(32, 2 * CPUS) * os.sysconf("SC_PAGE_SIZE")
"""Bytes by which resident memory may differ from what the kernel says: each CPU counts so many pages of a process by
itself (percpu_counter_batch). Equal runs on two CPUs differed by up to 0.1 MB."""

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Measured:
    """One rank, one transition. Bytes, and medians of seconds; ``gather_*`` is the usual way."""

    received: int
    received_norms: int
    peak: int
    limit: int
    resident: int
    resident_limit: int
    staged: int
    seconds: float
    copy_seconds: float
    gather_received: int
    gather_resident: int
    gather_seconds: float


def parse(name: str) -> GenerationLayout:
    """``p-t-d:p_g-t_g`` as layouts."""
    training, generation = name.split(":")
    pp, tp, dp = map(int, training.split("-"))
    generation_pp, generation_tp = map(int, generation.split("-"))
    return ParallelLayout(tp=tp, pp=pp, dp=dp).generation(tp=generation_tp, pp=generation_pp)


def value_of(tensor: str, dtype: torch.dtype) -> torch.Tensor:
    """What a tensor of the model is: other numbers in each tensor and each row."""
    shape = hf_table(SPEC)[tensor]
    first = sum(map(ord, tensor)) * 7919
    return ((torch.arange(torch.Size(shape).numel()) + first) % 65521).view(shape).to(dtype)


def shard_of(table: Table, dtype: torch.dtype) -> Tensors:
    """The parameters that a table says, each element as the model has it; padding is zero."""
    shard = {name: torch.zeros(parameter.shape, dtype=dtype) for name, parameter in table.items()}
    for tensor in hf_table(SPEC):
        boxes = [(name, box) for name, p in table.items() for box in p.boxes if box.tensor == tensor]
        value = value_of(tensor, dtype) if boxes else None
        for name, box in boxes:
            assert value is not None
            shard[name][slices(box.target)] = value[slices(box.source)]
    return shard


def num_bytes(tensors: Tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def added_memory(run: Callable[[], Tensors]) -> tuple[int, Tensors]:
    """Bytes by which the process grew at most while ``run`` ran, by the kernel's count; and what it returned.

    The median of three, all ranks at once, after one that is not counted: the first use of code takes memory for good.
    """
    grown, answer = [], run()
    for _ in range(3):
        answer = {}
        dist.barrier()
        current().release_cache()
        before = current().memory()["rss"]
        current().forget_peak()
        answer = run()
        grown.append(current().peak() - before)
    return int(statistics.median(grown)), answer


def most_allocated(run: Callable[[], Tensors]) -> int:
    """Bytes of tensors that are there at most while ``run`` runs, beside those that were there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        answer = run()
    del answer
    results: Any = profiler.profiler
    events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


def median_seconds(repeats: int, run: Callable[[], object]) -> float:
    """Median over the repeats, after one that is not counted; all ranks start together."""
    seconds = []
    for _ in range(repeats + 1):
        dist.barrier()
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


class Gather:
    """The usual way: every trainer parameter whole on every rank of a replica, one after the other, then cut."""

    def __init__(self, layout: GenerationLayout, rank: int) -> None:
        training = layout.training
        self.layout, self.at, self.rank = training, training.coordinates(rank), rank
        self.tp_group, self.pp_group = make_group(training.tp_groups()), make_group(training.pp_groups())
        tables = training_tables(SPEC, training)
        self.tables = {r: tables[r] for r in range(training.replica_size)}
        self.copies: dict[tuple[int, str], list[tuple[int, Copy]]] = {}
        for t in plan_transfers(
            {r + 1: table for r, table in self.tables.items()}, {0: generation_tables(SPEC, layout)[rank]}
        ):
            at = training.coordinates(t.sender - 1)
            self.copies.setdefault((at.pp, t.copy.source_name), []).append((at.tp, t.copy))

    def run(self, sources: Tensors, targets: Tensors, dtype: torch.dtype) -> int:
        """Fill the targets; returns bytes received."""
        received = 0
        for stage in range(self.layout.pp):
            for name, parameter in self.tables[stage * self.layout.tp].items():
                shards = [torch.empty(parameter.shape, dtype=dtype) for _ in range(self.layout.tp)]
                if self.at.pp == stage:
                    shards[self.at.tp] = sources[name]
                    if self.tp_group is not None:
                        dist.all_gather(shards, sources[name], group=self.tp_group)
                if self.pp_group is not None:
                    owner = self.rank + (stage - self.at.pp) * self.layout.tp
                    for shard in shards:
                        dist.broadcast(shard, src=owner, group=self.pp_group)
                size = shards[0].numel() * dtype.itemsize
                received += size * (self.layout.tp - 1 if self.at.pp == stage else self.layout.tp)
                for tp_rank, copy in self.copies.get((stage, name), ()):
                    targets[copy.target_name][copy.target_slices].copy_(shards[tp_rank][copy.source_slices])
        return received


def measure(rank: int, name: str, dtype: torch.dtype, bucket: int, repeats: int, share: bool) -> Measured:
    layout = parse(name)
    way = to_generation(SPEC, layout, rank)
    plan, group, gather = way.plan(rank, bucket // dtype.itemsize), make_group(way.groups), Gather(layout, rank)
    sources = shard_of(training_tables(SPEC, layout.training)[rank], dtype)
    table = generation_tables(SPEC, layout)[rank]
    expected = shard_of(table, dtype)

    def empty() -> Tensors:
        return {name: torch.empty(parameter.shape, dtype=dtype) for name, parameter in table.items()}

    def check(targets: Tensors) -> None:
        wrong = [name for name in expected if not torch.equal(targets[name], expected[name])]
        assert not wrong, f"rank {rank}: {name} {dtype}: wrong after the transition: {wrong}"

    def move() -> Tensors:
        targets = empty()
        traffic.append(reshard(plan, sources, targets, dtype=dtype, group=group, share=share))
        return targets

    def move_whole() -> Tensors:
        targets = empty()
        gathered.append(gather.run(sources, targets, dtype))
        return targets

    traffic, gathered = list[Traffic](), list[int]()
    shard, targets = added_memory(lambda: {name: tensor.zero_() for name, tensor in empty().items()})
    del targets
    resident, targets = added_memory(move)
    assert traffic[0].staged <= bucket
    check(targets)
    seconds = median_seconds(repeats, lambda: reshard(plan, sources, targets, dtype=dtype, group=group, share=share))
    del targets
    peak = most_allocated(move)
    gather_resident, targets = added_memory(move_whole)
    check(targets)
    gather_seconds = median_seconds(repeats, lambda: gather.run(sources, targets, dtype))
    flat = torch.ones(num_bytes(targets) // dtype.itemsize, dtype=dtype)
    other = torch.empty_like(flat)
    norms = sum(
        copy.num_elements
        for r in plan.rounds
        for _, copies in r.receives
        for copy in copies
        if "norm" in copy.target_name
    )
    return Measured(
        received=traffic[0].received - norms * dtype.itemsize,
        received_norms=norms * dtype.itemsize,
        peak=peak,
        limit=num_bytes(targets) + bucket,
        resident=resident,
        resident_limit=shard + bucket,
        staged=traffic[0].staged,
        seconds=seconds,
        copy_seconds=median_seconds(repeats, lambda: other.copy_(flat)),
        gather_received=gathered[0],
        gather_resident=gather_resident,
        gather_seconds=gather_seconds,
    )


def report(name: str, dtype: torch.dtype, by_rank: list[Measured]) -> str:
    """One line of the table; asserts that the received bytes are the formula's, and that memory keeps its limits."""
    layout = parse(name)
    t = layout.training
    matrices = sum(torch.Size(shape).numel() for tensor, shape in hf_table(SPEC).items() if "norm" not in tensor)
    size, tp = layout.tp * layout.pp, t.tp * t.pp
    formula = Fraction(tp - size, size * tp) * matrices * dtype.itemsize
    mean = Fraction(sum(m.received for m in by_rank), len(by_rank))
    assert mean == formula, f"{name}: {mean} bytes received a rank, the formula gives {formula}"

    over = max(m.peak - m.limit for m in by_rank)
    assert over <= 0, f"{name}: {over} bytes of tensors more than the generation shard and a bucket"
    above = max(m.resident - m.resident_limit for m in by_rank)
    assert above < RESOLUTION, f"{name}: {above} resident bytes more than the generation shard and a bucket"

    def largest(field: str) -> float:
        return max(getattr(m, field) for m in by_rank)

    def mb(field: str) -> str:
        return f"{largest(field) / 1e6:.1f}"

    return " | ".join(
        [
            f"| {name.replace(':', ' -> ')}",
            str(dtype).removeprefix("torch."),
            f"{float(mean) / 1e6:.1f}",
            mb("received"),
            f"{largest('received_norms') / 1e3:.0f}",
            f"{mb('peak')} / {mb('limit')}",
            mb("resident"),
            mb("staged"),
            f"{largest('seconds'):.3f}",
            f"{largest('seconds') / largest('copy_seconds'):.1f}",
            f"{mb('gather_received')}",
            f"{mb('gather_resident')}",
            f"{largest('gather_seconds'):.3f} |",
        ]
    )


HEADER = """\
| transition | dtype | received, MB (mean = formula) | (most) | norms, kB | peak / limit, MB | resident, MB \
| buffers, MB | seconds | x copy | gather: received, MB | resident, MB | seconds |
|---|---|---|---|---|---|---|---|---|---|---|---|---|"""


def run_rank(rank: int, world: int, store: str, names: list[str], arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(current().backend, init_method=f"file://{store}", rank=rank, world_size=world)
    if rank == 0:
        print(HEADER, flush=True)
    for dtype in [arguments.dtype] if arguments.dtype else ["float32", "bfloat16"]:
        for name in names:
            bucket = int(arguments.bucket_mb * 2**20)
            mine = measure(rank, name, getattr(torch, dtype), bucket, arguments.repeats, arguments.share)
            by_rank: list[Measured] = [mine] * world
            dist.all_gather_object(by_rank, mine)
            if rank == 0:
                print(report(name, getattr(torch, dtype), by_rank), flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("transitions", nargs="*", default=TRANSITIONS, help="p-t-d:p_g-t_g")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="only this one")
    parser.add_argument("--bucket-mb", type=float, default=16.0, help="MiB of send and receive buffers together")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--share", action="store_true", help="use the trainer's memory where shards coincide")
    arguments = parser.parse_args()
    worlds = {parse(name).world_size for name in arguments.transitions}
    if len(worlds) > 1:
        parser.error(f"the transitions need {sorted(worlds)} processes; give those of one number at a time")
    (world,) = worlds
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, (world, f"{folder}/store", list(arguments.transitions), arguments), nprocs=world)


if __name__ == "__main__":
    main()
