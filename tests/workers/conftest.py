"""Fixtures that the tests of workers share with those of the engines."""

from tests.engines.vllm.conftest import folders, reference_greedy, reference_log_probs  # noqa: F401
