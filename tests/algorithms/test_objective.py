"""The scalar of an update: global denominators, and what splits, padding, packing and masked NaN do to it: nothing."""

import pytest
import torch

from hybridflow.algorithms.losses import LOSSES
from hybridflow.algorithms.objective import (
    AGGREGATIONS,
    aggregate,
    columns_of,
    explained_variance,
    mask_column,
    objective,
    value_objective,
)
from hybridflow.config import LossConfig
from hybridflow.errors import ConfigError, DataError

NAN = float("nan")


def test_aggregations_divide_by_global_counts():
    loss = torch.tensor([[1.0, 2.0, NAN], [4.0, NAN, NAN], [NAN, NAN, NAN]])
    mask = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
    assert aggregate(loss, mask, "token-mean", 6, 4).item() == pytest.approx(7 / 6)
    assert aggregate(loss, mask, "seq-mean-token-sum", 6, 4).item() == pytest.approx(7 / 4)
    assert aggregate(loss, mask, "seq-mean-token-mean", 6, 4).item() == pytest.approx((1.5 + 4) / 4)
    assert aggregate(loss, mask, "seq-mean-token-sum-norm", 6, 4, scale=10).item() == pytest.approx(7 / 10 / 4)


def test_wrong_aggregations_are_refused():
    loss, mask = torch.ones(1, 1), torch.tensor([[True]])
    with pytest.raises(ConfigError, match=r"aggregation='mean' is not an aggregation.*Known: seq-mean-token-mean, "):
        aggregate(loss, mask, "mean", 1, 1)
    with pytest.raises(
        ConfigError, match=r"actor.loss.scale=None: seq-mean-token-sum-norm divides .*rollout.max_tokens"
    ):
        aggregate(loss, mask, "seq-mean-token-sum-norm", 1, 1)
    with pytest.raises(DataError, match="num_tokens=0, num_sequences=0: every token of the update is masked"):
        aggregate(loss, mask & False, "token-mean", 0, 0)
    with pytest.raises(DataError, match=r"loss is \[1\] for a mask \[1, 1\]"):
        aggregate(loss[0], mask, "token-mean", 1, 1)


def random_batch(rows: int = 6, width: int = 5) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    draw = lambda: torch.randn(rows, width, generator=generator)  # noqa: E731
    lengths = torch.tensor([5, 3, 1, 4, 2, 0])
    mask = torch.arange(width) < lengths[:, None]
    mask[0, 2] = False
    columns = {"log_probs": draw(), "advantages": draw(), "ref_log_probs": draw(), "loss_weights": draw().abs()}
    columns["high_covariance"] = draw() > 0.5
    return draw(), columns, mask


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("name", LOSSES)
def test_splits_padding_order_and_masked_nan_do_not_change_the_gradient(mode, name):
    config = LossConfig(
        name=name, aggregation=mode, scale=5.0, kl_coef=0.1, kl_kind="k3+", entropy_coef=0.01, dual_clip=3.0
    )
    log_probs, columns, mask = random_batch()
    columns = {key: columns[key] for key in columns_of(config, columns)}
    entropy = torch.rand(mask.shape, generator=torch.Generator().manual_seed(2))
    counts = (float(mask.sum()), float(mask.any(dim=1).sum()))

    def gradient(pieces: list[list[int]], pad: int = 0, poison: bool = False) -> torch.Tensor:
        leaf = log_probs.clone().requires_grad_()
        for rows in pieces:
            widen = lambda x: torch.nn.functional.pad(x, (0, pad), value=0)  # noqa: E731
            keep = widen(mask[rows])
            given = {k: widen(v[rows]) for k, v in columns.items()}
            if poison:
                given = {k: v.where(keep, NAN if v.is_floating_point() else True) for k, v in given.items()}
            objective(widen(leaf[rows]), widen(entropy[rows]), given, keep, config, *counts)[0].backward()
        return leaf.grad

    whole = gradient([[0, 1, 2, 3, 4, 5]])
    assert whole.abs().sum() > 0
    torch.testing.assert_close(gradient([[5, 0], [2], [], [1, 3, 4]]), whole, rtol=0, atol=1e-6)
    torch.testing.assert_close(gradient([[0], [1], [2], [3], [4], [5]]), whole, rtol=0, atol=1e-6)
    torch.testing.assert_close(gradient([[0, 1, 2, 3, 4, 5]], pad=3), whole, rtol=0, atol=1e-6)
    assert torch.equal(gradient([[0, 1, 2, 3, 4, 5]], poison=True), whole)


