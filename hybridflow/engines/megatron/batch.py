"""Rows of prompts and responses as the padded micro-batches that the model takes.

Where it stands: between a worker's jagged columns and the model's forward. Padding exists only in here.
Invariant: the k-th wanted token of row r is the k-th entry of that row in the model's flat answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hybridflow.errors import DataError


@dataclass(frozen=True)
class MicroBatch:
    """One forward of the model.

    Attributes:
        input_ids, position_ids: [b, s] int64, padded on the right.
        targets: [b, s] int64; at position i the token to score there (the row's token i + 1), -1 where none is wanted.
        mask: [b, T] bool: which response tokens are wanted, T the longest response here.
        rows: the rows' numbers in the batch this was cut from.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    targets: torch.Tensor
    mask: torch.Tensor
    rows: list[int]

    def unflatten(self, values: torch.Tensor) -> torch.Tensor:
        """Flat answers [N] of the wanted tokens -> [b, T], zero elsewhere."""
        return values.new_zeros(self.mask.shape).masked_scatter(self.mask, values)


def make_micro_batch(
    prompts: Sequence[torch.Tensor],
    responses: Sequence[torch.Tensor],
    masks: Sequence[torch.Tensor] | None,
    rows: list[int],
    device: torch.device,
) -> MicroBatch:
    """Join and pad the given rows. No rows make a micro-batch that asks for nothing.

    Args:
        prompts, responses: 1-D int64 token ids of every row of the batch.
        masks: 1-D bool per row, same length as the response: which response tokens are wanted; None means all.
        rows: which rows to take.

    Raises:
        DataError: for an empty prompt (its first response token has nothing to be predicted from), or a mask of another
            length than its response.
    """
    if not rows:
        nothing = torch.zeros(1, 1, dtype=torch.int64, device=device)
        return MicroBatch(nothing, nothing, nothing - 1, torch.zeros(0, 0, dtype=torch.bool, device=device), rows=[])
    longest = max(len(prompts[i]) + len(responses[i]) for i in rows)
    widest = max(len(responses[i]) for i in rows)
    # The last token predicts nothing, so it is left out of the input.
    input_ids = torch.zeros(len(rows), longest - 1, dtype=torch.int64)
    targets = torch.full_like(input_ids, -1)
    mask = torch.zeros(len(rows), widest, dtype=torch.bool)
    for j, i in enumerate(rows):
        prompt, response = prompts[i], responses[i]
        if len(prompt) == 0:
            raise DataError(f"prompts: row {i} has no token; a response is predicted from at least one.")
        wanted = torch.ones(len(response), dtype=torch.bool) if masks is None else masks[i]
        if len(wanted) != len(response):
            raise DataError(f"response_mask: row {i} has {len(wanted)} entries for {len(response)} response tokens.")
        tokens = torch.cat([prompt, response])
        input_ids[j, : len(tokens) - 1] = tokens[:-1]
        targets[j, len(prompt) - 1 : len(tokens) - 1] = torch.where(wanted, response, -1)
        mask[j, : len(response)] = wanted
    position_ids = torch.arange(longest - 1).expand(len(rows), -1)
    return MicroBatch(*(x.to(device) for x in (input_ids, position_ids, targets, mask)), rows=list(rows))
