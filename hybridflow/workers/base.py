"""What a role is: a class with registered methods that runs in every device process of its pool.

A Worker knows its rank, its layout and its peers in the same process; it never knows Ray or other processes' handles.
``@register`` says how the arguments of a method are spread and its answers gathered; the driver's WorkerGroup reads
that mark and offers a method of the same name and signature. The invariant: a method registered on a class stays
registered where a subclass overrides it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from hybridflow.errors import ConfigError
from hybridflow.platform import Platform, current
from hybridflow.protocol.data import DataProto
from hybridflow.protocol.transfer import UNEVEN, Protocol, transfer_protocol
from hybridflow.resharding.hybrid import Phases
from hybridflow.resharding.layout import Coordinates, Layout

if TYPE_CHECKING:
    import torch

    from hybridflow.config import RunConfig

_MARK = "__hybridflow_registration__"
_Method = TypeVar("_Method", bound=Callable[..., Any])

Prepare = Callable[[DataProto], DataProto]
SpreadBy = Callable[[DataProto, int, "RunConfig"], Sequence[Sequence[int]]]
Unless = Callable[["RunConfig"], bool]

RESERVED_PARAMETERS = ("blocking", "timeout")
"""Keyword arguments that the driver's side of a method adds."""


@dataclass(frozen=True)
class Registration:
    """How the driver calls a method.

    Attributes:
        protocol: key of the transfer protocol.
        prepare: pure function ``(batch) -> batch`` run on the driver on the method's first argument.
        uneven: ``pad``, ``balance`` or ``refuse`` a batch that does not divide among the replicas.
        spread: pure function ``(batch, number of replicas, config) -> rows of each replica``, run on the driver on the
            prepared batch; None gives each replica neighbouring rows.
        unless: pure function of the configuration: where it is true, the method has nothing to do. The driver's answer
            is then an empty batch, at once, and no rank hears of the call.
    """

    protocol: Protocol | str
    prepare: Prepare | None = None
    uneven: str = "pad"
    spread: SpreadBy | None = None
    unless: Unless | None = None


def register(
    protocol: Protocol | str,
    prepare: Prepare | None = None,
    uneven: str = "pad",
    spread: SpreadBy | None = None,
    unless: Unless | None = None,
) -> Callable[[_Method], _Method]:
    """Mark a method of a Worker as one that the driver may call; see :class:`Registration` for the arguments.

    Raises:
        ConfigError: for an unknown protocol, an unknown ``uneven``, or a parameter name that the driver's side uses.
    """
    transfer_protocol(protocol)
    if uneven not in UNEVEN:
        raise ConfigError(f"@register(uneven={uneven!r}): choose one of {', '.join(UNEVEN)}.")

    def mark(method: _Method) -> _Method:
        clash = set(RESERVED_PARAMETERS) & set(inspect.signature(method).parameters)
        if clash:
            raise ConfigError(f"{method.__qualname__}: the parameter {clash.pop()!r} is the driver's; rename it.")
        setattr(method, _MARK, Registration(protocol, prepare, uneven, spread, unless))
        return method

    return mark


def registrations(worker: type[Worker]) -> dict[str, Registration]:
    """The registered methods of a class by name; an override inherits its parent's registration."""
    found: dict[str, Registration] = {}
    for base in worker.__mro__:
        for name, value in vars(base).items():
            mark = getattr(value, _MARK, None)
            if mark is not None:
                found.setdefault(name, mark)
    return dict(sorted(found.items()))


@dataclass(frozen=True)
class WorkerContext:
    """Where a worker stands. Made by the device process, one for each role.

    Attributes:
        role: name of the role.
        rank: rank of the process in its pool, and in the pool's torch.distributed world.
        layout: the role's layout on the pool.
        config: the run's configuration.
        peers: live view of all roles of this process by name, this one included.
        pool: name of the pool.
        platform: what the process computes on; the CPU in pools of ``kind: cpu``.
        phases: training and generation by turns, one object for all roles of this process.
    """

    role: str
    rank: int
    layout: Layout
    config: RunConfig
    peers: Mapping[str, Worker]
    pool: str
    platform: Platform = field(default_factory=current)
    phases: Phases = field(default_factory=Phases)

    @property
    def coordinates(self) -> Coordinates:
        return self.layout.coordinates(self.rank)

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    @property
    def device(self) -> torch.device:
        """The one device of this process."""
        return self.platform.device()


class Worker:
    """Base of every role. The constructor is cheap; :meth:`setup` builds what is heavy."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context

    @register(Protocol.ONE_TO_ALL)
    def setup(self) -> None:
        """Build models, engines and process groups. Called once, on all ranks at once, so it may be collective."""

    def close(self) -> None:
        """Release what outlives the process (files, child processes). Called on each rank when its pool stops."""
