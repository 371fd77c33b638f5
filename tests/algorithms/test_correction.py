"""Off-policy correction against hand arithmetic: weights, rejection, metrics, decoupled PPO."""

import math

import pytest
import torch

from hybridflow.algorithms.correction import BOUNDS, LEVELS, correct, off_policy_metrics, rejected
from hybridflow.algorithms.objective import objective
from hybridflow.config import CorrectionConfig, LossConfig
from hybridflow.errors import ConfigError, DataError

NAN = float("nan")
MASK = torch.tensor([[True, True, False], [True, True, True], [False, False, False]])
# Ratios train / rollout of the tokens: 4 and 1/2; 1, 2 and 1.
LOG_RATIO = torch.tensor([[4.0, 0.5, NAN], [1.0, 2.0, 1.0], [NAN, NAN, NAN]]).log()
ROLLOUT = torch.where(MASK, -1.0, NAN)
TRAIN = ROLLOUT + LOG_RATIO


def weights(**changes) -> list[float]:
    return correct(TRAIN, ROLLOUT, MASK, CorrectionConfig(**changes)).weights[MASK].tolist()


@pytest.mark.parametrize(
    ("level", "bound", "expected"),
    [
        ("token", "none", [4, 0.5, 1, 2, 1]),
        ("token", "truncate", [1.5, 0.5, 1, 1.5, 1]),
        ("token", "clip", [1.5, 0.75, 1, 1.5, 1]),
        ("token", "mask", [0, 0, 1, 0, 1]),
        ("sequence", "none", [2, 2, 2, 2, 2]),
        ("sequence", "truncate", [1.5] * 5),
        ("sequence", "mask", [0.0] * 5),
        ("geometric", "none", [2**0.5, 2**0.5, 2 ** (1 / 3), 2 ** (1 / 3), 2 ** (1 / 3)]),
        ("geometric", "clip", [2**0.5, 2**0.5, 2 ** (1 / 3), 2 ** (1 / 3), 2 ** (1 / 3)]),
        ("none", "truncate", [1.0] * 5),
    ],
)
def test_weights_at_every_level_and_bound(level, bound, expected):
    assert weights(level=level, bound=bound, low=0.75, high=1.5) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("level", "low", "high", "expected"),
    [
        ("sequence", 0.5, 1.9, [True, True, False]),  # products 2 and 2
        ("sequence", 0.5, 2.1, [False, False, False]),
        ("sequence", 2.1, 3.0, [True, True, False]),
        ("geometric", 0.5, 1.3, [True, False, False]),  # 1.41 and 1.26
        ("token", 0.6, 3.0, [True, False, False]),  # 4 and 1/2 are outside
        ("token", 0.4, 5.0, [False, False, False]),
    ],
)
def test_sequences_are_rejected_by_bounds_on_train_over_rollout(level, low, high, expected):
    assert rejected(TRAIN, ROLLOUT, MASK, level, low, high).tolist() == expected


def test_rejected_sequences_leave_the_mask():
    config = CorrectionConfig(level="token", reject="geometric", reject_low=0.5, reject_high=1.3)
    found = correct(TRAIN, ROLLOUT, MASK, config)
    assert found.mask.tolist() == [[False] * 3, [True] * 3, [False] * 3]
    assert found.weights.tolist() == [[0, 0, 0], pytest.approx([1, 2, 1]), [0, 0, 0]]
    assert found.metrics["rejected"] == pytest.approx(1 / 2)
    assert found.metrics["dropped"] == pytest.approx(2 / 5)


def test_metrics_are_the_ratios_before_and_the_weights_after():
    metrics = correct(TRAIN, ROLLOUT, MASK, CorrectionConfig(level="token", bound="mask", low=0.0, high=3.0)).metrics
    ratios = [4, 0.5, 1, 2, 1]
    assert metrics["ratio_mean"] == pytest.approx(8.5 / 5)
    assert metrics["ess"] == pytest.approx(8.5**2 / (5 * 22.25))
    assert metrics["chi_square"] == pytest.approx(22.25 / 5 - 1)
    assert metrics["k3"] == pytest.approx(sum(r - 1 - math.log(r) for r in ratios) / 5)
    assert metrics["weight_mean"] == pytest.approx(4.5 / 5)
    assert metrics["weight_max"] == pytest.approx(2.0)
    assert metrics["weight_ess"] == pytest.approx(4.5**2 / (5 * 6.25))
    assert metrics["bounded"] == metrics["dropped"] == pytest.approx(1 / 5)
    assert metrics["rejected"] == 0


