"""KL estimators against hand arithmetic and the exact KL; their gradients; the controllers."""

import math

import pytest
import torch

from hybridflow.algorithms.kl import KINDS, AdaptiveKL, FixedKL, controller_of, full, kl, penalised
from hybridflow.config import AlgorithmConfig
from hybridflow.errors import ConfigError, DataError

LN2 = math.log(2.0)
NAN = float("nan")


def one(value: float) -> torch.Tensor:
    return torch.tensor([[value]], dtype=torch.float64)


def test_estimators_have_schulmans_values():
    # p = 1/2, q = 1/4: d = ln 2; k3 = exp(-d) - 1 + d = ln 2 - 1/2.
    p, q = one(math.log(0.5)), one(math.log(0.25))
    expected = {"k1": LN2, "k2": LN2**2 / 2, "k3": LN2 - 0.5, "low_var": LN2 - 0.5, "abs": LN2}
    for kind, value in expected.items():
        assert kl(p, q, kind).item() == pytest.approx(value)
        if kind != "k2":
            assert kl(p, q, f"{kind}+").item() == pytest.approx(value)
    assert kl(q, p, "k1").item() == pytest.approx(-LN2)
    assert kl(q, p, "abs").item() == pytest.approx(LN2)
    assert kl(q, p, "k3").item() == pytest.approx(1 - LN2)


def test_k3_is_clamped_and_k1_and_k2_are_not():
    assert kl(one(-50.0), one(0.0), "k3").item() == 10.0
    assert kl(one(0.0), one(-50.0), "k3").item() == 10.0
    assert kl(one(0.0), one(-8.0), "k3").item() == pytest.approx(math.exp(-8) - 1 + 8)
    assert kl(one(-50.0), one(0.0), "k1").item() == -50.0
    assert kl(one(-50.0), one(0.0), "k2").item() == 1250.0


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.endswith("+")])
def test_straight_through_kinds_have_the_gradient_of_k2(kind):
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(2, 3, generator=generator, dtype=torch.float64).requires_grad_()
    q = torch.randn(2, 3, generator=generator, dtype=torch.float64)
    (found,) = torch.autograd.grad(kl(p, q, kind).sum(), p)
    torch.testing.assert_close(found, p.detach() - q)
    torch.testing.assert_close(kl(p, q, kind), kl(p, q, kind[:-1]))


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_unbiased_kinds_average_to_the_exact_kl(kind):
    generator = torch.Generator().manual_seed(0)
    logits, ref = (0.5 * torch.randn(5, generator=generator, dtype=torch.float64) for _ in range(2))
    p, q = logits.log_softmax(0), ref.log_softmax(0)
    exact = full(logits, ref)
    assert exact.item() == pytest.approx(
        sum((math.exp(a) * (a - b)) for a, b in zip(p.tolist(), q.tolist(), strict=True))
    )
    assert (p.exp() * kl(p, q, kind)).sum().item() == pytest.approx(exact.item())


def test_of_the_gradients_k2s_is_the_exact_kls_and_k1s_is_nothing():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, generator=generator, dtype=torch.float64).requires_grad_()
    ref = torch.randn(5, generator=generator, dtype=torch.float64)
    (exact,) = torch.autograd.grad(full(logits, ref), logits)

    def expected_gradient(kind: str) -> torch.Tensor:
        p = logits.log_softmax(0)
        return torch.autograd.grad((p.exp().detach() * kl(p, ref.log_softmax(0), kind)).sum(), logits)[0]

    for kind in ("k2", "k1+", "k3+"):
        torch.testing.assert_close(expected_gradient(kind), exact)
    torch.testing.assert_close(expected_gradient("k1"), torch.zeros_like(exact))


def test_kl_in_the_reward_is_taken_off_each_token():
    mask = torch.tensor([[True, True, False]])
    rewards, p, q = (torch.tensor([x]) for x in ([0.0, 1.0, NAN], [-1.0, -1.0, NAN], [-2.0, -0.5, NAN]))
    found, divergence = penalised(rewards, p.requires_grad_(), q, mask, coef=0.1)
    assert divergence.tolist() == [[1.0, -0.5, 0.0]]
    assert found[0].tolist() == pytest.approx([-0.1, 1.05, 0.0])
    assert not found.requires_grad


def test_the_adaptive_controller_moves_the_coefficient_by_at_most_a_fifth_a_horizon():
    controller = AdaptiveKL(coef=0.1, target=6.0, horizon=100)
    assert controller.after(kl=6.0, num_samples=50).coef == pytest.approx(0.1)
    assert controller.after(kl=6.6, num_samples=50).coef == pytest.approx(0.1 * (1 + 0.1 * 0.5))
    assert controller.after(kl=60.0, num_samples=50).coef == pytest.approx(0.1 * (1 + 0.2 * 0.5))
    assert controller.after(kl=0.0, num_samples=100).coef == pytest.approx(0.08)
    assert controller.after(kl=6.6, num_samples=50).after(6.6, 50).coef == pytest.approx(0.1 * 1.05**2)
    assert FixedKL(0.1).after(kl=60.0, num_samples=50) == FixedKL(0.1)
    with pytest.raises(ConfigError, match="target and horizon above 0"):
        AdaptiveKL(coef=0.1, target=0.0, horizon=100)


def test_unknown_kinds_list_the_known_ones_and_name_the_setting():
    with pytest.raises(ConfigError, match=r"actor.loss.kl_kind='k4' is not known.*Known: abs, abs\+, k1, k1\+, k2, k3"):
        kl(one(0.0), one(0.0), "k4")
    with pytest.raises(ConfigError, match=r"algorithm.kl_kind='k4'"):
        penalised(one(0.0), one(0.0), one(0.0), torch.tensor([[True]]), 0.1, "k4")


def test_mismatched_shapes_are_refused_with_both():
    with pytest.raises(
        DataError, match=r"log_probs is \[2, 3\], ref_log_probs \[2, 1\]: give both for the same tokens"
    ):
        kl(torch.zeros(2, 3), torch.zeros(2, 1), "k1")
    with pytest.raises(DataError, match=r"logits is \[2, 5\], ref_logits \[5\]"):
        full(torch.zeros(2, 5), torch.zeros(5))


def test_settings_choose_the_controller():
    assert controller_of(AlgorithmConfig(kl_coef=0.1)) == FixedKL(0.1)
    adaptive = controller_of(AlgorithmConfig(kl_coef=0.1, kl_target=0.02, kl_horizon=50))
    assert adaptive == AdaptiveKL(0.1, 0.02, 50)
