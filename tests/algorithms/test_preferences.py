"""Bradley-Terry and DPO against the written formulas."""

import math

import pytest
import torch

from hybridflow.algorithms.objective import objective
from hybridflow.algorithms.preferences import bradley_terry, bradley_terry_weights, dpo, dpo_advantages
from hybridflow.config import LossConfig, PreferenceConfig
from hybridflow.errors import ConfigError, DataError
from hybridflow.protocol.data import DataProto


def test_bradley_terry_is_the_log_loss_of_the_gap():
    # exp(ln 3) / (1 + exp(ln 3)) = 3/4; the wrong way round 1/4; with a margin of ln 3 even.
    chosen, rejected = torch.tensor([math.log(3), 0.0]), torch.tensor([0.0, math.log(3)])
    loss, metrics = bradley_terry(chosen, rejected)
    assert loss.tolist() == pytest.approx([-math.log(0.75), -math.log(0.25)])
    assert (metrics["accuracy"].item(), metrics["score_gap"].item()) == (1, pytest.approx(0.0))
    assert bradley_terry(chosen, rejected, margin=math.log(3))[0][0].item() == pytest.approx(math.log(2))
    assert bradley_terry(chosen, rejected, torch.tensor([math.log(3), 0.0]))[0].tolist() == pytest.approx(
        [math.log(2), -math.log(0.25)]
    )


def test_bradley_terry_is_finite_for_any_gap():
    loss, _ = bradley_terry(torch.tensor([-1e4]), torch.tensor([1e4]))
    assert loss.item() == 2e4


def test_dpo_is_the_log_loss_of_the_gap_of_log_ratios():
    # Log-ratios 1 and -1 with beta ln(3) / 2: gap ln 3.
    given = [torch.tensor([x]) for x in (-4.0, -6.0, -5.0, -5.0)]
    loss, metrics = dpo(*given, beta=math.log(3) / 2)
    assert loss.item() == pytest.approx(-math.log(0.75))
    assert metrics["accuracy"].item() == 1
    assert metrics["chosen_reward"].item() == pytest.approx(math.log(3) / 2) == -metrics["rejected_reward"].item()
    smoothed, _ = dpo(*given, beta=math.log(3) / 2, label_smoothing=0.1)
    assert smoothed.item() == pytest.approx(-0.9 * math.log(0.75) - 0.1 * math.log(0.25))


def test_dpos_gradient_is_the_papers_and_leaves_the_reference_alone():
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(5, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(4)]
    dpo(*leaves, beta=0.3)[0].sum().backward()
    chosen, rejected, ref_chosen, ref_rejected = leaves
    gap = 0.3 * (chosen - rejected - ref_chosen + ref_rejected).detach()
    torch.testing.assert_close(chosen.grad, -0.3 * torch.sigmoid(-gap))
    torch.testing.assert_close(rejected.grad, 0.3 * torch.sigmoid(-gap))
    assert ref_chosen.grad is None and ref_rejected.grad is None


LENGTHS = (3, 1, 4, 2, 2, 5)


