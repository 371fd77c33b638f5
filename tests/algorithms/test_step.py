"""The driver's advantage step: columns in, columns out, by configuration."""

import math

import numpy as np
import pytest
import torch

from hybridflow.algorithms.step import check_functions, compute_advantages
from hybridflow.config import (
    ActorConfig,
    AlgorithmConfig,
    CorrectionConfig,
    GRPOConfig,
    LossConfig,
    RolloutConfig,
    SFTConfig,
)
from hybridflow.errors import ConfigError, DataError
from hybridflow.protocol.data import DataProto

NAN = float("nan")
MASKS = [[True, True], [True], [True, False, True], [True]]


def jagged(rows: list[list[float]]) -> torch.Tensor:
    return DataProto.jagged([torch.tensor(row) for row in rows])


def make_batch(**more) -> DataProto:
    tensors = {
        "rewards": torch.tensor([1.0, 0.0, 2.0, NAN]),
        "group_ids": torch.tensor([0, 0, 0, 0]),
        "response_mask": DataProto.jagged([torch.tensor(row) for row in MASKS]),
        "log_probs": jagged([[-1.0, -2.0], [-1.0], [-1.0, NAN, -3.0], [-1.0]]),
        "rollout_log_probs": jagged([[-1.0, -2.0], [-1.0 - math.log(4)], [-1.0, NAN, -3.0], [-1.0]]),
        "ref_log_probs": jagged([[-1.0, -1.0], [-3.0], [-1.0, NAN, -2.5], [-1.0]]),
        **more,
    }
    reasons = np.array(["stop", "length", "stop", "stop"], dtype=object)
    return DataProto.from_dict(tensors, {"finish_reason": reasons}, {"step": 3})


def settings(loss: LossConfig | None = None, max_tokens: int = 4, **algorithm) -> GRPOConfig:
    return GRPOConfig(
        name="x",
        rollout=RolloutConfig(max_tokens=max_tokens),
        actor=ActorConfig(loss=loss or LossConfig()),
        algorithm=AlgorithmConfig(**algorithm),
    )


def test_advantages_keep_the_responses_lengths():
    found = compute_advantages(make_batch(), settings(normalize_std=False))
    assert found.keys() == ["advantages", "returns"]
    assert found.lengths("advantages").tolist() == [2, 1, 3, 1]
    assert found.flat("advantages").tolist() == [0, 0, -1, 1, 0, 1, 0]
    assert torch.equal(found.flat("returns"), found.flat("advantages"))
    assert found.meta_info == {}


def test_the_estimator_is_chosen_by_name_with_its_settings():
    found = compute_advantages(make_batch(), settings(estimator="rloo"))
    assert found.flat("advantages").tolist() == [0, 0, -1.5, 1.5, 0, 1.5, 0]
    # Returns gamma^k r of 1, 0 and 2: 0.5, 1 | 0 | 1, 2; the failed row is left out.
    found = compute_advantages(make_batch(), settings(estimator="reinforce_plus_plus", gamma=0.5))
    assert found.flat("returns").tolist() == [0.5, 1.0, 0.0, 1.0, 0.0, 2.0, 0.0]
    values = torch.tensor([0.5, 1.0, 0.0, 1.0, 2.0])
    expected = ((values - values.mean()) / values.std()).tolist()
    assert found.flat("advantages").tolist() == pytest.approx([*expected[:4], 0.0, expected[4], 0.0], abs=1e-6)


def test_other_columns_reach_the_estimator_that_names_them():
    batch = make_batch(
        values=jagged([[0.5, 0.5], [0.5], [0.5, NAN, 0.5], [0.5]]), baseline_rewards=torch.tensor([1.0, 1.0, 1.0, 1.0])
    )
    gae = compute_advantages(batch, settings(estimator="gae", whiten=False))
    assert gae.flat("advantages").tolist() == [0.5, 0.5, -0.5, 1.5, 0, 1.5, 0]
    assert gae.flat("returns").tolist() == [1, 1, 0, 2, 0, 2, 0.5]
    remax = compute_advantages(batch, settings(estimator="remax"))
    assert remax.flat("advantages").tolist() == [0, 0, -1, 1, 0, 1, 0]


