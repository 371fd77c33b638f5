"""What a step's batch says about the run: pure functions from columns to named numbers.

Invariant: NaN in a log-probability shows as NaN in the metric; it is never dropped by a maximum.
"""

from __future__ import annotations

import torch

from hybridflow.algorithms.correction import off_policy_metrics
from hybridflow.algorithms.evaluation import majority, pass_at_all_k
from hybridflow.algorithms.filters import group_shares
from hybridflow.errors import DataError
from hybridflow.protocol.data import DataProto


def mismatch(rollout_log_probs: torch.Tensor, log_probs: torch.Tensor) -> dict[str, float]:
    """How far the rollout's log-probabilities are from the trainer's for the same tokens and weights.

    Args:
        rollout_log_probs, log_probs: [N] float32, the same tokens in the same order.

    Returns:
        ``max_diff`` and ``mean_diff`` of |rollout - trainer|, ``mult_prob_error`` = mean exp|d|, and
        :func:`.correction.off_policy_metrics`, before any correction. All NaN where any log-probability is NaN.
    """
    if rollout_log_probs.shape != log_probs.shape:
        raise DataError(
            f"rollout_log_probs has {rollout_log_probs.numel()} tokens, log_probs {log_probs.numel()}: "
            "both must cover the same response tokens."
        )
    if rollout_log_probs.numel() == 0:
        return {}
    d = (log_probs.double() - rollout_log_probs.double()).cpu()
    return {
        "max_diff": d.abs().max().item(),
        "mean_diff": d.abs().mean().item(),
        "mult_prob_error": d.abs().exp().mean().item(),
        **off_policy_metrics(d),
    }


def batch_metrics(batch: DataProto) -> dict[str, float]:
    """Metrics of the columns that are there: rewards, responses, entropy, rollout against trainer, and ``teacher/kl``:
    how far the policy is from its teacher, the mean log-ratio of its own tokens."""
    found: dict[str, float] = {}
    if "rewards" in batch:
        rewards = batch["rewards"].double()
        found["reward/mean"] = rewards.nanmean().item()
        found["reward/failed"] = rewards.isnan().double().mean().item()
        found["reward/solved"] = batch["solved"].double().mean().item()
    if "rewards" in batch and "group_ids" in batch and len(batch["group_ids"].unique()) < len(batch):
        shares = group_shares(batch["rewards"], batch["solved"], batch["group_ids"])
        found |= {f"reward/{name}": share for name, share in shares.items()}
    if "response_mask" in batch:
        lengths = batch.lengths("response_mask").double()
        found["response/length"] = lengths.mean().item()
        found["response/longest"] = lengths.max().item()
    if "finish_reason" in batch:
        found["response/cut"] = sum(reason == "length" for reason in batch["finish_reason"]) / len(batch)
    if "entropy" in batch:
        found["actor/entropy"] = batch.flat("entropy").double().mean().item()
    if "teacher_log_probs" in batch and "log_probs" in batch:
        away = (batch.flat("log_probs") - batch.flat("teacher_log_probs")).double()
        found["teacher/kl"] = away.mean().item()
    if "rollout_log_probs" in batch and "log_probs" in batch:
        # What the policy did not say (a tool's answer) has no log-probability of the rollout.
        said = batch.flat("response_mask") if "response_mask" in batch else slice(None)
        compared = mismatch(batch.flat("rollout_log_probs")[said], batch.flat("log_probs")[said])
        found |= {f"rollout_vs_trainer/{name}": value for name, value in compared.items()}
    return found


def staleness(batch: DataProto, version: int) -> dict[str, float]:
    """By how many steps the policy that answered is behind the one that learns from the answers.

    Args:
        batch: ``weight_version`` int64 [B], of each row's oldest token; maybe ``token_versions``, of every token.
        version: of the weights before the update.

    Returns:
        ``rollout/staleness`` (mean) and ``rollout/staleness_max``, of the oldest tokens. Where that is not 0, also
        ``rollout/token_staleness``, the mean over tokens, and ``rollout/mixed``, the share of responses to which
        several versions have contributed. Empty without the column.
    """
    if "weight_version" not in batch:
        return {}
    behind = (version - batch["weight_version"]).double()
    found = {"rollout/staleness": behind.mean().item(), "rollout/staleness_max": behind.max().item()}
    if behind.any() and "token_versions" in batch:
        rows = batch.flat("token_versions").split(batch.lengths("token_versions").tolist())
        found["rollout/token_staleness"] = (version - batch.flat("token_versions")).double().mean().item()
        found["rollout/mixed"] = sum(int(row.min()) < int(row.max()) for row in rows) / len(rows)
    return found


def evaluation_metrics(batch: DataProto) -> dict[str, float]:
    """What held-out prompts, answered and scored, say about the model.

    Args:
        batch: ``solved``, ``rewards``, ``group_ids`` (one label a prompt), ``responses``, ``data_source``; maybe
            ``answer``.

    Returns:
        ``evaluate/accuracy`` (share solved), ``evaluate/reward`` (mean of the scored answers), ``evaluate/length``,
        ``evaluate/failed`` (share without a score; they count as not solved). With n > 1 answers to every
        prompt also ``evaluate/pass@k`` for k = 2 to n with the bounds ``/low`` and ``/high`` of its 95 % bootstrap
        interval (pass@1 is the accuracy), and, where the reward function says what answers it has read,
        ``evaluate/majority@n``: see :func:`.evaluation.majority`. Where there are several data sources, all of it for
        each of them too, as ``<metric>/<source>``.
    """
    found = _evaluation(batch)
    sources = batch["data_source"].tolist()
    if len(set(sources)) > 1:
        for name in sorted(set(sources)):
            rows = torch.tensor([source == name for source in sources])
            found |= {f"{metric}/{name}": value for metric, value in _evaluation(batch[rows]).items()}
    return found


def _evaluation(batch: DataProto) -> dict[str, float]:
    """The metrics of :func:`evaluation_metrics`, of all rows alike."""
    solved, groups = batch["solved"], batch["group_ids"]
    found = {
        "evaluate/accuracy": solved.double().mean().item(),
        "evaluate/reward": batch["rewards"].double().nanmean().item(),
        "evaluate/length": batch.lengths("responses").double().mean().item(),
        "evaluate/failed": batch["rewards"].isnan().double().mean().item(),
    }
    estimates = pass_at_all_k(solved, groups)
    for k, estimate in estimates.items():
        if k > 1:
            bounds = {"": estimate.value, "/low": estimate.low, "/high": estimate.high}
            found |= {f"evaluate/pass@{k}{bound}": value for bound, value in bounds.items()}
    answers = batch["answer"].tolist() if "answer" in batch else []
    if len(estimates) > 1 and any(answer is not None for answer in answers):
        rows = [(groups == group).nonzero()[:, 0].tolist() for group in groups.unique()]
        votes = [[answers[i] for i in members] for members in rows]
        found[f"evaluate/majority@{len(estimates)}"] = majority(votes, [solved[members].tolist() for members in rows])
    return found


def pair_metrics(batch: DataProto) -> dict[str, float]:
    """What scores say about held-out pairs, two neighbouring rows each, the chosen answer first.

    Args:
        batch: ``scores`` [B].

    Returns:
        ``evaluate/accuracy``, the share of pairs whose chosen answer scores higher, and ``evaluate/score_gap``.
    """
    scores = batch["scores"].double()
    gap = scores[0::2] - scores[1::2]
    return {"evaluate/accuracy": (gap > 0).double().mean().item(), "evaluate/score_gap": gap.mean().item()}
