"""What every schema is made of."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any


class Settings:
    """A dataclass whose fields are set once.

    ``dataclass(frozen=True)`` would say the same, but OmegaConf then refuses to merge a list into it.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__:
            raise FrozenInstanceError(f"settings do not change during a run: {type(self).__name__}.{name}")
        super().__setattr__(name, value)
