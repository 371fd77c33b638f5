"""megatron-core's own resharding (``megatron.core.resharding``) as an oracle for plans between two Megatron layouts.

It knows tensor, pipeline and data parallelism of Megatron models, nothing of vLLM's parameters, so it judges the part
that both know: the same weights, by the same number of elements on their way.
"""

from typing import Any

import pytest
import torch

from hybridflow.models.transition import training_tables
from hybridflow.resharding.layout import ParallelLayout
from hybridflow.resharding.plan import plan_rank
from hybridflow.resharding.transport import reshard
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny_model

# From one layout to another on the same four ranks.
PAIRS = [({"tp": 4}, {"tp": 2}), ({"tp": 2, "pp": 2}, {"pp": 4}), ({"pp": 2}, {"tp": 2, "cp": 2})]


def built(folder: str, layout: ParallelLayout) -> tuple[Any, torch.nn.Module]:
    from hybridflow.engines.megatron.engine import MegatronEngine

    engine = MegatronEngine(folder, layout, torch.float32, valid_vocab=61)
    (module,) = engine.modules.values()
    return engine, module


def both_ways(rank: int, folder: str, zeros: str) -> list[tuple[list[str], int, int]]:
    """Of each pair: parameters in which the two differ, and the elements that this rank received by ours and theirs."""
    import torch.distributed as dist
    from megatron.core.resharding.refit import swap_model_weights

    found = []
    for degrees in PAIRS:
        before, after = (ParallelLayout.on(4, **d) for d in degrees)
        source, source_module = built(folder, before)
        target, target_module = built(zeros, after)
        plan = plan_rank(rank, training_tables(source.spec, before), training_tables(source.spec, after), 5000)
        reshard(plan, source.parameters(), target.parameters(), dtype=torch.float32, group=dist.group.WORLD)
        ours = {name: parameter.clone() for name, parameter in target.parameters().items()}
        for parameter in target.parameters().values():
            parameter.zero_()
        with target.parallel:
            swap_model_weights(source_module, target_module, "gloo")
        theirs = target.parameters()
        differing = [name for name in ours if not torch.equal(ours[name], theirs[name])]
        operations: Any = target_module._cached_reshard_plan
        crossed = sum(theirs[o.param_name][o.my_slice].numel() for o in operations.recv_ops if o.peer_rank != rank)
        found.append((differing, plan.num_received, crossed))
    return found


@pytest.mark.distributed
def test_megatron_moves_the_same_weights_and_as_many_elements_or_more(tmp_path):
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 4, "vocab_size": 64}
    folder = save_tiny_model(tmp_path / "model", "qwen3", **sizes)
    other = save_tiny_model(tmp_path / "other", "qwen3", seed=1, **sizes)
    by_rank = run_ranks(both_ways, 4, folder, other)
    for k, pair in enumerate(PAIRS):
        assert [found[k][0] for found in by_rank] == [[]] * 4, pair
        ours, theirs = ([found[k][side] for found in by_rank] for side in (1, 2))
        if "pp" in pair[0] and "tp" in pair[1]:
            # Theirs takes a whole replica's copy; ours first what a rank holds itself.
            assert sum(ours) < sum(theirs) and all(a <= b for a, b in zip(ours, theirs, strict=True)), pair
        else:
            assert ours == theirs and sum(ours) > 0, pair
