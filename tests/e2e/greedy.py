"""A driver of a user's own: GRPO, and after the last step greedy answers of the engine, kept in ``<run>/greedy``.

What it keeps is what the weights that were synced last say, to be compared with the model folder of the run.
"""

import hybridflow
from hybridflow.algorithms.step import compute_advantages
from hybridflow.config import GRPOConfig


@hybridflow.driver("grpo", GRPOConfig)
def main(config: GRPOConfig) -> None:
    with hybridflow.launch(config) as run:
        for prompts in run.steps():
            batch = run.rollout.generate(prompts.repeat(config.rollout.n))
            batch = batch.union(run.reward.score(batch))
            batch = batch.union(run.actor.log_probs(batch))
            batch = batch.union(run.reference.log_probs(batch))
            batch = batch.union(compute_advantages(batch, config))
            run.finish_step(run.actor.update(batch), batch)
        held_out = run.source.held_out()[: config.evaluate.size]
        answers = run.rollout.generate(held_out, sampling=config.evaluate.sampling, tag="evaluate")
        answers.save_to_disk(run.tracker.run_dir / "greedy")


if __name__ == "__main__":
    main()
