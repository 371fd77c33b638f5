"""One reward out of several functions: the configured function's, and named components added to it with their weights.

Where it stands: between the configuration and the scoring processes on the way in, between their outcomes and the
batch's columns on the way out. Invariants: reward = score + sum of weight * component; a component that fails leaves
the answer without a reward; whether an answer is solved is for the function itself to say, whatever is added to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hybridflow.config import RewardConfig
from hybridflow.errors import ConfigError, RewardError
from hybridflow.rewards.functions import Call, Component, Outcome, failure

VERDICT = "verdict"
"""The column of what a judge says."""

SCORE = "score"
"""Name of the function's own part beside those of the components."""

JUDGED = "judged"
"""What :func:`hybridflow.rewards.judge.score` reports besides the score."""

GROUP_METRICS = ("groups_without_signal", "groups_all_solved", "groups_none_solved")
REWARD_METRICS = (
    *("mean", "failed", "solved", "seconds", "kl", "kl_coef", "overlong_penalty", "violations"),
    *(SCORE, JUDGED, "judge_tokens", "judge_cut", "judge_seconds", *GROUP_METRICS),
)
"""What a run logs as ``reward/<name>`` itself."""


def components_of(config: RewardConfig, where: str = "reward") -> list[Component]:
    """The function, then the components in the order of the configuration; one that is null is left out.

    Args:
        where: name of the settings, ``reward`` or ``cost``.
    """
    return [
        Component(where, config.function, config.options),
        *(
            Component(f"{where}.components.{name}", part.function, part.options)
            for name, part in config.components.items()
            if part is not None
        ),
    ]


def weights_of(config: RewardConfig) -> dict[str, float]:
    """The weight of each component, in the order of :func:`components_of`."""
    return {name: part.weight for name, part in config.components.items() if part is not None}


def check_reward(config: RewardConfig, where: str = "reward") -> None:
    """Import every function, so that a run fails before anything is started.

    Raises:
        ConfigError: names the setting, and what is there instead.
    """
    try:
        _check_calls(config, where)
    except RewardError as error:
        raise ConfigError(str(error)) from error


def _check_calls(config: RewardConfig, where: str) -> None:
    calls = [Call(component) for component in components_of(config, where)]
    if config.judge.path and not any(call.reads(VERDICT) for call in calls):
        raise RewardError(
            f"{where}.judge.path={config.judge.path!r}, but no function of {where} reads what the judge says: none has "
            f"an argument {VERDICT!r}. Set {where}.function=hybridflow.rewards.judge:score, or write f(prompts, "
            f"responses, ground_truth, {VERDICT})."
        )
    for component, call in zip(components_of(config, where), calls, strict=True):
        if not config.judge.path and call.needs(VERDICT):
            raise RewardError(
                f"{component.setting}.function={component.function!r} reads the column {VERDICT!r}, which a judge "
                f"gives. Set {where}.judge.path to the folder of a language model."
            )
        call.check_options(component.setting)


def combine(outcomes: Sequence[Outcome], weights: Mapping[str, float], solved_at: float) -> Outcome:
    """The outcome of one answer.

    Args:
        outcomes: of the function and of each component, up to the first that failed.
        weights: of the components.
        solved_at: ``reward.solved_at``, where the function does not say whether the answer is solved.

    Returns:
        ``extras`` has what the function reports; with components also ``score``, each component's own score, and what
        it reports as ``<component>/<name>``.
    """
    names = ["", *weights]
    failed = next((i for i, outcome in enumerate(outcomes) if outcome.error is not None), None)
    if failed is not None:
        return failure(f"{names[failed]}: {outcomes[failed].error}" if failed else str(outcomes[0].error))
    own, *parts = outcomes
    taken = sorted(own.extras.keys() & (set(REWARD_METRICS) - {JUDGED}))
    if taken:
        return failure(f"returned {taken[0]!r}, which the run logs itself, as something else; rename it")
    solved = own.reward >= solved_at if own.solved is None else own.solved
    if not parts:
        return replace(own, solved=solved)
    reported = {SCORE: own.reward}
    for name, part in zip(weights, parts, strict=True):
        reported |= {name: part.reward, **{f"{name}/{extra}": value for extra, value in part.extras.items()}}
    clash = sorted(own.extras.keys() & reported)
    if clash:
        return failure(f"returned {clash[0]!r}, which is also the name of a component; rename one")
    reward = own.reward + sum(weight * part.reward for weight, part in zip(weights.values(), parts, strict=True))
    return replace(own, reward=reward, solved=solved, extras={**own.extras, **reported})
