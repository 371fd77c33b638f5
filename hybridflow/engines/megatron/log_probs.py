"""Log-probabilities and entropy of chosen tokens from vocabulary-parallel logits.

Where it stands: the last operation of the policy model's forward, inside the tensor-parallel group.
Invariant: every rank of the group returns the same numbers, whatever the number of vocabulary shards.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from hybridflow.engines.megatron import cpu  # noqa: F401  (before megatron)

from megatron.core.tensor_parallel import mappings  # isort: skip

# Stands for "never drawn": finite, so that 0 * IMPOSSIBLE stays 0 in the entropy.
IMPOSSIBLE = -1e30


def vocab_parallel_log_probs(
    logits: torch.Tensor, targets: torch.Tensor, group: dist.ProcessGroup, first_id: int, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """log p(target) and, if asked, the entropy of each row.

    Args:
        logits: [N, V/tp] float32, this rank's shard of the vocabulary.
        targets: [N] int64 global token ids.
        group: the tensor-parallel group.
        first_id: token id of this shard's first column.
        with_entropy: also return H = logsumexp(x) - sum_v p_v x_v.

    Returns:
        log_probs [N] float32 and entropy [N] float32 or None; both differentiable in ``logits``.
    """
    top = logits.detach().amax(dim=-1)
    if group.size() > 1:
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    shifted = logits - top[:, None]
    weights = shifted.exp()
    total = _sum(weights.sum(dim=-1), group)
    log_total = total.log()

    local = targets - first_id
    here = (local >= 0) & (local < logits.shape[-1])
    chosen = shifted.gather(1, local.clamp(0, logits.shape[-1] - 1)[:, None])[:, 0]
    log_probs = _sum(torch.where(here, chosen, 0.0), group) - log_total
    if not with_entropy:
        return log_probs, None
    return log_probs, log_total - _sum((weights * shifted).sum(dim=-1), group) / total


def _sum(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum over the tensor-parallel group; the gradient passes through unchanged to every shard."""
    return mappings.reduce_from_tensor_model_parallel_region(x, group=group) if group.size() > 1 else x
