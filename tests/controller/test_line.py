"""The line between the driver and a process: order, objects that are let go, and its ends. No Ray here."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import socket
import threading
import time
from concurrent.futures import Future
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from queue import Empty, SimpleQueue
from typing import Any

import pytest

from hybridflow.controller import line as lines
from hybridflow.controller.line import Asked, Line, Served, uninterrupted


class Ref:
    """What the line uses of Ray's reference to an object."""

    def __init__(self, name: bytes) -> None:
        self.name = name

    def binary(self) -> bytes:
        return self.name


class Process:
    """The other end, in a thread, which does what it is told: ``echo`` or ``make`` an object of a name."""

    def __init__(self, host: str = "") -> None:
        self.served = Served(host)
        self.made: list[bytes] = []
        self.go_on = threading.Event()
        self.go_on.set()
        self.end: Future[None] = Future()
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def future(self) -> Future[None]:
        return self.end

    def _serve(self) -> None:
        for number, method, *given in self.served.calls():
            self.go_on.wait(10)
            made = [Ref(given[0])] if method == "make" else []
            self.served.answer(number, pickle.dumps((method, given)), made)
        if not self.end.done():
            self.end.set_result(None)


@pytest.fixture(params=["", "127.0.0.1"], ids=["unix", "tcp"])
def process(request: pytest.FixtureRequest) -> Process:
    """On the driver's node, and on another."""
    return Process(request.param)


def knock(address: lines.Address) -> socket.socket:
    """A connection of somebody who has no key."""
    if isinstance(address.at, tuple):
        return socket.create_connection(address.at)
    stranger = socket.socket(socket.AF_UNIX)
    stranger.connect(address.at)
    return stranger


class Deaf(Process):
    """One that lets the driver in and reads nothing."""

    def _serve(self) -> None:
        self.connection = self.served._accepted()


def asked_of(line: Line, arrived: SimpleQueue[Asked], *call: Any, needs: tuple[Asked, ...] = ()) -> Asked:
    asked = Asked(0, arrived)
    line.call(asked, *call, needs=needs)
    return asked


def said(asked: Asked) -> Any:
    assert asked.message is not None
    return pickle.loads(asked.message)  # type: ignore[arg-type]


def test_calls_are_answered_in_order_however_large_and_many_they_are(process: Process):
    """More bytes than the sockets hold go out and come back before either end does anything else."""
    line, arrived = Line(process.served.address, process), SimpleQueue()
    process.go_on.clear()
    sent = [asked_of(line, arrived, "echo", bytes([n]) * 500_000) for n in range(60)]
    process.go_on.set()
    assert [arrived.get(timeout=30) for _ in sent] == sent
    assert [said(asked)[1][0][:1] for asked in sent] == [bytes([n]) for n in range(60)]


@pytest.mark.skipif(not os.path.exists("/proc/net/if_inet6"), reason="this machine has no IPv6")
def test_a_line_may_go_over_ipv6():
    process = Process("::1")
    line, arrived = Line(process.served.address, process), SimpleQueue()
    asked = asked_of(line, arrived, "echo", 7)
    assert arrived.get(timeout=10) is asked and said(asked) == ("echo", [7])


def test_a_call_waits_for_the_answers_it_takes_and_holds_back_those_behind_it(process: Process):
    other = Process()
    first, second = Line(process.served.address, process), Line(other.served.address, other)
    arrived: SimpleQueue[Asked] = SimpleQueue()
    process.go_on.clear()
    made = asked_of(first, arrived, "echo", b"given")
    taking = asked_of(second, arrived, "take", needs=(made,))
    behind = asked_of(second, arrived, "echo", b"behind")
    with pytest.raises(Empty):
        arrived.get(timeout=0.2)
    process.go_on.set()
    assert [arrived.get(timeout=10) for _ in range(3)] == [made, taking, behind]
    assert said(taking) == ("take", [made.message])


