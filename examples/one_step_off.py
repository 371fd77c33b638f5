"""GRPO with generation one step ahead: while a step is trained on, the rollout's pool generates the next one.

    python examples/one_step_off.py
    python examples/one_step_off.py placement=disaggregate pools.rollout.devices=[2] max_staleness=2

The rollout has a pool of its own (placement=disaggregate). Its answers come from a policy that is up to `max_staleness`
steps behind, which `algorithm.correction` makes up for. What differs from examples/grpo.py is `generate` and `ahead`.
"""

import hybridflow
from hybridflow.algorithms.step import compute_advantages
from hybridflow.config import OneStepOffConfig


@hybridflow.driver("one_step_off", OneStepOffConfig)
def main(config: OneStepOffConfig) -> None:
    with hybridflow.launch(config) as run:

        def generate(prompts: hybridflow.DataProto) -> hybridflow.DataFuture:
            return run.rollout.generate(prompts.repeat(config.rollout.n), blocking=False)

        for generated in run.steps(generate, ahead=config.max_staleness):
            with run.timer("generate"):
                batch = generated.result()
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