def test_metrics_of_sequences_have_one_sample_a_sequence():
    metrics = correct(TRAIN, ROLLOUT, MASK, CorrectionConfig(level="sequence", high=3.0)).metrics
    assert metrics["ratio_mean"] == pytest.approx(2.0)
    assert metrics["ess"] == pytest.approx(1.0)


def test_equal_policies_weigh_nothing():
    metrics = correct(ROLLOUT, ROLLOUT, MASK, CorrectionConfig(level="token", reject="token")).metrics
    assert metrics["ratio_mean"] == metrics["ess"] == metrics["weight_mean"] == metrics["weight_ess"] == 1.0
    assert metrics["k3"] == metrics["chi_square"] == metrics["bounded"] == metrics["dropped"] == 0.0
    assert off_policy_metrics(torch.zeros(0)) == {}
    assert all(math.isnan(x) for x in off_policy_metrics(torch.tensor([0.0, NAN])).values())


def test_weights_carry_no_gradient():
    train = TRAIN.clone().requires_grad_()
    assert not correct(train, ROLLOUT, MASK, CorrectionConfig(level="token")).weights.requires_grad


def test_token_weights_with_ppo_are_decoupled_ppo():
    """(pi_prox / pi_behav) min(u A, clip(u) A), with tokens of one row drawn by different versions."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda scale: scale * torch.randn(3, 4, generator=generator, dtype=torch.float64)  # noqa: E731
    proximal = -1 + draw(0.3)
    behaviour = proximal + torch.tensor([0.0, 0.1, -0.2, 0.4])  # four versions
    current, advantages, mask = proximal + draw(0.3), draw(1.0), torch.ones(3, 4, dtype=torch.bool)
    found = correct(proximal, behaviour, mask, CorrectionConfig(level="token", bound="none"))
    leaf, other = current.clone().requires_grad_(), current.clone().requires_grad_()
    columns = {"log_probs": proximal, "advantages": advantages, "loss_weights": found.weights}
    loss, _ = objective(leaf, leaf.detach(), columns, mask, LossConfig(), 12, 3)
    u = (other - proximal).exp()
    weight = (proximal - behaviour).exp()
    expected = -(weight * torch.minimum(u * advantages, u.clamp(0.8, 1.2) * advantages)).sum() / 12
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-8)
    for mine, theirs in zip(torch.autograd.grad(loss, leaf), torch.autograd.grad(expected, other), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("level", LEVELS[1:])
@pytest.mark.parametrize("bound", BOUNDS)
def test_order_padding_and_what_is_masked_do_not_matter(level, bound):
    config = CorrectionConfig(level=level, bound=bound, low=0.6, high=1.7, reject="geometric", reject_high=1.3)
    straight = correct(TRAIN.nan_to_num(0.0), ROLLOUT.nan_to_num(0.0), MASK, config)
    poisoned = correct(TRAIN, ROLLOUT, MASK, config)
    assert torch.equal(straight.weights, poisoned.weights) and straight.metrics == poisoned.metrics
    order = torch.tensor([1, 2, 0])
    wide = [torch.nn.functional.pad(x[order], (0, 2), value=0) for x in (TRAIN, ROLLOUT, MASK)]
    found = correct(*wide, config)
    assert torch.equal(found.weights[:, :3], straight.weights[order])
    assert torch.equal(found.mask[:, :3], straight.mask[order])
    assert found.metrics == pytest.approx(straight.metrics)


def test_bad_input_is_refused():
    with pytest.raises(ConfigError, match=r"low=2.0, high=1.0: bounds on the ratio train/rollout need 0 <= low < high"):
        weights(level="token", low=2.0, high=1.0)
    with pytest.raises(ConfigError, match=r"bound='truncat' is not known. Did you mean 'truncate'\?"):
        weights(level="token", bound="truncat")
    with pytest.raises(ConfigError, match=r"correction.level='tokens' is not known. Did you mean 'token'\?"):
        weights(level="tokens")
    with pytest.raises(ConfigError, match=r"correction.reject='tokens' is not known. Did you mean 'token'\?"):
        weights(reject="tokens")
    with pytest.raises(DataError, match=r"rollout_log_probs is \[3, 2\] for a mask \[3, 3\]"):
        correct(TRAIN, ROLLOUT[:, :2], MASK, CorrectionConfig(level="token"))
    with pytest.raises(DataError, match="is False everywhere"):
        correct(TRAIN, ROLLOUT, MASK & False, CorrectionConfig(level="token"))
