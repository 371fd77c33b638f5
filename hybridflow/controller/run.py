"""The handle a driver works with: groups as attributes, steps, named timers, and what happens at a step's end.

Where it stands: :func:`hybridflow.launch` builds it; a driver's loop reads as the algorithm because everything that a
schedule decides (sync, evaluate, save, log, stop) happens in :meth:`Run.finish_step`.

Invariants: a checkpoint is written between two steps only; the order of a weight sync is fixed here and nowhere else;
the weight version is the number of the last finished step.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybridflow.algorithms.evaluation import best_of
from hybridflow.algorithms.kl import AdaptiveKL, controller_of
from hybridflow.algorithms.metrics import batch_metrics, evaluation_metrics, pair_metrics, staleness
from hybridflow.algorithms.step import KL_COEF
from hybridflow.checkpoint import CheckpointStore
from hybridflow.checks import Plan
from hybridflow.checks.base import CRITICS
from hybridflow.checks.placement import OWN_ROLES
from hybridflow.config import DPOConfig, RLConfig, RunConfig
from hybridflow.controller.future import together
from hybridflow.controller.group import WorkerGroup
from hybridflow.controller.placement import AbsentRole, join_pools
from hybridflow.data.prompts import PromptSource
from hybridflow.data.stream import PromptStream
from hybridflow.errors import CheckpointError, ConfigError, HybridFlowError, nearest
from hybridflow.protocol.data import DataProto
from hybridflow.protocol.meta import join_metric, join_metrics
from hybridflow.timing import Timer
from hybridflow.trace import Span
from hybridflow.tracking import Tracker, changed_settings, mismatch_above, save_config

INTERRUPTED = "interrupted"


class Run:
    """A started run.

    Attributes:
        config: the typed configuration.
        plan: what the checked configuration means: layouts, rows and updates of a step.
        step: number of the current training step, from 1; 0 before the first.
        saved_step: of the last checkpoint of this run or the one it resumed; -1 where there is none.
        stream: the prompts to come; ``steps`` takes ``data.prompts_per_step`` of them for each step.
        state: numbers of the driver's own that checkpoints keep, such as a multiplier that it adapts. The weight of a
            KL with ``algorithm.kl_target`` is one.
        actor, critic, cost_critic, rollout, reference, teacher, reward, cost: the roles' groups (an
            :class:`AbsentRole` where not placed).
    """

    actor: WorkerGroup | AbsentRole
    critic: WorkerGroup | AbsentRole
    cost_critic: WorkerGroup | AbsentRole
    rollout: WorkerGroup | AbsentRole
    reference: WorkerGroup | AbsentRole
    teacher: WorkerGroup | AbsentRole
    reward: WorkerGroup | AbsentRole
    cost: WorkerGroup | AbsentRole

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
        self.stream = PromptStream(source)
        self.groups = dict(groups)
        for role, group in groups.items():
            setattr(self, role, group)
        self._kl = controller_of(config.algorithm) if isinstance(config, RLConfig) else None
        self.step = 0
        self.state: dict[str, float] = {}
        self.stop_reason = ""
        self._timer = Timer()
        # What begin and start returned for steps that were not given out yet, the nearest ones in the second.
        self._begun: deque[Any] = deque()
        self._apart = {"rollout": join_pools(self.actor, self.rollout)}
        self._update_reference_every = reference_period(config)
        if self._update_reference_every:
            self._apart["reference"] = join_pools(self.actor, self.reference)
        self._reference_version = 0
        self._ahead: deque[Any] = deque()
        self.saved_step = self._synced = -1
        self._evaluation_lost = False

    # -- the driver's side

    def steps(
        self,
        start: Callable[[DataProto], Any] = lambda prompts: prompts,
        ahead: int = 0,
        begin: Callable[[DataProto], Any] | None = None,
    ) -> Iterator[Any]:
        """The prompts of each training step, from where the run stands to ``config.steps``.

        Evaluates before the first step, and after a resume what the step before it has lost; ends early at
        ``evaluate.stop_at`` or after Ctrl-C; evaluates and saves after the last one.

        Args:
            start: called with the prompts of each step; what it returns is what the step is given. A call that does
                not block starts work of later steps while this one goes on.
            ahead: so many later steps are started before this one is given out.
            begin: called in the place of ``start``, which is then called with what ``begin`` returned, one step before
                this is given out: for answers that go on over several steps and syncs (``rollout.begin``).
        """
        with _Interrupts(self):
            self.sync_weights()  # a broken path fails before the first step
            if self.config.evaluate.at_start and self.step == 0:
                with self.timer("evaluate"):
                    found = self.evaluate()
                self._log(found)
            if self._evaluation_lost:
                self._evaluate_late()
            while self.step < self.config.steps and not self.stop_reason:
                self._begin(self.step + 1)
                if isinstance(self._kl, AdaptiveKL):
                    self.stream.meta[KL_COEF] = self._kl.coef
                left = self.config.steps - self.step
                while self._steps_ahead <= min(ahead, left):
                    later = self.stream.take(self.config.data.prompts_per_step, self.step + self._steps_ahead)
                    self._begun.append(begin(later) if begin else later)
                while self._begun and len(self._ahead) <= min(1 if begin else ahead, left):
                    self._ahead.append(start(self._begun.popleft()))
                yield self._ahead.popleft()
            self._conclude()
            self._trace(self._take_spans())

    def describe(self) -> str:
        """The placement as a table: pools, devices, roles, layouts, and the nodes that the devices are on.

        Each group's own ``describe()`` lists its ranks.
        """
        pools = {group.pool.name: group.pool for group in self.groups.values() if isinstance(group, WorkerGroup)}
        counts = {name: Counter(place.node for place in pool.places) for name, pool in pools.items()}
        nodes = {name: ", ".join(f"{node} x {n}" for node, n in count.items()) for name, count in counts.items()}
        callable_roles = [role for role in self.groups if role not in OWN_ROLES or hasattr(self.config, role)]
        absent = [f"not placed: {role}" for role in callable_roles if isinstance(self.groups[role], AbsentRole)]
        return "\n".join([self.plan.placement_table(nodes), *absent])

    def timer(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """Time one named part of the step."""
        return self._timer(name)

    def finish_step(self, metrics: Mapping[str, float], batch: DataProto) -> None:
        """End a step: save, sync weights, evaluate and log, by the schedule in the config.

        Args:
            metrics: what ``update`` returned, of all roles; a name without a slash is one of ``actor/``.
            batch: everything the step produced; its columns give metrics and samples.
        """
        # What workers saw of their own rows first: a metric of the whole batch replaces the one of the same name.
        found = join_metrics(batch.meta_info.get("metrics", {})) | batch_metrics(batch)
        found |= {name if "/" in name else f"actor/{name}": value for name, value in metrics.items()}
        found |= staleness(batch, self.step - 1)
        if found.get("rollout/staleness_max"):
            # The trainer has moved on since: this is no measure of how alike the two engines compute.
            found = {name.replace("rollout_vs_trainer/", "off_policy/"): value for name, value in found.items()}
        if isinstance(self._kl, AdaptiveKL) and "reward/kl" in found:
            self._kl = self._kl.after(found["reward/kl"], len(batch))
            self.state[KL_COEF] = self._kl.coef
        if any(value for name, value in metrics.items() if name.endswith("update_skipped")):
            reason = "its gradient norm is not finite, or all its tokens are masked"
            self.tracker.say(f"warning: step {self.step}: an update was skipped: {reason}.")
        if reason := mismatch_above(self.config.tracking.mismatch_stop, "tracking.mismatch_stop", found):
            self.stop(reason)
        # First, while devices that take turns still hold the models in training; a checkpoint holds what comes of it.
        if self._due(self._update_reference_every) and self.reference:
            with self.timer("update_reference"):
                self.update_reference()
            found["reference/version"] = float(self.step)
        if self._due(self.config.checkpoint.every):
            with self.timer("save"):
                self.save()
        try:
            if "rollout_log_probs" in batch:
                with self.timer("sync_weights"):
                    found |= self.sync_weights()
            if self._due(self.config.evaluate.every):
                with self.timer("evaluate"):
                    found |= self.evaluate()
        except BaseException:
            # The step is done all the same, and may be saved. The first error is the one to tell.
            with contextlib.suppress(HybridFlowError):
                self._log(found, batch)
            raise
        self._log(found, batch)

    def sync_weights(self) -> dict[str, float]:
        """Give the rollout the actor's weights, stamped with the number of finished steps.

        Does nothing where the rollout has them already. Returns what the devices report, as
        :meth:`hybridflow.workers.rollout.RolloutWorker.sync_weights` says, joined.
        """
        if not self.rollout or self._synced == self.step:
            return {}
        found = self._give_weights("rollout")
        self._synced = self.step
        return found

    def update_reference(self) -> None:
        """Let the reference take the actor's weights; checkpoints keep them from now on."""
        self._give_weights("reference")
        self._reference_version = self.step

    def _give_weights(self, role: str) -> dict[str, float]:
        """The actor's weights to another role, whatever pools the two have; what the processes report, joined.

        Of two pools one may report what the other does not, such as the memory of generation.
        """
        if not self._apart[role]:
            return join_metrics(self.groups[role].sync_weights(self.step))
        sent = self.actor.send_weights(self.step, role, blocking=False)
        taken = self.groups[role].sync_weights(self.step, blocking=False)
        sides = [join_metrics(side) for side in together(sent, taken)]
        names = dict.fromkeys(name for side in sides for name in side)
        return {name: join_metric(name, [side[name] for side in sides if name in side]) for name in names}

    def evaluate(self) -> dict[str, float]:
        """Score held-out prompts under the current weights; the samples go to ``rollouts.jsonl`` as ``evaluate``.

        Returns:
            See :func:`hybridflow.algorithms.metrics.evaluation_metrics`; empty where nothing is held out, or no rollout
            or reward is placed. Held-out pairs are told apart by the actor's scores: ``evaluate/accuracy`` is the share
            of them in which the chosen answer scores higher.
        """
        settings = self.config.evaluate
        prompts = self.source.held_out()
        if "chosen" in prompts:
            pairs = prompts[: 2 * settings.size or len(prompts)]
            return self._evaluated(pair_metrics(pairs.union(self.actor.scores(pairs))))
        if not self.rollout or not self.reward or len(prompts) == 0:
            return {}
        self.sync_weights()
        prompts = prompts[: settings.size or len(prompts)].repeat(settings.n)
        batch = self.rollout.generate(prompts, sampling=settings.sampling, tag="evaluate")
        batch = batch.union(self.reward.score(batch))
        if self.config.tracking.rollouts_every:
            self.tracker.log_rollouts(self.step, batch, tag="evaluate")
        return self._evaluated(evaluation_metrics(batch))

    def _evaluated(self, found: dict[str, float]) -> dict[str, float]:
        stop_at = self.config.evaluate.stop_at
        if stop_at and found["evaluate/accuracy"] >= stop_at:
            self.stop(f"evaluate.stop_at={stop_at} is reached")
        self._compare(found)
        return found

    def _compare(self, found: Mapping[str, float]) -> None:
        """Keep the checkpoint of the best evaluation, and end a run that has stopped getting better.

        What was before is read from ``metrics.jsonl``, so a resumed run knows it too.
        """
        settings, metric = self.config.evaluate, self.config.evaluate.metric
        if not settings.patience and not self.config.checkpoint.keep_best:
            return
        if metric not in found:
            raise ConfigError(
                f"evaluate.metric={metric!r}: an evaluation has no such metric.{nearest(metric, list(found))}"
            )
        values = {**self.tracker.history(metric), self.step: found[metric]}
        best, since = best_of(values, settings.mode)
        if self.config.checkpoint.keep_best and best == self.step > 0:
            if self.saved_step != self.step:
                self.save()
            self.store.call_best(self.step)
            self._link("best")
        if settings.patience and since >= settings.patience:
            self.stop(
                f"{metric} has not got better than {values[best]:.4g} (step {best}) in {since} evaluations "
                "(evaluate.patience)"
            )

    def save(self) -> Path:
        """Write a checkpoint of the finished step; ``<run>/model`` then points at the actor's Hugging Face folder."""
        with self.store.writing(self.step) as folder:
            self.actor.save(str(folder.absolute()))
            for role in CRITICS:
                self.groups[role].save(str(folder.absolute() / role))
            if self._reference_version:
                self.reference.save(str(folder.absolute() / "reference"))
            # Prompts of steps that have only been started come again after a resume.
            position = self.stream.position - self._steps_ahead * self.config.data.prompts_per_step
            place = {"step": self.step, "position": position}
            state = {**place, "order": self._order(), "schedule": self._schedule(), "driver": self.state}
            state["reference"] = self._reference_version
            self.store.write_json(folder / "run.json", state)
            save_config(self.config, folder / "config.yaml")
        self.saved_step = self.step
        self._link("model")
        return self.store.folder(self.step)

    def _link(self, name: str) -> None:
        """Let ``<run>/<name>`` point at the model of this step's checkpoint."""
        link = self.tracker.run_dir / name
        fresh = link.with_name(f"{name}.new")
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(os.path.relpath(self.store.folder(self.step) / "model", link.parent))
        fresh.replace(link)

    def restore(self, folder: Path) -> None:
        """Continue from a checkpoint: weights, optimizer, schedule, the number of the step, the place in the data."""
        saved = self.store.read_json(folder / "run.json")
        for setting, value in self._order().items():
            before = saved["order"].get(setting)
            if before != value:
                raise CheckpointError(
                    f"{setting}={value!r}, but {folder} was written with {before!r}: the {saved['position']} prompts "
                    f"that it has used were others. Resume with the old value, or start a new run with "
                    f"model.path={folder / 'model'}."
                )
        self._warn_of_another_schedule(saved["schedule"])
        self.actor.load(str(folder.absolute()))
        for role in CRITICS:
            self.groups[role].load(str(folder.absolute() / role))
        self._reference_version = int(saved.get("reference", 0))  # older checkpoints have none
        if self._reference_version:
            self.reference.load(str(folder.absolute() / "reference"))
        self._begin(int(saved["step"]))
        self.stream.position = int(saved["position"])
        self.state = dict(saved.get("driver", {}))  # older checkpoints have none
        if isinstance(self._kl, AdaptiveKL):
            self._kl = replace(self._kl, coef=self.state.get(KL_COEF, self._kl.coef))
        self.saved_step = self.step
        self.tracker.say(f"resumed from {folder}: step {self.step} is done")
        if folder.resolve().parent == self.store.root.resolve():
            reported = self.tracker.reported(self.step)
            self._evaluation_lost = self._due(self.config.evaluate.every) and "evaluate/accuracy" not in reported
            if not reported:
                self.tracker.say(
                    f"warning: the run was killed after step {self.step} had been saved and before it was reported: "
                    "its metrics, samples and timeline are lost."
                )
            elif not self.tracker.traced(self.step):
                self.tracker.say(
                    f"warning: the run was killed while it wrote the samples of step {self.step}, which it had saved: "
                    "some may be missing from rollouts.jsonl."
                )
        if changed := changed_settings(self.config, folder / "config.yaml"):
            self.tracker.say(f"settings that differ from those it was saved with: {', '.join(changed)}")

    def stop(self, reason: str) -> None:
        """End the run after the current step."""
        self.stop_reason = self.stop_reason or reason

    # -- inside

    def _begin(self, step: int) -> None:
        self.step = step
        for group in self.groups.values():
            if isinstance(group, WorkerGroup):
                group.step = step
        self._timer.flush()

    @property
    def _steps_ahead(self) -> int:
        """Steps that were started, or begun, and not given out yet."""
        return len(self._begun) + len(self._ahead)

    def _order(self) -> dict[str, Any]:
        """What the order of the data depends on."""
        data = self.config.data
        return {
            "seed": self.config.seed,
            "data.train": data.train,
            "data.shuffle": data.shuffle,
        }

    def _schedule(self) -> dict[str, int]:
        """What the length of a decaying schedule depends on, where the settings do not give it."""
        return {"steps": self.config.steps, "updates": self.config.actor_steps * self.plan.updates}

    def _warn_of_another_schedule(self, saved: Mapping[str, int]) -> None:
        optimizer, now = self.config.actor.optimizer, self._schedule()
        if optimizer.schedule == "constant" or optimizer.decay_steps or now["updates"] == saved["updates"]:
            return
        self.tracker.say(
            f"warning: the {optimizer.schedule} schedule of the learning rate now ends at update {now['updates']} "
            f"(steps={now['steps']}); where the run was saved it ended at update {saved['updates']} "
            f"(steps={saved['steps']}), so the learning rate jumps. Set actor.optimizer.decay_steps={saved['updates']} "
            f"to go on along the old one."
        )

    def _due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    def _conclude(self) -> None:
        """After the last step: evaluate and save what the schedule has not, and say how the run ended."""
        interrupted = self.stop_reason == INTERRUPTED
        due = self.step > 0 and not self._due(self.config.evaluate.every)
        # A run that is resumed after its last step has been evaluated already.
        if due and not interrupted and "evaluate/accuracy" not in self.tracker.reported(self.step):
            self._evaluate_late()
        if self.saved_step != self.step and self.step > 0:
            self.save()
        if interrupted and self.step == 0:
            self.tracker.say("Interrupted before the first step; nothing was saved.")
        elif interrupted:
            self.tracker.say(
                f"Interrupted after step {self.step} of {self.config.steps}; the checkpoint is "
                f"{self.store.folder(self.step)}. Go on with the same command and checkpoint.resume=auto."
            )
        elif self.stop_reason:
            self.tracker.say(f"Stopped after step {self.step}: {self.stop_reason}.")

    def _evaluate_late(self) -> None:
        """Add an evaluation to the row of a step that is over."""
        self._timer.flush()
        if found := self.evaluate():
            self.tracker.log(self.step, found)

    def _log(self, metrics: Mapping[str, float], batch: DataProto | None = None) -> None:
        spans = self._take_spans()
        found = {**metrics, **self._timer.flush(), **memory_peaks(spans)}
        if batch is not None:
            response_tokens = float(batch.lengths("responses").sum())
            tokens = response_tokens + float(batch.lengths("prompts").sum())
            found["throughput/tokens_per_second"] = tokens / found["time/step"]
            found["throughput/response_tokens_per_second"] = response_tokens / found["time/step"]
        self.tracker.log(self.step, found, batch)
        self._trace(spans)  # after the samples: see restore

    def _take_spans(self) -> list[Span]:
        """What devices did since the last time."""
        pools = {id(group.pool): group.pool for group in self.groups.values() if isinstance(group, WorkerGroup)}
        return [pool.spans.popleft() for pool in pools.values() for _ in range(len(pool.spans))]

    def _trace(self, spans: list[Span]) -> None:
        """Write what devices and timers did to the trace."""
        self.tracker.trace(self.step, self._timer.spans, spans)
        self._timer.spans = []


def memory_peaks(spans: list[Span]) -> dict[str, float]:
    """``memory/<role>_peak_gb``: GiB that a process held at most while it worked for a role, its other roles' part
    included; the largest over the role's ranks."""
    peaks: dict[str, float] = {}
    for span in spans:
        name = f"memory/{span.role}_peak_gb"
        if span.peak:
            peaks[name] = max(peaks.get(name, 0.0), span.peak / 2**30)
    return peaks


def reference_period(config: RunConfig) -> int:
    """Steps between two updates of the reference, by the settings of the drivers that have one; 0 for none."""
    return config.reference.update_every if isinstance(config, RLConfig | DPOConfig) else 0


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
        if self.run.stop_reason == INTERRUPTED and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.run.stop_reason = INTERRUPTED
        self.run.tracker.say("Finishing this step, then saving. Press Ctrl-C again to stop at once.")

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)
