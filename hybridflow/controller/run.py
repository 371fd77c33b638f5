"""The handle a driver works with: groups as attributes, steps, named timers, and what happens at a step's end.

Where it stands: :func:`hybridflow.launch` builds it; a driver's loop reads as the algorithm because everything that a
schedule decides (sync, evaluate, save, log, stop) happens in :meth:`Run.finish_step`.

Invariants: a checkpoint is written between two steps only; the order of a weight sync is fixed here and nowhere else; the
weight version is the number of the last finished step.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from hybridflow.algorithms.metrics import batch_metrics
from hybridflow.checkpoint import CheckpointStore
from hybridflow.checks import Plan
from hybridflow.config import RunConfig
from hybridflow.controller.group import WorkerGroup
from hybridflow.controller.placement import AbsentRole
from hybridflow.data.prompts import PromptSource
from hybridflow.protocol.data import DataProto
from hybridflow.timing import Timer
from hybridflow.tracking import Tracker


class Run:
    """A started run.

    Attributes:
        config: the typed configuration.
        step: number of the current training step, from 1; 0 before the first.
        actor, rollout, reference, reward: the roles' groups (an :class:`AbsentRole` where not placed).
    """

    actor: WorkerGroup | AbsentRole
    rollout: WorkerGroup | AbsentRole
    reference: WorkerGroup | AbsentRole
    reward: WorkerGroup | AbsentRole

    def __init__(
        self,
        config: RunConfig,
        plan: Plan,
        groups: Mapping[str, WorkerGroup | AbsentRole],
        source: PromptSource,
        tracker: Tracker,
        store: CheckpointStore,
    ) -> None:
        self.config, self.plan, self.source, self.tracker, self.store = config, plan, source, tracker, store
        self.groups = dict(groups)
        for role, group in groups.items():
            setattr(self, role, group)
        self.step = 0
        self.timer_of_step = Timer()
        self.stop_reason = ""
        self._saved_at = -1
        self._evaluated: dict[str, float] = {}
        self._synced_at = -1

    # -- the driver's side

    def steps(self) -> Iterator[DataProto]:
        """The prompts of each training step, from where the run stands to ``config.steps``.

        Evaluates before the first step, ends early at ``evaluate.stop_at`` or after Ctrl-C, and evaluates and saves
        after the last one.
        """
        self.sync_weights()
        with _Interrupts(self):
            if self.config.evaluate.at_start and self.step == 0:
                self._log(0, self.evaluate())
            while self.step < self.config.steps and not self.stop_reason:
                self.step += 1
                for group in self.groups.values():
                    if isinstance(group, WorkerGroup):
                        group.step = self.step
                self.timer_of_step = Timer()
                yield self.source.batch(self.step)
            self._conclude()

    def timer(self, name: str) -> AbstractContextManager[Any]:
        """Time one named part of the step."""
        return self.timer_of_step(name)

    def finish_step(self, metrics: Mapping[str, float], batch: DataProto) -> None:
        """End a step: sync weights, evaluate, save and log, by the schedule in the config.

        Args:
            metrics: what ``actor.update`` returned.
            batch: everything the step produced; its columns give metrics and samples.
        """
        found = {f"actor/{name}": value for name, value in metrics.items()}
        found |= batch_metrics(batch)
        found |= {name: float(value) for name, value in _flat(batch.meta_info.get("metrics", {})).items()}
        if "rollout_log_probs" in batch:
            with self.timer("sync_weights"):
                found |= self.sync_weights()
        if self._due(self.config.evaluate.every):
            with self.timer("evaluate"):
                found |= self.evaluate()
        if self._due(self.config.checkpoint.every):
            with self.timer("save"):
                self.save()
        self._log(self.step, found, batch)

    def sync_weights(self) -> dict[str, float]:
        """Give the rollout the actor's weights, stamped with the number of finished steps."""
        if not self.rollout or not self.actor or self._synced_at == self.step:
            return {}
        reports = self.rollout.sync_weights(self.step)
        self._synced_at = self.step
        return {f"sync/{name}": sum(r[name] for r in reports) for name in reports[0]} if reports else {}

    def evaluate(self) -> dict[str, float]:
        """Score held-out prompts under the current weights.

        Returns:
            ``evaluate/accuracy`` (share solved), ``evaluate/reward``, ``evaluate/length``, and the accuracy of each data
            source where there are several; empty where nothing is held out or no rollout is placed.
        """
        settings = self.config.evaluate
        prompts = self.source.held_out()
        if settings.size:
            prompts = prompts[: settings.size]
        if not self.rollout or not self.reward or len(prompts) == 0:
            return {}
        self.sync_weights()
        batch = self.rollout.generate(prompts.repeat(settings.n), sampling=settings.sampling, tag="evaluate")
        batch = batch.union(self.reward.score(batch))
        solved = batch["solved"].double()
        found = {
            "evaluate/accuracy": solved.mean().item(),
            "evaluate/reward": batch["rewards"].double().nanmean().item(),
            "evaluate/length": batch.lengths("responses").double().mean().item(),
        }
        sources = batch["data_source"]
        if len(set(sources)) > 1:
            for name in sorted(set(sources)):
                found[f"evaluate/accuracy/{name}"] = solved[[s == name for s in sources]].mean().item()
        if settings.stop_at and found["evaluate/accuracy"] >= settings.stop_at:
            self.stop_reason = f"evaluate.stop_at={settings.stop_at} reached"
        self._evaluated = found
        return found

    def save(self) -> Path:
        """Write a checkpoint of the finished step: actor, optimizer, counters."""
        with self.store.writing(self.step) as folder:
            self.actor.save(str(folder))
            self.store.write_json(folder / "run.json", {"step": self.step, "weight_version": self.step})
        self._saved_at = self.step
        return self.store.folder(self.step)

    def stop(self, reason: str) -> None:
        """End after the current step."""
        self.stop_reason = self.stop_reason or reason

    # -- inside

    def _due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    def _conclude(self) -> None:
        """After the last step: evaluate and save what the schedule has not."""
        if not self._due(self.config.evaluate.every) and self.stop_reason != "interrupted":
            found = self.evaluate()
            if found:
                self.tracker.log(self.step, found)
        if self._saved_at != self.step and self.step > 0:
            self.save()

    def _log(self, step: int, metrics: Mapping[str, float], batch: DataProto | None = None) -> None:
        seconds = self.timer_of_step.flush()
        found = {**metrics, **seconds}
        if batch is not None and seconds.get("time/step"):
            tokens = int(batch.lengths("prompts").sum() + batch.lengths("responses").sum())
            found["throughput/tokens_per_second"] = tokens / seconds["time/step"]
            found["throughput/response_tokens_per_second"] = (
                int(batch.lengths("responses").sum()) / seconds["time/step"]
            )
        self.tracker.log(step, found, batch)


def _flat(metrics: Any) -> dict[str, float]:
    """Metrics of one worker, or the mean over a list of workers' metrics."""
    if isinstance(metrics, Mapping):
        return {name: value for name, value in metrics.items() if isinstance(value, int | float)}
    if not metrics:
        return {}
    return {name: sum(m[name] for m in metrics) / len(metrics) for name in metrics[0]}


class _Interrupts:
    """Ctrl-C and SIGTERM end the run after the current step, which is then saved; a second Ctrl-C ends it at once."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.previous: dict[int, Any] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self.previous[number] = signal.signal(number, self._handle)

    def _handle(self, number: int, frame: Any) -> None:
        if self.run.stop_reason == "interrupted" and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.run.stop_reason = "interrupted"
        self.run.tracker.say("Finishing this step, then saving. Press Ctrl-C again to stop at once.")

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)
