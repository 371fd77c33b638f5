"""Metrics of the same rows join by name in a union; nothing is lost."""

import copy
import json
import math
import pickle

import pytest
import torch

from hybridflow.errors import DataError
from hybridflow.protocol.data import DataProto
from hybridflow.protocol.meta import Max, Sum, join_metric, join_metrics


def with_metrics(key: str, metrics) -> DataProto:
    return DataProto.from_dict(tensors={key: torch.zeros(2)}, meta_info={"metrics": metrics})


def test_union_joins_the_metrics_of_two_roles_joined_over_their_workers():
    joined = with_metrics("a", [{"x": 1.0}, {"x": 3.0}]).union(with_metrics("b", {"y": 5}))
    assert joined.meta_info["metrics"] == {"x": 2.0, "y": 5}


def test_a_metric_that_one_worker_misses_becomes_nan_and_is_not_lost():
    found = join_metrics([{"a": 1.0}, {"a": 3.0, "b": 9.0}])
    assert found["a"] == 2.0
    assert math.isnan(found["b"])


def test_two_values_for_one_metric_are_refused_by_name():
    with pytest.raises(DataError, match=r"union, metrics: meta_info\['x'\] is 1.0 in part 0 but 2.0 in part 1"):
        with_metrics("a", {"x": 1.0}).union(with_metrics("b", {"x": 2.0}))


def test_a_metric_that_is_no_number_is_refused_by_name():
    with pytest.raises(DataError, match=r"\['x'\] is 'high'; a metric is a number"):
        join_metrics({"x": "high"})


def test_a_metric_says_how_workers_join_it_and_keeps_saying_so():
    workers = [
        {"tokens": Sum(12), "seconds": Max(2.5), "length": 3.0},
        {"tokens": Sum(8), "seconds": Max(4.0), "length": 5.0},
    ]
    found = join_metrics(workers)
    assert found == {"tokens": 20.0, "seconds": 4.0, "length": 4.0}
    # Two halves of a batch, each joined already, join again by the same rule.
    assert join_metrics([found, found]) == {"tokens": 40.0, "seconds": 4.0, "length": 4.0}
    for kept in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert join_metrics([kept, kept])["tokens"] == 40.0
    batch = DataProto.concat([with_metrics("a", worker)[:1] for worker in workers])
    assert batch.union(with_metrics("b", {"y": 1.0})).meta_info["metrics"]["tokens"] == 20.0
    assert json.dumps(found["tokens"]) == "20.0"


def test_a_sum_or_a_largest_of_which_one_worker_has_nothing_is_nan():
    found = join_metrics([{"tokens": Sum(12), "seconds": Max(2.5)}, {}, {"tokens": Sum(1), "seconds": Max(9.0)}])
    assert math.isnan(found["tokens"]) and math.isnan(found["seconds"])


def test_a_mean_may_be_weighted_and_a_weight_of_zero_takes_no_nan_in():
    assert join_metric("loss", [1.0, 4.0, math.nan], weights=[2, 1, 0]) == 2.0
    assert join_metric("tokens", [Sum(1), Sum(2)], weights=[3, 1]) == 3.0


def test_workers_that_disagree_on_what_a_metric_is_are_named():
    with pytest.raises(
        DataError, match=r"metric 'tokens': workers report \['Sum\(12\)', 'float\(8\)'\]; a metric is a Sum"
    ):
        join_metrics([{"tokens": Sum(12)}, {"tokens": 8.0}])
    with pytest.raises(DataError, match=r"\['Sum\(1\)', 'Max\(2\)'\]"):
        join_metrics([{"tokens": Sum(1)}, {"tokens": Max(2)}])
