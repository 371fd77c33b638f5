"""Every estimator against hand arithmetic, and the conventions that all of them share."""

import inspect
import math

import pytest
import torch

from hybridflow.algorithms.advantages import (
    ESTIMATORS,
    gae,
    gpg,
    grpo,
    grpo_stepwise,
    maxrl,
    opo,
    pass_at_k,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    rloo,
)
from hybridflow.errors import DataError

MASK = torch.tensor([[True, True, False]] * 6)
GROUPS = torch.tensor([7, 7, 7, 3, 3, 9])
SCORES = [1.0, 0.0, 2.0, 1.0, 0.0, 5.0]
NAN, INF = float("nan"), float("inf")


def first_column(estimator, scores: list[float], mask: torch.Tensor = MASK, **options) -> list[float]:
    """The advantage of each row; all its unmasked tokens have it, and returns are the same."""
    advantages, returns = estimator(torch.tensor(scores), GROUPS, mask, **options)
    assert torch.equal(advantages, returns)
    assert advantages.dtype == torch.float32
    assert torch.equal(advantages, torch.where(mask, advantages[:, :1], 0.0))
    return advantages[:, 0].tolist()


# -------------------------------------------------------------------------------------------------- relative to a group


def test_grpo_centres_scores_and_divides_by_the_unbiased_deviation():
    # group 7: 1, 0, 2: mean 1, unbiased std 1. group 3: 1, 0: mean 0.5, std sqrt(0.5). group 9: one row.
    deviation = math.sqrt(0.5)
    expected = [0.0, -1 / (1 + 1e-6), 1 / (1 + 1e-6), 0.5 / (deviation + 1e-6), -0.5 / (deviation + 1e-6), 0.0]
    assert first_column(grpo, SCORES) == pytest.approx(expected, abs=1e-7)
    assert first_column(grpo, SCORES, eps=1.0)[1] == pytest.approx(-1 / 2)


def test_grpo_without_the_deviation_only_takes_the_mean_off():
    assert first_column(grpo, SCORES, normalize_std=False) == [0.0, -1.0, 1.0, 0.5, -0.5, 0.0]


def test_rloo_takes_off_the_mean_of_the_others():
    # group 7: 1 - (0 + 2) / 2, 0 - (1 + 2) / 2, 2 - (1 + 0) / 2; group 3: 1 - 0, 0 - 1.
    assert first_column(rloo, SCORES) == [0.0, -1.5, 1.5, 1.0, -1.0, 0.0]


def test_reinforce_plus_plus_baseline_whitens_what_is_left_of_the_group_mean():
    # Two tokens each of 0, -1, 1, 0.5, -0.5, 0: mean 0, squares 2 (1 + 1 + 0.25 + 0.25) = 5 over 12 - 1 tokens.
    scale = 1 / math.sqrt(5 / 11 + 1e-8)
    expected = [x * scale for x in (0.0, -1.0, 1.0, 0.5, -0.5, 0.0)]
    assert first_column(reinforce_plus_plus_baseline, SCORES) == pytest.approx(expected, abs=1e-6)


def test_reinforce_plus_plus_baseline_weighs_rows_by_their_tokens():
    # Rows of 1 and 3 tokens with -0.5 and 0.5: mean (-0.5 + 1.5) / 4 = 0.25; variance (0.5625 + 3 * 0.0625) / 3.
    mask = torch.tensor([[True, False, False], [True, True, True]])
    advantages, _ = reinforce_plus_plus_baseline(torch.tensor([0.0, 1.0]), torch.tensor([0, 0]), mask)
    scale = 1 / math.sqrt(0.25 + 1e-8)
    assert advantages[:, 0].tolist() == pytest.approx([-0.75 * scale, 0.25 * scale])


def test_opos_baseline_weighs_scores_by_length():
    # Lengths 3 and 1 with scores 1 and 0: baseline 3 / 4.
    mask = torch.tensor([[True, True, True], [True, False, False]])
    advantages, _ = opo(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), mask)
    assert advantages.tolist() == [[0.25, 0.25, 0.25], [-0.75, 0.0, 0.0]]


