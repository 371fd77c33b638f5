"""Training layouts on several ranks against transformers and torch.optim.AdamW on one.

A selection: ``python -m benchmarks.layout_parity`` runs the whole table of docs/layouts.md. Starting processes costs
more than the training in them, so each world starts once and answers for all tests.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.megatron.parity import (
    Case,
    Trained,
    build,
    differences,
    score,
    settings,
    train,
    train_on_rank,
    train_oracle,
)
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.distributed

TOLERANCE = 1e-5
MODELS = {
    "qwen2-tied": {"tie_word_embeddings": True},
    "qwen3": {},
    "qwen3-tied": {"tie_word_embeddings": True},
    "llama": {"num_hidden_layers": 4},
    "llama-tied": {"num_hidden_layers": 4, "tie_word_embeddings": True},
    "llama-bias": {"attention_bias": True, "mlp_bias": True},
    "qwen3_moe": {},
    "qwen3_moe-tied": {"tie_word_embeddings": True, "norm_topk_prob": False},
}
CASES = {
    2: [
        ("qwen2-tied", Case({"tp": 2}, 2)),
        ("qwen3", Case({"tp": 2}, 2, options={"sequence_parallel": False, "recompute": "selective"})),
        ("llama-bias", Case({"tp": 2}, 2)),
        ("qwen3-tied", Case({"pp": 2}, 2, micro=20, tokens=True)),
        ("llama", Case({"pp": 2, "vpp": 2}, 2, options={"recompute": "full"})),
        ("llama-tied", Case({"pp": 2, "vpp": 2}, 2, micro=1)),
        ("qwen3", Case({"cp": 2}, 2)),
        ("qwen2-tied", Case({}, 2)),
        ("qwen3", Case({}, 2, distributed=False, micro=1)),
        ("qwen3_moe", Case({"ep": 2}, 2)),
        ("qwen3_moe-tied", Case({"tp": 2}, 2)),
    ],
    4: [
        ("qwen3-tied", Case({"tp": 2, "pp": 2}, 4)),
        ("qwen2-tied", Case({"tp": 2}, 4, options={"recompute": "full"})),
        ("llama-tied", Case({"pp": 2, "vpp": 2}, 4)),
        ("qwen3", Case({"cp": 2, "pp": 2}, 4)),
        ("qwen3_moe-tied", Case({"tp": 2, "pp": 2, "ep": 2, "etp": 1}, 4)),
        ("qwen3_moe", Case({"ep": 2, "etp": 2}, 4, options={"recompute": "full"})),
    ],
}
# Training that goes on from a checkpoint: where it was saved, and where it is loaded, by ranks.
UPDATES_BEFORE, UPDATES_AFTER = 2, 3
SAVED = {"qwen3-tied": Case({"tp": 2}, 4), "qwen3_moe": Case({"ep": 2, "etp": 2}, 4)}
RESUMED = {
    4: [("qwen3-tied", SAVED["qwen3-tied"]), ("qwen3-tied", Case({}, 4)), ("qwen3-tied", Case({"pp": 2}, 4))],
    2: [("qwen3-tied", Case({"pp": 2}, 2)), ("qwen3-tied", Case({"cp": 2}, 2)), ("qwen3_moe", Case({"tp": 2}, 2))],
    1: [("qwen3-tied", Case()), ("qwen3_moe", Case())],
}
BY_MEGATRON = RESUMED[4][1:]  # from its own checkpoint


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    parent = tmp_path_factory.mktemp("models")
    return {name: save_tiny_model(parent / name, name.split("-")[0], **changes) for name, changes in MODELS.items()}


@pytest.fixture(scope="module")
def expected(folders) -> dict[str, Trained]:
    return {name: train_oracle(folder) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def four_ranks(folders, tmp_path_factory) -> list[dict[str, Any]]:
    return run_ranks(on_four_ranks, 4, folders, str(tmp_path_factory.mktemp("four")), timeout=280)


@pytest.fixture(scope="module")
def two_ranks(folders, four_ranks) -> list[dict[str, Any]]:
    return run_ranks(on_two_ranks, 2, folders, four_ranks[0]["saved"], timeout=280)


@pytest.fixture(scope="module")
def one_rank(folders, four_ranks) -> list[dict[str, Any]]:
    return run_ranks(on_one_rank, 1, folders, four_ranks[0]["saved"])


def on_four_ranks(rank: int, folders: dict[str, str], out: str) -> dict[str, Any]:
    from tests.engines.megatron import sharded

    start = f"{out}/start"
    save(folders["llama"], Case({"tp": 2, "pp": 2, "vpp": 2}, 4), updates=0, out=start)
    engines = {name: save(folders[name], case, UPDATES_BEFORE, f"{out}/{name}") for name, case in SAVED.items()}
    sharded.save(engines["qwen3-tied"], f"{out}/sharded")
    return {
        "trained": train_on_rank(rank, [(folders[name], case) for name, case in CASES[4]]),
        "resumed": resume(folders, out, RESUMED[4]),
        "by megatron": resume_by_megatron(folders, out),
        "start": start,
        "saved": out,
    }


def on_two_ranks(rank: int, folders: dict[str, str], saved: str) -> dict[str, Any]:
    return {
        "trained": train_on_rank(rank, [(folders[name], case) for name, case in CASES[2]]),
        "resumed": resume(folders, saved, RESUMED[2]),
        "by turns": by_turns(folders["llama"], folders["qwen3"]),
    }


def on_one_rank(rank: int, folders: dict[str, str], saved: str) -> dict[str, Any]:
    return {"resumed": resume(folders, saved, RESUMED[1])}


def save(folder: str, case: Case, updates: int, out: str) -> Any:
    """The engine that was trained, and saved."""
    from hybridflow.config import ModelConfig
    from hybridflow.engines.megatron import checkpoint

    engine = build(folder, case, settings(case))
    train(engine, case, updates)
    checkpoint.save(engine, out, ModelConfig(path=folder))
    return engine


def resume(folders: dict[str, str], saved: str, runs: list[tuple[str, Case]]) -> list[Trained]:
    """What more updates from each model's checkpoint give in each layout."""
    from hybridflow.engines.megatron import checkpoint

    found = []
    for name, case in runs:
        engine = build(folders[name], case, settings(case))
        checkpoint.load(engine, f"{saved}/{name}")
        found.append(train(engine, case, UPDATES_AFTER))
    return found