def test_a_row_without_a_token_counts_in_no_denominator():
    log_probs, columns, mask = random_batch()
    config = LossConfig(aggregation="seq-mean-token-mean")
    whole, _ = objective(log_probs, log_probs, columns, mask, config, float(mask.sum()), 5)
    without, _ = objective(
        log_probs[:5], log_probs[:5], {k: v[:5] for k, v in columns.items()}, mask[:5], config, float(mask.sum()), 5
    )
    assert whole == without


def test_the_parts_add_up_and_are_reported_as_sums():
    mask = torch.tensor([[True, True, False]])
    log_probs, entropy = torch.tensor([[-1.0, -2.0, NAN]]), torch.tensor([[0.5, 1.5, NAN]])
    columns = {"advantages": torch.tensor([[1.0, 2.0, NAN]]), "ref_log_probs": torch.tensor([[-1.0, -3.0, NAN]])}
    config = LossConfig(name="reinforce", kl_coef=0.5, kl_kind="abs", entropy_coef=0.1)
    total, metrics = objective(log_probs, entropy, columns, mask, config, 4, 2)
    # -A log p: 1 + 4; KL: 0 + 1; entropy 2: (5 + 0.5 * 1 - 0.1 * 2) / 4.
    assert total.item() == pytest.approx(5.3 / 4)
    assert (metrics["kl"].item(), metrics["entropy"].item()) == (1.0, 2.0)


def test_weights_multiply_the_policy_loss_alone():
    mask = torch.ones(1, 2, dtype=torch.bool)
    log_probs, entropy = torch.tensor([[-1.0, -2.0]]), torch.ones(1, 2)
    columns = {"advantages": torch.ones(1, 2), "loss_weights": torch.tensor([[0.0, 2.0]])}
    config = LossConfig(name="reinforce", entropy_coef=0.1)
    assert objective(log_probs, entropy, columns, mask, config, 1, 1)[0].item() == pytest.approx(0 + 4 - 0.2)


def test_the_ratio_is_taken_to_the_column_that_is_named():
    mask, log_probs = torch.ones(1, 1, dtype=torch.bool), torch.tensor([[-1.0]])
    columns = {"log_probs": log_probs, "rollout_log_probs": log_probs - 0.1, "advantages": torch.ones(1, 1)}
    for name, ratio in (("log_probs", 1.0), ("rollout_log_probs", 1.1051709)):
        _, metrics = objective(log_probs, log_probs, columns, mask, LossConfig(old_log_probs=name), 1, 1)
        assert metrics["ratio"].item() == pytest.approx(ratio)


def test_own_log_probs_as_the_old_ones_give_the_loss_and_gradient_of_the_column_of_the_same_values():
    mask, log_probs = torch.tensor([[True, True, False]]), torch.tensor([[-1.0, -0.2, -3.0]])
    columns = {"advantages": torch.tensor([[2.0, -1.0, 9.0]])}
    found = []
    for name, extra in (("log_probs", {"log_probs": log_probs}), ("own", {})):
        leaf = log_probs.clone().requires_grad_()
        loss, metrics = objective(leaf, leaf, columns | extra, mask, LossConfig(old_log_probs=name), 2, 1)
        loss.backward()
        assert leaf.grad is not None
        found.append((loss.item(), leaf.grad.tolist(), metrics["ratio"].item()))
    # ratio 1: the loss is -mean(advantage), its gradient -advantage / 2.
    assert found == [(-0.5, [[-1.0, 0.5, 0.0]], 2.0)] * 2
    assert columns_of(LossConfig(old_log_probs="own"), ("advantages",)) == ("advantages",)