def test_a_missing_column_is_named_with_those_that_are_there():
    with pytest.raises(
        DataError, match=r"algorithm.estimator='gae' needs 'values', and the batch has no column 'values'"
    ):
        compute_advantages(make_batch(), settings(estimator="gae"))


def test_a_column_of_other_lengths_is_refused():
    batch = make_batch(ref_log_probs=jagged([[-1.0, -1.0], [-3.0], [-1.0], [-1.0]]))
    with pytest.raises(DataError, match="ref_log_probs: row 2 has 1 entries for 3 response tokens"):
        compute_advantages(batch, settings(kl_coef=0.1))


def test_kl_in_the_reward_changes_scores_and_token_rewards_alike():
    # KL (k1) of the tokens: 0, -1 | 2 | 0, -0.5 | 0; with 0.5: scores 1.5, -1, 2.25: mean 11 / 12.
    found = compute_advantages(make_batch(), settings(normalize_std=False, kl_coef=0.5))
    assert found.flat("advantages").tolist() == pytest.approx([7 / 12, 7 / 12, -23 / 12, 4 / 3, 0, 4 / 3, 0], abs=1e-6)
    assert found.meta_info["metrics"]["reward/kl"] == pytest.approx(0.5 / 6)
    found = compute_advantages(make_batch(), settings(estimator="reinforce_plus_plus", kl_coef=0.5))
    assert found.flat("returns").tolist() == pytest.approx([1.5, 1.5, -1.0, 2.25, 0, 2.25, 0])
    batch = make_batch()
    batch.meta_info["kl_coef"] = 1.0
    adapted = compute_advantages(batch, settings(estimator="reinforce_plus_plus", kl_coef=0.5))
    assert adapted.flat("returns").tolist() == pytest.approx([2.0, 2.0, -2.0, 2.5, 0, 2.5, 0])


def test_length_is_filtered_and_punished():
    config = settings(normalize_std=False, max_tokens=3, overlong_filter=True, overlong_buffer=2, overlong_penalty=3.0)
    found = compute_advantages(make_batch(), config)
    # Lengths 2, 1, 3, 1 of at most 3, buffer 2: penalties 1.5, 0, 3, 0: scores -0.5, 0, -1: mean -0.5.
    assert found.flat("advantages").tolist() == [0, 0, 0.5, -0.5, 0, -0.5, 0]
    assert found.meta_info["metrics"]["reward/overlong_penalty"] == pytest.approx(-4.5 / 4)
    assert found.flat("loss_mask").tolist() == [True, True, False, True, False, True, True]


def test_correction_gives_weights_a_mask_and_metrics():
    correction = CorrectionConfig(level="token", high=2.0, reject="sequence", reject_high=3.0)
    found = compute_advantages(make_batch(), settings(correction=correction))
    assert found.flat("loss_weights").tolist() == pytest.approx([1, 1, 0, 1, 0, 1, 1])
    assert found.flat("loss_mask").tolist() == [True, True, False, True, False, True, True]
    metrics = found.meta_info["metrics"]
    assert metrics["correction/ratio_mean"] == pytest.approx((5 + 4) / 6)
    assert metrics["correction/rejected"] == pytest.approx(1 / 4)
    truncated = compute_advantages(make_batch(), settings(correction=CorrectionConfig(level="token", high=2.0)))
    assert truncated.flat("loss_weights").tolist() == pytest.approx([1, 1, 2, 1, 0, 1, 1])


def test_losses_by_covariance_get_their_selection():
    for name, count in (("kl_cov", 3), ("clip_cov", 1)):
        loss = LossConfig(name=name, cov_share=0.5 if name == "kl_cov" else 0.0, cov_low=-9.0, cov_high=9.0)
        found = compute_advantages(make_batch(), settings(loss))
        selected = found.flat("high_covariance")
        assert selected.dtype == torch.bool and selected.sum() == count and not selected[4]
        assert torch.equal(compute_advantages(make_batch(), settings(loss)).flat("high_covariance"), selected)


def test_the_batch_takes_the_step_in_by_union():
    batch = make_batch()
    batch.meta_info["metrics"] = {"generate/tokens": 7.0}
    joined = batch.union(compute_advantages(batch, settings(kl_coef=0.5)))
    assert joined.meta_info["metrics"]["generate/tokens"] == 7.0
    assert "reward/kl" in joined.meta_info["metrics"] and "advantages" in joined


