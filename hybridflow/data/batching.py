"""How rows are shared among replicas, and how a replica's rows become micro-batches: pure functions on row numbers.

Rows are packed without padding, so what a micro-batch costs is the sum of its tokens; rows of similar length stand
together, because attention works on rectangles. Losses are sums divided by global counts, so neither the order nor the
split changes an update.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable, Sequence

import torch

from hybridflow.config import RunConfig
from hybridflow.errors import ConfigError, DataError
from hybridflow.models.spec import ModelSpec
from hybridflow.protocol.data import DataProto
from hybridflow.protocol.transfer import chunk_rows


def partition(work: Sequence[float], num_parts: int, equal_counts: bool = False) -> list[list[int]]:
    """Share items among parts so that the parts' sums of work are close.

    With any numbers of items, by largest differencing: every item starts as a partition of its own; the two partitions
    whose parts differ most are merged, the fullest part of one with the emptiest of the other, until one is left
    (Karmarkar and Karp 1982; Michiels et al. 2003 for more than two parts). With equal numbers, largest first, each
    to the emptiest part that has room (Graham 1969; differencing has to start from whole layers of ``num_parts`` items
    there, and is up to half as much above the mean where a few items are long).

    Args:
        work: of each item, at least 0.
        num_parts: parts to make, the fullest first.
        equal_counts: numbers of items differ by at most one.

    Returns:
        Items of each part, ascending; parts are empty where there are fewer items than parts.
    """
    order = sorted(range(len(work)), key=lambda i: (-work[i], i))
    parts = _largest_first(work, order, num_parts) if equal_counts else _differenced(work, order, num_parts)
    return [sorted(items) for _, items in sorted(parts, key=lambda part: -part[0])]


_Part = tuple[float, list[int]]
"""Sum of work, and items."""


def _largest_first(work: Sequence[float], order: Sequence[int], num_parts: int) -> list[_Part]:
    """Every part gets ``base`` items, and ``extra`` of them get one more."""
    base, extra = divmod(len(order), num_parts)
    with_room: list[tuple[float, int, list[int]]] = [(0.0, part, []) for part in range(num_parts)]
    full: list[_Part] = []
    for i in order:
        total, part, items = heapq.heappop(with_room)
        while len(items) == base and not extra:
            full.append((total, items))
            total, part, items = heapq.heappop(with_room)
        extra -= len(items) == base
        items.append(i)
        if len(items) > base:
            full.append((total + work[i], items))
        else:
            heapq.heappush(with_room, (total + work[i], part, items))
    return full + [(total, items) for total, _, items in with_room]


def _differenced(work: Sequence[float], order: Sequence[int], num_parts: int) -> list[_Part]:
    # (minus the difference between fullest and emptiest part, a number that breaks ties, [(sum, items)] fullest first)
    heap: list[tuple[float, int, list[_Part]]] = []
    ties = itertools.count()

    def push(parts: list[_Part]) -> None:
        parts = sorted(parts, key=lambda part: -part[0])
        heapq.heappush(heap, (parts[-1][0] - parts[0][0], next(ties), parts))

    push([(0.0, [])] * num_parts)
    for i in order:
        push([(work[i], [i])] + [(0.0, [])] * (num_parts - 1))
    while len(heap) > 1:
        (_, _, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        push([(a + b, [*x, *y]) for (a, x), (b, y) in zip(one, reversed(other), strict=True)])
    return heap[0][2]


def keep_groups(column: str) -> Callable[[DataProto, int, RunConfig], list[list[int]]]:
    """A ``spread`` for :func:`hybridflow.workers.base.register`: rows with equal values of ``column`` stay together.

    Replicas get whole groups, such as all samples of one prompt, with numbers of rows as close as that allows.
    """

    def spread(batch: DataProto, num_parts: int, config: RunConfig) -> list[list[int]]:
        values = [] if batch.signature(column).kind == "jagged" else batch[column].tolist()
        # A tensor's hash is its identity, so that every row would be a group of its own.
        if len(values) != len(batch) or not all(
            isinstance(value, Hashable) and not isinstance(value, torch.Tensor) for value in values
        ):
            raise DataError(
                f"keep_groups({column!r}): the column's cells cannot be compared as group ids. Give a column of "
                f"numbers or strings, one for each row."
            )
        groups: dict[Hashable, list[int]] = {}
        for row, value in enumerate(values):
            groups.setdefault(value, []).append(row)
        members = list(groups.values())
        parts = partition([len(rows) for rows in members], num_parts)
        return [sorted(row for group in part for row in members[group]) for part in parts]

    return spread


def row_work(tokens: Sequence[int], hidden_size: int) -> list[float]:
    """What rows cost in forward and backward, in tokens of a short row: n + n^2 / (12 * hidden_size).

    A layer has about 12 h^2 weights (24 h^2 operations a token), and causal attention over n tokens takes 2 n h
    operations a token.
    """
    return [n + n * n / (12 * hidden_size) for n in tokens]


def update_rows(num_rows: int, config: RunConfig, step: int, epoch: int) -> list[list[int]]:
    """Which rows of a step's batch share an optimizer update, in the order of the updates of one epoch.

    It depends on the seed, the step and the epoch, and not on where the rows are.
    """
    settings = config.actor
    order = list(range(num_rows))
    if settings.shuffle:
        seed = hash((config.seed, step, epoch)) % 2**63
        order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed)).tolist()
    size = settings.mini_batch_size or num_rows
    return [order[start : start + size] for start in range(0, num_rows, size)]


def by_work(batch: DataProto, num_parts: int, config: RunConfig) -> list[list[int]]:
    """A ``spread``: the replicas' rows cost about the same (see :func:`row_work`); numbers differ by at most one.

    Args:
        batch: jagged ``prompts`` and ``responses``.
        config: with ``actor.balance`` off, replicas get neighbouring rows.
    """
    return _share(batch, [list(range(len(batch)))], num_parts, config)


def by_work_of_updates(batch: DataProto, num_parts: int, config: RunConfig) -> list[list[int]]:
    """A ``spread``: the replicas' rows cost about the same in each optimizer update of the first epoch."""
    return _share(
        batch, update_rows(len(batch), config, int(batch.meta_info.get("step", 0)), epoch=0), num_parts, config
    )


