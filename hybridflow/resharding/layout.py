"""Parallel layouts as values: degrees, the rank order, and which rank sits where. Pure arithmetic.

Rank order of a training layout, fastest axis first: tensor, context, pipeline, data:

    rank = D * (p*t*c) + P * (t*c) + C * t + T

so one data-parallel replica is a block of neighbouring ranks. This is megatron-core's order ``"tp-cp-ep-pp-dp"``.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybridflow.errors import ConfigError


@dataclass(frozen=True)
class Coordinates:
    """Where one rank stands in a layout (0-based)."""

    dp: int
    pp: int
    cp: int
    tp: int


@dataclass(frozen=True)
class ParallelLayout:
    """Degrees of parallelism of one role.

    Attributes:
        tp: tensor-parallel size.
        pp: pipeline-parallel size.
        cp: context-parallel size.
        dp: data-parallel size.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1

    def __post_init__(self) -> None:
        for axis in ("tp", "pp", "cp", "dp"):
            size = getattr(self, axis)
            if not isinstance(size, int) or size < 1:
                raise ConfigError(f"layout.{axis}={size!r}: a degree is an integer of at least 1.")

    @classmethod
    def on(cls, world_size: int, *, tp: int = 1, pp: int = 1, cp: int = 1, where: str = "layout") -> ParallelLayout:
        """The layout that fills ``world_size`` devices: dp is what the other degrees leave.

        Raises:
            ConfigError: where tp*pp*cp does not divide the number of devices.
        """
        block = cls(tp=tp, pp=pp, cp=cp).replica_size
        if world_size % block:
            raise ConfigError(
                f"{where}: tp*pp*cp = {tp}*{pp}*{cp} = {block} does not divide the pool's {world_size} devices. "
                f"Change the degrees, or give the pool a multiple of {block} devices."
            )
        return cls(tp=tp, pp=pp, cp=cp, dp=world_size // block)

    @property
    def replica_size(self) -> int:
        """Ranks that hold one data-parallel replica: tp*pp*cp."""
        return self.tp * self.pp * self.cp

    @property
    def world_size(self) -> int:
        return self.replica_size * self.dp

    def coordinates(self, rank: int) -> Coordinates:
        """Coordinates of a rank; raises ConfigError outside ``0 <= rank < world_size``."""
        if not 0 <= rank < self.world_size:
            raise ConfigError(f"rank {rank} is outside the layout's world of {self.world_size} ({self}).")
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        dp, pp = divmod(rest, self.pp)
        return Coordinates(dp=dp, pp=pp, cp=cp, tp=tp)

    def rank(self, at: Coordinates) -> int:
        """Inverse of :meth:`coordinates`."""
        return at.dp * self.replica_size + at.pp * self.tp * self.cp + at.cp * self.tp + at.tp

    def is_collector(self, rank: int) -> bool:
        """Whether this rank answers for its replica: T=0, C=0, last pipeline stage."""
        at = self.coordinates(rank)
        return at.tp == 0 and at.cp == 0 and at.pp == self.pp - 1

    def __str__(self) -> str:
        return f"tp{self.tp} pp{self.pp} cp{self.cp} dp{self.dp}"
