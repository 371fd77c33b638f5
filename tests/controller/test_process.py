"""A device process by itself: what an interruption does that comes before its call has begun."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Iterator

import pytest
import torch

from hybridflow.config import RunConfig
from hybridflow.controller.call import Answer, Request
from hybridflow.controller.message import opened
from hybridflow.controller.process import INTERRUPT, DeviceProcess, interface_of
from hybridflow.platform import CPU
from hybridflow.resharding.layout import ParallelLayout
from tests.controller.echo import Echo

pytestmark = pytest.mark.ray


@pytest.fixture
def process(ray_session: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceProcess]:
    """One in this very process, with a role ``echo``."""
    for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    before, threads = signal.getsignal(INTERRUPT), torch.get_num_threads()
    found = DeviceProcess("here", 0, CPU, threads)
    given = pickle.dumps((Echo, ParallelLayout(), RunConfig(name="test")))
    assert Answer(*opened(found.create("echo", given))).error is None
    yield found
    signal.signal(INTERRUPT, before)


def call(process: DeviceProcess, failures: int) -> Answer:
    request = Request("echo", "nap", None, True, failures, pickle.dumps(((0.0,), {})))
    return Answer(*opened(process.call([], tuple(request))))


def test_a_call_that_is_cancelled_before_it_begins_does_not_run(process: DeviceProcess):
    assert call(process, failures=2).value == 0.0
    os.kill(os.getpid(), INTERRUPT)
    refused = call(process, failures=2).error
    assert refused is not None and refused.cause == (
        "not run, because it had failed on another rank, or its time was over, before it began here"
    )
    assert call(process, failures=3).value == 0.0, "what the driver queued after it knew runs"


def test_an_address_is_told_its_interface():
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("198.51.100.7") == "", "of a documentation network, which no machine has"
