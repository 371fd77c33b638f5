"""Fixtures that the tests of workers share with those of the engines."""

from tests.engines.vllm.conftest import (  # noqa: F401
    folders,
    make_model,
    prompts,
    reference_greedy,
    reference_log_probs,
    settings,
)
