"""PPO (Schulman et al., 2017; Ouyang et al., 2022): a critic estimates what an answer will be worth at each of its
tokens, and tokens after which it turns out better than estimated become likelier.

    python examples/ppo.py model=smollm2 data=arithmetic
    python examples/ppo.py 'roles.reference={pool: train}' algorithm.kl_coef=0.02    # a KL in the reward
    python examples/ppo.py 'roles.reference={pool: train}' actor.loss.kl_coef=0.02   # or in the loss

In the first `critic.warmup_steps` steps the critic alone learns.
"""

import hybridflow
from hybridflow.algorithms.step import compute_advantages
from hybridflow.config import PPOConfig


@hybridflow.driver("ppo", PPOConfig)
def main(config: PPOConfig) -> None:
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
            with run.timer("values"):
                batch = batch.union(run.critic.values(batch))
            with run.timer("advantage"):
                batch = batch.union(compute_advantages(batch, config))
            with run.timer("update_critic"):
                metrics = run.critic.update(batch)
            if run.step > config.critic.warmup_steps:
                with run.timer("update_actor"):
                    metrics |= run.actor.update(batch)
            run.finish_step(metrics, batch)


if __name__ == "__main__":
    main()
