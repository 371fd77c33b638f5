"""Several tokens a step: the responses are those of one token a step, and no step goes on for nothing."""

import numpy as np
import pytest
import torch

from hybridflow.config import RolloutConfig, SamplingConfig

pytest.importorskip("vllm")

from hybridflow.engines.vllm import multi_step
from hybridflow.engines.vllm.engine import Request

SAMPLING = SamplingConfig(temperature=1.3)


@pytest.fixture
def steps(engine, monkeypatch):
    """The number of sequences in every pass of the model on the session's engine, by its step."""
    found: list[list[int]] = []
    runner = engine._engine.model_executor.driver_worker.worker.model_runner
    execute, logits = runner.execute_model, engine._model.compute_logits

    def step(*args, **kwargs):
        found.append([])
        return execute(*args, **kwargs)

    def computed(hidden, *args, **kwargs):
        found[-1].append(len(hidden))
        return logits(hidden, *args, **kwargs)

    monkeypatch.setattr(runner, "execute_model", step)
    monkeypatch.setattr(engine._model, "compute_logits", computed)
    return found


@pytest.mark.parametrize("passes", [2, 16])
def test_several_tokens_a_step_are_those_of_one_a_step(passes, engine, prompts, steps, monkeypatch):
    # More than run at once, of four lengths; hot enough for some to end by the model's end id.
    requests = [Request(p, 31 * i, 1 + 17 * (i % 4)) for i, p in enumerate(prompts * 12)]
    found = {}
    for number in (1, passes):
        monkeypatch.setattr(multi_step, "PASSES", number)
        found[number] = engine.generate(requests, SamplingConfig(temperature=2.0))
        assert (max(map(len, steps)) > 1) == (number > 1)
        steps.clear()
    assert {c.finish_reason for c in found[1]} == {"stop", "length"}
    assert [c.token_ids for c in found[passes]] == [c.token_ids for c in found[1]]
    for got, expected in zip(found[passes], found[1], strict=True):
        assert torch.allclose(torch.tensor(got.log_probs), torch.tensor(expected.log_probs), rtol=0, atol=1e-5)


def test_a_step_ends_with_the_first_sequence_to_reach_its_length(engine, prompts, steps):
    # The first token comes with the prompt; no pass computes a token that nobody asked for.
    engine.generate([Request(prompts[0], 1, 5), Request(prompts[1], 2, 12)], SamplingConfig(temperature=0.01))
    assert steps == [[2] * 5, [1] * 7]


def test_a_step_ends_once_half_of_its_sequences_have(engine, prompts, steps):
    free = engine.generate([Request(prompts[2], 9, 24)], SAMPLING)[0].token_ids
    ends = next(t for t, token in enumerate(free) if t and token not in free[:t])
    engine._multi_step._stop, kept = torch.tensor([free[ends]], dtype=torch.int32), engine._multi_step._stop
    steps.clear()
    try:
        engine.generate([Request(prompts[2], 9, 24)], SAMPLING)
    finally:
        engine._multi_step._stop = kept
    # For the scheduler that id ends nothing, so the sequence goes on in further steps: the first one ended there.
    assert len(steps[0]) == ends + 1 and sum(map(len, steps)) == 24


def test_nobody_waits_for_a_place_that_is_free(build, folders, prompts, engine, monkeypatch):
    config = RolloutConfig(max_prompt_tokens=96, max_tokens=64, kv_cache_gb=0.05, max_sequences=2)
    narrow = build(folders["tied"], config=config)
    passes, logits = [], narrow._model.compute_logits
    monkeypatch.setattr(narrow._model, "compute_logits", lambda *a: (passes.append(1), logits(*a))[1])
    requests = [Request(p, 400 + i, 30) for i, p in enumerate(prompts * 6)]
    got = narrow.generate(requests, SamplingConfig(temperature=2.0))
    free = engine.generate(requests, SamplingConfig(temperature=2.0))
    assert [c.token_ids for c in got] == [c.token_ids for c in free]
    assert sum(c.finish_reason == "stop" for c in got) > 4
    # Two places: the next request takes the one that is free first.
    places = [0, 0]
    for completion in got:
        places[places.index(min(places))] += len(completion.token_ids)
    assert len(passes) == max(places)


def test_the_seeds_of_tokens_are_splitmix64():
    # The published sequence of the seed 1234567 (rosettacode.org/wiki/Pseudo-random_numbers/Splitmix64).
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    expected = torch.tensor([value >> 33 for value in published])
    assert torch.equal(multi_step.token_seeds([1234567], np.array([0]), 4)[:, 0], expected)
    # The n-th seed depends on n alone, not on where a step began.
    assert torch.equal(multi_step.token_seeds([3, 1234567], np.array([5, 2]), 2)[:, 1], expected[2:])
    far = multi_step.token_seeds([2**63 - 1, 0], np.array([10**6, 0]), 3)
    assert far.dtype == torch.int64 and far.shape == (3, 2) and bool(((far >= 0) & (far < 2**31)).all())
