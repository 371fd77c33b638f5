"""How the ``meta_info`` of several DataProtos becomes one: what union and concat do besides columns.

Invariant: nothing is dropped and nothing is chosen in silence: equal values are kept, metrics are all collected (by
concat, one dict a worker) or joined (by union, one dict), and any other difference is an error that names the key and
both values.

A metric says itself how the values of several workers become one: a plain number by its mean, ``Sum(n)`` by the sum,
``Max(n)`` by the largest.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from hybridflow.errors import DataError
from hybridflow.protocol.columns import same_value, short
from hybridflow.protocol.serialize import CONSTANTS

METRICS = "metrics"


class Sum(float):
    """A metric of which several workers have the sum: tokens, bytes."""


class Max(float):
    """A metric of which several workers have the largest: seconds that they spend side by side, memory."""


def merge(method: str, parts: Sequence[Mapping[str, Any]], collect_metrics: bool = False) -> dict[str, Any]:
    """One dict with the keys of all parts; NaN equals NaN. A key need not be in every part.

    Args:
        method: name of the operation in error messages.
        collect_metrics: the parts are workers that report the same metrics of their own rows, so the key ``metrics``
            is collected as :func:`merge_metrics` does. Otherwise they report different metrics of the same rows: one
            dict with the names of all, where a name that two parts report must have one value.

    Raises:
        DataError: names the key, both values and both parts where parts differ.
    """
    merged: dict[str, Any] = {}
    source: dict[str, int] = {}
    for index, part in enumerate(parts):
        for key, value in part.items():
            if key == METRICS:
                continue
            if key not in merged:
                merged[key], source[key] = value, index
            elif not same_value(merged[key], value):
                raise DataError(
                    f"{method}: meta_info[{key!r}] is {short(merged[key])} in part {source[key]} but {short(value)} in "
                    f"part {index}. Make them equal, or drop the key with select or pop first."
                )
    if any(METRICS in part for part in parts):
        found = [part.get(METRICS, {}) for part in parts]
        merged[METRICS] = (
            merge_metrics(found) if collect_metrics else merge(f"{method}, metrics", [join_metrics(m) for m in found])
        )
    return copied(merged)


def copied(meta_info: Mapping[str, Any]) -> dict[str, Any]:
    """A deep copy of a ``meta_info``.

    Raises:
        DataError: names the key of a value that cannot be copied.
    """
    if not isinstance(meta_info, Mapping):
        raise DataError(f"meta_info is a {type(meta_info).__name__}: give a dict.")
    found = {}
    for key, value in meta_info.items():
        try:
            found[key] = _copied(value)
        except Exception as error:
            raise DataError(
                f"meta_info[{key!r}] is {short(value)}, which cannot be copied ({type(error).__name__}: {error}). "
                f"Every batch has its own copy of meta_info: keep there what copy.deepcopy takes, such as numbers, "
                f"text, lists, dicts and detached tensors."
            ) from error
    return found


def _copied(value: Any) -> Any:
    """Quick where dicts, lists and tuples hold numbers and strings, as in almost every ``meta_info``."""
    kind = type(value)
    if kind in CONSTANTS:
        return value
    if kind is dict:
        return {key: _copied(part) for key, part in value.items()}
    if kind is list or kind is tuple:
        return kind([_copied(part) for part in value])
    return copy.deepcopy(value)


def join_metrics(metrics: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """One dict of metrics as it is, or several workers' dicts as one: NaN where one worker's is NaN or missing.

    Raises:
        DataError: for a value that is no number, or kinds that differ (see :func:`join_metric`); names the metric.
    """
    dicts = merge_metrics([metrics]) if metrics else []
    for entry in dicts:
        for name, value in entry.items():
            if not isinstance(value, Real):
                raise DataError(f"meta_info['metrics'][{name!r}] is {short(value)}; a metric is a number.")
    return {name: join_metric(name, [entry[name] for entry in dicts]) for name in (dicts[0] if dicts else {})}


def join_metric(name: str, values: Sequence[Any], weights: Sequence[float] | None = None) -> Any:
    """One metric of several workers: their sum if it is a :class:`Sum`, the largest if a :class:`Max`, else the mean.

    Args:
        name: of the metric, for the error.
        values: one of each worker. Equal plain numbers stay what they are.
        weights: of the mean; equal where None. A value of weight 0 does not count, even where it is NaN.

    Raises:
        DataError: where workers disagree on the kind; names the metric.
    """
    kinds = {kind for value in values for kind in (Sum, Max) if isinstance(value, kind)}
    plain = [value for value in values if not isinstance(value, Sum | Max) and not math.isnan(value)]
    if len(kinds) > 1 or (kinds and plain):
        raise DataError(
            f"metric {name!r}: workers report {[f'{type(value).__name__}({value:g})' for value in values]}; a metric "
            "is a Sum, a Max or a plain number (a mean) on all of them."
        )
    if kinds == {Sum}:
        return Sum(sum(values))
    if kinds == {Max}:
        return Max(math.nan if any(map(math.isnan, values)) else max(values))
    if all(value == values[0] for value in values):
        return values[0]
    shares = weights or [1.0] * len(values)
    return sum(share * value for share, value in zip(shares, values, strict=True) if share) / sum(shares)


def merge_metrics(parts: Sequence[Any]) -> list[dict[str, Any]]:
    """All dicts of all parts in order, each with all names: NaN where a dict lacks a metric.

    A metric that one worker did not report keeps its place, so that ``[m["loss"] for m in metrics]`` is as long as the
    list and a mean over it is NaN rather than a mean over fewer workers.

    Args:
        parts: of each worker a dict of metrics or a list of them; one that has none gives a dict of NaN.
    """
    dicts: list[Mapping[str, Any]] = []
    for index, part in enumerate(parts):
        entries = [part] if isinstance(part, Mapping) else part
        if not isinstance(entries, (list, tuple)) or not all(isinstance(entry, Mapping) for entry in entries):
            raise DataError(
                f"meta_info['metrics'] is {short(part)} in part {index}; it must be a dict or a list of dicts."
            )
        dicts.extend(entries or [{}])
    names = dict.fromkeys(name for entry in dicts for name in entry)
    return [{name: entry.get(name, math.nan) for name in names} for entry in dicts]
