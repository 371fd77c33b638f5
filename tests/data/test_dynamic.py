"""Dynamic sampling by hand: which groups a step keeps, how prompts count, and what a resumed run sees.

Answers are written here instead of generated: what is tested is which prompts are asked for and which answers are kept.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hybridflow.config import DataConfig, DynamicSamplingConfig, RolloutConfig
from hybridflow.data.dynamic import DynamicSampling
from hybridflow.data.prompts import PromptSource
from hybridflow.data.stream import PromptStream
from hybridflow.errors import DataError
from hybridflow.protocol.data import DataProto

SIZE, N = 4, 3
MIXED, RIGHT, WRONG = [1.0, 0.0, 1.0], [1.0] * N, [0.0] * N
Answers = Callable[[int, int, str], list[float]]


@pytest.fixture
def stream(tmp_path: Path, tokenizer) -> PromptStream:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": str(i), "ground_truth": "0"}) + "\n" for i in range(30)))
    config = DataConfig(train=str(path), evaluate_share=0.0, prompts_per_step=SIZE, shuffle=False)
    return PromptStream(PromptSource(config, tokenizer, RolloutConfig(), 0))


def scored(prompts: DataProto, answers: Answers, tag: str) -> DataProto:
    """N answers to each prompt, with rewards by ``answers(place, step, tag)``."""
    batch = prompts.repeat(N)
    step = prompts.meta_info["step"]
    rewards = torch.tensor([reward for place in prompts["group_ids"].tolist() for reward in answers(place, step, tag)])
    columns = DataProto.from_dict({"rewards": rewards, "solved": rewards == 1, "tokens": batch["group_ids"] * 10})
    columns.meta_info["metrics"] = {"reward/seconds": 1.0}
    return batch.union(columns)


def run_step(
    stream: PromptStream, answers: Answers, step: int = 1, by: str = "solved", max_tries: int = 5
) -> tuple[DataProto, list[list[int]], list[str]]:
    """The batch of a step, the groups that each try asked for, and the tries' tags."""
    sampling = DynamicSampling(stream, stream.take(SIZE, step), DynamicSamplingConfig(by=by, max_tries=max_tries))
    asked, tags = [], []
    for prompts in sampling.tries():
        asked.append(prompts["group_ids"].tolist())
        tags.append(sampling.tag)
        sampling.add(scored(prompts, answers, sampling.tag))
    return sampling.batch(), asked, tags


def groups_of(batch: DataProto) -> list[int]:
    """The groups of a batch in order, each checked to be whole and together."""
    ids = batch["group_ids"].tolist()
    assert ids == [group for group in dict.fromkeys(ids) for _ in range(N)]
    return list(dict.fromkeys(ids))


def metrics(batch: DataProto) -> dict[str, float]:
    return {name.removeprefix("sampling/"): x for name, x in batch.meta_info["metrics"].items() if "sampling/" in name}


def test_a_step_whose_groups_all_have_a_signal_is_generated_once(stream: PromptStream):
    batch, asked, tags = run_step(stream, lambda place, step, tag: MIXED)
    assert groups_of(batch) == [0, 1, 2, 3] and asked == [[0, 1, 2, 3]] and tags == ["train"]
    assert stream.position == 4
    assert metrics(batch) == pytest.approx(
        {"tries": 1, "prompts": 4, "returned": 0, "filled": 0, "solved": 2 / 3, "reward": 2 / 3}
        | {"groups_without_signal": 0, "groups_all_solved": 0, "groups_none_solved": 0}
    )
    assert batch.meta_info["step"] == 1 and batch.meta_info["metrics"]["reward/seconds"] == 1.0


def test_groups_without_a_signal_are_replaced_and_what_is_too_much_comes_next(stream: PromptStream):
    rewards = {0: RIGHT, 2: WRONG, 3: RIGHT, 5: WRONG}
    batch, asked, tags = run_step(stream, lambda place, step, tag: rewards.get(place, MIXED))
    # 1 of 4 has a signal: 3 are missing, and 12 would give them, but a try never has more than the first. Of the four
    # more, 4, 6 and 7 have one.
    assert asked == [[0, 1, 2, 3], [4, 5, 6, 7]] and tags == ["train", "train/2"]
    assert groups_of(batch) == [1, 4, 6, 7] and stream.position == 8
    found = metrics(batch)
    assert (found["tries"], found["prompts"], found["returned"], found["filled"]) == (2, 8, 0, 0)
    # Over all 8 groups, those left out too: 4 mixed ones with 2 right, 2 right ones with 3.
    assert found["solved"] == pytest.approx((4 * 2 + 2 * 3) / 24)
    assert (found["groups_all_solved"], found["groups_none_solved"]) == (2 / 8, 2 / 8)
    assert batch["tokens"].tolist() == [10 * group for group in (1, 4, 6, 7) for _ in range(N)]


