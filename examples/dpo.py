"""DPO (Rafailov et al., 2023): raise the likelihood of chosen answers over that of rejected ones, without a reward.

    python examples/dpo.py model=smollm2 data.train=my_pairs.jsonl
    python examples/dpo.py preference.beta=0.3

A row has a prompt and the texts `chosen` and `rejected`. The advantage step turns a pair's loss into one weight for
each of its answers; the update is then the plain policy gradient.
"""

import hybridflow
from hybridflow.algorithms.preferences import dpo_advantages
from hybridflow.config import DPOConfig


@hybridflow.driver("dpo", DPOConfig)
def main(config: DPOConfig) -> None:
    with hybridflow.launch(config) as run:
        for batch in run.steps():
            with run.timer("log_probs"):
                batch = batch.union(run.actor.log_probs(batch))
            with run.timer("ref_log_probs"):
                batch = batch.union(run.reference.log_probs(batch))
            with run.timer("advantage"):
                batch = batch.union(dpo_advantages(batch, config.preference))
            with run.timer("update_actor"):
                metrics = run.actor.update(batch)
            run.finish_step(metrics, batch)


if __name__ == "__main__":
    main()
