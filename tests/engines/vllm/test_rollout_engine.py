"""The engine against transformers, in fp32 on the CPU: tokens, log-probabilities, seeds, limits, weights."""

import gc
import math
import os
import random
import weakref

import numpy as np
import pytest
import torch

from hybridflow.checks.files import CPU_HEAD_DIMS
from hybridflow.config import RolloutConfig, SamplingConfig
from hybridflow.errors import ConfigError, DataError, ModelError
from hybridflow.models.spec import ModelSpec
from hybridflow.resharding.layout import ParallelLayout

pytest.importorskip("vllm")

from hybridflow.engines.vllm.engine import Request

GREEDY = SamplingConfig(temperature=0.0)
EOS = 5


def distance(found, expected) -> float:
    """Largest absolute difference; NaN wherever either side is not finite."""
    return float((torch.as_tensor(found) - torch.as_tensor(expected)).abs().max())


def ask(engine, prompts, sampling=GREEDY, max_tokens=24, seed=0):
    return engine.generate([Request(p, seed + i, max_tokens) for i, p in enumerate(prompts)], sampling)


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_greedy_tokens_are_those_of_transformers(
    name, build, engine, folders, prompts, reference_greedy, reference_log_probs
):
    used = engine if name == "tied" else build(folders[name])
    for prompt, got in zip(prompts, ask(used, prompts), strict=True):
        assert got.token_ids == reference_greedy(folders[name], prompt, 24)
        # Greedy log_probs are those of temperature 1.
        assert distance(got.log_probs, reference_log_probs(folders[name], prompt, got.token_ids)) < 1e-5
        assert got.finish_reason == ("stop" if got.token_ids[-1] == EOS else "length")


def test_sampled_log_probs_carry_the_temperature(engine, folders, prompts, reference_log_probs):
    drawn = ask(engine, prompts * 4, SamplingConfig(temperature=0.7))
    assert sum(len(c.token_ids) for c in drawn) > 300
    worst = [
        distance(got.log_probs, reference_log_probs(folders["tied"], prompt, got.token_ids, temperature=0.7))
        for prompt, got in zip(prompts * 4, drawn, strict=True)
    ]
    assert not any(math.isnan(w) for w in worst) and max(worst) < 1e-4
    wrong = [
        distance(got.log_probs, reference_log_probs(folders["tied"], prompt, got.token_ids, temperature=1.0))
        for prompt, got in zip(prompts * 4, drawn, strict=True)
    ]
    assert min(wrong) > 1e-3  # the comparison would notice a forgotten temperature


def test_top_k_renormalises_over_the_kept_tokens(engine, prompts):
    certain = ask(engine, prompts, SamplingConfig(temperature=1.0, top_k=1))
    assert [c.token_ids for c in certain] == [c.token_ids for c in ask(engine, prompts)]
    assert all(abs(x) < 1e-6 for c in certain for x in c.log_probs)


def test_frequencies_follow_the_probabilities(engine, folders, prompts):
    count = 4000
    drawn = engine.generate([Request(prompts[1], seed, 1) for seed in range(count)], SamplingConfig(temperature=1.5))
    exact = torch.zeros(200)
    for got in drawn:
        exact[got.token_ids[0]] = math.exp(got.log_probs[0])
    counts = torch.bincount(torch.tensor([c.token_ids[0] for c in drawn]), minlength=200)
    often = exact * count > 10
    assert exact[often].sum() > 0.5
    chi = ((counts - exact * count) ** 2 / (exact * count))[often].sum()
    degrees = int(often.sum())
    assert chi < degrees + 5 * math.sqrt(2 * degrees), (float(chi), degrees)


def test_a_seed_fixes_the_response_whatever_else_runs(engine, prompts):
    sampling = SamplingConfig(temperature=1.0)
    together = ask(engine, prompts, sampling, seed=100)
    torch.rand(7)
    assert ask(engine, prompts, sampling, seed=100) == together
    for index, prompt in enumerate(prompts):
        torch.rand(3)
        [alone] = ask(engine, [prompt], sampling, seed=100 + index)
        assert alone.token_ids == together[index].token_ids
        assert distance(alone.log_probs, together[index].log_probs) < 1e-5
    crowd = ask(engine, [*reversed(prompts * 20)], sampling, seed=5000)  # more than max_sequences
    assert len(crowd) == 160
    backwards = engine.generate([Request(p, 100 + i, 24) for i, p in reversed(list(enumerate(prompts)))], sampling)
    assert [c.token_ids for c in reversed(backwards)] == [c.token_ids for c in together]


