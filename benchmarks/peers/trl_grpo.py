"""TRL's GRPOTrainer on the benchmark's shape; run by ``benchmarks/against_trl.py`` inside TRL's own environment.

Prints one JSON line: seconds of each step after warm-up, and tokens (prompt + completion) of each.
"""

import argparse
import json
import time

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):
    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, *args, **kwargs) -> None:
        self.times.append(time.perf_counter())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", required=True, help="JSONL with messages as the prompt of each row")
    parser.add_argument("--prompts-per-step", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--vllm", action="store_true", help="generate with vLLM in the same process (colocate mode)")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    if args.vllm:
        import vllm._custom_ops as ops

        # With packed weights vLLM's CPU build cannot take new ones, which TRL hands over before every generation.
        ops._supports_onednn = False
    torch.set_num_threads(args.threads)
    with open(args.prompts) as file:
        rows = [json.loads(line) for line in file]
    tokens: list[int] = []

    def reward(prompts, completions, completion_ids, **_):
        tokens.append(sum(map(len, completion_ids)))
        return [float(len(ids) % 7) for ids in completion_ids]

    clock = Clock()
    trainer = GRPOTrainer(
        model=args.model,
        reward_funcs=reward,
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in rows]),
        callbacks=[clock],
        args=GRPOConfig(
            output_dir=args.out,
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=args.prompts_per_step * args.samples,
            gradient_accumulation_steps=1,
            num_generations=args.samples,
            max_completion_length=args.max_tokens,
            max_steps=args.steps,
            learning_rate=1e-6,
            beta=0.0,
            temperature=1.0,
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            dataloader_num_workers=0,
            gradient_checkpointing=False,
            use_vllm=args.vllm,
            vllm_mode="colocate",
            vllm_max_model_length=256,
        ),
    )
    clock.times.append(time.perf_counter())
    trainer.train()
    seconds = [b - a for a, b in zip(clock.times, clock.times[1:], strict=False)]
    print("RESULT " + json.dumps({"seconds": seconds[args.warm_up :], "response_tokens": tokens[args.warm_up :]}))


if __name__ == "__main__":
    main()
