"""Every loss against hand arithmetic, its gradient against autograd of the written formula, and masked NaN."""

import math

import pytest
import torch

from hybridflow.algorithms.losses import (
    LOSSES,
    covariance,
    find_loss,
    ppo,
    select_clip_cov,
    select_kl_cov,
    sft,
    value_loss,
)
from hybridflow.config import LossConfig
from hybridflow.errors import ConfigError, DataError

LN2 = math.log(2.0)
NAN, INF = float("nan"), float("inf")
YES = torch.tensor([[True]])


def one(value: float) -> torch.Tensor:
    return torch.tensor([[value]])


def loss_of(
    name: str, log_probs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, **changes
):
    """The loss; Clip-Cov and KL-Cov select every second token."""
    selected = (torch.arange(mask.shape[1]) % 2 == 0).expand_as(mask)
    extra = {"high_covariance": selected} if "high_covariance" in LOSSES[name].reads else {}
    return LOSSES[name].function(log_probs, old, advantages, mask, LossConfig(name=name, **changes), **extra)


# ----------------------------------------------------------------------------------------------------- values, by hand


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "expected"),
    [
        (0.0, 3.0, -3.0),  # ratio 1: the plain policy gradient
        (LN2, 1.0, -1.2),  # ratio 2, A > 0: clipped at 1.2
        (-LN2, 1.0, -0.5),  # ratio 1/2, A > 0: the lower, unclipped value
        (LN2, -1.0, 2.0),  # ratio 2, A < 0: unclipped
        (-LN2, -1.0, 0.8),  # ratio 1/2, A < 0: clipped at 0.8
    ],
)
def test_ppo_is_the_pessimistic_bound(log_ratio, advantage, expected):
    loss, _ = ppo(one(log_ratio), one(0.0), one(advantage), YES, LossConfig())
    assert loss.item() == pytest.approx(expected, rel=1e-6)


def test_the_dual_clip_bounds_the_loss_of_negative_advantages():
    loss, _ = ppo(one(math.log(10.0)), one(0.0), one(-1.0), YES, LossConfig(dual_clip=3.0))
    assert loss.item() == pytest.approx(3.0)
    loss, _ = ppo(one(math.log(10.0)), one(0.0), one(1.0), YES, LossConfig(dual_clip=3.0))
    assert loss.item() == pytest.approx(-1.2)


def test_asymmetric_clip_bounds_each_side_by_its_own_value():
    config = LossConfig(clip_low=0.1, clip_high=0.3)
    assert ppo(one(LN2), one(0.0), one(1.0), YES, config)[0].item() == pytest.approx(-1.3)
    assert ppo(one(-LN2), one(0.0), one(-1.0), YES, config)[0].item() == pytest.approx(0.9)


def test_gspo_clips_the_geometric_mean_of_the_sequence():
    # Log-ratios ln 4 and 0: s = 2 for both tokens. A = 1: clipped at 1.2; A = -1: 2.
    log_probs, old, mask = torch.tensor([[2 * LN2, 0.0, NAN]]), torch.zeros(1, 3), torch.tensor([[True, True, False]])
    for advantage, expected in ((1.0, -1.2), (-1.0, 2.0)):
        loss, metrics = loss_of("gspo", log_probs, old, torch.full((1, 3), advantage), mask)
        assert loss[0].tolist() == pytest.approx([expected, expected, 0.0])
        assert metrics["ratio"].item() == pytest.approx(4.0)
        assert metrics["clip_fraction"].item() == (2 if advantage > 0 else 0)


def test_gmpo_is_the_geometric_mean_of_clipped_ratios():
    # Log-ratios 1 and -1, clipped to +-0.4. A = 2: min(1, 0.4) and min(-1, -0.4): mean (0.4 - 1) / 2 = -0.3.
    # A = -2: -min(-1, -0.4) = 1 and -min(1, 0.4) = -0.4: mean 0.3.
    log_probs, old, mask = torch.tensor([[1.0, -1.0]]), torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    clips = {"clip_low": 0.4, "clip_high": 0.4}
    for advantage, expected in ((2.0, -2 * math.exp(-0.3)), (-2.0, 2 * math.exp(0.3))):
        loss, metrics = loss_of("gmpo", log_probs, old, torch.full((1, 2), advantage), mask, **clips)
        assert loss[0].tolist() == pytest.approx([expected, expected])
        assert metrics["clip_fraction"].item() == 1