def test_copies_of_a_prompt_differ_by_their_seeds(engine, prompts):
    copies = ask(engine, [prompts[2]] * 16, SamplingConfig(temperature=1.0))
    assert len({tuple(c.token_ids) for c in copies}) == 16
    seeds = [Request(prompts[2], 2**62 + 17, 24)] * 2
    first, second = engine.generate(seeds, SamplingConfig(temperature=1.0))
    assert first == second


def test_a_call_leaves_the_random_state_and_the_threads_alone(engine, prompts):
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    expected = torch.rand(4), random.random(), np.random.rand()
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    ask(engine, prompts, SamplingConfig(temperature=1.0))
    assert (
        torch.equal(torch.rand(4), expected[0]) and random.random() == expected[1] and np.random.rand() == expected[2]
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    assert torch.get_num_threads() == threads + 1
    torch.set_num_threads(threads)
    assert torch.is_grad_enabled()


def test_building_an_engine_leaves_the_random_state_alone(build, folders):
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    before = dict(os.environ)
    build(folders["other"], load_weights=False)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]
    assert {k: os.environ.get(k) for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK")} == {
        k: before.get(k) for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }


def test_a_stop_id_ends_a_response_and_is_part_of_it(build, engine, folders, prompts, settings):
    free = ask(engine, prompts)
    index, stop = next((i, c.token_ids[3]) for i, c in enumerate(free) if len(c.token_ids) > 8)
    config = RolloutConfig(max_prompt_tokens=96, max_tokens=64, kv_cache_gb=0.05, stop_token_ids=[stop])
    got = ask(build(folders["tied"], config=config), prompts)[index]
    cut = free[index].token_ids.index(stop) + 1
    assert got.token_ids == free[index].token_ids[:cut] and got.finish_reason == "stop"
    assert len(got.log_probs) == cut


def test_the_models_own_eos_ends_a_response(engine, prompts):
    drawn = ask(engine, prompts * 40, SamplingConfig(temperature=2.0), max_tokens=64)
    ended = [c for c in drawn if c.finish_reason == "stop"]
    assert ended and all(c.token_ids.index(EOS) == len(c.token_ids) - 1 for c in ended)
    assert all(EOS not in c.token_ids and len(c.token_ids) == 64 for c in drawn if c.finish_reason == "length")


def test_each_request_has_its_own_max_tokens(engine, prompts):
    limits = [1, 2, 3, 5, 8, 13, 21, 24]
    full = ask(engine, prompts)
    got = engine.generate([Request(p, i, n) for i, (p, n) in enumerate(zip(prompts, limits, strict=True))], GREEDY)
    assert [c.token_ids for c in got] == [c.token_ids[:n] for c, n in zip(full, limits, strict=True)]


def test_no_requests_give_no_completions(engine):
    assert engine.generate([], GREEDY) == []


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ([7] * 97, ["prompt 1 ", "97 tokens", "1 to 96", "rollout.max_prompt_tokens=96"]),
        ([], ["prompt 1 ", "0 tokens"]),
        ([7, 200], ["prompt 1 ", "token id 200", "200 ids"]),
        ([-1, 7], ["prompt 1 ", "token id -1"]),
    ],
)
def test_a_wrong_prompt_is_refused_before_anything_runs(engine, prompts, bad, words):
    with pytest.raises(DataError) as caught:
        ask(engine, [prompts[0], bad])
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_the_engines_own_length_limit_is_named(build, folders):
    short = build(folders["tied"], max_model_len=20)
    assert len(ask(short, [[7] * 19])[0].token_ids) == 1
    with pytest.raises(DataError, match=r"prompt 0 has 20 tokens; allowed are 1 to 19 .*max_model_len=20"):
        ask(short, [[7] * 20])


@pytest.mark.parametrize("temperature", [0.001, 0.0099])
def test_a_temperature_that_vllm_would_change_is_refused(engine, prompts, temperature):
    with pytest.raises(ConfigError, match=f"temperature={temperature}.*0.01"):
        ask(engine, prompts, SamplingConfig(temperature=temperature))