def test_prompts_behind_the_last_group_that_is_kept_are_given_back(stream: PromptStream):
    batch, asked, _ = run_step(stream, lambda place, step, tag: WRONG if place in (0, 1) else MIXED)
    # Half have a signal: for 2 more, 4 are asked for. 4 and 5 are enough; 6 and 7 come next, with new answers.
    assert asked == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert groups_of(batch) == [2, 3, 4, 5] and stream.position == 6
    found = metrics(batch)
    assert (found["prompts"], found["returned"]) == (6, 2)
    assert found["solved"] == pytest.approx(4 * 2 / 18)  # what is given back does not count
    following, asked, tags = run_step(stream, lambda place, step, tag: MIXED, step=2)
    assert groups_of(following) == [6, 7, 8, 9] and asked == [[6, 7, 8, 9]] and tags == ["train"]


def test_few_missing_groups_ask_for_few_prompts(stream: PromptStream):
    _, asked, _ = run_step(stream, lambda place, step, tag: WRONG if place == 2 else MIXED)
    assert asked == [[0, 1, 2, 3], [4, 5]]  # 3 of 4 had a signal: one more takes 4/3 prompts


def test_after_the_last_try_groups_without_a_signal_fill_the_batch_and_it_is_said(
    stream: PromptStream, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.WARNING):
        batch, asked, tags = run_step(stream, lambda place, step, tag: MIXED if place == 5 else RIGHT, max_tries=3)
    assert asked == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]] and tags == ["train", "train/2", "train/3"]
    assert groups_of(batch) == [0, 1, 2, 5] and stream.position == 12
    assert metrics(batch)["filled"] == 3
    assert "step 1: 1 of 4 groups have a signal after 3 tries (dynamic_sampling.max_tries); 3" in caplog.text


def test_one_try_is_grpo(stream: PromptStream):
    batch, asked, _ = run_step(stream, lambda place, step, tag: [RIGHT, MIXED][place % 2], max_tries=1)
    assert groups_of(batch) == [0, 1, 2, 3] == asked[0] and stream.position == 4


def test_a_failed_reward_is_no_signal_but_stays_in_its_group(stream: PromptStream):
    nan = math.nan
    rewards = {0: [1.0, nan, 1.0], 1: [nan, nan, nan], 2: [1.0, nan, 0.0]}
    batch, _, _ = run_step(stream, lambda place, step, tag: rewards.get(place, MIXED))
    assert groups_of(batch) == [2, 3, 4, 5] and batch["rewards"][1].isnan()


def test_the_signal_may_be_the_reward(stream: PromptStream):
    partial = [0.1, 0.2, 0.3]  # nothing is solved
    batch, asked, _ = run_step(stream, lambda place, step, tag: partial, by="rewards")
    assert groups_of(batch) == [0, 1, 2, 3] and len(asked) == 1
    _, asked, _ = run_step(stream, lambda place, step, tag: partial, by="solved", max_tries=2)
    assert len(asked) == 2


def noisy(place: int, step: int, tag: str) -> list[float]:
    """Answers as random as a policy's: others for each place, step and try."""
    draw = torch.Generator().manual_seed(hash((place, step, len(tag))) % 2**31)
    return (torch.rand(N, generator=draw) < 0.3).double().tolist()


def test_every_prompt_is_used_up_once_and_in_order_and_a_resumed_run_goes_on_where_it_stood(
    stream: PromptStream, caplog: pytest.LogCaptureFixture
):
    straight, places = [], []
    for step in range(1, 13):
        places.append(stream.position)
        batch, asked, _ = run_step(stream, noisy, step)
        straight.append(groups_of(batch))
        # Asked for from the first prompt on that is not used up, and used up to the last one that is kept.
        assert asked[0][0] == places[-1]
        assert [group for part in asked for group in part] == list(range(places[-1], asked[-1][-1] + 1))
        filled = metrics(batch)["filled"]
        assert stream.position == (asked[-1][-1] if filled else straight[-1][-1]) + 1
        assert metrics(batch)["prompts"] == stream.position - places[-1]
    kept = [group for groups in straight for group in groups]
    assert kept == sorted(set(kept)) and len(kept) == 12 * SIZE
    resumed = PromptStream(stream.source)
    resumed.position = places[6]
    assert [groups_of(run_step(resumed, noisy, step)[0]) for step in range(7, 13)] == straight[6:]


def test_answers_have_to_be_those_to_the_prompts_of_the_try(stream: PromptStream):
    first = stream.take(SIZE, 1)
    sampling = DynamicSampling(stream, first, DynamicSamplingConfig())
    tries = sampling.tries()
    next(tries)
    with pytest.raises(DataError, match=r"the batch answers the groups \[0, 1\], this try asked for \[0, 1, 2, 3\]"):
        sampling.add(scored(first[:2], noisy, "train"))
    with pytest.raises(DataError, match=r"try 1 has no answers: call add\(batch\)"):
        next(tries)
