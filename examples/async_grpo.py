"""GRPO on answers that go on over several updates: a long answer holds up neither the next step's answers nor the sync.

    python examples/async_grpo.py
    python examples/async_grpo.py pools.rollout.devices=[2] max_staleness=4

A step's prompts enter the engines up to `max_staleness` steps early, and are answered in the places that nearer steps
leave free. Each sync finds answers half-way: they keep their tokens and go on with the new weights. Every token has the
log-probability of the weights that drew it, which `algorithm.correction` weighs it by. What differs from
examples/one_step_off.py is `begin`.
"""

import hybridflow
from hybridflow.algorithms.step import compute_advantages
from hybridflow.config import OneStepOffConfig


@hybridflow.driver("async_grpo", OneStepOffConfig)
def main(config: OneStepOffConfig) -> None:
    with hybridflow.launch(config) as run:

        def begin(prompts: hybridflow.DataProto) -> hybridflow.DataProto:
            prompts = prompts.repeat(config.rollout.n)
            run.rollout.begin(prompts, blocking=False)
            return prompts

        def generate(prompts: hybridflow.DataProto) -> hybridflow.DataFuture:
            return run.rollout.generate(prompts, blocking=False)

        for generated in run.steps(generate, ahead=config.max_staleness, begin=begin):
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
