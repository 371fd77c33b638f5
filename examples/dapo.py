"""DAPO (Yu et al., 2025): GRPO with a higher upper clip, a loss averaged over all tokens, a penalty for length near
the limit, and dynamic sampling: prompts whose answers are all right or all wrong are replaced by the next ones.

    python examples/dapo.py model=smollm2 data=arithmetic
    python examples/dapo.py dynamic_sampling.max_tries=3 actor.loss.clip_high=0.25

What differs from examples/grpo.py is the loop around generation and reward; the rest is in configs/algorithm/dapo.yaml.
"""

import hybridflow
from hybridflow.algorithms.step import compute_advantages
from hybridflow.config import DAPOConfig
from hybridflow.data.dynamic import DynamicSampling


@hybridflow.driver("dapo", DAPOConfig)
def main(config: DAPOConfig) -> None:
    with hybridflow.launch(config) as run:
        for first in run.steps():
            sampling = DynamicSampling(run.stream, first, config.dynamic_sampling)
            for prompts in sampling.tries():
                with run.timer("generate"):
                    answers = run.rollout.generate(prompts.repeat(config.rollout.n), tag=sampling.tag)
                with run.timer("reward"):
                    sampling.add(answers.union(run.reward.score(answers)))
            batch = sampling.batch()
            with run.timer("log_probs"):
                batch = batch.union(run.actor.log_probs(batch))
            with run.timer("ref_log_probs"):
                batch = batch.union(run.reference.log_probs(batch))
            with run.timer("advantage"):
                batch = batch.union(compute_advantages(batch, config))
            with run.timer("update_actor"):
                metrics = run.actor.update(batch)
            run.finish_step(metrics, batch)


if __name__ == "__main__":
    main()