def test_a_process_keeps_what_it_has_made_until_the_driver_has_let_it_go(process: Process):
    line, arrived = Line(process.served.address, process), SimpleQueue()
    asked = asked_of(line, arrived, "make", b"an object")
    arrived.get(timeout=10)
    (lease,) = asked.leases
    assert list(process.served._made) == [b"an object"]
    del asked
    gc.collect()
    asked_of(line, arrived, "echo")
    arrived.get(timeout=10)
    assert list(process.served._made) == [b"an object"], "a lease of it lives"
    child = os.fork()
    if not child:
        line.release(b"an object")
        os._exit(0)
    os.waitpid(child, 0)
    asked_of(line, arrived, "echo")
    arrived.get(timeout=10)
    assert list(process.served._made) == [b"an object"], "a child that ends says nothing"
    del lease
    asked_of(line, arrived, "echo")
    arrived.get(timeout=10)  # behind the word on the lease
    assert list(process.served._made) == []


def test_what_is_queued_is_done_before_a_closed_line_ends(process: Process):
    line, arrived = Line(process.served.address, process), SimpleQueue()
    process.go_on.clear()
    sent = [asked_of(line, arrived, "echo", n) for n in range(3)]
    line.close()
    process.go_on.set()
    assert [said(arrived.get(timeout=10))[1] for _ in sent] == [[0], [1], [2]]
    process.thread.join(10)
    assert not process.thread.is_alive()


def test_rays_word_on_a_process_answers_all_that_it_was_asked(process: Process):
    """Also where the line stays open, as that to a silent node does."""
    other = Process()
    line, following = Line(process.served.address, process), Line(other.served.address, other)
    arrived: SimpleQueue[Asked] = SimpleQueue()
    answered = asked_of(line, arrived, "echo")
    assert arrived.get(timeout=10) is answered
    process.go_on.clear()
    asked = [asked_of(line, arrived, "echo", n) for n in range(2)]
    taking = asked_of(following, arrived, "take", needs=(asked[1],))
    gone = RuntimeError("the actor died")
    process.end.set_exception(gone)
    assert {arrived.get(timeout=10) for _ in range(3)} == {*asked, taking}
    assert [one.error for one in (*asked, taking)] == [gone] * 3 and answered.error is None
    late = asked_of(line, arrived, "echo")
    assert arrived.get(timeout=10) is late and late.error is gone
    behind = asked_of(following, arrived, "echo", 1)
    assert arrived.get(timeout=10) is behind and said(behind) == ("echo", [1])


def test_a_line_that_is_cut_while_ray_says_nothing_is_a_lost_connection(process: Process):
    line, arrived = Line(process.served.address, process), SimpleQueue()
    asked_of(line, arrived, "echo")
    arrived.get(timeout=10)
    process.go_on.clear()
    asked = asked_of(line, arrived, "echo")
    end = socket.fromfd(process.served._socket.fileno(), socket.AF_INET, socket.SOCK_STREAM)
    end.shutdown(socket.SHUT_RDWR)
    process.go_on.set()
    assert arrived.get(timeout=10) is asked and "its line is cut" in str(asked.error)


def test_a_child_that_a_process_forks_has_no_part_of_its_line(process: Process):
    line, arrived = Line(process.served.address, process), SimpleQueue()
    asked_of(line, arrived, "echo")
    arrived.get(timeout=10)
    child = os.fork()
    if not child:
        os._exit(0 if process.served._socket.fileno() == -1 else 1)
    assert os.waitpid(child, 0)[1] == 0 and process.served._socket.fileno() != -1


def test_only_who_has_the_key_is_let_in(process: Process):
    at: Any = process.served.address.at
    with pytest.raises(AuthenticationError):
        Client(at, family="AF_UNIX" if isinstance(at, bytes) else "AF_INET", authkey=b"guessed")
    line, arrived = Line(process.served.address, process), SimpleQueue()
    assert asked_of(line, arrived, "echo") is arrived.get(timeout=10), "who has it is, afterwards"


