"""Distillation's advantages and losses against the written formulas."""

import math

import pytest
import torch

from hybridflow.algorithms.advantages import distill_hybrid, grpo
from hybridflow.algorithms.distill import distill, hybrid, topk_reverse_kl
from hybridflow.errors import DataError

NAN = float("nan")


def test_the_advantage_is_the_teachers_log_probability_minus_the_students():
    teacher, student = torch.tensor([[-1.0, -2.0, NAN]]), torch.tensor([[-1.5, -1.0, NAN]])
    advantages, _ = distill(teacher, student, torch.tensor([[True, True, False]]))
    assert advantages.tolist() == [[0.5, -1.0, 0.0]]


def test_no_gradient_reaches_either_model_through_the_advantage():
    teacher, student = torch.zeros(1, 2, requires_grad=True), torch.zeros(1, 2, requires_grad=True)
    assert not distill(teacher, student, torch.ones(1, 2, dtype=torch.bool))[0].requires_grad


def test_another_teacher_gives_another_gradient():
    # At ratio 1 the gradient of the policy loss in log_probs is minus the advantage.
    mask, old = torch.ones(1, 2, dtype=torch.bool), torch.tensor([[-1.0, -1.0]])
    gradients = []
    for teacher in (torch.tensor([[-0.5, -2.0]]), torch.tensor([[-3.0, -2.0]])):
        log_probs = old.clone().requires_grad_()
        advantages, _ = distill(teacher, old, mask)
        (-(log_probs - old).exp() * advantages).sum().backward()
        gradients.append(log_probs.grad.tolist())
    assert gradients == [[[-0.5, 1.0]], [[2.0, 1.0]]]


def test_hybrid_adds_the_clipped_teachers_advantage_to_accepted_rows():
    rl = torch.tensor([[1.0, 1.0, 0.0], [-1.0, -1.0, -1.0]])
    opd = torch.tensor([[3.0, -0.5, 0.0], [3.0, -0.5, 0.2]])
    found = hybrid(rl, opd, torch.tensor([True, False]), lambda_rl=0.5, lambda_opd=2.0, clip=1.0)
    assert found.tolist() == [[0.5 + 2.0, 0.5 - 1.0, 0.0], [-0.5, -0.5, -0.5]]


def test_hybrid_without_the_teacher_is_grpo_bit_for_bit():
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(8, 5, generator=generator) < 0.7
    rl, _ = grpo(torch.randn(8, generator=generator), torch.arange(8) // 4, mask)
    rl = torch.where(mask, rl, -0.0)
    opd = torch.randn(8, 5, generator=generator)
    found = hybrid(rl, opd, torch.ones(8, dtype=torch.bool), lambda_opd=0.0)
    assert torch.equal(found.view(torch.int32), rl.view(torch.int32))


def full_kl(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    p, q = student.log_softmax(-1), teacher.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def test_top_k_with_a_tail_is_the_kl_over_k_plus_one_bins():
    # p = (1/2, 1/4 | 1/4), q = (1/4, 1/2 | 1/4): 1/2 ln 2 - 1/4 ln 2 + 0.
    p, q = torch.tensor([[[0.5, 0.25]]]).log(), torch.tensor([[[0.25, 0.5]]]).log()
    assert topk_reverse_kl(p, q, torch.tensor([[True]])).item() == pytest.approx(math.log(2) / 4)


def test_top_k_of_the_whole_vocabulary_but_one_token_is_the_full_kl_with_its_gradient():
    generator = torch.Generator().manual_seed(0)
    student = torch.randn(1, 3, 6, generator=generator, dtype=torch.float64).requires_grad_()
    teacher = torch.randn(1, 3, 6, generator=generator, dtype=torch.float64)
    mask = torch.ones(1, 3, dtype=torch.bool)
    found = topk_reverse_kl(student.log_softmax(-1)[..., :5], teacher.log_softmax(-1)[..., :5], mask)
    expected = full_kl(student, teacher)
    torch.testing.assert_close(found, expected)
    mine, theirs = (torch.autograd.grad(x.sum(), student, retain_graph=True)[0] for x in (found, expected))
    torch.testing.assert_close(mine, theirs)


def test_fewer_tokens_bound_the_full_kl_from_below():
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(1, 9, 7, generator=generator, dtype=torch.float64) for _ in range(2))
    ids = teacher.topk(3).indices
    found = topk_reverse_kl(
        student.log_softmax(-1).gather(-1, ids), teacher.log_softmax(-1).gather(-1, ids), torch.ones(1, 9) > 0
    )
    assert (found > 0).all() and (found < full_kl(student, teacher)).all()


def test_masked_nan_reaches_neither_value_nor_gradient():
    student = torch.tensor([[[-1.0, -2.0], [NAN, NAN]]], requires_grad=True)
    teacher = torch.tensor([[[-1.5, -1.0], [NAN, NAN]]], requires_grad=True)
    found = topk_reverse_kl(student, teacher, torch.tensor([[True, False]]))
    found.sum().backward()
    assert found[0, 1] == 0 and found[0, 0] > 0
    assert student.grad[0, 1].tolist() == [0, 0] and student.grad[0, 0].abs().sum() > 0
    assert teacher.grad is None


def test_mismatched_shapes_are_refused():
    x = torch.zeros(1, 2)
    with pytest.raises(DataError, match=r"accepted \[2\]: give \[B, T\], \[B, T\] and \[B\]"):
        hybrid(x, x, torch.ones(2, dtype=torch.bool))
    for clip in (-1.0, torch.nan):
        with pytest.raises(DataError, match=f"clip={clip}"):
            hybrid(x, x, torch.ones(1, dtype=torch.bool), clip=clip)
    with pytest.raises(DataError, match=r"teacher_log_probs \[1, 2\]: give \[B, T, K\] for a mask \[1, 2\]"):
        topk_reverse_kl(x[..., None], x, torch.ones(1, 2, dtype=torch.bool))


def test_the_hybrid_estimator_is_grpo_and_the_teacher_by_their_weights():
    scores, groups = torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1])
    mask = torch.tensor([[True, True], [True, False], [True, True], [True, True]])
    student = torch.tensor([[-1.0, -2.0], [-1.0, math.nan], [-1.0, -1.0], [-2.0, -1.0]])
    teacher = torch.tensor([[-0.5, -5.0], [-1.0, math.nan], [-3.0, -1.0], [-1.0, -1.5]])
    rewarded, _ = grpo(scores, groups, mask)
    alone, _ = distill_hybrid(scores, groups, teacher, student, mask, lambda_opd=0.0)
    assert torch.equal(alone, rewarded)
    both, _ = distill_hybrid(scores, groups, teacher, student, mask, lambda_rl=0.0, lambda_opd=2.0, opd_clip=0.75)
    # log-ratios 0.5, -3 | 0 | -2, 0 | 1, -0.5, clipped to 0.75 and doubled
    assert both.tolist() == [[1.0, -1.5], [0.0, 0.0], [-1.5, 0.0], [1.5, -1.0]]
    trusted = torch.tensor([True, False, False, False])
    some, _ = distill_hybrid(scores, groups, teacher, student, mask, trusted)
    assert torch.equal(some[1:], rewarded[1:]) and some[0, 0] == rewarded[0, 0] + 0.5
