"""A reward model from pairs of answers (Bradley and Terry, 1952): the chosen one is to score higher than the rejected.

    python examples/reward_model.py model=smollm2 data.train=my_pairs.jsonl
    python examples/ppo.py roles.reward.pool=train reward.path=runs/reward-model-tiny/model

A row has a prompt and the texts `chosen` and `rejected`. The actor here is the reward model in training: it begins from
a language model, whose new head begins with zeros. What it leaves in `model` is a sequence classifier with one label.
"""

import hybridflow
from hybridflow.algorithms.preferences import bradley_terry_weights
from hybridflow.config import RewardModelConfig


@hybridflow.driver("reward_model", RewardModelConfig)
def main(config: RewardModelConfig) -> None:
    with hybridflow.launch(config) as run:
        for batch in run.steps():
            with run.timer("scores"):
                batch = batch.union(run.actor.scores(batch))
            with run.timer("advantage"):
                batch = batch.union(bradley_terry_weights(batch))
            with run.timer("update_actor"):
                metrics = run.actor.update(batch)
            run.finish_step(metrics, batch)


if __name__ == "__main__":
    main()
