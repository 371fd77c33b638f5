"""Where metrics go besides ``metrics.jsonl``: TensorBoard, Weights & Biases, MLflow.

Where it stands: :class:`hybridflow.tracking.Tracker` gives each sink every row; a sink never reads. All three work
without a network. The invariant: importing this module imports none of them, so only the ones a run names have to be
installed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hybridflow.config import RunConfig
from hybridflow.errors import RunFolderError

Row = tuple[int, float, Mapping[str, float]]
"""Step, seconds since the epoch, metrics."""

_MLFLOW_BATCH = 1000  # as many as MLflow takes in one call


@contextlib.contextmanager
def written_to(path: Path) -> Iterator[None]:
    """Turn what the system says on a file of the run into a RunFolderError."""
    try:
        yield
    except OSError as error:
        raise RunFolderError(
            f"{error.filename or path} cannot be written: {error.strerror or error}. Free space or choose another "
            "runs_dir; a run with a checkpoint goes on with checkpoint.resume=auto."
        ) from error


class Sink(Protocol):
    """Takes rows in the order of their steps; a later row of the same step adds to it."""

    def log(self, row: Row) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Entry:
    """One known sink.

    Attributes:
        module: what has to be importable.
        install: what to install for it.
        make: ``(config, run_dir, rows of the resumed run)`` -> the sink.
    """

    module: str
    install: str
    make: Callable[[RunConfig, Path, Iterable[Row]], Sink]

    def missing(self) -> str:
        return f"{self.module} is not installed. Install it with: pip install {self.install}"


class TensorBoard:
    """Event files in ``<run>/tensorboard``.

    A resumed run's earlier rows are written anew: old event files also hold steps after the checkpoint, and TensorBoard
    would draw both.
    """

    def __init__(self, config: RunConfig, run_dir: Path, earlier: Iterable[Row]) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event: Any = importlib.import_module("tensorboard.compat.proto.event_pb2").Event
        self._summary: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2").Summary
        self._folder = run_dir / "tensorboard"
        shutil.rmtree(self._folder, ignore_errors=True)
        with written_to(self._folder):
            self._writer = EventFileWriter(str(self._folder))
        for row in earlier:
            self.log(row)

    def log(self, row: Row) -> None:
        step, timestamp, metrics = row
        # One event for all of them: each one costs the step a turn of the writer's thread.
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        event = self._event(step=step, wall_time=timestamp, summary=self._summary(value=values))
        with written_to(self._folder):
            self._writer.add_event(event)
            self._writer.flush()

    def close(self) -> None:
        with written_to(self._folder):
            self._writer.close()


class Wandb:
    """A run of project ``tracking.project``; ``WANDB_MODE=offline`` keeps it in ``<run>/wandb``.

    Weights & Biases does not take a step twice: of a resumed run it ignores steps it has seen before.
    """

    def __init__(self, config: RunConfig, run_dir: Path, earlier: Iterable[Row]) -> None:
        wandb: Any = importlib.import_module("wandb")
        run_id = _kept_id(run_dir / "wandb_id", bool(list(earlier)), lambda: uuid.uuid4().hex[:8])
        self._run = wandb.init(
            project=config.tracking.project,
            name=config.name,
            id=run_id,
            resume="allow",
            dir=str(run_dir),
            config=dataclasses.asdict(config),  # type: ignore[call-overload]
        )

    def log(self, row: Row) -> None:
        step, _, metrics = row
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run of experiment ``tracking.project``, in ``<run>/mlflow.db`` or where ``MLFLOW_TRACKING_URI`` says."""

    def __init__(self, config: RunConfig, run_dir: Path, earlier: Iterable[Row]) -> None:
        mlflow: Any = importlib.import_module("mlflow")
        self._metric = mlflow.entities.Metric
        local = f"sqlite:///{(run_dir / 'mlflow.db').absolute()}"
        self._client = mlflow.MlflowClient(os.environ.get("MLFLOW_TRACKING_URI", local))
        experiment = self._client.get_experiment_by_name(config.tracking.project)
        # A server knows where artifacts go; without one, MLflow would put them into the working directory.
        artifacts = None if "MLFLOW_TRACKING_URI" in os.environ else (run_dir / "mlflow").absolute().as_uri()
        number = (
            experiment.experiment_id
            if experiment
            else self._client.create_experiment(config.tracking.project, artifact_location=artifacts)
        )

        def create() -> str:
            return self._client.create_run(number, run_name=config.name).info.run_id

        self._run_id = _kept_id(run_dir / "mlflow_id", bool(list(earlier)), create)
        if self._client.get_run(self._run_id).info.status != "RUNNING":
            self._client.update_run(self._run_id, status="RUNNING")
        self._client.log_dict(self._run_id, dataclasses.asdict(config), "config.yaml")  # type: ignore[call-overload]

    def log(self, row: Row) -> None:
        step, timestamp, metrics = row
        rows = [self._metric(name, value, int(timestamp * 1000), step) for name, value in metrics.items()]
        for start in range(0, len(rows), _MLFLOW_BATCH):
            self._client.log_batch(self._run_id, rows[start : start + _MLFLOW_BATCH])

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


SINKS: dict[str, Entry] = {
    "tensorboard": Entry("tensorboard", "tensorboard", TensorBoard),
    "wandb": Entry("wandb", "'hybridflow[tracking]'", Wandb),
    "mlflow": Entry("mlflow", "'hybridflow[tracking]'", MLflow),
}


def _kept_id(path: Path, resumed: bool, create: Callable[[], Any]) -> str:
    """The id under which a run is known elsewhere: kept in its folder, so that a resumed run goes on under it."""
    if resumed and path.is_file():
        return path.read_text("utf-8").strip()
    value = str(create())
    path.write_text(value + "\n", "utf-8")
    return value
