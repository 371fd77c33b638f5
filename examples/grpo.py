"""GRPO (DeepSeekMath, 2024): sample a group of answers to each prompt, and prefer the ones better than their group.

    python examples/grpo.py model=smollm2 data=arithmetic
    python examples/grpo.py pools.train.devices=[1] actor.optimizer.lr=1e-6

The loop below is the whole algorithm; every call on a role runs on all of that role's devices.
"""

import hybridflow
from hybridflow.algorithms.step import compute_advantages
from hybridflow.config import GRPOConfig


@hybridflow.driver("grpo", GRPOConfig)
def main(config: GRPOConfig) -> None:
    with hybridflow.launch(config) as run:
        for prompts in run.steps():
            with run.timer("generate"):
                batch = run.rollout.generate(prompts.repeat(config.rollout.n))
            with run.timer("reward"):
                scored = run.reward.score(batch, blocking=False)
            with run.timer("log_probs"):
                batch = batch.union(run.actor.log_probs(batch))
            with run.timer("ref_log_probs"):
                batch = batch.union(run.reference.log_probs(batch))
            with run.timer("reward"):
                batch = batch.union(scored.result())
            with run.timer("advantage"):
                batch = batch.union(compute_advantages(batch, config))
            with run.timer("update_actor"):
                metrics = run.actor.update(batch)
            run.finish_step(metrics, batch)


if __name__ == "__main__":
    main()