def test_gpg_scales_by_the_share_of_rows_with_an_advantage():
    # Of 6 rows 4 have an advantage (0 of group 7 is its mean, group 9 has one row): 6 / 4.
    assert first_column(gpg, SCORES) == [0.0, -1.5, 1.5, 0.75, -0.75, 0.0]
    assert first_column(gpg, [1.0] * 6) == [0.0] * 6


def test_maxrl_divides_by_the_mean_where_it_is_positive():
    assert first_column(maxrl, [1.0, 0.0, 2.0, 1.0, 0.0, 5.0]) == [0.0, -1.0, 1.0, 1.0, -1.0, 0.0]
    assert first_column(maxrl, [3.0, 0.0, 3.0, -1.0, 0.0, 5.0]) == [0.5, -1.0, 0.5, 0.0, 0.0, 0.0]


def test_pass_at_k_is_the_analytical_solution():
    # n = 4 answers, c = 1 right, k = 2: R = 1 - C(3,2)/C(4,2) = 1/2, sigma = 1/2; a draw of 2 that holds a given wrong
    # answer is right with R' = 1 - C(2,1)/C(3,1) = 1/3. Right: (1 - 1/2) / (1/2); wrong: (1/3 - 1/2) / (1/2).
    scores, groups, mask = torch.tensor([0.0, 1.0, 0.0, 0.0]), torch.zeros(4, dtype=torch.int64), torch.ones(4, 1) > 0
    advantages, _ = pass_at_k(scores, groups, mask, k=2)
    assert advantages[:, 0].tolist() == pytest.approx([-1 / 3, 1.0, -1 / 3, -1 / 3])


def test_pass_at_k_is_grpo_with_the_biased_deviation_for_one_draw():
    scores, groups, mask = torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0]), torch.zeros(5).long(), torch.ones(5, 1) > 0
    advantages, _ = pass_at_k(scores, groups, mask, k=1)
    expected = (scores - scores.mean()) / scores.std(correction=0)
    torch.testing.assert_close(advantages[:, 0], expected)


def test_pass_at_k_gives_nothing_where_every_draw_comes_out_alike():
    mask, groups = torch.ones(4, 1) > 0, torch.zeros(4, dtype=torch.int64)
    for scores in ([0.0] * 4, [1.0] * 4, [1.0, 1.0, 1.0, 0.0], [1.0, NAN, NAN, NAN]):
        assert (pass_at_k(torch.tensor(scores), groups, mask, k=2)[0] == 0).all()


def test_stepwise_grpo_normalises_inside_group_and_step():
    step_scores = torch.tensor([[1.0, 4.0], [3.0, NAN], [5.0, 0.0]])
    groups = torch.tensor([2, 2, 8])
    step_ids = torch.tensor([[0, 0, 1, -1], [0, 0, 0, 0], [0, 1, 1, 1]])
    mask = torch.tensor([[True, True, True, True], [True, True, True, False], [True, True, True, True]])
    advantages, _ = grpo_stepwise(step_scores, groups, step_ids, mask, normalize_std=False)
    # Step 0 of group 2: 1 and 3; step 1 of group 2, and group 8, have one row each.
    assert advantages.tolist() == [[-1, -1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]]
    raw, _ = grpo_stepwise(step_scores, groups, step_ids, mask, normalize_std=False, single="raw")
    assert raw.tolist() == [[-1, -1, 4, 0], [1, 1, 1, 0], [5, 0, 0, 0]]


SINGLE = {"grpo": grpo, "rloo": rloo, "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline, "opo": opo}
GROUPED = {**SINGLE, "gpg": gpg, "maxrl": maxrl, "pass_at_k": lambda *args: pass_at_k(*args, k=1)}


@pytest.mark.parametrize("name", GROUPED)
def test_a_group_of_equal_scores_gives_exactly_zero(name):
    scores = [0.1, 0.1, 0.1, 0.3, 0.3, 1.0] if name != "pass_at_k" else [1.0, 1.0, 1.0, 0.0, 0.0, 1.0]
    assert first_column(GROUPED[name], scores) == [0.0] * 6


@pytest.mark.parametrize("name", SINGLE)
def test_a_group_of_one_gives_zero_or_its_score(name):
    found = first_column(SINGLE[name], [1.0, 1.0, 1.0, 1.0, 1.0, 5.0], single="raw")
    if name == "reinforce_plus_plus_baseline":  # Two tokens of 5 and ten of 0, whitened.
        deviation = math.sqrt((2 * (25 / 6) ** 2 + 10 * (5 / 6) ** 2) / 11)
        assert found == pytest.approx([-5 / 6 / deviation] * 5 + [25 / 6 / deviation])
    else:
        assert found == [0, 0, 0, 0, 0, 5]
    assert first_column(SINGLE[name], [1.0, 1.0, 1.0, 1.0, 1.0, 5.0], single="zero") == [0.0] * 6
    with pytest.raises(DataError, match="single='one': a group of one gives 'zero' or 'raw'"):
        first_column(SINGLE[name], [1.0] * 6, single="one")


@pytest.mark.parametrize("failed", [NAN, INF, -INF])
@pytest.mark.parametrize("name", GROUPED)
def test_a_failed_reward_counts_as_if_its_row_were_not_there(name, failed):
    scores = torch.tensor([1.0, failed, 0.0, 1.0, 0.0, failed])
    keep = scores.isfinite()
    found, _ = GROUPED[name](scores, GROUPS, MASK)
    without, _ = GROUPED[name](scores[keep], GROUPS[keep], MASK[keep])
    if name == "gpg":  # its factor counts all rows
        without = without * 6 / 4
    torch.testing.assert_close(found[keep], without)
    assert (found[~keep] == 0).all()


# --------------------------------------------------------------------------------------------- per token, with a critic


def test_gae_follows_the_recursion():
    rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.5, 0.4, 0.2]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    gamma, lam = 0.9, 0.8
    last = 1.0 - 0.2
    middle = (0.9 * 0.2 - 0.4) + gamma * lam * last
    first = (0.9 * 0.4 - 0.5) + gamma * lam * middle
    advantages, returns = gae(rewards, values, mask, gamma, lam, whiten=False)
    assert advantages[0].tolist() == pytest.approx([first, middle, last])
    assert returns[0].tolist() == pytest.approx([first + 0.5, middle + 0.4, last + 0.2])


def test_gae_whitens_advantages_and_not_returns():
    rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.5, 0.4, 0.2]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    # gamma = lam = 1: A = 1 - V = 0.5, 0.6, 0.8: mean 19 / 30, squares (16 + 1 + 25) / 900, over n - 1 = 2.
    advantages, returns = gae(rewards, values, mask)
    scale = 1 / math.sqrt(42 / 900 / 2 + 1e-8)
    assert advantages[0].tolist() == pytest.approx([-4 / 30 * scale, -1 / 30 * scale, 5 / 30 * scale], rel=1e-5)
    assert returns[0].tolist() == pytest.approx([1, 1, 1])


def multi_turn(x: list[list[float]], gap: float = NAN) -> torch.Tensor:
    """The rows with a masked token after the second one."""
    return torch.tensor([[a, b, gap, *rest] for a, b, *rest in x])


