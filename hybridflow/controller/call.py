"""One call of a role's method as data: what the driver submits, and any process can work out for itself.

Where it stands: ``group.py`` makes an :class:`Invocation` of each call and runs its two halves, distribute and collect.
Where an argument is the value of a call that still runs, the driver does not wait for it: the message names that call
too (:class:`Later`), and is sent with the answers of that call's ranks once they are there. Each rank that gets it
collects the argument, distributes its own call and takes its share. The invariant: both halves are pure, so every rank
comes to the shares that the driver would have sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from hybridflow.config import RunConfig
from hybridflow.controller.message import Message, opened
from hybridflow.errors import DataError, WorkerError
from hybridflow.protocol.transfer import Call, Dispatch, Payload, TransferProtocol, transfer_protocol
from hybridflow.resharding.layout import Layout
from hybridflow.workers.base import Registration


class Answer(NamedTuple):
    """What one rank says to one call: a value, or the error. It travels as a plain tuple.

    Attributes:
        measured: when the rank began and ended, by :func:`hybridflow.timing.now`, and the most bytes it held in
            between, 0 of a call too short to ask; None where it did not run.
    """

    value: Any = None
    error: WorkerError | None = None
    measured: tuple[float, float, int] | None = None


class ArgumentFailed(Exception):
    """A call cannot run, because the call whose value it takes has failed.

    Attributes:
        error: of that call.
    """

    def __init__(self, error: WorkerError) -> None:
        super().__init__(error)
        self.error = error


@dataclass(frozen=True)
class Invocation:
    """What the driver asked a role for.

    Attributes:
        role, method, step: name the call in errors.
        layout: the role's.
        protocol: spreads arguments and gathers answers.
        call: arguments and how they are spread; an argument may be one that is not there yet.
        prepare: applied to the first argument before it is spread.
    """

    role: str
    method: str
    step: int | None
    layout: Layout
    protocol: TransferProtocol
    call: Call
    prepare: Callable[[Any], Any] | None = None

    @staticmethod
    def of(
        role: str,
        method: str,
        step: int | None,
        layout: Layout,
        registration: Registration,
        config: RunConfig,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Invocation:
        spread = None if registration.spread is None else partial(_spread, registration.spread, config)
        call = Call(tuple(args), dict(kwargs), f"{role}.{method}", registration.uneven, spread)
        protocol = transfer_protocol(registration.protocol)
        return Invocation(role, method, step, layout, protocol, call, registration.prepare)

    def distribute(self, value_of: Callable[[Any], Any]) -> tuple[Call, Dispatch]:
        """The call with all its arguments, and each rank's share of it.

        Args:
            value_of: gives the value of an argument; every other argument as it is.

        Raises:
            DataError: the protocol has not one share for each rank.
        """
        args, kwargs = self.call.payload(value_of)
        if self.prepare is not None and args:
            args = (self.prepare(args[0]), *args[1:])
        call = replace(self.call, args=args, kwargs=kwargs)
        dispatch = self.protocol.distribute(self.layout, call)
        if not isinstance(dispatch, Dispatch) or len(dispatch.payloads) != self.layout.world_size:
            given = f"{len(dispatch.payloads)} payloads" if isinstance(dispatch, Dispatch) else type(dispatch).__name__
            raise DataError(
                f"{call.where}: distribute of protocol {self.protocol.name!r} gave {given} for "
                f"{self.layout.world_size} ranks ({self.layout}); "
                f"return Dispatch([(args, kwargs), ...]) with one payload for each rank."
            )
        return call, dispatch

    def collect(self, call: Call, dispatch: Dispatch, outputs: Sequence[Any]) -> Any:
        return self.protocol.collect(self.layout, call, dispatch, outputs)

    def with_arguments(self, of: Callable[[Any], Any]) -> Invocation:
        """The same call with each argument replaced by ``of(argument)``."""
        args, kwargs = self.call.payload(of)
        return replace(self, call=replace(self.call, args=args, kwargs=kwargs))


def _spread(spread_by: Callable[..., Any], config: RunConfig, batch: Any, num_chunks: int) -> Any:
    return spread_by(batch, num_chunks, config)


@dataclass(frozen=True, eq=False)
class Later:
    """An argument that was not there when its message was sent: the value of another call.

    Attributes:
        invocation: that call; its own arguments may be of this kind.
        answers: places of its ranks' answers among those that come with the message.
    """

    invocation: Invocation
    answers: range

    def value(self, answers: Sequence[Message]) -> Any:
        """Collect the other call's answers.

        Raises:
            ArgumentFailed: where one of them is an error.
        """
        own = [Answer(*opened(answers[place])) for place in self.answers]
        for answer in own:
            if answer.error is not None:
                raise ArgumentFailed(answer.error)
        call, dispatch = self.invocation.distribute(partial(value_of, answers=answers))
        return self.invocation.collect(call, dispatch, [answer.value for answer in own])


def value_of(argument: Any, answers: Sequence[Message]) -> Any:
    """An argument as a method takes it; see :meth:`Later.value`."""
    return argument.value(answers) if isinstance(argument, Later) else argument


Share = Payload | Invocation
"""What a rank is given: its arguments, or the whole call where some of its arguments come later."""


class Request(NamedTuple):
    """What one rank is asked for.

    Attributes:
        role, method, step: name the method.
        wanted: whether its output is; else it stays in the process.
        failures: how many failed calls of the pool the driver knew of when it queued this one.
        share: message of the arguments; None where there are none.
    """

    role: str
    method: str
    step: int | None
    wanted: bool
    failures: int
    share: Message | None


def arguments(share: Share | None, rank: int, answers: Sequence[Message]) -> Payload:
    """A rank's arguments.

    Raises:
        ArgumentFailed: where the call that one of them comes from has failed.
    """
    if share is None:
        return (), {}
    if not isinstance(share, Invocation):
        return share
    _, dispatch = share.distribute(partial(value_of, answers=answers))
    return dispatch.payloads[rank]
