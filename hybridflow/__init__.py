"""HybridFlow: RL post-training of language models, written as a plain Python driver and run distributed.

    @hybridflow.driver("grpo", GRPOConfig)
    def main(config):
        with hybridflow.launch(config) as run:
            for prompts in run.steps():
                ...

Importing the package loads neither ray, vllm nor megatron.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["DataFuture", "DataProto", "driver", "launch"]

if TYPE_CHECKING:
    from hybridflow.compose import driver
    from hybridflow.controller.future import DataFuture
    from hybridflow.controller.launch import launch
    from hybridflow.protocol.data import DataProto

_HOMES = {
    "driver": "hybridflow.compose",
    "launch": "hybridflow.controller.launch",
    "DataFuture": "hybridflow.controller.future",
    "DataProto": "hybridflow.protocol.data",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hybridflow' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
