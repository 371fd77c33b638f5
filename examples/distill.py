"""On-policy distillation (Agarwal et al., 2024): a teacher scores what the student writes, token by token.

    python examples/distill.py model.path=runs/demo/sft-tiny/model teacher.path=runs/demo/grpo-tiny/model
    python examples/distill.py algorithm=distill_hybrid algorithm.lambda_opd=0.3

The student's own samples are its training data; the advantage of a token is how much likelier the teacher finds it.
With `algorithm=distill_hybrid` GRPO's advantage is added. The teacher stands on a pool of its own.
"""

import hybridflow
from hybridflow.algorithms.step import compute_advantages
from hybridflow.config import DistillConfig


@hybridflow.driver("distill", DistillConfig)
def main(config: DistillConfig) -> None:
    with hybridflow.launch(config) as run:
        for prompts in run.steps():
            with run.timer("generate"):
                batch = run.rollout.generate(prompts.repeat(config.rollout.n))
            with run.timer("teacher_log_probs"):
                taught = run.teacher.log_probs(batch, blocking=False)
            with run.timer("reward"):
                scored = run.reward.score(batch, blocking=False)
            with run.timer("log_probs"):
                batch = batch.union(run.actor.log_probs(batch))
            with run.timer("teacher_log_probs"):
                batch = batch.union(taught.result())
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
