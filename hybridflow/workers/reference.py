"""The reference policy: a frozen model that scores what the actor said.

Where it stands: beside the actor, whose weights it takes over where ``reference.update_every`` says so, slice by slice
from the actor's layout to its own. Invariant: between two such moments its weights never change.
"""

from __future__ import annotations

from hybridflow.data.batching import by_work
from hybridflow.protocol.data import DataProto
from hybridflow.protocol.transfer import Protocol
from hybridflow.resharding.hybrid import TRAINING
from hybridflow.resharding.layout import ParallelLayout
from hybridflow.workers.base import register
from hybridflow.workers.model import ModelWorker
from hybridflow.workers.sync import WeightSync


class ReferenceWorker(ModelWorker):
    """Scores responses under the weights the run started from, or those it has taken from the actor since."""

    def setup(self) -> None:
        self.build_engine(optimizer=None)
        self._sync: WeightSync | None = None

    @register(Protocol.THREE_D, uneven="balance", spread=by_work)
    def log_probs(self, batch: DataProto) -> DataProto | None:
        """``ref_log_probs`` of every response token.

        Args:
            batch: jagged int64 ``prompts`` and ``responses``; ``meta_info["temperature"]`` divides the logits.

        Returns:
            ``ref_log_probs``: jagged float32, the responses' lengths.
        """
        scored = self.score_tokens(batch)
        return None if scored is None else DataProto.from_dict(tensors={"ref_log_probs": scored[0]})

    @register(Protocol.ONE_TO_ALL)
    def join_actor(self, training: ParallelLayout, address: tuple[str, int]) -> None:
        """Take weights from an actor on a pool of its own, which does ``join_receiver`` at the same time.

        Args:
            training: the actor's layout.
            address: of the actor's store.
        """
        mine, rank = self.engine.layout, training.world_size + self.context.rank
        self._sync = WeightSync.between(
            self.context.role, training, mine, rank, address, self.context.config, receiver=self.engine
        )

    @register(Protocol.ONE_TO_ALL)
    def sync_weights(self, version: int) -> dict[str, float]:
        """Take the weights of the actor, those of ``version``.

        An actor on a pool of its own does ``send_weights`` at the same time.

        Returns:
            What :meth:`hybridflow.workers.sync.WeightSync.run` says.
        """
        self.context.phases.enter(TRAINING)
        if self._sync is None:
            actor = self.context.peers["actor"].engine  # type: ignore[attr-defined]
            self._sync = WeightSync.to_reference(self.context.rank, self.context.config, actor, self.engine)
        return self._sync.run(version)
