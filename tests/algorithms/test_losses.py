"""Losses against hand arithmetic; splits, padding and masked NaN change nothing."""

import math

import pytest
import torch

from hybridflow.algorithms.kl import kl
from hybridflow.algorithms.losses import aggregate, columns_of, objective, ppo, sft
from hybridflow.config import LossConfig
from hybridflow.errors import ConfigError

LN2 = math.log(2.0)
NAN = float("nan")


def one(value: float) -> torch.Tensor:
    return torch.tensor([[value]])


YES = torch.tensor([[True]])


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


def test_the_clip_fraction_counts_tokens_where_the_clip_is_active():
    log_probs = torch.tensor([[LN2, LN2, 0.0]])
    advantages = torch.tensor([[1.0, -1.0, 1.0]])
    _, metrics = ppo(log_probs, torch.zeros(1, 3), advantages, torch.ones(1, 3, dtype=torch.bool), LossConfig())
    assert metrics["clip_fraction"].item() == 1


def test_kl_estimators_have_schulmans_values():
    # p = 1/2, q = 1/4: d = ln 2; k3 = exp(-d) - 1 + d = ln 2 - 1/2.
    p, q = one(math.log(0.5)), one(math.log(0.25))
    assert kl(p, q, "k1").item() == pytest.approx(LN2)
    assert kl(p, q, "k2").item() == pytest.approx(LN2**2 / 2)
    assert kl(p, q, "k3").item() == pytest.approx(LN2 - 0.5)


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ConfigError, match=r"kl_kind='k4'.*Known: k1, k2, k3"):
        kl(one(0.0), one(0.0), "k4")
    with pytest.raises(ConfigError, match=r"name='ppoo' is not a loss. Did you mean 'ppo'\?"):
        columns_of(LossConfig(name="ppoo"))
    with pytest.raises(ConfigError, match=r"aggregation='mean' is not an aggregation"):
        aggregate(one(0.0), YES, "mean", 1, 1)


def test_aggregations_divide_by_global_counts():
    loss = torch.tensor([[1.0, 2.0, NAN], [4.0, NAN, NAN], [NAN, NAN, NAN]])
    mask = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
    assert aggregate(loss, mask, "token-mean", 6, 4).item() == pytest.approx(7 / 6)
    assert aggregate(loss, mask, "seq-mean-token-sum", 6, 4).item() == pytest.approx(7 / 4)
    assert aggregate(loss, mask, "seq-mean-token-mean", 6, 4).item() == pytest.approx((1.5 + 4) / 4)


def random_batch(rows: int = 6, width: int = 5) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    draw = lambda: torch.randn(rows, width, generator=generator)  # noqa: E731
    lengths = torch.tensor([5, 3, 1, 4, 2, 0])
    mask = torch.arange(width) < lengths[:, None]
    mask[0, 2] = False
    return draw(), {"log_probs": draw(), "advantages": draw(), "ref_log_probs": draw()}, mask


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
@pytest.mark.parametrize("name", ["ppo", "sft"])
def test_splits_padding_and_masked_nan_do_not_change_the_gradient(mode, name):
    config = LossConfig(name=name, aggregation=mode, kl_coef=0.1, entropy_coef=0.01, dual_clip=3.0)
    log_probs, columns, mask = random_batch()
    entropy = torch.rand(mask.shape, generator=torch.Generator().manual_seed(2))
    counts = (float(mask.sum()), float(mask.any(dim=1).sum()))

    def gradient(pieces: list[list[int]], pad: int = 0, poison: bool = False) -> torch.Tensor:
        leaf = log_probs.clone().requires_grad_()
        for rows in pieces:
            widen = lambda x: torch.nn.functional.pad(x, (0, pad), value=0)  # noqa: E731
            keep = widen(mask[rows])
            given = {k: widen(v[rows]) for k, v in columns.items()}
            if poison:
                given = {k: v.where(keep, NAN) for k, v in given.items()}
            objective(widen(leaf[rows]), widen(entropy[rows]), given, keep, config, *counts)[0].backward()
        return leaf.grad

    whole = gradient([[0, 1, 2, 3, 4, 5]])
    assert whole.abs().sum() > 0
    torch.testing.assert_close(gradient([[5, 0], [2], [1, 3, 4]]), whole, rtol=0, atol=1e-7)
    torch.testing.assert_close(gradient([[0, 1, 2, 3, 4, 5]], pad=3), whole, rtol=0, atol=1e-7)
    assert torch.equal(gradient([[0, 1, 2, 3, 4, 5]], poison=True), whole)


def test_sft_is_the_negative_log_likelihood():
    loss, _ = sft(one(-1.5), one(NAN), one(NAN), YES, LossConfig(name="sft"))
    assert loss.item() == 1.5
