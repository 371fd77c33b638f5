"""Rewards of a batch of answers, on plain lists.

Where it stands: between the reward role (:mod:`hybridflow.workers.reward`) and the pool of scoring processes.
Invariant: a batch gets one reward per answer; an answer that fails has the reward NaN, is not solved, and says why; a
batch in which too many fail is an error.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridflow.config import RewardConfig
from hybridflow.errors import RewardError
from hybridflow.protocol.meta import Max
from hybridflow.rewards.components import SCORE, combine, components_of, weights_of
from hybridflow.rewards.functions import Outcome, failure
from hybridflow.rewards.pool import ScorePool


@dataclass(frozen=True)
class Scores:
    """What was made of a batch; every list has one entry an answer.

    Attributes:
        rewards: NaN where an answer could not be scored.
        solved: whether the answer counts as right.
        errors: why there is no reward, or None.
        answers: the final answers as the function has read them; None where it says none.
        steps: scores of the steps of each answer; None where the function gives none.
        components: ``score`` (the function's own) and each component's score, before weights; None for an answer
            without a reward. An empty list where no components are configured.
        metrics: ``seconds``, and the mean of each further number that the functions report, over the answers it was
            reported for; with components, also of their scores. What rewards, solved and errors say is not repeated.
    """

    rewards: list[float]
    solved: list[bool]
    errors: list[str | None]
    answers: list[str | None]
    steps: list[tuple[float, ...] | None]
    components: list[dict[str, float] | None]
    metrics: dict[str, float]


class Scorer:
    """Scores batches by a function and components; starts the scoring processes when it is built.

    Args:
        config: the function and how it is called.
        where: name of these settings, for messages.

    Raises:
        RewardError: where a function cannot be used.
    """

    def __init__(self, config: RewardConfig, where: str = "reward") -> None:
        if not 0 <= config.max_failed <= 1:
            raise RewardError(f"{where}.max_failed={config.max_failed} is a share: choose 0 to 1.")
        self.config, self.where = config, where
        self._weights = weights_of(config)
        self._pool = ScorePool(components_of(config, where), config.timeout, config.processes, config.in_flight)

    def score(
        self,
        prompts: Sequence[Any],
        responses: Sequence[str],
        ground_truth: Sequence[Any],
        failed: Mapping[int, str] | None = None,
        **columns: Sequence[Any],
    ) -> Scores:
        """Score answers.

        Args:
            prompts: conversations.
            responses: texts of the answers.
            ground_truth: what to compare with.
            failed: rows that are known to have no score, and why.
            columns: further columns, offered to the functions under their names.

        Raises:
            RewardError: if more than ``reward.max_failed`` of the answers could not be scored.
        """
        start = time.perf_counter()
        named = {"prompts": prompts, "responses": responses, "ground_truth": ground_truth, **columns}
        failed = failed or {}
        rows = [dict(zip(named, values, strict=True)) for values in zip(*named.values(), strict=True)]
        found = iter(self._pool.score([row for i, row in enumerate(rows) if i not in failed]))
        outcomes = [
            failure(failed[i]) if i in failed else combine(next(found), self._weights, self.config.solved_at)
            for i in range(len(rows))
        ]
        self._check_failures(outcomes)
        return Scores(
            rewards=[outcome.reward for outcome in outcomes],
            solved=[bool(outcome.solved) for outcome in outcomes],
            errors=[outcome.error for outcome in outcomes],
            answers=[outcome.answer for outcome in outcomes],
            steps=[outcome.steps for outcome in outcomes],
            components=[self._parts(outcome) for outcome in outcomes] if self._weights else [],
            metrics={**_means(outcomes), "seconds": Max(time.perf_counter() - start)},
        )

    def close(self) -> None:
        """End the scoring processes."""
        self._pool.close()

    def _parts(self, outcome: Outcome) -> dict[str, float] | None:
        return None if outcome.error is not None else {name: outcome.extras[name] for name in (SCORE, *self._weights)}

    def _check_failures(self, outcomes: Sequence[Outcome]) -> None:
        errors = [outcome.error for outcome in outcomes if outcome.error is not None]
        if len(errors) <= self.config.max_failed * len(outcomes):
            return
        counts = ", ".join(f"{count} x {reason}" for reason, count in Counter(errors).most_common(3))
        raise RewardError(
            f"{len(errors)} of {len(outcomes)} answers could not be scored by "
            f"{', '.join(part.function for part in components_of(self.config))}; "
            f"{self.where}.max_failed={self.config.max_failed:g} "
            f"accepts {math.floor(self.config.max_failed * len(outcomes))}. First reason: "
            f"{errors[0]}. Most frequent: {counts}. Mend the function, or raise {self.where}.timeout or "
            f"{self.where}.max_failed."
        )


def _means(outcomes: Sequence[Outcome]) -> dict[str, float]:
    values: dict[str, list[float]] = defaultdict(list)
    for outcome in outcomes:
        for name, value in outcome.extras.items():
            values[name].append(value)
    return {name: sum(numbers) / len(numbers) for name, numbers in values.items()}