def _share(batch: DataProto, updates: list[list[int]], num_parts: int, config: RunConfig) -> list[list[int]]:
    """Share the rows of each update among parts."""
    if num_parts == 1:
        return [list(range(len(batch)))]
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    if not config.actor.balance:
        for rows in updates:
            for part, at in zip(parts, chunk_rows(len(rows), num_parts), strict=True):
                part += [rows[i] for i in at]
        return [sorted(part) for part in parts]
    tokens = (batch.lengths("prompts") + batch.lengths("responses")).tolist()
    work = row_work(tokens, ModelSpec.from_folder(config.model.path).hidden_size)
    totals = [0.0] * num_parts
    for rows in updates:
        found = partition([work[row] for row in rows], num_parts, equal_counts=True)
        # The fullest part of this update goes where there is least so far.
        emptiest_first = sorted(range(num_parts), key=lambda part: totals[part])
        for part, items in zip(emptiest_first, found, strict=True):
            parts[part] += [rows[i] for i in items]
            totals[part] += sum(work[rows[i]] for i in items)
    return [sorted(part) for part in parts]


def even_out(batches: Sequence[Sequence[int]], lengths: Sequence[int], count: int) -> list[list[int]]:
    """As many micro-batches as the replica with most of them has: replicas that compute together need equal numbers.

    The micro-batches with most tokens are halved; where only single rows are left, empty ones are added.

    Args:
        batches: rows of each micro-batch.
        lengths: tokens by row number.
        count: at least ``len(batches)``.
    """
    found = [list(rows) for rows in batches]
    while len(found) < count:
        most = max(found, key=lambda rows: sum(lengths[i] for i in rows) if len(rows) > 1 else -1, default=[])
        if len(most) < 2:
            found.append([])
        else:
            found.remove(most)
            found += [most[::2], most[1::2]]
    return found


def micro_batches(lengths: Sequence[int], rows: int, tokens: int = 0) -> list[list[int]]:
    """Split rows into micro-batches.

    Args:
        lengths: tokens of each row.
        rows: rows of one micro-batch; not read where ``tokens`` is above 0.
        tokens: budget of one micro-batch: the sum of its rows' tokens.

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
    used = 0
    for i in order:
        if not found or used + lengths[i] > tokens:
            found.append([])
            used = 0
        found[-1].append(i)
        used += lengths[i]
    return found
