"""Layouts of models with experts: what is accepted, and what is refused before anything starts."""

from collections.abc import Callable
from pathlib import Path

import pytest

from hybridflow.checks import Plan
from tests.assets import write_model

EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("experts") / "model", **EXPERTS)


def test_experts_have_degrees_of_their_own(checked: Callable[..., Plan], model: Path) -> None:
    plan = checked(
        f"model.path={model}",
        "pools.train.devices=[4]",
        "roles.actor.layout={tp: 2, ep: 4, etp: 1}",
        "roles.rollout.layout={tp: 2, ep: 2}",
    )
    assert str(plan.layouts["actor"]) == "tp2 pp1 cp1 dp2 ep4 etp1"
    assert plan.layouts["rollout"] == plan.layouts["actor"].generation(tp=2, ep=2)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["roles.actor.layout={tp: 2, etp: 1}"], "roles.actor.layout.etp=1 differs from tp=2: that needs ep above 1."),
        (["roles.actor.layout.ep=3"], "ep*etp = 3*1 = 3 does not divide the tp*cp*dp = 1*1*4 = 4 ranks"),
        (
            ["roles.actor.layout={pp: 2, cp: 2}"],
            "roles.actor.layout: with pp=2, ep*etp = 1*1 = 1 has to be tp*cp = 1*2 = 2 for a model with experts.",
        ),
        (
            ["roles.actor.layout.tp=2", "actor.sequence_parallel=false"],
            "actor.sequence_parallel=false with roles.actor.layout.tp=2: a model with experts needs it, because every "
            "rank routes tokens of its own. Set it to true, or tp to 1.",
        ),
    ],
)
def test_a_layout_that_does_not_fit_experts_is_refused(
    overrides: list[str], message: str, refused: Callable[..., str], model: Path
) -> None:
    assert message in refused(f"model.path={model}", "pools.train.devices=[4]", *overrides)


def test_experts_of_a_model_without_any_are_refused(refused: Callable[..., str]) -> None:
    text = refused("pools.train.devices=[4]", "roles.actor.layout.ep=2", "roles.rollout.layout={tp: 2, ep: 2}")
    assert "roles.actor.layout: ep=2, etp=1 split experts, and a qwen3 model has none. Set ep to 1" in text
    assert "roles.rollout.layout.ep=2: a qwen3 model has no experts. Set it to 1." in text
