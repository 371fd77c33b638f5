"""Metrics of the same rows join by name in a union; nothing is lost."""

import math

import pytest
import torch

from hybridflow.errors import DataError
from hybridflow.protocol.data import DataProto
from hybridflow.protocol.meta import mean_metrics


def with_metrics(key: str, metrics) -> DataProto:
    return DataProto.from_dict(tensors={key: torch.zeros(2)}, meta_info={"metrics": metrics})


def test_union_joins_the_metrics_of_two_roles_averaged_over_their_workers():
    joined = with_metrics("a", [{"x": 1.0}, {"x": 3.0}]).union(with_metrics("b", {"y": 5}))
    assert joined.meta_info["metrics"] == {"x": 2.0, "y": 5}


def test_a_metric_that_one_worker_misses_becomes_nan_and_is_not_lost():
    found = mean_metrics([{"a": 1.0}, {"a": 3.0, "b": 9.0}])
    assert found["a"] == 2.0
    assert math.isnan(found["b"])


def test_two_values_for_one_metric_are_refused_by_name():
    with pytest.raises(DataError, match=r"union, metrics: meta_info\['x'\] is 1.0 in part 0 but 2.0 in part 1"):
        with_metrics("a", {"x": 1.0}).union(with_metrics("b", {"x": 2.0}))


def test_a_metric_that_is_no_number_is_refused_by_name():
    with pytest.raises(DataError, match=r"\['x'\] is 'high'; a metric is a number"):
        mean_metrics({"x": "high"})
