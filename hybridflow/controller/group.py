"""WorkerGroup: a role as the driver sees it. Calling one of its methods is a distributed computation.

The group binds every registered method of the worker class under its own name and signature. A call is prepared and
distributed here (``protocol/transfer.py``), runs on every rank (``controller/process.py``) and is collected here. The
invariants: the first rank that fails ends the call for the driver and for all its peers, also for those that hang in a
collective; and no failure is lost: where nobody reads a future's, or ranks no longer agree after one, the next call of
the role says so.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError

from hybridflow.controller import outside
from hybridflow.controller.pool import Failure, ResourcePool
from hybridflow.controller.process import Answer, load_class
from hybridflow.controller.store import packed
from hybridflow.errors import ConfigError, PlacementError, WorkerDiedError, WorkerError
from hybridflow.protocol.transfer import Call, Payload, TransferProtocol, transfer_protocol
from hybridflow.resharding.layout import Layout
from hybridflow.workers.base import RESERVED_PARAMETERS, Registration, Worker, registrations

if TYPE_CHECKING:
    from hybridflow.config import RunConfig

_LOST_PEER = ("Connection closed by peer", "Connection reset", "Broken pipe", "DistNetworkError", "DistBackendError")
"""What a rank raises when its peer in a collective dies: a consequence, so we look for the cause a little longer."""

_LOST_PEER_WAIT = 5.0
"""Seconds to wait for Ray's word on a dead process after a rank has lost its peer."""

_ALIKE_WAIT = 1.0
"""Seconds for the other ranks of a failed call to fail alike before they are interrupted."""

_INTERRUPT_WAIT = 2.0
"""Seconds to leave a call after an interruption; a rank in native code (a collective) does not heed one."""


