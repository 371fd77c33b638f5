"""What stands in for megatron-core's own on a CPU, against plain torch."""

import pytest
import torch


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_the_gated_activation_and_its_gradient_are_those_of_plain_torch(dtype, bias):
    from hybridflow.engines.megatron import cpu

    cpu.install()
    from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl

    torch.manual_seed(0)
    given = torch.randn(7, 1, 10, dtype=dtype), torch.randn(10, dtype=dtype), torch.randn(7, 1, 5, dtype=dtype)
    found, expected = (
        (given[0].clone().requires_grad_(), given[1].clone().requires_grad_() if bias else None) for _ in range(2)
    )
    answer = bias_swiglu_impl(*found)
    whole = expected[0] if expected[1] is None else expected[0] + expected[1]
    oracle = torch.nn.functional.silu(whole[..., :5]) * whole[..., 5:]
    close = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 0.02, "atol": 0.02}
    torch.testing.assert_close(answer, oracle, **close)
    answer.backward(given[2]), oracle.backward(given[2])
    for mine, theirs in zip(found, expected, strict=True):
        if mine is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, **close)


def test_the_gated_activation_of_weighted_tokens_is_that_of_plain_torch():
    from hybridflow.engines.megatron import cpu

    cpu.install()
    from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl

    torch.manual_seed(1)
    x, weights, g = (torch.randn(*shape, dtype=torch.float64) for shape in ((7, 10), (7, 1), (7, 5)))
    found = x.clone().requires_grad_(), weights.clone().requires_grad_()
    expected = x.clone().requires_grad_(), weights.clone().requires_grad_()
    answer = weighted_bias_swiglu_impl(found[0], None, found[1])
    oracle = torch.nn.functional.silu(expected[0][:, :5]) * expected[0][:, 5:] * expected[1]
    torch.testing.assert_close(answer, oracle)
    answer.backward(g), oracle.backward(g)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("rows", [(7, 2, 3), (0, 1)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rms_norm_and_its_gradient_are_those_of_plain_torch(dtype, rows):
    from hybridflow.engines.megatron import cpu

    torch.manual_seed(2)
    x, weight, g = (torch.randn(*shape, dtype=dtype) for shape in ((*rows, 16), (16,), (*rows, 16)))
    found, expected = ((x.clone().requires_grad_(), weight.clone().requires_grad_()) for _ in range(2))
    answer = cpu.rms_norm(*found, 1e-3)
    oracle = torch.nn.functional.rms_norm(expected[0], (16,), expected[1], 1e-3)
    close = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 0.02, "atol": 0.02}
    torch.testing.assert_close(answer, oracle, **close)
    answer.backward(g), oracle.backward(g)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, **close)


@pytest.mark.parametrize("cached", [1, 25, 200_000])
def test_the_gradient_of_the_gated_activation_is_the_same_in_parts_and_of_any_memory_layout(cached, monkeypatch):
    from hybridflow.engines.megatron import cpu

    monkeypatch.setattr(cpu, "_CACHED", cached)
    torch.manual_seed(3)
    y = torch.randn(3, 7, 10, dtype=torch.float64).transpose(0, 1).requires_grad_()
    g = torch.randn(3, 7, 5, dtype=torch.float64).transpose(0, 1)
    (torch.nn.functional.silu(y[..., :5]) * y[..., 5:]).backward(g)
    torch.testing.assert_close(cpu._swiglu_back(g, y.detach()), y.grad)
