"""What a trained model leaves on disk, in Hugging Face coordinates.

    <folder>/model/                    weights, config, tokenizer: a Hugging Face folder as it is
    <folder>/optimizer/exp_avg/        the same tensors' first moments, float32
    <folder>/optimizer/exp_avg_sq/     second moments
    <folder>/optimizer/main/           float32 main copies, for models in bfloat16
    <folder>/optimizer/state.json      optimizer updates so far

Weights, moments and main copies are elementwise images of one another, so the model's table serves all of them.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch.distributed as dist

from hybridflow.config import ModelConfig
from hybridflow.engines.megatron.engine import MegatronEngine
from hybridflow.errors import CheckpointError
from hybridflow.models.hf_io import export_folder, load_parameters


def save(engine: MegatronEngine, folder: str, source: ModelConfig) -> None:
    """Write the engine's model and optimizer below ``folder``; all ranks call, the first one writes.

    Raises:
        CheckpointError: naming the path and the reason.
    """
    world = dist.group.WORLD
    tokenizer = source.tokenizer_path or None
    parts = [(engine.table, engine.parameters())]
    export_folder(Path(folder) / "model", engine.spec, source.path, parts, group=world, tokenizer_folder=tokenizer)
    if engine.optimizer is not None:
        below = Path(folder) / "optimizer"
        table, states = engine.optimizer_states()
        for kind, tensors in states.items():
            export_folder(below / kind, engine.spec, below, [(table, tensors)], group=world)
        if dist.get_rank() == 0:
            (below / "state.json").write_text(json.dumps({"updates": engine.optimizer.updates}))
    dist.barrier()


def load(engine: MegatronEngine, folder: str) -> None:
    """Continue from what :func:`save` wrote, in place, in any layout.

    Raises:
        CheckpointError: a part is missing; names it.
    """
    engine.changes += 1
    load_parameters(Path(folder) / "model", engine.table, engine.parameters())
    if engine.optimizer is None:
        return
    below = Path(folder) / "optimizer"
    table, states = engine.optimizer_states()
    for kind, tensors in states.items():
        if not (below / kind).is_dir():
            raise CheckpointError(
                f"{below / kind} is missing: the checkpoint was written with another model.dtype. "
                "Resume with the dtype it was written with, or start a new run from its model folder."
            )
        load_parameters(below / kind, table, tensors)
    engine.optimizer.set_updates(int(json.loads((below / "state.json").read_text())["updates"]))