def test_strangers_that_stay_keep_nobody_waiting(process: Process):
    strangers = [knock(process.served.address) for _ in range(4)]
    for stranger, said_first in zip(
        strangers, (b"", b"\0\0", b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\x20half"), strict=True
    ):
        stranger.sendall(said_first)
    time.sleep(0.1)
    line, arrived = Line(process.served.address, process), SimpleQueue()
    assert asked_of(line, arrived, "echo") is arrived.get(timeout=10)
    with pytest.raises(ConnectionRefusedError):
        knock(process.served.address)
    [stranger.close() for stranger in strangers]


def test_a_process_that_does_not_let_its_driver_in_is_given_up(process: Process, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lines, "_HANDSHAKE", 1)
    silent = Served("" if isinstance(process.served.address.at, bytes) else "127.0.0.1")
    with pytest.raises(OSError):
        Line(silent.address, process)


def test_a_process_at_whose_door_too_many_stand_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lines, "_HANDSHAKE", 1)
    silent, strangers, given_up = Served(""), [], threading.Event()
    with pytest.raises(BlockingIOError):
        while True:
            strangers.append(socket.socket(socket.AF_UNIX))
            strangers[-1].setblocking(False)
            strangers[-1].connect(silent.address.at)

    def connect() -> None:
        with pytest.raises(OSError):
            Line(silent.address, None)
        given_up.set()

    threading.Thread(target=connect, daemon=True).start()
    assert given_up.wait(10)
    [stranger.close() for stranger in strangers]


def test_a_process_that_is_gone_ends_a_call_that_waits_for_room():
    process, gone = Deaf(), RuntimeError("the actor died")
    line, arrived = Line(process.served.address, process), SimpleQueue()
    asked = [asked_of(line, arrived, "echo", bytes(2**25)) for _ in range(3)]  # more than the sockets hold
    with pytest.raises(Empty):
        arrived.get(timeout=0.3)
    process.end.set_exception(gone)
    assert {id(arrived.get(timeout=10)) for _ in asked} == {id(one) for one in asked}
    assert all(one.error is gone for one in asked)


def test_what_is_let_go_together_is_told_in_one_message():
    process = Deaf()
    line = Line(process.served.address, process)
    names = [b"%d" % n for n in range(50)]
    for name in names:
        line.release(name)
    process.thread.join()
    assert next(lines._received(process.connection)) == names


def test_a_process_that_does_not_read_keeps_nobody_waiting_and_gets_all_of_it_afterwards():
    process = Deaf()
    line, arrived = Line(process.served.address, process), SimpleQueue()
    sent = [bytes([n]) * size for n, size in enumerate((2**25, 7, 2**22, 2**10, 2**20))]
    begin = time.monotonic()
    for data in sent:
        asked_of(line, arrived, "echo", data)
    line.release(b"an object")
    assert time.monotonic() - begin < 5
    process.thread.join()
    come = lines._received(process.connection)
    found = [next(come) for _ in range(6)]
    assert found.pop(1) == [b"an object"], "before the calls that have not begun to go"
    assert found == [(number, "echo", data) for number, data in enumerate(sent)]


def test_a_message_that_was_sent_in_part_is_the_last_of_its_line(monkeypatch: pytest.MonkeyPatch):
    class Alarm(Exception):
        pass

    def ring(*_: object, **__: object) -> None:
        raise Alarm

    monkeypatch.setattr(lines, "_RAYS_WORD", 0.1)
    process = Deaf()
    line, arrived = Line(process.served.address, process), SimpleQueue()
    with monkeypatch.context() as patch, pytest.raises(Alarm):
        patch.setattr(threading.Thread, "start", ring)  # of what would send the rest
        asked_of(line, arrived, "echo", bytes(2**25))
    assert "its line is cut" in str(arrived.get(timeout=10).error)
    late = asked_of(line, arrived, "echo")
    assert arrived.get(timeout=10) is late and "its line is cut" in str(late.error)


def test_ctrl_c_waits_for_what_must_be_whole_and_a_second_one_does_not():
    reached = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        signal.raise_signal(signal.SIGINT)
        with uninterrupted():
            reached.append("end")
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        reached.append("not this")
    assert reached == ["end"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler
