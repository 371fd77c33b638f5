"""WorkerGroup: a role as the driver sees it. Calling one of its methods is a distributed computation.

The group binds every registered method of the worker class under its own name and signature. A call is prepared and
distributed here (``protocol/transfer.py``), runs on every rank (``controller/process.py``) and is collected here. The
invariants: the first rank that fails ends the call for the driver, also while its peers hang in a collective; and
after a call that left ranks hanging or apart, the next one says so instead of hanging too.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from hybridflow.controller.pool import Failure, ResourcePool
from hybridflow.controller.process import Answer, load_class
from hybridflow.errors import ConfigError, PlacementError, WorkerDiedError, WorkerError
from hybridflow.protocol.transfer import Call, Payload, TransferProtocol, transfer_protocol
from hybridflow.resharding.layout import Layout
from hybridflow.workers.base import Registration, Worker, registrations

if TYPE_CHECKING:
    from hybridflow.config import RunConfig

_LOST_PEER = ("Connection closed by peer", "Connection reset", "Broken pipe", "DistNetworkError", "DistBackendError")
"""What a rank raises when its peer in a collective dies: a consequence, so we look for the cause a little longer."""

_LOST_PEER_WAIT = 5.0
"""Seconds to wait for Ray's word on a dead process after a rank has lost its peer."""