def test_columns_are_those_of_loss_kl_and_weights():
    offered = ("responses", "log_probs", "advantages", "ref_log_probs", "response_mask")
    assert columns_of(LossConfig(), offered) == ("log_probs", "advantages")
    assert columns_of(LossConfig(kl_coef=0.1), offered) == ("log_probs", "advantages", "ref_log_probs")
    assert columns_of(LossConfig(name="sft"), offered) == ()
    assert columns_of(LossConfig(name="reinforce"), (*offered, "loss_weights")) == ("advantages", "loss_weights")
    with pytest.raises(
        DataError, match=r"actor.loss.name='kl_cov' reads the column 'high_covariance', which the batch la"
    ):
        columns_of(LossConfig(name="kl_cov"), offered)
    assert mask_column(offered) == "response_mask"
    assert mask_column((*offered, "loss_mask")) == "loss_mask"


def test_a_function_of_the_users_own_is_imported_once(tmp_path):
    file = tmp_path / "counted.py"
    file.write_text(
        "calls = []\n"
        "def counted(log_probs, old_log_probs, advantages, mask, config):\n"
        "    calls.append(1)\n    return log_probs, {'calls': len(calls)}\n"
    )
    x, mask = torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool)
    config = LossConfig(name=f"{file}:counted")
    found = [objective(x, x, {"log_probs": x, "advantages": x}, mask, config, 1, 1)[1]["calls"] for _ in range(3)]
    assert found == [1, 2, 3]


def test_a_loss_of_the_users_own_is_the_objective(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def mine(log_probs, old_log_probs, advantages, mask, config, values):\n"
        "    return config.options['factor'] * log_probs * values, {}\n"
        "def wrong(log_probs, old_log_probs, advantages, mask, config):\n    return log_probs.mean(), {}\n"
    )
    mask = torch.ones(1, 2, dtype=torch.bool)
    x = torch.tensor([[1.0, 2.0]])
    columns = {"log_probs": x, "advantages": x, "values": x}
    config = LossConfig(name=f"{file}:mine", options={"factor": 3.0})
    assert columns_of(config, columns) == ("log_probs", "advantages", "values")
    assert objective(x, x, columns, mask, config, 1, 1)[0].item() == pytest.approx(3 * (1 + 4))
    with pytest.raises(DataError, match=r"loss is \[\] for a mask \[1, 2\]"):
        objective(x, x, columns, mask, LossConfig(name=f"{file}:wrong"), 1, 1)


def test_the_value_objective_is_the_same_in_pieces_and_its_metrics_are_by_hand():
    values, old = torch.tensor([[1.0, 2.0], [0.5, torch.nan]]), torch.tensor([[0.0, 2.0], [0.5, 0.0]])
    returns, mask = torch.tensor([[2.0, 1.0], [0.0, torch.inf]]), torch.tensor([[True, True], [True, False]])
    loss, sums = value_objective(values, old, returns, mask, 0.25, 3.0)
    # (1 - 2)^2 = 1, clipped (0.25 - 2)^2 = 3.0625; (2 - 1)^2 = 1; (0.5 - 0)^2 = 0.25; halves, over 3 tokens.
    assert loss.item() == pytest.approx((3.0625 + 1 + 0.25) / 6)
    parts = [value_objective(*(x[i : i + 1] for x in (values, old, returns, mask)), 0.25, 3.0) for i in (0, 1)]
    assert sum(part.item() for part, _ in parts) == pytest.approx(loss.item())
    means = {name: sum(float(s[name]) for _, s in parts) / 3 for name in sums}
    found = explained_variance(means)
    # Returns 2, 1, 0 have variance 2/3; errors 1, -1, -0.5 have 2.25/3 - (0.5/3)^2.
    expected = 1 - (2.25 / 3 - 0.25 / 9) / (2 / 3)
    assert found == pytest.approx(
        {"clip_fraction": 1 / 3, "value": 3.5 / 3, "return": 1.0, "explained_variance": expected}
    )
    constant = explained_variance({"return": 2.0, "return_square": 4.0, "error": 1.0, "error_square": 2.0})
    assert constant == {"return": 2.0, "explained_variance": 0.0}
