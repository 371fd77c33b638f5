"""Bradley-Terry and DPO against the written formulas."""

import math

import pytest
import torch

from hybridflow.algorithms.preferences import bradley_terry, dpo
from hybridflow.errors import ConfigError, DataError


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


def test_bad_input_is_refused():
    one = torch.zeros(1)
    with pytest.raises(DataError, match=r"chosen \[1\], rejected \[2\]: give \[N\] each"):
        bradley_terry(one, torch.zeros(2))
    with pytest.raises(ConfigError, match="beta=0, label_smoothing=0.0: beta is above 0"):
        dpo(one, one, one, one, beta=0)
    with pytest.raises(ConfigError, match="label_smoothing=0.5"):
        dpo(one, one, one, one, beta=0.1, label_smoothing=0.5)
