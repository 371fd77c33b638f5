"""Parallel layouts as values: degrees, the rank order, and which rank sits where. Pure arithmetic.

Rank order of a training layout, fastest axis first: tensor, context, pipeline, data:

    rank = D * (p*t*c) + P * (t*c) + C * t + T

so one data-parallel replica is a block of neighbouring ranks. This is megatron-core's order ``"tp-cp-ep-pp-dp"``.
Experts cut the ranks of one pipeline stage by degrees of their own; the stage's rank ``D * (t*c) + C * t + T`` is
``eD * (e*et) + E * et + eT``.

A generation layout says how the same ranks stand while they generate: ``training.generation(tp=2)``. Every rank is in
one of its replicas, which hold the model in ``p_g * t_g`` shards.

Invariant: the ranks of every group ascend, because torch.distributed sorts them and vLLM takes its tensor-parallel rank
from there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from fractions import Fraction

from hybridflow.errors import ConfigError

Groups = list[list[int]]
"""Groups of ranks that together are the world, in the order of their first ranks."""


@dataclass(frozen=True)
class Coordinates:
    """Where one rank stands in a layout (0-based). ``edp``, ``ep`` and ``etp`` say which experts it holds."""

    dp: int
    pp: int
    cp: int
    tp: int
    edp: int = 0
    ep: int = 0
    etp: int = 0


class _Ranks:
    """What training and generation layouts share."""

    tp: int
    pp: int
    cp: int
    dp: int

    def coordinates(self, rank: int) -> Coordinates:
        """Coordinates of a rank; raises ConfigError outside ``0 <= rank < world_size``."""
        raise NotImplementedError

    @property
    def replica_size(self) -> int:
        """Ranks that hold one data-parallel replica: tp*pp*cp."""
        return self.tp * self.pp * self.cp

    @property
    def world_size(self) -> int:
        return self.replica_size * self.dp

    def is_collector(self, rank: int) -> bool:
        """Whether this rank answers for its replica: T=0, C=0, last pipeline stage."""
        at = self.coordinates(rank)
        return at.tp == 0 and at.cp == 0 and at.pp == self.pp - 1

    def tp_groups(self) -> Groups:
        """Ranks that share the layers of one stage of one replica."""
        return self._groups(lambda at: (at.dp, at.pp, at.cp))

    def pp_groups(self) -> Groups:
        """The stages of each pipeline, first stage first."""
        return self._groups(lambda at: (at.dp, at.cp, at.tp))

    def dp_groups(self) -> Groups:
        """Ranks that hold the same shard and see different rows."""
        return self._groups(lambda at: (at.pp, at.cp, at.tp))

    def ep_groups(self) -> Groups:
        """Ranks that share the experts of one stage, each with other experts."""
        return self._groups(lambda at: (at.edp, at.pp, at.etp))

    def etp_groups(self) -> Groups:
        """Ranks that share the same experts, each with other slices."""
        return self._groups(lambda at: (at.edp, at.pp, at.ep))

    def edp_groups(self) -> Groups:
        """Ranks that hold the same slices of the same experts."""
        return self._groups(lambda at: (at.pp, at.ep, at.etp))

    def _groups(self, key: Callable[[Coordinates], Hashable]) -> Groups:
        found: dict[Hashable, list[int]] = {}
        for rank in range(self.world_size):
            found.setdefault(key(self.coordinates(rank)), []).append(rank)
        return list(found.values())

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ConfigError(f"rank {rank} is outside the layout's world of {self.world_size} ({self}).")


@dataclass(frozen=True)
class ParallelLayout(_Ranks):
    """Degrees of parallelism of one role in training.

    Attributes:
        tp: tensor-parallel size.
        pp: pipeline-parallel size.
        cp: context-parallel size.
        dp: data-parallel size.
        ep: expert-parallel size: experts of a layer are spread over this many ranks of a stage.
        etp: tensor-parallel size of an expert; 0 becomes ``tp``.
        vpp: virtual pipeline stages of each rank (interleaved 1F1B); 1 is the plain schedule.

    Raises:
        ConfigError: for a degree below 1, interleaving without a pipeline, or experts that do not fit the ranks.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 0
    vpp: int = 1

    def __post_init__(self) -> None:
        if self.etp == 0:
            object.__setattr__(self, "etp", self.tp)
        for axis in ("tp", "pp", "cp", "dp", "ep", "etp", "vpp"):
            _check_degree(axis, getattr(self, axis))
        if self.vpp > 1 and self.pp == 1:
            raise ConfigError(
                f"layout.vpp={self.vpp} interleaves the stages of a pipeline, but layout.pp=1. Set vpp to 1, or pp to "
                f"2 or more."
            )
        if self.ep > 1 or self.etp != self.tp:
            self._check_experts()

    def _check_experts(self) -> None:
        experts, stage = self.ep * self.etp, self.tp * self.cp * self.dp
        if stage % experts:
            raise ConfigError(
                f"layout: ep*etp = {self.ep}*{self.etp} = {experts} does not divide the tp*cp*dp = "
                f"{self.tp}*{self.cp}*{self.dp} = {stage} ranks of a pipeline stage. Change ep or etp."
            )
        if self.pp > 1 and experts != self.tp * self.cp:
            # megatron-core wants the same pipelines for experts and the rest, and in this rank order the experts'
            # are the same only then.
            raise ConfigError(
                f"layout: with pp={self.pp}, ep*etp = {self.ep}*{self.etp} = {experts} has to be tp*cp = "
                f"{self.tp}*{self.cp} = {self.tp * self.cp}. Change ep or etp, or set pp to 1."
            )

    @classmethod
    def on(
        cls,
        world_size: int,
        *,
        tp: int = 1,
        pp: int = 1,
        cp: int = 1,
        ep: int = 1,
        etp: int = 0,
        vpp: int = 1,
        where: str = "layout",
    ) -> ParallelLayout:
        """The layout that fills ``world_size`` devices: dp is what the other degrees leave.

        Raises:
            ConfigError: where tp*pp*cp does not divide the number of devices, and as the class does.
        """
        block = cls(tp=tp, pp=pp, cp=cp).replica_size
        if world_size % block:
            raise ConfigError(
                f"{where}: tp*pp*cp = {tp}*{pp}*{cp} = {block} does not divide the pool's {world_size} devices. "
                f"Change the degrees, or give the pool a multiple of {block} devices."
            )
        return cls(tp=tp, pp=pp, cp=cp, dp=world_size // block, ep=ep, etp=etp, vpp=vpp)

    def coordinates(self, rank: int) -> Coordinates:
        self._check_rank(rank)
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        dp, pp = divmod(rest, self.pp)
        rest, etp = divmod((dp * self.cp + cp) * self.tp + tp, self.etp)
        edp, ep = divmod(rest, self.ep)
        return Coordinates(dp=dp, pp=pp, cp=cp, tp=tp, edp=edp, ep=ep, etp=etp)

    def rank(self, at: Coordinates) -> int:
        """Inverse of :meth:`coordinates`, from ``dp``, ``pp``, ``cp`` and ``tp``."""
        return ((at.dp * self.pp + at.pp) * self.cp + at.cp) * self.tp + at.tp

    def cp_groups(self) -> Groups:
        """Ranks that share the tokens of each sequence."""
        return self._groups(lambda at: (at.dp, at.pp, at.tp))

    def generation(self, *, tp: int, pp: int = 1, ep: int = 1) -> GenerationLayout:
        """How these ranks stand while they generate; see :class:`GenerationLayout` for arguments and errors."""
        return GenerationLayout(self, tp=tp, pp=pp, ep=ep)

    def __str__(self) -> str:
        text = f"tp{self.tp} pp{self.pp} cp{self.cp} dp{self.dp}"
        text += f" ep{self.ep} etp{self.etp}" if self.ep > 1 or self.etp != self.tp else ""
        return text + (f" vpp{self.vpp}" if self.vpp > 1 else "")


@dataclass(frozen=True)
class GenerationLayout(_Ranks):
    """The ranks of a training layout as generation replicas (HybridFlow, arXiv 2409.19256, section 5).

    Where t_g divides t and p_g divides p, training rank (D, P, C, T) stands in replica ``(D*c + C) * d_g + gD`` with

        gP = P // (p/p_g)    gT = T // (t/t_g)    gD = (P % (p/p_g)) * (t/t_g) + T % (t/t_g)    d_g = p*t/(p_g*t_g)

    so its training shard lies inside its generation shard, and a micro-DP group (the d_g ranks of one D, C, gP and gT)
    holds between its members all that each of them needs. Context-parallel ranks hold the same weights, so each makes
    a replica of its own.

    Otherwise (a generation degree larger than the training one, or no divisor of it) a replica is ``p_g * t_g``
    neighbouring ranks, tensor axis fastest; :meth:`warning` says what that costs.

    Attributes:
        training: the layout of the same ranks in training. On a pool that only generates, the same degrees.
        tp, pp: tensor- and pipeline-parallel size of one replica.
        ep: 1 cuts every expert over the tensor-parallel ranks; ``tp`` gives each of them whole experts. vLLM has
            nothing between.

    Raises:
        ConfigError: where tp*pp does not divide the number of ranks, for a degree below 1 or another ``ep``.
    """

    training: ParallelLayout
    tp: int
    pp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for axis in ("tp", "pp", "ep"):
            _check_degree(axis, getattr(self, axis))
        if self.ep not in (1, self.tp):
            allowed = " or ".join(map(str, sorted({1, self.tp})))
            raise ConfigError(
                f"layout.ep={self.ep} of a generation layout with tp={self.tp}: vLLM either cuts every expert over the "
                f"tensor-parallel ranks or spreads whole experts over all of them. Set ep to {allowed}."
            )
        size, t = self.tp * self.pp, self.training
        if t.world_size % size:
            raise ConfigError(
                f"layout: generation tp*pp = {self.tp}*{self.pp} = {size} does not divide the {t.world_size} ranks of "
                f"tp*pp*cp*dp = {t.tp}*{t.pp}*{t.cp}*{t.dp}. Change the generation layout's tp or pp."
            )

    @property
    def cp(self) -> int:
        """1: a generation replica does not split sequences."""
        return 1

    @property
    def dp(self) -> int:
        """Generation replicas of the world."""
        return self.training.world_size // (self.tp * self.pp)

    @property
    def nested(self) -> bool:
        """Whether every training shard lies inside the same rank's generation shard."""
        return self.training.tp % self.tp == 0 and self.training.pp % self.pp == 0

    @property
    def micro_dp(self) -> int:
        """d_g: replicas among the ranks that hold one training replica (one context-parallel rank of it if nested)."""
        size = self.tp * self.pp
        if self.nested:
            return self.training.pp * self.training.tp // size
        return math.lcm(size, self.training.replica_size) // size

    def coordinates(self, rank: int) -> Coordinates:
        self._check_rank(rank)
        if self.nested:
            at, p, t = self.training.coordinates(rank), self.training.pp // self.pp, self.training.tp // self.tp
            replica = (at.dp * self.training.cp + at.cp) * self.micro_dp + (at.pp % p) * t + at.tp % t
            pp, tp = at.pp // p, at.tp // t
        else:
            rest, tp = divmod(rank, self.tp)
            replica, pp = divmod(rest, self.pp)
        ep, etp = (tp, 0) if self.ep > 1 else (0, tp)
        return Coordinates(dp=replica, pp=pp, cp=0, tp=tp, edp=replica, ep=ep, etp=etp)

    def rank(self, at: Coordinates) -> int:
        """Inverse of :meth:`coordinates`, from ``dp``, ``pp`` and ``tp``."""
        if not self.nested:
            return (at.dp * self.pp + at.pp) * self.tp + at.tp
        p, t = self.training.pp // self.pp, self.training.tp // self.tp
        block, micro = divmod(at.dp, self.micro_dp)
        dp, cp = divmod(block, self.training.cp)
        return self.training.rank(Coordinates(dp=dp, pp=at.pp * p + micro // t, cp=cp, tp=at.tp * t + micro % t))

    def micro_dp_groups(self) -> Groups:
        """The d_g ranks that hold the same generation shard in the replicas of :attr:`micro_dp`."""
        return self._groups(lambda at: (at.dp // self.micro_dp, at.pp, at.tp))

    def transition_groups(self) -> Groups:
        """Smallest groups whose members' training shards together hold all that each of them generates with.

        The micro-DP groups where the layout is nested; else whole training replicas, as many as share a generation
        replica.
        """
        if self.nested:
            return self.micro_dp_groups()
        return self._groups(lambda at: at.dp // self.micro_dp)

    def received_share(self, rank: int) -> Fraction:
        """Share of the model that a rank's generation shard has and its training shard has not.

        Counts parameters that both layouts cut evenly. ``(tp - t_g*p_g) / (t_g*p_g*tp)`` where the layout is nested
        (HybridFlow, table 2, with tp there the product of the training degrees).
        """
        at, here = self.training.coordinates(rank), self.coordinates(rank)
        owned = _overlap(at.tp, self.training.tp, here.tp, self.tp) * _overlap(
            at.pp, self.training.pp, here.pp, self.pp
        )
        return Fraction(1, self.tp * self.pp) - owned

    def warning(self) -> str:
        """What a transition costs beyond that of a dividing layout; empty where it costs nothing more."""
        shares = [self.received_share(rank) for rank in range(self.world_size)]
        if self.nested or not max(shares):
            return ""
        mean = sum(shares) / len(shares)
        return (
            f"generation tp={self.tp} pp={self.pp} does not divide training tp={self.training.tp} "
            f"pp={self.training.pp}, so ranks hold other slices in training than they generate with: at each weight "
            f"sync a rank receives {mean} of the model on average and {max(shares)} at most, within groups of "
            f"{self.micro_dp * self.tp * self.pp} ranks. Generation degrees that divide the training ones keep every "
            f"rank's own slice in place."
        )

    def __str__(self) -> str:
        return f"tp{self.tp} pp{self.pp} cp1 dp{self.dp}" + (f" ep{self.ep}" if self.ep > 1 else "")


Layout = ParallelLayout | GenerationLayout


def training_of(layout: Layout) -> ParallelLayout:
    """The role's layout in training."""
    return layout.training if isinstance(layout, GenerationLayout) else layout


def generation_of(layout: Layout) -> GenerationLayout:
    """The role's layout in generation; where it has none, that of training."""
    return layout if isinstance(layout, GenerationLayout) else layout.generation(tp=layout.tp, pp=layout.pp)


def _check_degree(axis: str, size: int) -> None:
    if not isinstance(size, int) or size < 1:
        raise ConfigError(f"layout.{axis}={size!r}: a degree is an integer of at least 1.")


def _overlap(index: int, count: int, other_index: int, other_count: int) -> Fraction:
    """Length that the index-th of ``count`` equal parts of [0, 1] shares with a part of another division."""
    start = max(Fraction(index, count), Fraction(other_index, other_count))
    stop = min(Fraction(index + 1, count), Fraction(other_index + 1, other_count))
    return max(Fraction(0), stop - start)
