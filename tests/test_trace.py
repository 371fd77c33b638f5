"""The timeline: a file that stays open and valid, is cut on resume, and says how idle a process was."""

import json
from pathlib import Path

import pytest

from hybridflow.trace import END, HEAD, Events, Span, idle_shares, read_trace
from hybridflow.tracking import JsonLines

GB = 2**30


def span(rank: int, role: str, method: str, begin: float, end: float, step: int = 1, pool: str = "train") -> Span:
    return Span(pool, rank, role, method, step, begin, end, 2 * GB)


def write(path: Path, steps: dict[int, tuple[list, list]], resumed_step: int = 0) -> Path:
    events, file = Events(), JsonLines(path, resumed_step, HEAD, END)
    for step, (timers, spans) in steps.items():
        for event in events.of_step(step, timers, spans):
            file.append(event)
    file.close()
    return path


def test_the_file_is_chromes_format_with_the_array_left_open(tmp_path: Path) -> None:
    spans = [span(0, "actor", "update", 100.5, 101.0), span(1, "actor", "update", 100.5, 100.75)]
    path = write(tmp_path / "trace.json", {3: ([("update_actor", 100.25, 101.25)], spans)})
    events = json.loads(path.read_text().rstrip().removesuffix(",") + "]")
    complete = [e for e in events if e["ph"] == "X"]
    assert [(e["name"], e["ts"], e["dur"]) for e in complete] == [
        ("update_actor", 100_250_000, 1_000_000),
        ("actor.update", 100_500_000, 500_000),
        ("actor.update", 100_500_000, 250_000),
    ]
    assert complete[1]["args"] == {"step": 1, "peak_gb": 2.0}
    named = {(e["pid"], e["tid"] if e["name"] == "thread_name" else None): e["args"] for e in events if e["ph"] == "M"}
    assert {named[e["pid"], e["tid"]]["name"] for e in complete} == {"timers", "actor"}
    assert len({e["pid"] for e in complete}) == 3


def test_names_are_written_once_and_read_back(tmp_path: Path) -> None:
    steps = {n: ([("generate", n, n + 1)], [span(0, "rollout", "generate", n, n + 0.5)]) for n in (1, 2)}
    path = write(tmp_path / "trace.json", steps)
    assert path.read_text().count("process_name") == 2
    assert [(e["step"], e["process"], e["role"], e["name"], e["begin"]) for e in read_trace(path)] == [
        (1, "driver", "timers", "generate", 1.0),
        (1, "pool train rank 0", "rollout", "rollout.generate", 1.0),
        (2, "driver", "timers", "generate", 2.0),
        (2, "pool train rank 0", "rollout", "rollout.generate", 2.0),
    ]


def test_the_end_of_a_long_file_is_read_with_the_names_of_its_beginning(tmp_path: Path) -> None:
    steps = {n: ([], [span(0, "actor", "log_probs", n, n + 0.5)]) for n in range(1, 2001)}
    path = write(tmp_path / "trace.json", steps)
    found = read_trace(path, tail_bytes=1000)
    assert 3 < len(found) < 20
    assert found[-1]["step"] == 2000
    assert {(e["process"], e["role"]) for e in found} == {("pool train rank 0", "actor")}


def test_a_resumed_run_goes_on_after_its_checkpoint(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.json", {n: ([("save", n, n + 1)], []) for n in (1, 2, 3)})
    with path.open("a") as file:
        file.write('{"step": 4, "na')  # killed while it wrote
    write(path, {3: ([("save", 30.0, 31.0)], [])}, resumed_step=2)
    assert [(e["step"], e["begin"]) for e in read_trace(path)] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert path.read_bytes().count(b"[") == 1
    write(path, {1: ([("save", 5.0, 6.0)], [])})
    assert [(e["step"], e["begin"]) for e in read_trace(path)] == [(1, 5.0)]


def test_idle_is_what_no_call_of_a_process_covers(tmp_path: Path) -> None:
    spans = [
        span(0, "rollout", "generate", 0.0, 4.0),
        span(0, "actor", "update", 3.0, 5.0),  # overlaps by one second
        span(1, "rollout", "generate", 8.0, 12.0),  # ends after the driver has stopped looking
    ]
    path = write(tmp_path / "trace.json", {1: ([("generate", 0.0, 8.0), ("update_actor", 8.0, 10.0)], spans)})
    assert idle_shares(read_trace(path)) == {
        "pool train rank 0": pytest.approx(0.5),
        "pool train rank 1": pytest.approx(0.8),
    }


def test_a_run_without_a_trace_has_no_events(tmp_path: Path) -> None:
    assert read_trace(tmp_path / "trace.json") == []
    assert idle_shares([]) == {}