def resume_by_megatron(folders: dict[str, str], saved: str) -> list[tuple[list[str], Trained]]:
    """Of each layout: what differs from what our checkpoint gives, and what more updates give."""
    from hybridflow.engines.megatron import checkpoint
    from tests.engines.megatron import sharded

    found = []
    for name, case in BY_MEGATRON:
        ours, theirs = (build(folders[name], case, settings(case)) for _ in range(2))
        checkpoint.load(ours, f"{saved}/{name}")
        sharded.load(theirs, f"{saved}/sharded", UPDATES_BEFORE)
        wanted, given = ({"weights": e.parameters(), **e.optimizer_states()[1]} for e in (ours, theirs))
        assert sorted(wanted) == sorted(given) == ["exp_avg", "exp_avg_sq", "weights"]
        differing = [
            f"{kind} {parameter}"
            for kind, tensors in wanted.items()
            for parameter, tensor in tensors.items()
            if not torch.equal(tensor, given[kind][parameter])
        ]
        found.append((differing, train(theirs, case, UPDATES_AFTER)))
    return found


def by_turns(folder: str, other: str) -> tuple[Trained, list[torch.Tensor | None], str]:
    """An actor and a reference of other layouts and models in one process, by turns; and one in the other's context."""
    actor_case, case = Case({"tp": 2}, 2), Case({"pp": 2}, 2)
    actor, reference = build(folder, actor_case, settings(actor_case)), build(other, case)
    found = [score(reference, case)]
    trained = train(actor, actor_case)
    found.append(score(reference, case))
    try:
        with reference.parallel:
            actor._run([], lambda *_: None, 1.0, False, training=False)
    except RuntimeError as error:
        return trained, found, str(error)
    return trained, found, ""