def test_tool_tokens_inside_a_row_change_nothing():
    rewards, values = [[0.0, 0.5, 1.0], [0.1, 0.0, -1.0]], [[0.5, 0.4, 0.2], [0.1, 0.3, 0.6]]
    mask, gap = torch.ones(2, 3, dtype=torch.bool), multi_turn([[1.0] * 3] * 2).isfinite()
    plain = gae(torch.tensor(rewards), torch.tensor(values), mask, 0.9, 0.8)
    for garbage in (NAN, INF, 3.0):
        found = gae(multi_turn(rewards, garbage), multi_turn(values, garbage), gap, 0.9, 0.8)
        for straight, interrupted in zip(plain, found, strict=True):
            torch.testing.assert_close(interrupted[gap].view(2, 3), straight)
            assert (interrupted[~gap] == 0).all()
        straight, _ = reinforce_plus_plus(torch.tensor(rewards), mask, 0.9)
        interrupted, _ = reinforce_plus_plus(multi_turn(rewards, garbage), gap, 0.9)
        torch.testing.assert_close(interrupted[gap].view(2, 3), straight)


def test_reinforce_plus_plus_whitens_the_discounted_return():
    rewards, mask = torch.tensor([[0.0, 1.0], [0.0, 3.0]]), torch.ones(2, 2, dtype=torch.bool)
    # Returns 0.5, 1 and 1.5, 3: mean 1.5, variance (1 + 0.25 + 0 + 2.25) / 3.
    advantages, returns = reinforce_plus_plus(rewards, mask, gamma=0.5)
    assert returns.tolist() == [[0.5, 1.0], [1.5, 3.0]]
    scale = 1 / math.sqrt(3.5 / 3 + 1e-8)
    assert advantages.flatten().tolist() == pytest.approx([-1 * scale, -0.5 * scale, 0, 1.5 * scale])


