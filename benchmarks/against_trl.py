"""GRPO steps of HybridFlow and of TRL's GRPOTrainer in turn: same model, prompts, shape, precision and cores.

    python benchmarks/against_trl.py                     # 0.46 M parameters
    python benchmarks/against_trl.py --hidden 384 --layers 6    # about 10 M
    python benchmarks/against_trl.py --spread            # responses of all lengths, as trained models give
    python benchmarks/against_trl.py --model models/smollm2 --prompts 2 --samples 4 --steps 3 --rounds 1     # 135 M
    python benchmarks/against_trl.py --vllm              # TRL's vLLM mode too (compiling vLLM takes it two minutes)

TRL gets an environment of its own (``runs/benchmarks/trl``: TRL 1.16, the same torch and transformers; vLLM is this
environment's). Both are run in two settings, of which the better one counts: TRL with one thread and with two,
HybridFlow with two device processes of one thread and with one of two.
A random model draws its end id once in some 300 tokens, so responses run to ``--max-tokens``: the case that is best for
a trainer that pads. With ``--spread`` the end's probability differs from place to place.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
from pathlib import Path

from hybridflow.data import demo

ROOT = Path("runs/benchmarks")
PINS = ["torch==2.13.0", "transformers==5.19.0", "trl==1.16.0", "accelerate==1.15.0", "datasets==5.2.0"]
WARM_UP = 2
END_LOGIT_STD = 2.3


def trl_python() -> str:
    """The interpreter of TRL's environment, made on the first call."""
    python = ROOT / "trl" / "bin" / "python"
    if not python.exists():
        print("making TRL's environment (a minute or two)", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(ROOT / "trl")], check=True)
        pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, PINS[0]], check=True, stderr=subprocess.DEVNULL)
        subprocess.run([*pip, *PINS], check=True, stderr=subprocess.DEVNULL)
        # What TRL's environment lacks (vLLM and its dependencies) is found in this one.
        folder = next((ROOT / "trl" / "lib").glob("python*")) / "site-packages"
        (folder / "fallback.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return str(python)


def write_prompts(folder: Path) -> None:
    """The demo's prompts, in messages that both put through the chat template; and its model."""
    demo.write_demo(folder, 0)
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": r["messages"][:1]}) + "\n" for r in rows))


def make_model(folder: Path, hidden: int, layers: int, spread: bool) -> None:
    """A random Qwen3 with the demo's tokenizer in ``folder/model``; with ``spread`` its responses have all lengths."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder / "model")
    heads = hidden // config.head_dim
    for name, value in {
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 2),
        "layer_types": ["full_attention"] * layers,
        "max_window_layers": layers,
    }.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    if spread:
        # Logits of the end id of this standard deviation: after some tokens the end is likely, after most it is not.
        row = model.get_output_embeddings().weight.data[config.eos_token_id]
        row *= END_LOGIT_STD / (config.initializer_range * math.sqrt(hidden))
    model.save_pretrained(folder / "model")


def count_parameters(model: Path) -> int:
    """Elements of all tensors in a model folder."""
    from safetensors import safe_open

    total = 0
    for path in model.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            total += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return total


def run_trl(args: argparse.Namespace, assets: Path, threads: int, vllm: bool = False) -> list[float]:
    """Response tokens a second of each measured step."""
    command = [
        trl_python(), "benchmarks/peers/trl_grpo.py",
        "--model", str(args.model), "--prompts", str(assets / "prompts.jsonl"),
        "--prompts-per-step", str(args.prompts), "--samples", str(args.samples), "--max-tokens", str(args.max_tokens),
        "--steps", str(args.steps + WARM_UP), "--warm-up", str(WARM_UP), "--threads", str(threads),
        "--out", str(ROOT / "trl_out"), *(["--vllm"] if vllm else []),
    ]  # fmt: skip
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise SystemExit(f"TRL failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    found = json.loads(lines[0].removeprefix("RESULT "))
    return [t / s for t, s in zip(found["response_tokens"], found["seconds"], strict=False)]


def run_ours(args: argparse.Namespace, assets: Path, devices: int) -> list[float]:
    """Response tokens a second of each measured step."""
    shutil.rmtree(ROOT / "ours", ignore_errors=True)
    command = [
        sys.executable, "examples/grpo.py", f"runs_dir={ROOT}", "name=ours",
        f"model.path={args.model}", f"pools.train.devices=[{devices}]",
        # All cores of the two; the process that scores answers needs little.
        f"pools.train.cores_per_device={1.9 / devices}", "pools.cpu.cores_per_device=0.1",
        f"data.train={assets}/train.jsonl", f"data.evaluate={assets}/heldout.jsonl",
        f"data.prompts_per_step={args.prompts}", f"rollout.n={args.samples}", f"rollout.max_tokens={args.max_tokens}",
        f"actor.micro_batch_size={args.prompts * args.samples}", "actor.optimizer.lr=1e-6",
        "actor.loss.old_log_probs=own",  # as TRL does where a batch is used once
        "evaluate.at_start=false", "evaluate.every=0", "checkpoint.every=0", f"steps={args.steps + WARM_UP}",
        "rollout.kv_cache_gb=0.05", "rollout.max_prompt_tokens=64",
    ]  # fmt: skip
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (ROOT / "ours" / "metrics.jsonl").read_text().splitlines()]
    # Wall-clock from one step's report to the next: what TRL's callback measures too.
    rows = [row for row in rows if "time/step" in row and row["step"] >= WARM_UP]
    tokens = [row["throughput/response_tokens_per_second"] * row["time/step"] for row in rows]
    seconds = [b["timestamp"] - a["timestamp"] for a, b in itertools.pairwise(rows)]
    return [t / s for t, s in zip(tokens[1:], seconds, strict=True)][:-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--spread", action="store_true", help="a random model whose responses have all lengths")
    parser.add_argument("--model", type=Path, help="a model folder, in place of a random model of that shape")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--vllm", action="store_true", help="also measure TRL's colocated vLLM mode")
    args = parser.parse_args()
    random_model = f"{args.hidden}x{args.layers}{'_spread' if args.spread else ''}"
    assets = ROOT / f"assets_{args.model.name if args.model else random_model}"
    write_prompts(assets)
    if not args.model:
        make_model(assets, args.hidden, args.layers, args.spread)
        args.model = assets / "model"
    found: dict[str, list[float]] = {}
    for _ in range(args.rounds):
        for name, run in {
            "TRL, 1 thread": lambda: run_trl(args, assets, 1),
            "HybridFlow, 2 devices": lambda: run_ours(args, assets, 2),
            "TRL, 2 threads": lambda: run_trl(args, assets, 2),
            "HybridFlow, 1 device": lambda: run_ours(args, assets, 1),
            **({"TRL, vLLM": lambda: run_trl(args, assets, 2, vllm=True)} if args.vllm else {}),
        }.items():
            found.setdefault(name, []).extend(run())
    shape = f"{args.prompts} x {args.samples} samples, up to {args.max_tokens} tokens"
    print(f"{count_parameters(args.model) / 1e6:.2f} M parameters, {shape}")
    median = {name: statistics.median(values) for name, values in found.items()}
    for name, value in median.items():
        print(f"  {name:<21} {value:8.0f} response tokens/s in whole steps (median of {len(found[name])} steps)")
    ours, theirs = (max(v for name, v in median.items() if name.startswith(of)) for of in ("HybridFlow", "TRL"))
    print(f"  HybridFlow / TRL, the better setting of each: {ours / theirs:.2f}")


if __name__ == "__main__":
    main()
