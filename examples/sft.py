"""Supervised fine-tuning: raise the likelihood of given answers.

    python examples/sft.py model=smollm2 data.train=my_chats.jsonl

Rows end in an assistant message, or carry their answer in a column; only the answer's tokens are trained on.
"""

import hybridflow
from hybridflow.config import SFTConfig


@hybridflow.driver("sft", SFTConfig)
def main(config: SFTConfig) -> None:
    with hybridflow.launch(config) as run:
        for batch in run.steps():
            with run.timer("update_actor"):
                metrics = run.actor.update(batch)
            run.finish_step(metrics, batch)


if __name__ == "__main__":
    main()
