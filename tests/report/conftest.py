"""A run's folder as files, without a run."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridflow.trace import END, HEAD, Events, Span
from hybridflow.tracking import JsonLines


@pytest.fixture
def finished_run(tmp_path: Path) -> Callable[[int], Path]:
    """The folder of a run of four steps with this many samples; every third one is solved."""

    def write(num_samples: int) -> Path:
        folder = tmp_path / "grpo-tiny"
        folder.mkdir()
        metrics, samples = JsonLines(folder / "metrics.jsonl", 0), JsonLines(folder / "rollouts.jsonl", 0)
        trace, events = JsonLines(folder / "trace.json", 0, HEAD, END), Events()
        for step in range(1, 5):
            metrics.write_step(
                step, {"reward/mean": step / 4, "time/step": 1.0, "time/generate": 0.75, "time/other": 0.25}
            )
            spans = [Span("train", rank, "rollout", "generate", step, step, step + 0.5, 2**30) for rank in (0, 1)]
            for event in events.of_step(step, [("generate", step, step + 0.75)], spans):
                trace.append(event)
        for i in range(num_samples):
            samples.append(sample(i, 1 + i * 4 // num_samples))
        for file in (metrics, samples, trace):
            file.close()
        (folder / "config.yaml").write_text(json.dumps({"model": {"path": "no/where"}, "name": "</script><b>x"}))
        return folder

    return write


def sample(number: int, step: int) -> dict:
    length = 8 + number % 57
    return {
        "step": step,
        "tag": "train",
        "prompt": f"What is {number} + 1?",
        "response": f"It is <b>{number + 1}</b>.",
        "reward": float(number % 3 == 0),
        "solved": number % 3 == 0,
        "ground_truth": str(number + 1),
        "finish_reason": "stop",
        "version": step - 1,
        "response_ids": [(number * 7 + j) % 262 for j in range(length)],
        "log_probs": [-0.01 * j for j in range(length)],
        "trainer_log_probs": [-0.01 * j - 1e-4 for j in range(length)],
        "advantages": 0.5,
        **({"mask": [0] + [1] * (length - 1)} if number == 0 else {}),
    }
