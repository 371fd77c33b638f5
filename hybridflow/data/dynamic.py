"""Dynamic sampling: prompts whose answers teach nothing are replaced by the prompts that come next.

Where it stands: in a driver, around generation and reward (DAPO, Yu et al. 2025, arXiv 2503.14476, section 3.2). A
group is all answers to one prompt; it has a signal if they are not all right and not all wrong. Invariants:

- Groups are kept or left out as wholes, in the order of the data, and a step gets exactly the groups it asked for.
- How prompts count: a step keeps the first groups with a signal. Every prompt up to the last kept one is used up: it
  was trained on, or it had no signal. Every prompt behind it is given back and comes next, with new answers, whatever
  its answers were. So no prompt is lost, whether a prompt is given back does not depend on its own answers, and a
  checkpoint needs one number, the place in the data, to resume with the prompt that would have come next.
- Tries are bounded. Where the last one leaves places open, the first groups without a signal take them (as in GRPO),
  and everything that was sampled is used up.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator

import torch

from hybridflow.algorithms.filters import group_shares, with_signal
from hybridflow.config import DynamicSamplingConfig
from hybridflow.data.stream import PromptStream
from hybridflow.errors import DataError
from hybridflow.protocol.data import DataProto
from hybridflow.protocol.meta import METRICS, join_metrics

log = logging.getLogger(__name__)


class DynamicSampling:
    """The tries of one step.

    ::

        sampling = DynamicSampling(run.stream, prompts, config.dynamic_sampling)
        for prompts in sampling.tries():
            answers = run.rollout.generate(prompts.repeat(config.rollout.n), tag=sampling.tag)
            sampling.add(answers.union(run.reward.score(answers)))
        batch = sampling.batch()

    Args:
        stream: gives further prompts; ``prompts`` are the last it gave.
        prompts: of the first try, as many as the step has groups.
        config: what a signal is, and how many tries there are.
    """

    def __init__(self, stream: PromptStream, prompts: DataProto, config: DynamicSamplingConfig) -> None:
        self._stream, self._first, self._config = stream, prompts, config
        self._asked: list[DataProto] = []
        self._scored: list[DataProto] = []

    @property
    def tag(self) -> str:
        """What makes the random draws of this try others than those of the one before (see ``rollout.generate``)."""
        return "train" if len(self._asked) < 2 else f"train/{len(self._asked)}"

    def tries(self) -> Iterator[DataProto]:
        """Prompts to answer, until enough groups have a signal or ``max_tries`` is reached.

        A try after the first has as many prompts as fill the step if signals stay as frequent as they were, but never
        more than the first.

        Raises:
            DataError: if the answers of a try were not added.
        """
        prompts = self._first
        while True:
            self._asked.append(prompts)
            yield prompts
            if len(self._scored) != len(self._asked):
                raise DataError(
                    f"try {len(self._asked)} has no answers: call add(batch) once in each round of tries()."
                )
            missing = len(self._first) - len(self._with_signal())
            if missing <= 0 or len(self._asked) >= self._config.max_tries:
                return
            share = len(self._with_signal()) / sum(map(len, self._asked))
            count = math.ceil(missing / share) if share else len(self._first)
            prompts = self._stream.take(min(count, len(self._first)), prompts.meta_info["step"])

    def add(self, batch: DataProto) -> None:
        """The scored answers to the prompts of this try: ``group_ids``, ``rewards``, ``solved`` and all the rest.

        Raises:
            DataError: if they answer other prompts.
        """
        wanted, found = self._asked[-1]["group_ids"], batch["group_ids"].unique()
        if not torch.equal(wanted, found):
            raise DataError(
                f"add: the batch answers the groups {found.tolist()}, this try asked for {wanted.tolist()}: add all "
                "answers to the prompts of one try."
            )
        self._scored.append(batch)

    def batch(self) -> DataProto:
        """The answers of exactly as many groups as the step asked for; prompts behind them are given back.

        ``meta_info["metrics"]`` has besides what the workers report: ``sampling/tries``; ``sampling/prompts`` used up;
        ``sampling/returned`` prompts; ``sampling/filled``, groups without a signal that are in the batch; and, over all
        answers to the prompts that are used up, ``sampling/solved``, ``sampling/reward`` and the shares of
        :func:`hybridflow.algorithms.filters.group_shares`.
        """
        size, kept = len(self._first), self._with_signal()[: len(self._first)]
        groups = torch.cat([asked["group_ids"] for asked in self._asked]).tolist()
        fill = [group for group in groups if group not in set(kept)][: size - len(kept)]
        last = groups[-1] if fill else kept[-1]
        self._stream.give_back(groups[-1] - last)
        chosen = torch.tensor([*kept, *fill])
        parts = [scored[torch.isin(scored["group_ids"], chosen)] for scored in self._scored]
        batch = DataProto.concat([part for part in parts if len(part)])
        used = {
            key: torch.cat([scored[key][scored["group_ids"] <= last] for scored in self._scored])
            for key in ("rewards", "solved", "group_ids")
        }
        counts = {"tries": len(self._asked), "prompts": last + 1 - groups[0], "returned": groups[-1] - last}
        shares = group_shares(used["rewards"], used["solved"], used["group_ids"])
        means = {"solved": used["solved"].double().mean().item(), "reward": used["rewards"].double().nanmean().item()}
        found = {**counts, "filled": len(fill), **means, **shares}
        batch.meta_info[METRICS] = {
            **join_metrics(batch.meta_info.get(METRICS, {})),
            **{f"sampling/{name}": float(value) for name, value in found.items()},
        }
        if fill:
            log.warning(
                "step %d: %d of %d groups have a signal after %d tries (dynamic_sampling.max_tries); %d without one "
                "fill the batch.",
                *(batch.meta_info.get("step", 0), len(kept), size, len(self._asked), len(fill)),
            )
        return batch

    def _with_signal(self) -> list[int]:
        """The groups that have a signal, in the order of the data."""
        found: list[int] = []
        for scored in self._scored:
            values = scored["rewards"]
            if self._config.by == "solved":
                values = torch.where(values.isfinite(), scored["solved"].float(), torch.nan)
            found += scored["group_ids"][with_signal(values, scored["group_ids"])].unique().tolist()
        return found
