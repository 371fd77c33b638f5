"""Which cluster a run is on, one that it joins or one of its own, and which of Ray's words on it are shown."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from ray._private import worker

from hybridflow.controller.launch import deaths_left_to_errors, join_cluster
from hybridflow.errors import PlacementError

OWN = """
import os
import psutil
import ray
from hybridflow import compose
from hybridflow.config import GRPOConfig
from hybridflow.controller.launch import start_or_join

with start_or_join(compose.load("grpo", GRPOConfig)):
    print(ray.get_runtime_context().gcs_address)
    print(os.getpgid(0), *(os.getpgid(child.pid) for child in psutil.Process().children(recursive=True)))
"""

PARAGRAPH = {"lines": ["A worker died or was killed while executing a task by an unexpected system error. ..."]}
WARNING = {"lines": ["The actor waits for resources."]}


def test_rays_paragraphs_on_deaths_are_left_out_and_its_warnings_shown(capsys: pytest.CaptureFixture[str]):
    before = worker.print_to_stdstream
    with deaths_left_to_errors():
        for lines in (PARAGRAPH, WARNING):
            worker.print_to_stdstream({**lines, "pid": "raylet", "is_err": False}, ignore_prefix=False)
    assert worker.print_to_stdstream is before
    assert capsys.readouterr().out.endswith("The actor waits for resources.\n")


def test_a_ray_that_prints_by_other_means_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(worker, "print_to_stdstream")
    with deaths_left_to_errors():
        assert not hasattr(worker, "print_to_stdstream")
    assert not hasattr(worker, "print_to_stdstream")


def test_a_cluster_that_does_not_answer_is_named_in_seconds() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        start = time.monotonic()
        with pytest.raises(PlacementError, match=rf"='{address}': no Ray cluster answers there \(.*Connection refused"):
            join_cluster(address)
    assert time.monotonic() - start < 20


@pytest.fixture(scope="module")
def printed(ray_session: str) -> list[str]:
    """What a process printed that started Ray beside a cluster on this machine."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # a short path: Ray makes sockets below it
        known = Path(folder) / "ray" / "ray_current_cluster"  # where `ray start` leaves its address
        known.parent.mkdir()
        known.write_text(ray_session)
        environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
        done = subprocess.run(
            [sys.executable, "-c", OWN], env={**environment, "RAY_TMPDIR": folder}, capture_output=True, text=True
        )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


JOIN = """
import sys
from hybridflow.controller.launch import join_cluster
from hybridflow.errors import PlacementError

try:
    join_cluster(sys.argv[1], log_to_driver=False)
except PlacementError as error:
    print(error)
"""


@pytest.mark.ray
def test_a_cluster_that_asks_for_a_token_says_how_to_give_it(ray_session: str) -> None:
    assert os.environ["RAY_AUTH_MODE"] == "token"  # Ray's default where it is started here
    command = [sys.executable, "-c", JOIN, ray_session]
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert f"='{ray_session}': no Ray cluster answers there" in done.stdout, done.stdout + done.stderr[-2000:]
    assert done.stdout.strip().endswith(
        "asks for a token (RAY_AUTH_MODE is disabled here)? Then set RAY_AUTH_MODE=token, and put what `ray "
        "get-auth-token` says on its head into ~/.ray/auth_token."
    )


@pytest.mark.ray
def test_a_run_without_an_address_starts_ray_even_where_a_cluster_runs_on_this_machine(
    printed: list[str], ray_session: str
) -> None:
    assert printed[0].rpartition(":")[2].isdigit() and printed[0] != ray_session


@pytest.mark.ray
def test_a_signal_to_the_drivers_group_does_not_reach_ray(printed: list[str]) -> None:
    own, *groups = map(int, printed[1].split())
    assert len(groups) >= 2 and own not in groups