def test_cispo_weighs_the_log_likelihood_by_the_ratio_clipped_on_both_sides():
    log_probs, old = torch.tensor([[-1.0, -1.0, -1.0]]), torch.tensor([[-1.0 - LN2, -1.0 + LN2, -1.0]])
    loss, metrics = loss_of("cispo", log_probs, old, torch.full((1, 3), 2.0), torch.ones(1, 3, dtype=torch.bool))
    assert loss[0].tolist() == pytest.approx([1.2 * 2, 0.8 * 2, 1.0 * 2])
    assert metrics["clip_fraction"].item() == 2
    assert loss_of("cispo", one(-1.0), one(-1.0 + LN2), one(2.0), YES, clip_low=1.0)[0].item() == pytest.approx(1.0)


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    log_probs = one(LN2).requires_grad_()
    loss_of("cispo", log_probs, one(0.0), one(1.0), YES)[0].sum().backward()
    assert log_probs.grad.item() == pytest.approx(-1.2)


def test_sapo_gates_softly_with_a_temperature_for_each_sign():
    sigmoid = lambda x: 1 / (1 + math.exp(-x))  # noqa: E731
    assert loss_of("sapo", one(LN2), one(0.0), one(3.0), YES)[0].item() == pytest.approx(-3 * 4 * sigmoid(1.0))
    assert loss_of("sapo", one(LN2), one(0.0), one(-3.0), YES)[0].item() == pytest.approx(
        3 * 4 / 1.05 * sigmoid(1.05), rel=1e-6
    )


def test_sapos_gradient_at_ratio_one_is_the_policy_gradient():
    log_probs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    advantages = torch.tensor([[2.0, -3.0]])
    loss_of("sapo", log_probs, log_probs.detach(), advantages, torch.ones(1, 2) > 0)[0].sum().backward()
    torch.testing.assert_close(log_probs.grad, -advantages)


@pytest.mark.parametrize("name", ["reinforce", "gpg"])
def test_reinforce_is_the_weighted_log_likelihood(name):
    assert loss_of(name, one(-1.5), one(NAN), one(2.0), YES)[0].item() == 3.0


def test_clip_cov_is_ppo_without_the_selected_tokens():
    log_probs, old, advantages = torch.tensor([[LN2, LN2]]), torch.zeros(1, 2), torch.tensor([[-1.0, -1.0]])
    leaf = log_probs.clone().requires_grad_()
    loss, metrics = loss_of("clip_cov", leaf, old, advantages, torch.ones(1, 2) > 0)
    loss.sum().backward()
    assert loss[0].tolist() == pytest.approx([0.0, 2.0])
    assert leaf.grad[0].tolist() == pytest.approx([0.0, 2.0])
    assert metrics["clip_fraction"].item() == 1


def test_kl_cov_adds_the_kl_to_the_selected_tokens_and_clips_nothing():
    log_probs, old, advantages = torch.tensor([[LN2, LN2]]), torch.zeros(1, 2), torch.tensor([[1.0, 1.0]])
    loss, metrics = loss_of("kl_cov", log_probs, old, advantages, torch.ones(1, 2) > 0, cov_kl_coef=0.5)
    assert loss[0].tolist() == pytest.approx([-2.0 + 0.5 * LN2, -2.0])
    assert metrics["clip_fraction"].item() == 1


@pytest.mark.parametrize(
    ("old", "new", "advantage", "inside"),
    [
        (0.10, 0.35, 1.0, True),  # up by 0.25, below 0.28
        (0.50, 0.90, 1.0, False),  # up by 0.40
        (0.50, 0.90, -1.0, True),  # against the advantage
        (0.40, 0.10, -1.0, False),  # down by 0.30, above 0.2
        (0.40, 0.25, -1.0, True),  # down by 0.15
        (0.001, 0.01, 1.0, True),  # a ratio of 10, and hardly any probability
    ],
)
def test_dppo_tv_masks_by_the_distance_along_the_advantage(old, new, advantage, inside):
    changes = {"clip_low": 0.2, "clip_high": 0.28}
    found = loss_of("dppo_tv", one(math.log(new)), one(math.log(old)), one(advantage), YES, **changes)
    assert found[0].item() == pytest.approx(-advantage * new / old if inside else 0.0, rel=1e-5)
    assert found[1]["clip_fraction"].item() == (0 if inside else 1)