@pytest.fixture
def own(tmp_path) -> str:
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n"
        "def doubled(scores, mask, factor=2.0):\n"
        "    found = torch.where(mask, (factor * scores)[:, None], 0.0)\n"
        "    return found, found.clone()\n"
        "def sharp(scores, mask, entropy):\n"
        "    return doubled(scores, mask)\n"
        "def maybe_sharp(scores, mask, entropy=None):\n"
        "    return doubled(scores, mask)\n"
        "def near(log_probs, old_log_probs, advantages, mask, config, entropy):\n"
        "    return -advantages * entropy, {}\n"
        "def flat(scores, mask):\n"
        "    return scores, scores\n"
        "def alone(scores, mask):\n"
        "    return torch.where(mask, scores[:, None], 0.0)\n"
    )
    return str(file)


def test_an_estimator_of_the_users_own_gets_what_it_names(own: str):
    # The fourth reward has failed, which the function does not know: its row has no advantage all the same.
    batch = make_batch()
    found = compute_advantages(batch, settings(estimator=f"{own}:doubled"))
    assert found.flat("advantages").tolist() == [2, 2, 0, 4, 0, 4, 0]
    config = settings(estimator=f"{own}:doubled", options={"factor": 3.0})
    assert compute_advantages(batch, config).flat("advantages").tolist() == [3, 3, 0, 6, 0, 6, 0]
    with pytest.raises(DataError, match=r"flat' returned advantages \[4\] for a mask \[4, 3\]"):
        compute_advantages(batch, settings(estimator=f"{own}:flat"))
    with pytest.raises(DataError, match=r"alone' returned a Tensor: return two tensors \[B, T\], advantages and"):
        compute_advantages(batch, settings(estimator=f"{own}:alone"))


def test_functions_are_imported_before_a_run(own: str):
    check_functions(settings(estimator=f"{own}:doubled", options={"factor": 3.0}))
    check_functions(SFTConfig(name="x", actor=ActorConfig(loss=LossConfig(name="sft"))))
    with pytest.raises(
        ConfigError, match=r"algorithm.options.facter: .*doubled has no such argument. Did you mean 'factor'"
    ):
        check_functions(settings(estimator=f"{own}:doubled", options={"facter": 3.0}))
    with pytest.raises(ConfigError, match=r"algorithm.estimator='.*:tripled': .* has no 'tripled'"):
        check_functions(settings(estimator=f"{own}:tripled"))
    with pytest.raises(ConfigError, match=r"actor.loss.name='.*:flat' takes \(scores, mask\)"):
        check_functions(settings(LossConfig(name=f"{own}:flat")))
    with pytest.raises(ConfigError, match=r"algorithm.kl_kind='no_such.module:kl': there is no module 'no_such'"):
        check_functions(settings(kl_kind="no_such.module:kl"))


def test_what_reads_columns_that_are_not_made_is_refused_before_a_run(own: str):
    alone = LossConfig(old_log_probs="own")
    check_functions(settings(alone, estimator=f"{own}:maybe_sharp"))
    check_functions(settings(estimator=f"{own}:sharp"))
    with pytest.raises(ConfigError, match=r"old_log_probs='own': algorithm.estimator='.*:sharp' reads the column entr"):
        check_functions(settings(alone, estimator=f"{own}:sharp"))
    with pytest.raises(ConfigError, match=r"'own': actor.loss.name='.*:near' reads the column entropy, which is not"):
        check_functions(settings(LossConfig(name=f"{own}:near", old_log_probs="own")))


@pytest.mark.parametrize("column", ["log_probs", "ref_log_probs"])
def test_what_a_model_computed_that_is_no_number_is_named(column: str):
    bad = make_batch(**{column: jagged([[-1.0, NAN], [-1.0], [-1.0, NAN, -3.0], [-1.0]])})
    with pytest.raises(DataError, match=f"^{column} of row 0 is nan at token 1, and 1 of 6 tokens are not finite"):
        compute_advantages(bad, settings(kl_coef=0.1))
