"""WorkerGroup: a role as the driver sees it. Calling one of its methods is a distributed computation.

The group binds every registered method of the worker class under its own name and signature. A call is prepared and
distributed here (``protocol/transfer.py``), runs on every rank (``controller/process.py``) and is collected here. The
invariants: the first rank that fails ends the call for the driver and for all its peers, also for those that hang in a
collective; and no failure is lost: where nobody reads a future's, or ranks no longer agree after one, the next call of
the role says so.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from hybridflow.controller.call import Invocation, Share
from hybridflow.controller.future import Answered, Awaited, DataFuture
from hybridflow.controller.line import uninterrupted
from hybridflow.controller.message import Ready, message, packed, sendable
from hybridflow.controller.pool import ResourcePool
from hybridflow.controller.process import load_class
from hybridflow.errors import ConfigError, DataError, PlacementError
from hybridflow.protocol.data import DataProto
from hybridflow.protocol.transfer import Call, Dispatch, Protocol
from hybridflow.resharding.layout import Layout
from hybridflow.workers.base import RESERVED_PARAMETERS, Registration, Worker, registrations

if TYPE_CHECKING:
    from hybridflow.config import RunConfig


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

        def call(*args: Any, blocking: bool = True, timeout: float | None = None, **kwargs: Any) -> Any:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{self.role}.{name}{signature}: {error}.") from None
            if timeout is not None and not timeout > 0:
                raise ConfigError(f"{self.role}.{name}(timeout={timeout!r}): give seconds above 0, or leave it out.")
            future = self._submit(name, registration, bound, timeout or self.timeout)
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
        self, name: str, registration: Registration, bound: inspect.BoundArguments, timeout: float | None
    ) -> DataFuture:
        self._refuse_after_failure(name)
        invocation = Invocation.of(
            self.role, name, self.step, self.layout, registration, self.config, bound.args, bound.kwargs
        )
        if registration.unless is not None and registration.unless(self.config):
            return Answered(invocation.call.where, DataProto())
        awaited = Awaited()
        waits = any(isinstance(argument, DataFuture) for argument in (*bound.args, *bound.kwargs.values()))
        given = invocation.with_arguments(awaited.argument) if waits else invocation
        origin = f"the arguments of {self.role}.{name}"
        by_rank: Sequence[Share]
        if awaited.calls:
            by_rank, dispatched = [given.with_arguments(partial(packed, origin=origin))] * self.pool.size, None
        else:
            dispatched = given.distribute(lambda argument: argument)
            by_rank = dispatched[1].payloads
        packs = {id(share): share if awaited.calls else packed(share, origin) for share in by_rank}
        if not invocation.call.args and not invocation.call.kwargs:
            shares, put = [None] * self.pool.size, []
        else:
            messages = {key: _pickled(pack, origin) for key, pack in packs.items()}
            shares, put = sendable([messages[id(share)] for share in by_rank])
        sends = invocation.protocol.answers
        with uninterrupted(), self.pool.lock:
            known = self.pool.num_failures
            asked, arrived = self.pool.ask(
                "call",
                [
                    ((self.role, name, self.step, sends(self.layout, rank), known, share),)
                    for rank, share in enumerate(shares)
                ],
                awaited.answers,
            )
            kept = [*packs.values(), *put, *awaited.answers]
            future = DataFuture(self, invocation, asked, arrived, timeout, dispatched, awaited.calls, kept)
            self.pool.open_calls[future] = None
            return future

    def _construct(self, worker: type[Worker] | str, config: RunConfig) -> None:
        """Create the worker of this role in every process of the pool."""
        self._refuse_after_failure("create")
        (arguments,), put = sendable([message((worker, self.layout, config))])
        with uninterrupted(), self.pool.lock:
            asked, arrived = self.pool.ask("create", [(self.role, arguments)] * self.pool.size)
        registration = Registration(Protocol.ONE_TO_ALL)
        create = Invocation.of(self.role, "create", self.step, self.layout, registration, config, (), {})
        DataFuture(self, create, asked, arrived, self.timeout, (Call(), Dispatch([])), kept=put).result()

    def _refuse_after_failure(self, method: str) -> None:
        """Say once that an unread call of the role has failed; say always that a failure has broken it."""
        if not self.pool.started:
            raise PlacementError(f"{self.role}.{method}: pool {self.pool.name!r} has been stopped.")
        failure = self.pool.failure_for(self.role)
        if failure is None:
            return
        first, unread = failure.error, not failure.told
        failure.tell()
        what = (
            f"{first.role}.{first.method} failed on rank {first.rank}"
            + (f" in step {first.step}" if first.step is not None else "")
            + f" ({first.cause})"
            + (f", so that {failure.left_out}, which takes its value, did not run" if failure.left_out else "")
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


def _pickled(pack: Any, origin: str) -> Ready:
    """Packed arguments as bytes; raises DataError that names the call where one cannot be pickled."""
    try:
        return message(pack)
    except DataError:
        raise
    except Exception as error:  # a value may raise anything when it is pickled
        raise DataError(
            f"{origin} cannot be sent to other processes ({type(error).__name__}: {error}). Give what can be pickled."
        ) from error