def test_dppo_kl_masks_by_the_binary_kl():
    # q = 0.2, p = 0.3: 0.2 ln(2/3) + 0.8 ln(8/7) = 0.02573.
    distance = 0.2 * math.log(2 / 3) + 0.8 * math.log(8 / 7)
    for bound, expected in ((distance * 1.001, -1.5), (distance * 0.999, 0.0)):
        found, _ = loss_of("dppo_kl", one(math.log(0.3)), one(math.log(0.2)), one(1.0), YES, clip_high=bound)
        assert found.item() == pytest.approx(expected)
    assert loss_of("dppo_kl", one(math.log(0.3)), one(math.log(0.2)), one(-1.0), YES, clip_low=0.0)[
        0
    ].item() == pytest.approx(1.5)


def test_dppo_kl_is_finite_where_a_token_is_certain():
    found, _ = loss_of("dppo_kl", one(0.0), one(-1e-7), one(1.0), YES)
    assert found.item() == pytest.approx(-1.0)


def test_sft_is_the_negative_log_likelihood():
    loss, _ = sft(one(-1.5), one(NAN), one(NAN), YES, LossConfig(name="sft"))
    assert loss.item() == 1.5


def test_value_loss_is_the_larger_of_plain_and_clipped():
    yes = torch.ones(1, 3, dtype=torch.bool)
    values, old, returns = (
        torch.tensor([[1.0, 1.0, 0.1]]),
        torch.tensor([[0.0, 0.0, 0.0]]),
        torch.tensor([[2.0, 0.9, 2.0]]),
    )
    # Clipped to 0.2, 0.2 and 0.1: squares 1 and 3.24, 0.01 and 0.49, 3.61 twice.
    loss, metrics = value_loss(values, old, returns, yes, clip=0.2)
    assert loss[0].tolist() == pytest.approx([1.62, 0.245, 1.805])
    assert (metrics["clip_fraction"].item(), metrics["value"].item()) == (2, pytest.approx(2.1))
    assert value_loss(values, old, returns, yes, clip=0.0)[0][0].tolist() == pytest.approx([0.5, 0.005, 1.805])


def test_the_clip_fraction_counts_tokens_where_the_clip_is_active():
    log_probs = torch.tensor([[LN2, LN2, 0.0]])
    advantages = torch.tensor([[1.0, -1.0, 1.0]])
    _, metrics = ppo(log_probs, torch.zeros(1, 3), advantages, torch.ones(1, 3, dtype=torch.bool), LossConfig())
    assert metrics["clip_fraction"].item() == 1
    assert metrics["ratio"].item() == pytest.approx(5.0)
    assert metrics["approx_kl"].item() == pytest.approx(2 * (1 - LN2))


@pytest.mark.parametrize("name", [name for name, loss in LOSSES.items() if "old_log_probs" in loss.reads])
def test_log_ratios_are_clamped_so_that_nothing_overflows(name):
    for log_probs, old in ((-1.0, -500.0), (-500.0, -1.0)):
        leaf = one(log_probs).requires_grad_()
        loss, metrics = loss_of(name, leaf, one(old), one(-1.0), YES)
        loss.sum().backward()
        assert math.isfinite(loss.item()) and math.isfinite(leaf.grad.item())
        assert metrics["ratio"].item() <= math.exp(20.0) * 1.001


# -------------------------------------------------------------- gradients, against autograd of the formula in float64


