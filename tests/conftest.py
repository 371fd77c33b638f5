"""One small Ray cluster for all tests of a session that need one."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest

RAY_ENVIRONMENT = {
    "RAY_raylet_start_wait_time_s": "180",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_prestart_worker_first_driver": "0",
}


@pytest.fixture(scope="session")
def ray_session() -> Iterator[str]:
    """Ray on this machine, with 8 cores declared; gives the cluster's address. Pools are started by the tests."""
    import ray

    os.environ.update(RAY_ENVIRONMENT)
    ray.init(
        "local",  # never a cluster that somebody else has started on this machine
        num_cpus=8,
        num_gpus=0,
        object_store_memory=200 * 2**20,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()