class WorkerGroup:
    """One role on one pool.

    Args:
        pool: a started pool; several groups on it share its processes.
        role: name of the role, unique in the pool.
        worker: subclass of Worker, or its import path ``"package.module:Class"``.
        layout: the role's layout; it fills the pool.
        config: the run's configuration, given to every worker.
        timeout: seconds a blocking call may take; None waits for as long as its processes live.

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
        """A table of ranks: node, process id, coordinates, and ``*`` where the rank answers for its replica."""
        rows = [f"{self!r}", f"{'rank':>4} {'node':<15} {'pid':>7} {'dp':>3} {'pp':>3} {'cp':>3} {'tp':>3}"]
        for place in self.pool.places:
            at = self.layout.coordinates(place.rank)
            mark = " *" if self.layout.is_collector(place.rank) else ""
            rows.append(
                f"{place.rank:>4} {place.node:<15} {place.pid:>7} {at.dp:>3} {at.pp:>3} {at.cp:>3} {at.tp:>3}{mark}"
            )
        return "\n".join(rows)

    # -------------------------------------------------------------------------------------------------- calls

    def _bind(self, name: str, registration: Registration) -> Callable[..., Any]:
        """The driver's side of one method."""
        method = getattr(self.worker_class, name)
        _, *parameters = inspect.signature(method).parameters.values()
        signature = inspect.Signature(parameters)
        protocol = transfer_protocol(registration.protocol)

        def call(*args: Any, blocking: bool = True, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            future = self._submit(name, registration, protocol, bound)
            return future.result_or_abandon(self.timeout) if blocking else future

        call.__name__, call.__qualname__ = name, f"{self.role}.{name}"
        call.__doc__ = inspect.getdoc(method)
        blocking = inspect.Parameter("blocking", inspect.Parameter.KEYWORD_ONLY, default=True, annotation=bool)
        # A keyword-only parameter stands before **kwargs.
        at = len(parameters) - any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
        shown = inspect.signature(method).replace(parameters=[*parameters[:at], blocking, *parameters[at:]])
        call.__signature__ = shown  # type: ignore[attr-defined]
        return call

    def _submit(
        self, name: str, registration: Registration, protocol: TransferProtocol, bound: inspect.BoundArguments
    ) -> DataFuture:
        self._refuse_if_broken(name)
        args = [arg.result() if isinstance(arg, DataFuture) else arg for arg in bound.args]
        kwargs = {key: arg.result() if isinstance(arg, DataFuture) else arg for key, arg in bound.kwargs.items()}
        if registration.prepare is not None and args:
            args[0] = registration.prepare(args[0])
        spread_by = registration.spread
        spread = None if spread_by is None else lambda batch, chunks: spread_by(batch, chunks, self.config)
        call = Call(tuple(args), kwargs, f"{self.role}.{name}", registration.uneven, spread)
        dispatch = protocol.distribute(self.layout, call)
        payloads = _put_shared(dispatch.payloads)
        with self.pool.lock:
            refs = [
                process.call.remote(self.role, name, self.step, payload, protocol.answers(self.layout, rank))
                for rank, (process, payload) in enumerate(zip(self.pool.processes, payloads, strict=True))
            ]
        return DataFuture(self, name, refs, lambda outputs: protocol.collect(self.layout, call, dispatch, outputs))

    def _construct(self, worker: type[Worker] | str, config: RunConfig) -> None:
        """Create the worker of this role in every process of the pool."""
        self._refuse_if_broken("create")
        with self.pool.lock:
            refs = [p.create.remote(self.role, worker, self.layout, config) for p in self.pool.processes]
        DataFuture(self, "create", refs, lambda outputs: None).result_or_abandon(self.timeout)

    def _refuse_if_broken(self, method: str) -> None:
        if not self.pool.started:
            raise PlacementError(f"{self.role}.{method}: pool {self.pool.name!r} has been stopped.")
        failure = self.pool.failure_for(self.role)
        if failure is None:
            return
        first = failure.error
        why = "its process is gone"
        if not failure.dead:
            waiting = sorted(failure.pending.values())
            why = f"ranks {waiting} are still inside it" if waiting else "it succeeded on some ranks and not on others"
        cause = (
            f"not called, because pool {self.pool.name!r} is broken since {first.role}.{first.method} failed on rank "
            f"{first.rank}" + (f" in step {first.step}" if first.step is not None else "") + f" ({first.cause}) and "
            f"{why}. Stop the pool, start it again and set its roles up, or run again from the last checkpoint."
        )
        raise type(first)(self.role, first.rank, method, self.step, cause, first.traceback)


class DataFuture:
    """The value of a call that may still be running.

    A future is also accepted as an argument of another group's method, which then waits for its value.
    """

    def __init__(self, group: WorkerGroup, method: str, refs: list[Any], collect: Callable[[list[Any]], Any]) -> None:
        self._group, self._method, self._step, self._collect = group, method, group.step, collect
        self._pending: dict[Any, int] = {ref: rank for rank, ref in enumerate(refs)}
        self._outputs: list[Any] = [None] * len(refs)
        self._raised: dict[int, bool] = {}
        self._error: WorkerError | None = None
        self._value: Any = None
        self._collected = False

    def __repr__(self) -> str:
        return f"DataFuture({self._group.role}.{self._method}, {'done' if self.done() else 'running'})"

    def done(self) -> bool:
        """Whether :meth:`result` returns (or raises) without waiting."""
        if self._error is not None or not self._pending:
            return True
        self._read(timeout=0)
        return self._error is not None or not self._pending

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the value.

        Args:
            timeout: seconds to wait at most; the call goes on after it, and the result may be asked for again.

        Raises:
            WorkerError: as soon as one rank raises, also while others hang; its cause starts with ``TimeoutError``
                where ranks have not answered in time.
            WorkerDiedError: where a process is gone.
        """
        if self._error is None and self._pending:
            self._read(timeout)
        if self._error is not None:
            raise self._error
        if self._pending:
            raise self._timed_out(timeout)
        if not self._collected:
            self._value, self._collected = self._collect(self._outputs), True
            self._outputs = []
        return self._value

    def result_or_abandon(self, timeout: float | None) -> Any:
        """The result, for a caller that does not come back after a timeout: the pool then remembers who still runs."""
        try:
            return self.result(timeout)
        except WorkerError as error:
            if self._error is None:
                self._settle(error)
            raise

    # ----------------------------------------------------------------------------------------------- internals

    def _read(self, timeout: float | None) -> None:
        """Take answers as they come until all are in, one is an error, or the time is over."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._pending and self._error is None:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready, _ = ray.wait(list(self._pending), num_returns=1, timeout=left)
            if not ready:
                return
            error = self._take(ready[0])
            if error is not None:
                self._fail(error)

    def _take(self, ref: Any) -> WorkerError | None:
        """Read the answer of one rank: its value is kept, its error returned."""
        rank = self._pending.pop(ref)
        answer = self._answer(ref, rank)
        self._raised[rank] = answer.error is not None
        self._outputs[rank] = answer.value
        return answer.error

    def _answer(self, ref: Any, rank: int) -> Answer:
        role = self._group.role
        try:
            return ray.get(ref)
        except RayActorError as error:
            cause = f"the process is gone ({self._place(rank)}): {_death_cause(error)}"
            return Answer(error=WorkerDiedError(role, rank, self._method, self._step, cause))
        except RayTaskError as error:
            # Outside of the worker's own code: an argument that cannot be loaded there, a value that cannot be sent.
            cause = f"{type(error.cause).__name__}: {error.cause}"
            return Answer(error=WorkerError(role, rank, self._method, self._step, cause, str(error)))
        except RayError as error:
            return Answer(error=WorkerError(role, rank, self._method, self._step, f"{type(error).__name__}: {error}"))

    def _place(self, rank: int) -> str:
        places = self._group.pool.places
        return f"pid {places[rank].pid} on node {places[rank].node}" if places else "its pool has been stopped"

    def _fail(self, error: WorkerError) -> None:
        """Settle on the error to report, and let the pool remember it with the ranks that are left behind."""
        deadline = time.monotonic() + _LOST_PEER_WAIT
        while _lost_peer(error) and self._pending:
            ready, _ = ray.wait(list(self._pending), num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            other = self._take(ready[0])
            error = other if other is not None and not _lost_peer(other) else error
        self._settle(error)

    def _settle(self, error: WorkerError) -> None:
        self._error = error
        self._group.pool.failures.append(Failure(self._group.role, error, self._raised, dict(self._pending)))

    def _timed_out(self, timeout: float | None) -> WorkerError:
        waiting = sorted(self._pending.values())
        cause = (
            f"TimeoutError: no answer within {timeout:g} s from ranks {waiting} of {len(self._outputs)} "
            f"({'; '.join(self._place(rank) for rank in waiting[:8])})"
        )
        return WorkerError(self._group.role, waiting[0], self._method, self._step, cause)


def _put_shared(payloads: list[Payload]) -> list[Any]:
    """Arguments by rank, serialised once for all the ranks that share them."""
    uses: dict[int, int] = {}
    for payload in payloads:
        uses[id(payload)] = uses.get(id(payload), 0) + 1
    stored: dict[int, Any] = {id(p): ray.put(p) for p in {id(p): p for p in payloads if uses[id(p)] > 1}.values()}
    return [stored.get(id(payload), payload) for payload in payloads]


def _lost_peer(error: WorkerError) -> bool:
    return not isinstance(error, WorkerDiedError) and any(sign in error.cause for sign in _LOST_PEER)


def _death_cause(error: Exception) -> str:
    """The part of Ray's message that says why, in one line."""
    text = " ".join(str(error).split())
    for sign in ("Worker exit type:", "The actor is dead because", "The actor died because"):
        if sign in text:
            return text[text.index(sign) :]
    return text