class WorkerGroup:
    """One role on one pool.

    Args:
        pool: a started pool; several groups on it share its processes.
        role: name of the role, unique in the pool.
        worker: subclass of Worker, or its import path ``"package.module:Class"``.
        layout: the role's layout; it fills the pool.
        config: the run's configuration, given to every worker.
        timeout: seconds a call may take that is not given its own; None waits for as long as its processes live.

    Attributes:
        step: the training step named in errors; the driver's loop sets it.

    Raises:
        ConfigError: where the layout does not fill the pool or a method's name is one of the group's own.
        PlacementError: where the pool is not started.
        WorkerError: where a worker cannot be constructed.
    """

    def __init__(
        self,
        pool: ResourcePool,
        role: str,
        worker: type[Worker] | str,
        layout: Layout,
        config: RunConfig,
        timeout: float | None = None,
    ) -> None:
        if not pool.started:
            raise PlacementError(f"role {role!r}: pool {pool.name!r} is not started; call its start() first.")
        if layout.world_size != pool.size:
            raise ConfigError(
                f"roles.{role}.layout: {layout} = {layout.tp}*{layout.pp}*{layout.cp}*{layout.dp} = "
                f"{layout.world_size} ranks, but pool {pool.name!r} has {pool.size} devices. Use "
                f"ParallelLayout.on({pool.size}, tp=..., pp=..., cp=...), which fills the pool."
            )
        self.pool, self.role, self.layout, self.timeout, self.config = pool, role, layout, timeout, config
        self.step: int | None = None
        self.worker_class = load_class(worker)
        self._methods = registrations(self.worker_class)
        clash = sorted(set(self._methods) & (set(dir(WorkerGroup)) | set(vars(self))))
        if clash:
            raise ConfigError(f"{self.worker_class.__name__}.{clash[0]}: a WorkerGroup uses this name; rename it.")
        self._construct(worker, config)
        for name, registration in self._methods.items():
            setattr(self, name, self._bind(name, registration))

    def __getattr__(self, name: str) -> Any:
        # Reached only where normal look-up fails.
        methods = ", ".join(self.__dict__.get("_methods", {}))
        raise AttributeError(
            f"role {self.__dict__.get('role')!r} has no method {name!r}. Registered methods: {methods}. A worker's "
            f"method is called from the driver once it carries @register(...)."
        )

    def __repr__(self) -> str:
        return f"WorkerGroup({self.role!r}: {self.worker_class.__name__} on pool {self.pool.name!r}, {self.layout})"

    def describe(self) -> str:
        """A table of ranks: node, device, process id, coordinates, and ``*`` where the rank answers for its replica."""
        head = f"{'rank':>4} {'node':<15} {'device':<6} {'pid':>7} {'dp':>3} {'pp':>3} {'cp':>3} {'tp':>3}"
        rows = [f"{self!r}", head]
        for place in self.pool.places:
            at = self.layout.coordinates(place.rank)
            mark = " *" if self.layout.is_collector(place.rank) else ""
            rows.append(
                f"{place.rank:>4} {place.node:<15} {place.device:<6} {place.pid:>7} "
                f"{at.dp:>3} {at.pp:>3} {at.cp:>3} {at.tp:>3}{mark}"
            )
        return "\n".join(rows)

    # -------------------------------------------------------------------------------------------------- calls

    def _bind(self, name: str, registration: Registration) -> Callable[..., Any]:
        """The driver's side of one method."""
        method = getattr(self.worker_class, name)
        _, *parameters = inspect.signature(method).parameters.values()
        signature = inspect.Signature(parameters)
        protocol = transfer_protocol(registration.protocol)

        def call(*args: Any, blocking: bool = True, timeout: float | None = None, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            if timeout is not None and not timeout > 0:
                raise ConfigError(f"{self.role}.{name}(timeout={timeout!r}): give seconds above 0, or leave it out.")
            future = self._submit(name, registration, protocol, bound, timeout or self.timeout)
            self.pool.open_calls.add(future)
            return future.result() if blocking else future

        call.__name__, call.__qualname__ = name, f"{self.role}.{name}"
        call.__doc__ = inspect.getdoc(method)
        own = [
            inspect.Parameter("blocking", inspect.Parameter.KEYWORD_ONLY, default=True, annotation=bool),
            inspect.Parameter("timeout", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=float | None),
        ]
        assert [parameter.name for parameter in own] == list(RESERVED_PARAMETERS)
        # A keyword-only parameter stands before **kwargs.
        at = len(parameters) - any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
        shown = inspect.signature(method).replace(parameters=[*parameters[:at], *own, *parameters[at:]])
        call.__signature__ = shown  # type: ignore[attr-defined]
        return call

    def _submit(
        self,
        name: str,
        registration: Registration,
        protocol: TransferProtocol,
        bound: inspect.BoundArguments,
        timeout: float | None,
    ) -> DataFuture:
        self._refuse_after_failure(name)
        args = [arg.result() if isinstance(arg, DataFuture) else arg for arg in bound.args]
        kwargs = {key: arg.result() if isinstance(arg, DataFuture) else arg for key, arg in bound.kwargs.items()}
        if registration.prepare is not None and args:
            args[0] = registration.prepare(args[0])
        spread_by = registration.spread
        spread = None if spread_by is None else lambda batch, chunks: spread_by(batch, chunks, self.config)
        call = Call(tuple(args), kwargs, f"{self.role}.{name}", registration.uneven, spread)
        dispatch = protocol.distribute(self.layout, call)
        payloads = _packed(dispatch.payloads, call.where)
        with self.pool.lock:
            known = self.pool.num_failures
            refs = [
                process.call.remote(self.role, name, self.step, payload, protocol.answers(self.layout, rank), known)
                for rank, (process, payload) in enumerate(zip(self.pool.processes, payloads, strict=True))
            ]
        collect = partial(protocol.collect, self.layout, call, dispatch)
        return DataFuture(self, name, refs, collect, timeout)

    def _construct(self, worker: type[Worker] | str, config: RunConfig) -> None:
        """Create the worker of this role in every process of the pool."""
        self._refuse_after_failure("create")
        with self.pool.lock:
            refs = [p.create.remote(self.role, worker, self.layout, config) for p in self.pool.processes]
        DataFuture(self, "create", refs, lambda outputs: None, self.timeout).result()

    def _refuse_after_failure(self, method: str) -> None:
        """Say once that an unread call of the role has failed; say always that a failure has broken it."""
        if not self.pool.started:
            raise PlacementError(f"{self.role}.{method}: pool {self.pool.name!r} has been stopped.")
        failure = self.pool.failure_for(self.role)
        if failure is None:
            return
        first, unread = failure.error, not failure.told
        failure.told = True
        what = (
            f"{first.role}.{first.method} failed on rank {first.rank}"
            + (f" in step {first.step}" if first.step is not None else "")
            + f" ({first.cause})"
            + (" and nobody has read its future" if unread else "")
        )
        if failure.consequence:
            broken = f"pool {self.pool.name!r}" if failure.dead else f"the role on pool {self.pool.name!r}"
            cause = (
                f"not called, because {broken} is broken since {what}: {failure.consequence}. Stop the pool, start it "
                f"again and set its roles up, or run again from the last checkpoint."
            )
        else:
            cause = f"not called, because {what}. The role itself is whole: call it again if that does not matter."
        raise type(first)(self.role, first.rank, method, self.step, cause, first.traceback)


class DataFuture:
    """The value of a call that may still be running.

    A future is also accepted as an argument of another group's method, which then waits for its value.
    """

    def __init__(
        self,
        group: WorkerGroup,
        method: str,
        refs: list[Any],
        collect: Callable[[list[Any]], Any],
        timeout: float | None,
    ) -> None:
        self._group, self._method, self._step, self._collect = group, method, group.step, collect
        self._timeout = timeout
        self._deadline = math.inf if timeout is None else time.monotonic() + timeout
        self._pending: dict[Any, int] = {ref: rank for rank, ref in enumerate(refs)}
        self._outputs: list[Any] = [None] * len(refs)
        self._errors: dict[int, WorkerError] = {}
        self._failure: Failure | None = None
        self._value: Any = None
        self._collected = False

    def __repr__(self) -> str:
        state = "failed" if self._failure else "running" if self._pending else "done"
        return f"DataFuture({self._group.role}.{self._method}, {state})"

    def done(self) -> bool:
        """Whether :meth:`result` returns (or raises) without waiting."""
        self.wait(timeout=0)
        return not self._pending

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the call's end, good or bad, or for ``timeout`` seconds."""
        self._read(math.inf if timeout is None else time.monotonic() + timeout)
        if not self._pending:
            self._group.pool.open_calls.discard(self)

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the value.

        Args:
            timeout: seconds to wait at most; the call goes on after it, and the result may be asked for again.

        Raises:
            WorkerError: as soon as one rank raises, also while others hang; its cause starts with ``TimeoutError``
                where ranks have not answered in time.
            WorkerDiedError: where a process is gone.
        """
        self.wait(timeout)
        if self._failure is not None:
            self._failure.told = True
            raise self._failure.error
        if self._pending:
            raise self._timed_out(timeout or 0.0)
        if not self._collected:
            self._value, self._collected = self._collect(self._outputs), True
            self._outputs = []
        return self._value

    # ----------------------------------------------------------------------------------------------- internals

    def _read(self, until: float) -> None:
        """Take answers as they come until all are in, one is an error, or the time or the call's own time is over."""
        while self._pending and self._failure is None:
            if not self._take(min(until, self._deadline)):
                if self._deadline <= until:
                    self._fail(self._timed_out(self._timeout or 0.0, with_stacks=True), wait=0.0)
                return
            if self._errors:
                (error,) = self._errors.values()
                self._fail(error, _LOST_PEER_WAIT if _lost_peer(error) else _ALIKE_WAIT)

    def _take(self, until: float) -> bool:
        """Read the answer of the next rank that has one: its value or its error is kept. False if none came in time."""
        left = None if until == math.inf else max(0.0, until - time.monotonic())
        ready, _ = ray.wait(list(self._pending), num_returns=1, timeout=left)
        for ref in ready:
            rank = self._pending.pop(ref)
            answer = self._answer(ref, rank)
            self._outputs[rank] = answer.value
            if answer.error is not None:
                self._errors[rank] = answer.error
        return bool(ready)

    def _answer(self, ref: Any, rank: int) -> Answer:
        role = self._group.role
        try:
            return ray.get(ref)
        except (RayActorError, OutOfMemoryError) as error:
            cause = f"the process is gone ({self._place(rank)}): {self._why_gone(rank, error)}"
            return Answer(error=WorkerDiedError(role, rank, self._method, self._step, cause))
        except RayTaskError as error:
            # Outside of the worker's own code: an argument that cannot be loaded there, a value that cannot be sent.
            cause = f"{type(error.cause).__name__}: {error.cause}"
            return Answer(error=WorkerError(role, rank, self._method, self._step, cause, str(error)))
        except RayError as error:
            return Answer(error=WorkerError(role, rank, self._method, self._step, f"{type(error).__name__}: {error}"))

    def _place(self, rank: int) -> str:
        places = self._group.pool.places
        return str(places[rank]) if places else "its pool has been stopped"

    def _why_gone(self, rank: int, error: RayError) -> str:
        pool = self._group.pool
        for failure in pool.failures:
            if rank in failure.ended:
                call = f"{failure.error.role}.{failure.error.method}"
                return f"it was ended, because it did not leave {call} after that had failed"
        return outside.cause_of_death(error, pool.places[rank] if pool.places else None)

    def _fail(self, error: WorkerError, wait: float) -> None:
        """End the call on all ranks, and let the pool remember what that has done to it.

        The others get a moment to fail alike, then an exception where they are; a process that is still inside after
        that (in a collective, whose peer will not come) is ended.
        """
        pool, places = self._group.pool, self._group.pool.places
        self._take_all(wait)
        cancelled = sorted(self._pending.values())
        if cancelled and places:
            outside.interrupt([places[rank] for rank in cancelled])
            self._take_all(_INTERRUPT_WAIT)
        ended = sorted(self._pending.values())
        self._pending.clear()
        cancelled = [rank for rank in cancelled if rank in self._errors]
        own = [found for rank, found in self._errors.items() if rank not in cancelled]
        deaths = [found for found in own if isinstance(found, WorkerDiedError)]
        causes = [found for found in (error, *own) if not _lost_peer(found)]
        self._failure = Failure(
            error=[*deaths, *causes, error][0],
            ended=ended,
            cancelled=cancelled,
            dead=bool(ended or deaths),
            apart=bool(cancelled) or 0 < len(self._errors) < len(self._outputs),
        )
        pool.remember(self._failure)
        pool.end(ended)

    def _take_all(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self._pending and self._take(until):
            pass

    def _timed_out(self, seconds: float, with_stacks: bool = False) -> WorkerError:
        waiting, places = sorted(self._pending.values()), self._group.pool.places
        cause = (
            f"TimeoutError: no answer within {seconds:g} s from ranks {waiting} of {len(self._outputs)} "
            f"({'; '.join(self._place(rank) for rank in waiting[:8])})"
        )
        stacks = outside.stacks([places[rank] for rank in waiting]) if with_stacks and places else ""
        return WorkerError(self._group.role, waiting[0], self._method, self._step, cause, stacks)


def _packed(payloads: list[Payload], where: str) -> list[Any]:
    """Arguments by rank, ready to be sent; packed once for all the ranks that share them."""
    distinct = {id(payload): payload for payload in payloads}
    ready = {key: packed(payload, f"the arguments of {where}") for key, payload in distinct.items()}
    return [ready[id(payload)] for payload in payloads]


def _lost_peer(error: WorkerError) -> bool:
    return not isinstance(error, WorkerDiedError) and any(sign in error.cause for sign in _LOST_PEER)
