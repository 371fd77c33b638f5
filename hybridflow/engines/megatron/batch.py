"""Rows of prompts and responses as the packed micro-batches that the model takes.

Where it stands: between a worker's jagged columns and the model's forward.
Invariant: the k-th wanted token of row r is the k-th entry of that row in the model's flat answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hybridflow.errors import DataError


@dataclass(frozen=True)
class MicroBatch:
    """One forward of the model: rows one after another in one stream of t tokens, nothing between them.

    Attributes:
        input_ids, position_ids: [t] int64; each row without its last token, which predicts nothing.
        targets: [t] int64; at position i the token to score there (the row's token i + 1), -1 where none is wanted.
        lengths: tokens of each sequence in the stream; what fills up the end of the stream is the last one.
        mask: [b, T] bool: which response tokens are wanted, T the longest response here.
        rows: the rows' numbers in the batch this was cut from.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    targets: torch.Tensor
    lengths: tuple[int, ...]
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
    multiple: int = 1,
) -> MicroBatch:
    """Join the given rows. No rows make a micro-batch that asks for nothing.

    Args:
        prompts, responses: 1-D int64 token ids of every row of the batch.
        masks: 1-D bool per row, same length as the response: which response tokens are wanted; None means all.
        rows: which rows to take.
        multiple: the stream is filled up to a multiple of this many tokens, so that ranks can share it evenly.

    Raises:
        DataError: for an empty prompt (its first response token has nothing to be predicted from), or a mask of another
            length than its response.
    """
    inputs: list[torch.Tensor] = []
    targets: list[torch.Tensor] = []
    mask = torch.zeros(len(rows), max((len(responses[i]) for i in rows), default=0), dtype=torch.bool)
    for j, i in enumerate(rows):
        prompt, response = prompts[i], responses[i]
        if len(prompt) == 0:
            raise DataError(f"prompts: row {i} has no token; a response is predicted from at least one.")
        wanted = torch.ones(len(response), dtype=torch.bool) if masks is None else masks[i]
        if len(wanted) != len(response):
            raise DataError(f"response_mask: row {i} has {len(wanted)} entries for {len(response)} response tokens.")
        inputs.append(torch.cat([prompt, response])[:-1])
        targets.append(torch.cat([prompt.new_full((len(prompt) - 1,), -1), torch.where(wanted, response, -1)]))
        mask[j, : len(response)] = wanted
    used = sum(len(row) for row in inputs)
    fill = torch.zeros(max(-used % multiple, 0 if used else multiple), dtype=torch.int64)
    inputs, targets = [row for row in (*inputs, fill) if len(row)], [row for row in (*targets, fill - 1) if len(row)]
    positions = [torch.arange(len(row)) for row in inputs]
    return MicroBatch(
        input_ids=torch.cat(inputs).to(device),
        position_ids=torch.cat(positions).to(device),
        targets=torch.cat(targets).to(device),
        lengths=tuple(len(row) for row in inputs),
        mask=mask.to(device),
        rows=list(rows),
    )
