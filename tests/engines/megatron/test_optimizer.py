"""The learning rate of every update, by hand."""

import pytest

from hybridflow.config import OptimizerConfig
from hybridflow.engines.megatron.optimizer import learning_rate


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ({"warmup_steps": 2}, [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ({"schedule": "linear"}, [1.0, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
        ({"schedule": "linear", "warmup_steps": 1}, [1.0, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
        ({"schedule": "linear", "warmup_steps": 2, "min_lr": 0.2}, [0.5, 1.0, 0.84, 0.68, 0.52, 0.36]),
        ({"schedule": "linear", "decay_steps": 4}, [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]),
        # Half a cosine in 4 parts, after a warm-up of 3 updates: (1 + cos 45) / 2, 1 / 2, (1 - cos 45) / 2.
        ({"schedule": "cosine", "warmup_steps": 3}, [1 / 3, 2 / 3, 1.0, 0.853553, 0.5, 0.146447]),
    ],
)
def test_schedules_have_the_written_values(settings: dict, wanted: list[float]) -> None:
    config = OptimizerConfig(lr=1.0, **settings)
    assert [learning_rate(config, update, 6) for update in range(1, 7)] == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_run_of_one_update_trains(schedule: str) -> None:
    assert learning_rate(OptimizerConfig(lr=1.0, schedule=schedule), 1, 1) == 1.0
