"""Joining a cluster that is not there."""

from __future__ import annotations

import socket
import time

import pytest

from hybridflow.controller.launch import join_cluster
from hybridflow.errors import PlacementError


def test_a_cluster_that_does_not_answer_is_named_in_seconds() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        start = time.monotonic()
        with pytest.raises(PlacementError, match=rf"='{address}': no Ray cluster answers there \(.*Connection refused"):
            join_cluster(address)
    assert time.monotonic() - start < 20