def answers(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits [6, 5, 7] float64 of three pairs of answers, their tokens, the reference's log_probs and the mask."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, 5, 7, generator=generator, dtype=torch.float64).requires_grad_()
    tokens = torch.randint(7, (6, 5), generator=generator)
    ref = torch.randn(6, 5, generator=generator, dtype=torch.float64) - 2
    return logits, tokens, ref, torch.arange(5) < torch.tensor(LENGTHS)[:, None]


def picked(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(dim=-1).gather(-1, tokens[..., None])[..., 0]


def pairs_of(log_probs: torch.Tensor, ref: torch.Tensor, mask: torch.Tensor) -> DataProto:
    lengths = torch.tensor(LENGTHS)
    return DataProto.from_dict(
        {
            "log_probs": DataProto.from_padded(log_probs.detach(), lengths),
            "ref_log_probs": DataProto.from_padded(ref, lengths),
            "response_mask": DataProto.from_padded(mask, lengths),
            "chosen": torch.tensor([True, False] * 3),
        }
    )


@pytest.mark.parametrize("cuts", [[[0, 1, 2, 3, 4, 5]], [[0], [1], [2], [3], [4], [5]], [[5, 0], [3, 1, 4], [2]]])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_the_update_with_dpos_advantages_has_the_gradient_of_dpo(cuts: list[list[int]], label_smoothing: float):
    logits, tokens, ref, mask = answers()
    sums = (picked(logits, tokens) * mask).sum(dim=1)
    refs = (ref * mask).sum(dim=1)
    loss, _ = dpo(sums[0::2], sums[1::2], refs[0::2], refs[1::2], 0.3, label_smoothing)
    (wanted,) = torch.autograd.grad(loss.mean(), logits)

    config = PreferenceConfig(beta=0.3, label_smoothing=label_smoothing)
    found = dpo_advantages(pairs_of(picked(logits, tokens), ref, mask), config)
    assert found.meta_info["metrics"]["preference/loss"] == pytest.approx(loss.mean().item())
    settings = LossConfig(name="reinforce", aggregation="seq-mean-token-sum")
    weights = found.to_padded("advantages")
    for rows in cuts:
        share, _ = objective(
            *(picked(logits, tokens)[rows], torch.zeros(len(rows), 5)),
            {"advantages": weights[rows].double()},
            mask[rows],
            settings,
            num_tokens=float(mask.sum()),
            num_sequences=6.0,
        )
        share.backward()
    torch.testing.assert_close(logits.grad, wanted, rtol=1e-6, atol=1e-9)


def test_what_pairs_say_of_themselves_is_the_mean_over_pairs():
    logits, tokens, ref, mask = answers(1)
    found = dpo_advantages(pairs_of(picked(logits, tokens), ref, mask), PreferenceConfig(beta=0.5)).meta_info["metrics"]
    ratios = 0.5 * ((picked(logits, tokens) - ref) * mask).sum(dim=1).detach()
    margins = ratios[0::2] - ratios[1::2]
    assert found == {
        "preference/loss": pytest.approx(torch.nn.functional.softplus(-margins).mean().item()),
        "preference/accuracy": pytest.approx((margins > 0).double().mean().item()),
        "preference/chosen_reward": pytest.approx(ratios[0::2].mean().item()),
        "preference/rejected_reward": pytest.approx(ratios[1::2].mean().item()),
        "preference/margin": pytest.approx(margins.mean().item()),
    }


def test_rows_that_are_no_pairs_are_refused():
    logits, tokens, ref, mask = answers()
    batch = pairs_of(picked(logits, tokens), ref, mask)
    with pytest.raises(DataError, match="pairs are two neighbouring rows, the chosen answer first"):
        dpo_advantages(batch[[1, 0, 2, 3]], PreferenceConfig())
    mask[3] = False
    with pytest.raises(DataError, match="response_mask: row 3 has no token to learn"):
        dpo_advantages(pairs_of(picked(logits, tokens), ref, mask), PreferenceConfig())


def test_bad_input_is_refused():
    one = torch.zeros(1)
    with pytest.raises(DataError, match=r"chosen \[1\], rejected \[2\]: give \[N\] each"):
        bradley_terry(one, torch.zeros(2))
    with pytest.raises(DataError, match=r"margin \[1, 1\]: give \[N\] each"):
        bradley_terry(one, one, margin=torch.zeros(1, 1))
    with pytest.raises(ConfigError, match="beta=0, label_smoothing=0.0: beta is above 0"):
        dpo(one, one, one, one, beta=0)
    with pytest.raises(ConfigError, match="label_smoothing=0.5"):
        dpo(one, one, one, one, beta=0.1, label_smoothing=0.5)


def test_weights_of_a_reward_model_have_the_gradient_of_its_loss() -> None:
    scores = torch.tensor([1.0, 0.5, -0.2, 0.7], dtype=torch.float64)
    batch = DataProto.from_dict({"scores": scores.float(), "chosen": torch.tensor([True, False, True, False])})
    found = bradley_terry_weights(batch)
    # d/dg -log sigmoid(g) = -sigmoid(-g), g = 0.5 and -0.9, averaged over 2 pairs; rows count 4.
    slopes = [1 / (1 + math.exp(0.5)), 1 / (1 + math.exp(-0.9))]
    expected = [2 * slopes[0], -2 * slopes[0], 2 * slopes[1], -2 * slopes[1]]
    assert found["score_weights"].tolist() == pytest.approx(expected)
    metrics = found.meta_info["metrics"]
    assert metrics["preference/accuracy"] == 0.5 and metrics["preference/score_gap"] == pytest.approx(-0.2)
    assert metrics["preference/loss"] == pytest.approx((math.log1p(math.exp(-0.5)) + math.log1p(math.exp(0.9))) / 2)
    with pytest.raises(DataError, match="pairs are two neighbouring rows"):
        bradley_terry_weights(batch[[1, 0, 2, 3]])
