"""ReMax (Li et al., 2024): REINFORCE with the reward of the greedy answer as the baseline; no critic, no groups.

    python examples/remax.py model=smollm2 data=arithmetic
    python examples/remax.py rollout.n=2 actor.optimizer.lr=1e-4

What differs from examples/grpo.py is the second generation and its score.
"""

import hybridflow
from hybridflow.algorithms.step import compute_advantages
from hybridflow.config import ReMaxConfig, SamplingConfig

GREEDY = SamplingConfig(temperature=0.0)


@hybridflow.driver("remax", ReMaxConfig)
def main(config: ReMaxConfig) -> None:
    with hybridflow.launch(config) as run:
        for prompts in run.steps():
            with run.timer("generate"):
                batch = run.rollout.generate(prompts.repeat(config.rollout.n))
                greedy = run.rollout.generate(prompts, sampling=GREEDY, tag="greedy")
            with run.timer("reward"):
                scored = run.reward.score(batch, blocking=False)
                baseline_scored = run.reward.score(greedy, blocking=False)
            with run.timer("log_probs"):
                batch = batch.union(run.actor.log_probs(batch))
            with run.timer("ref_log_probs"):
                batch = batch.union(run.reference.log_probs(batch))
            with run.timer("reward"):
                batch = batch.union(scored.result())
                baseline = baseline_scored.result().select("rewards", [], []).rename("rewards", "baseline_rewards")
            with run.timer("advantage"):
                batch = batch.union(baseline.repeat(config.rollout.n))
                batch = batch.union(compute_advantages(batch, config))
            with run.timer("update_actor"):
                metrics = run.actor.update(batch)
            run.finish_step(metrics, batch)


if __name__ == "__main__":
    main()