def test_remax_takes_the_greedy_score_off_the_return():
    rewards = torch.tensor([[0.0, -0.25, 1.0], [2.0, NAN, NAN]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    advantages, returns = remax(rewards, torch.tensor([0.5, 3.0]), mask)
    assert returns.tolist() == [[0.75, 0.75, 1.0], [2.0, 0.0, 0.0]]
    assert advantages.tolist() == [[0.25, 0.25, 0.5], [-1.0, 0.0, 0.0]]


def test_a_failed_reward_leaves_its_row_at_zero_and_out_of_the_whitening():
    rewards, values = torch.tensor([[0.0, 1.0], [NAN, 0.0], [0.0, 3.0]]), torch.full((3, 2), 0.25)
    mask, keep = torch.ones(3, 2, dtype=torch.bool), torch.tensor([True, False, True])
    for estimate in (lambda r, v, m: gae(r, v, m), lambda r, v, m: reinforce_plus_plus(r, m)):
        found, _ = estimate(rewards, values, mask)
        without, _ = estimate(rewards[keep], values[keep], mask[keep])
        torch.testing.assert_close(found[keep], without)
        assert (found[1] == 0).all()
    assert gae(rewards, values, mask)[1][1].tolist() == [0.25, 0.25]
    baselines = torch.tensor([NAN, 0.0, 1.0])
    assert remax(rewards, baselines, mask)[0].tolist() == [[0, 0], [0, 0], [2, 2]]


def test_one_token_alone_is_whitened_to_zero():
    one = torch.ones(1, 1, dtype=torch.bool)
    assert reinforce_plus_plus(torch.tensor([[5.0]]), one)[0].tolist() == [[0.0]]


# ---------------------------------------------------------------------------------------------- what all have in common


def inputs(rows: int = 7, width: int = 6, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """A batch with every input that an estimator may name: gaps inside rows, one row without a token."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
    mask = torch.arange(width) < torch.tensor([6, 4, 1, 5, 2, 0, 3])[:rows, None]
    mask[0, 2] = mask[3, 1] = False
    return {
        "scores": torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0])[:rows].to(dtype),
        "groups": torch.tensor([4, 4, 4, 1, 1, 1, 1])[:rows],
        "mask": mask,
        "rewards": draw(rows, width),
        "values": draw(rows, width),
        "baseline_scores": draw(rows),
        "step_scores": draw(rows, 2),
        "step_ids": (torch.arange(width) // 3).expand(rows, -1).clone(),
        "teacher_log_probs": draw(rows, width),
        "log_probs": draw(rows, width),
        "k": 2,  # type: ignore[dict-item]
    }


def run(name: str, given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    names = inspect.signature(ESTIMATORS[name]).parameters
    return ESTIMATORS[name](**{key: value for key, value in given.items() if key in names})


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_order_of_rows_does_not_matter(name):
    given, order = inputs(), torch.tensor([5, 2, 0, 4, 1, 3, 6])
    shuffled = {key: value[order] if isinstance(value, torch.Tensor) else value for key, value in given.items()}
    for straight, found in zip(run(name, given), run(name, shuffled), strict=True):
        assert straight.abs().sum() > 0
        torch.testing.assert_close(found, straight[order], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_padding_and_what_is_masked_do_not_matter(name):
    given = inputs()
    mask = given["mask"]
    padded = {}
    for key, value in given.items():
        padded[key] = value
        if isinstance(value, torch.Tensor) and value.shape == mask.shape:
            garbage = {torch.bool: False, torch.int64: 99}.get(value.dtype, NAN)
            poisoned = value if key == "mask" else value.where(mask, garbage)
            padded[key] = torch.nn.functional.pad(poisoned, (0, 2), value=garbage)
    for straight, found in zip(run(name, given), run(name, padded), strict=True):
        assert torch.equal(found[:, :-2], straight)
        assert (found[:, -2:] == 0).all() and (straight[~mask] == 0).all()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_results_are_float32_whatever_comes_in(name):
    for dtype in (torch.bfloat16, torch.float64):
        assert [x.dtype for x in run(name, inputs(dtype=dtype))] == [torch.float32, torch.float32]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_batch_without_a_token_is_refused(name):
    given = inputs()
    given["mask"] = torch.zeros_like(given["mask"])
    with pytest.raises(DataError, match=r"mask \[7, 6\] is False everywhere"):
        run(name, given)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_mismatched_shapes_are_refused_with_both(name):
    given = inputs()
    for key in set(inspect.signature(ESTIMATORS[name]).parameters) & set(given) - {"mask", "k"}:
        wrong = {**given, key: given[key][:5]}
        with pytest.raises(DataError, match=rf"{key}.* \[5"):
            run(name, wrong)
    with pytest.raises(DataError, match=r"mask is torch.int64 \[7, 6\]: give a bool tensor"):
        run(name, {**given, "mask": given["mask"].long()})


def test_other_bad_inputs_name_the_rule():
    given = inputs()
    with pytest.raises(DataError, match="groups are torch.float32: give integers, such as groups.long"):
        run("grpo", {**given, "groups": given["groups"].float()})
    for key in ("groups", "step_ids"):
        with pytest.raises(DataError, match=f"{key} are torch.float32: give integers"):
            run("grpo_stepwise", {**given, key: given[key].float()})
    with pytest.raises(DataError, match="k=0: draw at least 1 answer"):
        run("pass_at_k", {**given, "k": 0})  # type: ignore[dict-item]
    with pytest.raises(DataError, match=r"scores hold 0.5: pass@k needs 0 \(wrong\) and 1 \(right\)"):
        run("pass_at_k", {**given, "scores": given["scores"] * 0.5})
    with pytest.raises(DataError, match=r"step_ids reach 1, but step_scores \[7, 1\] has 1 steps"):
        run("grpo_stepwise", {**given, "step_scores": given["step_scores"][:, :1]})


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_value_that_is_no_number_is_named_before_it_spreads(bad: float):
    mask = torch.tensor([[True, True, False], [True, True, True]])
    values = torch.zeros(2, 3)
    values[0, 2] = bad  # outside of the mask it is never read
    gae(torch.zeros(2, 3), values, mask)
    values[1, 1] = bad
    with pytest.raises(DataError, match=f"^values of row 1 is {bad} at token 1, and 1 of 5 tokens are not finite: "):
        gae(torch.zeros(2, 3), values, mask)