def formula(name: str, new: torch.Tensor, old: torch.Tensor, a: torch.Tensor, picked: torch.Tensor) -> torch.Tensor:
    """The papers' formulas for one row without masked tokens, written as they stand there."""
    r = torch.exp(new - old)
    clip = torch.clip(r, 1 - 0.2, 1 + 0.3)
    if name in ("ppo", "clip_cov"):
        loss = -torch.minimum(r * a, clip * a)
        return torch.where(picked, loss.detach() * 0, loss) if name == "clip_cov" else loss
    if name == "gspo":
        s = torch.exp((new - old).mean()).detach() * new.exp() / new.exp().detach()
        return -torch.minimum(s * a, torch.clip(s, 0.8, 1.3) * a)
    if name == "gmpo":
        bounded = torch.where(
            a > 0,
            torch.minimum(r, torch.clip(r, math.exp(-0.2), math.exp(0.3))),
            torch.maximum(r, torch.clip(r, math.exp(-0.2), math.exp(0.3))),
        )
        return -a.mean() * torch.prod(bounded) ** (1 / len(new)) * torch.ones_like(new)
    if name == "cispo":
        return -clip.detach() * a * new
    if name == "sapo":
        tau = torch.where(a > 0, torch.tensor(1.0).to(a), torch.tensor(1.05).to(a))
        return -4 / tau * torch.sigmoid(tau * (r - 1)) * a
    if name in ("reinforce", "gpg"):
        return -a * new
    if name == "kl_cov":
        return -r * a + picked * 1.0 * (new - old).abs()
    if name in ("dppo_tv", "dppo_kl"):
        p, q = new.exp().detach(), old.exp()
        distance = (p - q).abs() if name == "dppo_tv" else q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()
        inside = ~(((a > 0) & (r > 1) & (distance > 0.3)) | ((a < 0) & (r < 1) & (distance > 0.2)))
        return -r * a * inside
    assert name == "sft"
    return -new


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_those_of_the_written_formula(name):
    generator = torch.Generator().manual_seed(4)
    draw = lambda: torch.randn(4, 6, generator=generator, dtype=torch.float64)  # noqa: E731
    old = -1.0 + 0.5 * draw().clamp(max=1.5)
    new = (old + 0.6 * draw()).clamp(max=-0.05)
    advantages = draw()
    if name == "gmpo":  # defined for one advantage a sequence
        advantages = advantages[:, :1].expand(4, 6).contiguous()
    mask = torch.arange(6) < torch.tensor([[6], [5], [3], [0]])
    leaf = new.clone().requires_grad_()
    loss, _ = loss_of(name, leaf, old, advantages, mask, clip_low=0.2, clip_high=0.3)
    assert loss.dtype == torch.float64
    (gradient,) = torch.autograd.grad(loss.sum(), leaf)
    other = new.clone().requires_grad_()
    picked, total = torch.arange(6) % 2 == 0, torch.zeros(4, 6, dtype=torch.float64)
    for row, n in enumerate(mask.sum(1).tolist()):
        if n:
            total[row, :n] = formula(name, other[row, :n], old[row, :n], advantages[row, :n], picked[:n])
    (expected,) = torch.autograd.grad(total.sum(), other)
    torch.testing.assert_close(loss, total, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)
    assert gradient.abs().sum() > 0


def test_the_value_losss_gradient_is_that_of_the_written_formula():
    generator = torch.Generator().manual_seed(0)
    values, old, returns = (torch.randn(3, 5, generator=generator, dtype=torch.float64) for _ in range(3))
    leaf, other = values.clone().requires_grad_(), values.clone().requires_grad_()
    value_loss(leaf, old, returns, torch.ones(3, 5) > 0, clip=0.5)[0].sum().backward()
    clipped = torch.maximum(torch.minimum(other, old + 0.5), old - 0.5)
    (torch.maximum((other - returns) ** 2, (clipped - returns) ** 2) / 2).sum().backward()
    torch.testing.assert_close(leaf.grad, other.grad)


@pytest.mark.parametrize("name", [*LOSSES, "value"])
def test_what_is_masked_reaches_neither_loss_nor_metrics_nor_gradient(name):
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(3, 4, generator=generator) for _ in range(3)]
    mask = torch.tensor([[True, False, True, True], [True, True, False, False], [False] * 4])

    def outcome(garbage: float):
        first, second, third = (x.where(mask, garbage) for x in tensors)
        leaf = first.clone().requires_grad_()
        if name == "value":
            loss, metrics = value_loss(leaf, second, third, mask, clip=0.2)
        else:
            loss, metrics = loss_of(name, leaf, second, third, mask)
        loss.sum().backward()
        return loss.detach(), leaf.grad, metrics

    clean_loss, clean_gradient, clean_metrics = outcome(0.0)
    assert (clean_loss[~mask] == 0).all() and clean_gradient.abs().sum() > 0
    for garbage in (NAN, INF, -INF):
        loss, gradient, metrics = outcome(garbage)
        assert torch.equal(loss, clean_loss)
        assert torch.equal(gradient, clean_gradient)
        assert metrics == clean_metrics


@pytest.mark.parametrize("name", LOSSES)
def test_halves_are_computed_in_float32(name):
    x = torch.randn(2, 3).bfloat16()
    assert loss_of(name, x, x, x, torch.ones(2, 3) > 0)[0].dtype == torch.float32


# -------------------------------------------------------------------------------------------- tokens of high covariance


