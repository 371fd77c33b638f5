"""How rows become micro-batches: pure functions on lengths.

Rows of similar length stand together, so that padding inside a micro-batch stays small. Losses are sums divided by
global counts, so neither the order nor the split changes an update.
"""

from __future__ import annotations

from collections.abc import Sequence

from hybridflow.errors import ConfigError


def micro_batches(lengths: Sequence[int], rows: int, tokens: int = 0) -> list[list[int]]:
    """Split rows into micro-batches.

    Args:
        lengths: tokens of each row.
        rows: rows of one micro-batch; not read where ``tokens`` is above 0.
        tokens: budget of one micro-batch, counted as it is computed: rows times the longest row.

    Returns:
        Indices of the rows of each micro-batch, longest rows first (a run out of memory shows in the first one).

    Raises:
        ConfigError: where one row alone is over the token budget.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    if tokens <= 0:
        return [order[i : i + rows] for i in range(0, len(order), rows)]
    if order and lengths[order[0]] > tokens:
        raise ConfigError(
            f"actor.micro_batch_tokens={tokens} is less than the {lengths[order[0]]} tokens of the longest row. "
            "Raise it to at least rollout.max_prompt_tokens + rollout.max_tokens."
        )
    found: list[list[int]] = []
    for i in order:
        # The first row of a micro-batch is its longest: it sets the width.
        if not found or (len(found[-1]) + 1) * lengths[found[-1][0]] > tokens:
            found.append([])
        found[-1].append(i)
    return found