def test_a_cache_that_cannot_hold_one_sequence_is_refused(build, folders):
    with pytest.raises(
        ConfigError, match=r"6 blocks of 32 tokens \* \(2 \* 2 layers \* 2 KV heads \* 32 \* 4 bytes\) = 196608"
    ):
        build(folders["tied"], config=RolloutConfig(max_prompt_tokens=96, max_tokens=64, kv_cache_gb=0.00005))
    with pytest.raises(ConfigError, match=r"300 tokens .*256 positions"):
        build(folders["tied"], max_model_len=300)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (ParallelLayout().generation(tp=1, pp=1), "3 blocks"),
        (ParallelLayout(pp=2).generation(tp=1, pp=2), "rollout layout tp1 pp2 cp1 dp1: an engine has no pipeline"),
        (ParallelLayout(tp=3).generation(tp=3), "rollout layout.tp=3 does not divide the model's num_heads=4"),
    ],
)
def test_a_layout_that_an_engine_cannot_have_is_refused(folders, layout, message):
    from hybridflow.engines.vllm.engine import RolloutEngine

    config = RolloutConfig(max_prompt_tokens=96, max_tokens=64, kv_cache_gb=1e-5)
    spec = ModelSpec.from_folder(folders["tied"])
    with pytest.raises(ConfigError, match=message):
        RolloutEngine(folders["tied"], spec, torch.float32, config, 200, 64, layout=layout)


def test_heads_that_the_cpu_kernels_lack_are_refused(build, make_model, tmp_path):
    with pytest.raises(ModelError, match="head_dim=16: on a CPU vLLM's attention knows 32, 64"):
        build(make_model(tmp_path, seed=1, tied=True, head_dim=16))
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert list(CPU_HEAD_DIMS) == CPUAttentionBackend.get_supported_head_sizes()


def test_prompts_that_wait_for_their_prefill_come_out_the_same(build, engine, folders, prompts, monkeypatch):
    # A step then takes 224 tokens, fewer than the prompts have together.
    monkeypatch.setattr("hybridflow.engines.vllm.engine._BATCHED_TOKENS", 0)
    slow = build(folders["tied"])
    sampling = SamplingConfig(temperature=0.8)
    assert [c.token_ids for c in ask(slow, prompts * 3, sampling)] == [
        c.token_ids for c in ask(engine, prompts * 3, sampling)
    ]


def test_sequences_that_wait_for_memory_come_out_the_same(build, engine, folders, prompts, monkeypatch):
    # 8 blocks, of which one sequence fills up to 4: most requests wait, some are preempted and start again.
    config = RolloutConfig(max_prompt_tokens=96, max_tokens=64, kv_cache_gb=8 * 32 * 2 * 2 * 2 * 32 * 4 / 2**30)
    small = build(folders["tied"], config=config, max_model_len=128)
    scheduler, preempted = small._engine.engine_core.engine_core.scheduler, []
    preempt = scheduler._preempt_request
    monkeypatch.setattr(scheduler, "_preempt_request", lambda *a, **k: (preempted.append(1), preempt(*a, **k))[1])
    sampling = SamplingConfig(temperature=0.8)
    assert [c.token_ids for c in ask(small, prompts * 2, sampling, max_tokens=48)] == [
        c.token_ids for c in ask(engine, prompts * 2, sampling, max_tokens=48)
    ]
    assert preempted