def assert_equal(found: Trained, wanted: Trained, where: object) -> None:
    apart = differences(found, wanted)
    assert max(apart.values()) < TOLERANCE, (where, apart)


@pytest.mark.parametrize("world", CASES)
def test_every_layout_trains_as_one_process_does(expected, world, request):
    answers = request.getfixturevalue("two_ranks" if world == 2 else "four_ranks")
    for number, (name, case) in enumerate(CASES[world]):
        for answer in answers:
            assert_equal(answer["trained"][number], expected[name], (name, case))
        # Ranks of the last stage answer, the others have nothing to say.
        silent = sum(answer["trained"][number].losses is None for answer in answers)
        assert silent == world - world // case.layout.get("pp", 1)


@pytest.mark.parametrize("world", RESUMED)
def test_training_goes_on_in_another_layout(folders, world, request):
    """Weights, both moments and the schedule's clock, saved by replicas that share the optimizer's state out among
    them, and by ranks with half of each of half the experts."""
    answers = request.getfixturevalue({4: "four_ranks", 2: "two_ranks", 1: "one_rank"}[world])
    for number, (name, case) in enumerate(RESUMED[world]):
        wanted = train_oracle(folders[name], UPDATES_BEFORE + UPDATES_AFTER)
        rest = Trained(wanted.losses[UPDATES_BEFORE:], wanted.norms[UPDATES_BEFORE:], wanted.log_probs)
        for answer in answers:
            assert_equal(answer["resumed"][number], rest, (name, case))


def test_megatrons_own_checkpoints_hold_the_same_and_go_on_alike(four_ranks):
    """Saved by both in tp2 x dp2, and loaded by both in dp4 and pp2 x dp2: weights and moments, and the losses of the
    updates after it, to the last bit. Without replicas megatron-core takes another optimizer, which does not read what
    the distributed one has written: there the test above is the only judge."""
    for answer in four_ranks:
        for (differing, trained), ours in zip(answer["by megatron"], answer["resumed"][1:], strict=True):
            assert differing == [] and (trained.losses, trained.norms) == (ours.losses, ours.norms)
            if ours.log_probs is not None:
                assert torch.equal(trained.log_probs, ours.log_probs)


def test_roles_of_one_process_keep_to_their_own_layouts(folders, expected, two_ranks):
    oracle = train_oracle(folders["qwen3"], updates=0)
    for trained, (before, after), message in (answer["by turns"] for answer in two_ranks):
        assert_equal(trained, expected["llama"], "actor")
        if before is not None and after is not None:
            torch.testing.assert_close(before, oracle.log_probs, rtol=0, atol=TOLERANCE)
            assert torch.equal(before, after)
        assert message == "a model of layout tp2 pp1 cp1 dp1 was called outside of its own context"


def test_a_checkpoint_of_four_ranks_is_the_model_bit_for_bit(folders, four_ranks):
    from safetensors.torch import load_file

    out = Path(four_ranks[0]["start"])
    source = load_file(Path(folders["llama"]) / "model.safetensors")
    found = load_file(out / "model/model.safetensors")
    assert found.keys() == source.keys()
    assert all(torch.equal(found[name], source[name]) for name in source)
    moments = load_file(out / "optimizer/exp_avg/model.safetensors")
    assert {name: tensor.shape for name, tensor in moments.items()} == {n: t.shape for n, t in source.items()}
    assert not any(tensor.any() for tensor in moments.values())
    assert json.loads((out / "optimizer/state.json").read_text()) == {"updates": 0}
