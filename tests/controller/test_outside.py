"""What is said of a process by those outside of it: Ray's long messages in one line, stacks or why there are none."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, OutOfMemoryError

from hybridflow.controller import outside
from hybridflow.controller.process import Place

# As Ray 2.60 writes it, shortened where "..." stands.
OUT_OF_MEMORY = """1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 192.0.2.2, \
ID: 804e3a4d) was 22.47GB used / 23.54GB limit (0.955)
OOM kill reason: Memory usage 2581508096B exceeded threshold of 2544964608B (95% of 25276502016B limit)
Object store memory usage: [- objects spillable: 0
...
To see more information about memory usage on this node, use `ray logs raylet.out -ip 192.0.2.2`
Top 10 memory users: PID\tMEM(GB)\tCOMMAND
6193\t18.44\tray::DeviceProcess.call
6017\t0.07\t/home/.venv/bin/python /home/examples/grpo.py model=local model.path=models/large
6109\t0.06\tray::DashboardAgent
6051\t0.05\tray::RuntimeEnvAgent
Refer to the documentation on how to address the out of memory issue: https://docs.ray.io/..."""

DEAD = "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail:"


def died(message: str) -> ActorDiedError:
    error = ActorDiedError()
    error.error_msg = message
    return error


def test_an_out_of_memory_kill_names_the_amounts_and_the_largest_users():
    assert outside.cause_of_death(OutOfMemoryError(OUT_OF_MEMORY), None) == (
        "its node ran out of memory (22.47GB used of 23.54GB), so Ray ended it; largest: "
        "18.44 GB ray::DeviceProcess.call (pid 6193), 0.07 GB /home/.venv/bin/python /home/examples/gr (pid 6017), "
        "0.06 GB ray::DashboardAgent (pid 6109)"
    )


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (
            f"{DEAD} Worker unexpectedly exits with a connection error code 2. End of file. Some common causes "
            "include: (1) the process was killed by the OOM killer ...",
            "it was killed, crashed or exited without a word (Ray's SYSTEM_ERROR, end of file)",
        ),
        (
            f"{DEAD} Worker exits unexpectedly. Worker exits with an exit code 1.\n The process receives a SIGTERM.",
            "SYSTEM_ERROR: Worker exits unexpectedly. Worker exits with an exit code 1. "
            "The process receives a SIGTERM.",
        ),
        ("The actor is dead because it was killed by `ray.kill`.", "it was ended by ray.kill"),
        (
            "The actor died unexpectedly before finishing this task.\n\tclass_name: DeviceProcess\n"
            "The actor died because its node has died. Node Id: ab12",
            "The actor died because its node has died. Node Id: ab12",
        ),
        ("Something new. " * 100, ("Something new. " * 100)[:300]),
    ],
)
def test_rays_word_on_a_death_is_cut_to_one_line(message: str, cause: str):
    assert outside.cause_of_death(died(message), None) == cause


def test_a_lost_connection_says_what_it_may_be():
    error = ActorUnavailableError("RpcError: RPC error: Socket closed rpc_code: 14", b"\0" * 16)
    assert outside.cause_of_death(error, Place(1, "10.0.0.2", 77, node_id="gone", log="/tmp/gone.err")) == (
        "the connection to it was lost: a child of its own outlives it, or its node is gone or silent"
    )


def test_the_stack_of_a_process_that_is_gone_or_without_py_spy_says_so(monkeypatch: pytest.MonkeyPatch):
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    place = Place(0, "here", child.pid)
    assert outside._stack(place).startswith("    (not known: py-spy: ")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setitem(os.environ, "PATH", "/nowhere")
    assert outside._stack(place) == "    (not known: py-spy is not installed on its node)"


def test_only_a_device_process_is_interrupted():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    outside._interrupt(Place(0, "here", child.pid))  # the signal would end it
    child.communicate(b"\n")
    assert child.returncode == 0


WITHOUT_THE_SIGNAL = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
print("it waits", flush=True)
input()
"""


def test_an_interruption_is_a_signal_of_the_main_thread():
    # One for the whole process may go to another thread after py-spy has held the main one, and then wakes nobody.
    program = ["ray::DeviceProcess", "-c", WITHOUT_THE_SIGNAL]
    child = subprocess.Popen(program, executable=sys.executable, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout and child.stdout.readline() == b"it waits\n"
    outside._interrupt(Place(0, "here", child.pid))
    status = Path(f"/proc/{child.pid}/status").read_text()
    child.communicate(b"\n")
    pending = {name: int(bits, 16) for name, bits in re.findall(r"(SigPnd|ShdPnd):\s*(\w+)", status)}
    assert pending == {"SigPnd": 1 << signal.SIGUSR1 - 1, "ShdPnd": 0}
