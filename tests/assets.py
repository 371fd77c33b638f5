"""The cheapest model folder and data that the checks accept, written in milliseconds: nothing here can be trained."""

import json
from pathlib import Path

DRIVER_OF = {"remax": "remax", "distill": "distill", "distill_hybrid": "distill"}
"""The driver that makes what an option of the group ``algorithm`` reads; the others are GRPO's."""

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 262,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


def write_model(folder: Path, **changes: object) -> Path:
    """A folder with a config.json, an empty tokenizer and empty weights."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def overrides_for(folder: Path) -> list[str]:
    """Write model and data below ``folder`` and name them, and a runs_dir, as overrides."""
    model = write_model(folder / "model")
    for name in ("train.jsonl", "heldout.jsonl"):
        (folder / name).write_text(json.dumps({"prompt": "1+1=", "ground_truth": "2"}) + "\n")
    return [
        f"model.path={model}",
        f"data.train={folder / 'train.jsonl'}",
        f"data.evaluate={folder / 'heldout.jsonl'}",
        f"runs_dir={folder / 'runs'}",
    ]