def test_an_error_in_a_step_leaves_a_clean_engine(engine, prompts, monkeypatch):
    expected = ask(engine, prompts)
    model, calls = engine._model, []

    def fails(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return forward(*args, **kwargs)

    forward = model.forward
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(model, "forward", fails)
        ask(engine, prompts)
    assert len(calls) == 3 and not engine._engine.has_unfinished_requests()
    engine.weights_changed(0)  # nothing holds a block of the cache any more
    again = ask(engine, prompts)
    assert [c.token_ids for c in again] == [c.token_ids for c in expected]
    assert max(distance(a.log_probs, e.log_probs) for a, e in zip(again, expected, strict=True)) < 1e-5


def test_what_an_interrupted_step_did_not_compute_is_computed_by_the_next(
    engine, folders, monkeypatch, reference_log_probs
):
    # Longer than a block of the cache, and asked for nowhere else: nothing of them is in the cache before.
    fresh = [[150 - i, *range(6 + i, 86 + i)] for i in range(4)]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(engine._model, "forward", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
        ask(engine, fresh)
    for prompt, got in zip(fresh, ask(engine, fresh), strict=True):
        assert distance(got.log_probs, reference_log_probs(folders["tied"], prompt, got.token_ids)) < 1e-5


def test_weights_that_are_not_finite_are_an_error(build, folders, prompts):
    broken = build(folders["other"])
    with torch.no_grad():
        broken.parameters()["model.norm.weight"].fill_(float("nan"))
    broken.weights_changed(3)
    with pytest.raises(ModelError, match="weights of version 3 are not finite"):
        ask(broken, prompts)


def test_bfloat16_stays_near_float32(build, folders, prompts, reference_log_probs):
    got = ask(build(folders["tied"], dtype=torch.bfloat16), prompts, SamplingConfig(temperature=1.0))
    for prompt, completion in zip(prompts, got, strict=True):
        expected = reference_log_probs(folders["tied"], prompt, completion.token_ids)
        assert float((torch.tensor(completion.log_probs) - expected).abs().mean()) < 0.05


@pytest.mark.parametrize("sampling", [GREEDY, SamplingConfig(temperature=1.5)])
def test_ids_without_a_meaning_are_never_drawn(
    build, folders, prompts, reference_log_probs, reference_greedy, sampling
):
    masked = build(folders["tied"], valid_vocab=60)
    short = [[x % 60 for x in p] for p in prompts]
    got = ask(masked, short * 8, sampling)
    assert all(x < 60 for c in got for x in c.token_ids)
    for prompt, completion in zip(short, got, strict=False):
        temperature = sampling.temperature or 1.0
        expected = reference_log_probs(folders["tied"], prompt, completion.token_ids, temperature, valid_vocab=60)
        assert distance(completion.log_probs, expected) < 1e-4
        if sampling is GREEDY:
            assert completion.token_ids == reference_greedy(folders["tied"], prompt, 24, valid_vocab=60)


def test_closing_an_engine_frees_it_and_leaves_the_groups(engine, build_for_session, folders, prompts):
    before = torch.distributed.group.WORLD
    other = build_for_session(folders["other"])
    weights = weakref.ref(other._model)
    other.close()
    gc.collect()
    assert weights() is None and torch.distributed.group.WORLD is before
    assert len(ask(engine, prompts)) == len(prompts)


def test_without_weights_nothing_is_generated(build, folders, prompts):
    with pytest.raises(RuntimeError, match="no weights yet"):
        ask(build(folders["tied"], load_weights=False), prompts)


@pytest.mark.parametrize(
    ("first", "second"), [("tied", "other"), ("untied", "other_untied"), ("experts", "other_experts")]
)
def test_weights_written_in_place_are_used_at_once(
    build, folders, prompts, reference_greedy, reference_log_probs, first, second
):
    from hybridflow.models.hf_io import load_parameters
    from hybridflow.models.tables import vllm_table

    live = build(folders[first], load_weights=False)
    table = vllm_table(ModelSpec.from_folder(folders[first]), tp=1, tp_rank=0)
    assert {name: tuple(p.shape) for name, p in live.parameters().items()} == {
        name: tuple(boxes.shape) for name, boxes in table.items()
    }
    # Three times the same prompts: a prefix cache that survives a change would show.
    for version, name in ((1, first), (2, second), (7, first)):
        load_parameters(folders[name], table, live.parameters())
        live.weights_changed(version)
        assert live.weight_version == version
        for prompt, got in zip(prompts, ask(live, prompts), strict=True):
            assert got.weight_version == version
            assert got.token_ids == reference_greedy(folders[name], prompt, 24)
            assert distance(got.log_probs, reference_log_probs(folders[name], prompt, got.token_ids)) < 1e-5


def test_an_engine_packs_its_matrices_for_as_long_as_they_stay(build, folders, prompts, reference_greedy):
    from hybridflow.engines.vllm.cpu import _PackedLinear

    def packed(engine):
        products = [getattr(layer, "cpu_linear", None) for layer in engine._model.modules()]
        return {product._packed is not None for product in products if isinstance(product, _PackedLinear)}

    folder = folders["tied"]
    expected = [reference_greedy(folder, prompt, 24) for prompt in prompts]
    live = build(folder)
    assert packed(live) == {False}
    assert [got.token_ids for got in ask(live, prompts)] == expected
    assert True in packed(live)
    live.weights_changed(1)
    assert packed(live) == {False}
    ask(live, prompts[:1])
    live.memory.release_kv_cache()
    live.release_weights()
    assert packed(live) == {False}


def test_responses_that_are_half_way_go_on_under_new_weights(
    build, folders, prompts, reference_greedy, reference_log_probs
):
    from hybridflow.models.hf_io import load_parameters
    from hybridflow.models.tables import vllm_table

    live = build(folders["tied"])
    table = vllm_table(ModelSpec.from_folder(folders["tied"]), tp=1, tp_rank=0)
    sampling = SamplingConfig(temperature=1.2)
    long = [Request(prompt, 50 + i, 30) for i, prompt in enumerate(prompts)]
    of_version = ["tied", "other", "tied"]
    live.begin(long, sampling)
    for version, name in enumerate(of_version):
        if version:
            load_parameters(folders[name], table, live.parameters())
            live.weights_changed(version)
        for prompt, got in zip(prompts[:3], ask(live, prompts[:3], max_tokens=6), strict=True):
            assert got.token_versions == [version] * len(got.token_ids)
            assert got.token_ids == reference_greedy(folders[name], prompt, 6)
    done = live.generate(long, sampling)
    assert not live._engine.has_unfinished_requests() and not live._begun and not live._done
    assert sum(set(completion.token_versions) == {0, 1, 2} for completion in done) > 4
    for request, completion in zip(long, done, strict=True):
        assert completion.token_versions == sorted(completion.token_versions)
        assert len(completion.token_versions) == len(completion.token_ids) == len(completion.log_probs)
        for version, name in enumerate(of_version):
            # As that version alone has it, for all tokens before: nothing of another version's keys and values is left.
            own = [t for t, found in enumerate(completion.token_versions) if found == version]
            expected = reference_log_probs(folders[name], request.prompt_ids, completion.token_ids, temperature=1.2)
            assert not own or distance([completion.log_probs[t] for t in own], expected[own]) < 1e-4


def test_a_pause_between_two_steps_changes_no_response(engine, prompts):
    sampling = SamplingConfig(temperature=0.9)
    long = [Request(prompt, 70 + i, 40) for i, prompt in enumerate(prompts * 12)]  # more than run at once
    straight = engine.generate(long, sampling)
    engine.begin(long, sampling)
    for pause in range(3):
        ask(engine, prompts[:1], max_tokens=5)
        engine.weights_changed(0)  # the same weights; keys and values are dropped and computed again
        assert engine._engine.has_unfinished_requests(), pause
    # The last rows first: who is asked for when does not matter either.
    last, first = engine.generate(long[50:], sampling), engine.generate(long[:50], sampling)
    assert [c.token_ids for c in first + last] == [c.token_ids for c in straight]
    assert max(distance(a.log_probs, b.log_probs) for a, b in zip(first + last, straight, strict=True)) < 1e-5


def test_what_has_begun_is_not_begun_again_and_goes_with_an_error(engine, prompts, monkeypatch):
    request = Request(prompts[0], 3, 20)
    engine.begin([request], GREEDY)
    for again in ([request], [Request(prompts[1], 4, 5)] * 2):
        with pytest.raises(DataError, match="a request is begun that has begun already .* or twice in one call"):
            engine.begin(again, GREEDY)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(engine._model, "forward", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
        ask(engine, prompts[:2])
    assert not engine._engine.has_unfinished_requests()
    engine.begin([request], GREEDY)
    assert engine.generate([request], GREEDY)[0].token_ids == ask(engine, prompts[:1], max_tokens=20)[0].token_ids


def test_a_prefix_cache_in_use_is_not_called_reset(engine, prompts):
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input

    held = SamplingParams(max_tokens=60, seed=1, detokenize=False, logprobs=0)
    engine._engine.add_request("held", tokens_input(prompts[-1]), held)
    engine._engine.step()
    try:
        with pytest.raises(RuntimeError, match="refused to drop its prefix cache for weight version 9"):
            engine.weights_changed(9)
        assert engine.weight_version == 0
    finally:
        engine._engine.abort_request(["held"])
    engine.weights_changed(0)


def test_a_compiled_model_says_what_the_plain_one_does(build, folders, prompts, engine):
    config = RolloutConfig(max_prompt_tokens=96, max_tokens=64, kv_cache_gb=0.05, enforce_eager=False)
    compiled = build(folders["tied"], config=config)
    requests = [Request(prompt, seed, 12) for seed, prompt in enumerate(prompts)]
    for sampling in (SamplingConfig(temperature=0.0), SamplingConfig()):
        got, expected = compiled.generate(requests, sampling), engine.generate(requests, sampling)
        assert [c.token_ids for c in got] == [c.token_ids for c in expected]
        for mine, theirs in zip(got, expected, strict=True):
            assert torch.allclose(torch.tensor(mine.log_probs), torch.tensor(theirs.log_probs), rtol=0, atol=1e-4)
