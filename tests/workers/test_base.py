"""What @register refuses, before any process is asked."""

import pytest

from hybridflow.errors import ConfigError
from hybridflow.protocol.transfer import Protocol
from hybridflow.workers.base import Worker, register, registrations


def test_a_registration_with_a_wrong_word_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"@register\(uneven='drop'\): choose one of pad, balance, refuse\."):
        register(Protocol.DP, uneven="drop")
    with pytest.raises(ConfigError, match=r"unknown transfer protocol 'THREED'.*Did you mean 'THREE_D'\?"):
        register("THREED")


@pytest.mark.parametrize("name", ["blocking", "timeout"])
def test_a_parameter_that_the_drivers_side_adds_is_refused_by_name(name: str):
    scope: dict = {}
    exec(f"def score(self, batch, {name}=None): ...", scope)
    with pytest.raises(ConfigError, match=rf"score: the parameter '{name}' is the driver's; rename it\."):
        register(Protocol.DP)(scope["score"])


def test_an_override_stays_registered_and_others_are_not():
    class Base(Worker):
        @register(Protocol.DP, uneven="balance")
        def score(self) -> None: ...

        def plain(self) -> None: ...

    class Own(Base):
        def score(self) -> None: ...

    found = registrations(Own)
    assert list(found) == ["score", "setup"]
    assert (found["score"].protocol, found["score"].uneven) == (Protocol.DP, "balance")