def test_covariance_is_centred_over_unmasked_tokens():
    log_probs = torch.tensor([[-1.0, -3.0, NAN]])
    advantages = torch.tensor([[1.0, 0.0, NAN]])
    found = covariance(log_probs, advantages, torch.tensor([[True, True, False]]))
    assert found.tolist() == [[0.5, 0.5, 0.0]]


def test_kl_cov_selects_the_tokens_of_the_greatest_covariance():
    log_probs = torch.tensor([[-1.0, -2.0, -3.0, -4.0]] * 2)
    advantages = torch.tensor([[2.0, 0.0, 0.0, -1.0], [0.0, 0.0, 0.0, 9.0]])
    mask = torch.ones(2, 4, dtype=torch.bool)
    # Mean advantage 1.25: covariances 1.5 * 0.75, ..., 1.5 * 2.25 at the end of row 0, -1.5 * 7.75 of row 1.
    assert select_kl_cov(log_probs, advantages, mask, share=0.0).nonzero().tolist() == [[0, 3]]
    mask[0, 3] = False
    assert not select_kl_cov(log_probs, advantages, mask, share=1.0)[0, 3]
    assert select_kl_cov(log_probs, advantages, mask, share=1.0).sum() == 7


def test_clip_cov_draws_between_its_bounds_by_seed():
    generator = torch.Generator().manual_seed(0)
    log_probs, advantages = (torch.randn(20, 50, generator=generator) for _ in range(2))
    mask = torch.rand(20, 50, generator=generator) < 0.8
    found = select_clip_cov(log_probs, advantages, mask, share=0.01, low=0.5, high=2.0, seed=1)
    value = covariance(log_probs, advantages, mask)[found]
    assert len(value) == int(0.01 * mask.sum()) and (value > 0.5).all() and (value < 2.0).all() and mask[found].all()
    again, other = (select_clip_cov(log_probs, advantages, mask, 0.01, 0.5, 2.0, seed) for seed in (1, 2))
    assert torch.equal(found, again) and not torch.equal(found, other)
    assert not select_clip_cov(log_probs, advantages, mask, 0.01, low=1e6, high=2e6, seed=1).any()


# ------------------------------------------------------------------------------------------------------------ bad input


def test_unknown_names_list_the_known_ones():
    with pytest.raises(
        ConfigError, match=r"actor.loss.name='ppoo' is not known. Did you mean 'ppo'\? Known: cispo, clip"
    ):
        find_loss("ppoo")


@pytest.mark.parametrize("name", ["ppo", "gspo", "gmpo", "cispo", "clip_cov", "dppo_tv", "dppo_kl"])
def test_a_negative_clip_is_refused(name):
    with pytest.raises(ConfigError, match="actor.loss.clip_low=-0.1: has to be at least 0"):
        loss_of(name, one(0.0), one(0.0), one(1.0), YES, clip_low=-0.1)


@pytest.mark.parametrize("clip", [-1, math.nan])
def test_a_value_clip_that_bounds_nothing_is_refused(clip):
    with pytest.raises(ConfigError, match=f"clip={clip}: the value clip"):
        value_loss(one(0.0), one(0.0), one(0.0), YES, clip=clip)


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_tokens_of_high_covariance_are_given_one_by_one(name):
    x, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(DataError, match=r"high_covariance is \[2, 1\] for a mask \[2, 3\]"):
        LOSSES[name].function(x, x, x, mask, LossConfig(), mask[:, :1])


@pytest.mark.parametrize("name", LOSSES)
def test_mismatched_shapes_are_refused_with_both(name):
    with pytest.raises(DataError, match=r"log_probs is \[1, 2\] for a mask \[1, 1\]: give \[B, T\]"):
        loss_of(name, torch.zeros(1, 2), one(0.0), one(0.0), YES)
    if "advantages" in LOSSES[name].reads:
        with pytest.raises(DataError, match=r"advantages is \[1\] for a mask \[1, 1\]"):
            loss_of(name, one(0.0), one(0.0), torch.zeros(1), YES)


def test_a_loss_of_the_users_own_reads_the_columns_it_names(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def mine(log_probs, old_log_probs, advantages, mask, config, values):\n    return -log_probs * values, {}\n"
        "def short(log_probs, mask):\n    return -log_probs, {}\n"
    )
    loss = find_loss(f"{file}:mine")
    assert loss.reads == ("old_log_probs", "advantages", "values")
    with pytest.raises(
        ConfigError, match=r"short' takes \(log_probs, mask\): a loss is f\(log_probs, old_log_probs, adv"
    ):
        find_loss(f"{file}:short")
