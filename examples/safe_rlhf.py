"""Safe RLHF (Dai et al., 2023): PPO on rewards minus costs, weighed by a multiplier that grows while answers cost more
than the limit and shrinks while they cost less.

    python examples/safe_rlhf.py safety.cost_limit=0.2
    python examples/safe_rlhf.py cost.function=my_costs.py:harm 'roles.reference={pool: train}' algorithm.kl_coef=0.02

What differs from examples/ppo.py: the roles cost and cost_critic, and the advantages.
"""

import hybridflow
from hybridflow.algorithms.safety import next_multiplier, safe_advantages
from hybridflow.config import SafeRLHFConfig


@hybridflow.driver("safe_rlhf", SafeRLHFConfig)
def main(config: SafeRLHFConfig) -> None:
    with hybridflow.launch(config) as run:
        for prompts in run.steps():
            with run.timer("generate"):
                batch = run.rollout.generate(prompts.repeat(config.rollout.n))
            with run.timer("reward"):
                scored = run.reward.score(batch, blocking=False)
                judged = run.cost.score(batch, blocking=False)
            with run.timer("log_probs"):
                batch = batch.union(run.actor.log_probs(batch))
            with run.timer("ref_log_probs"):
                batch = batch.union(run.reference.log_probs(batch))
            with run.timer("reward"):
                batch = batch.union(scored.result())
                batch = batch.union(judged.result())
            with run.timer("values"):
                batch = batch.union(run.critic.values(batch))
                batch = batch.union(run.cost_critic.values(batch))
            with run.timer("advantage"):
                multiplier = run.state.get("multiplier", config.safety.multiplier)
                run.state["multiplier"] = next_multiplier(multiplier, batch["costs"], config.safety)
                batch = batch.union(safe_advantages(batch, config, run.state["multiplier"]))
            with run.timer("update_critic"):
                metrics = run.critic.update(batch)
                metrics |= run.cost_critic.update(batch)
            if run.step > config.critic.warmup_steps:
                with run.timer("update_actor"):
                    metrics |= run.actor.update(batch)
            run.finish_step(metrics, batch)


if __name__ == "__main__":
    main()
