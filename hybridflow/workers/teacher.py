"""The teacher of a distillation: a frozen model of another folder that scores what the actor said."""

from __future__ import annotations

from hybridflow.config import TeacherConfig
from hybridflow.data.batching import by_work
from hybridflow.protocol.data import DataProto
from hybridflow.protocol.transfer import Protocol
from hybridflow.workers.base import register
from hybridflow.workers.model import ModelWorker


class TeacherWorker(ModelWorker):
    """Scores responses under the weights of ``teacher.path``."""

    def setup(self) -> None:
        settings: TeacherConfig = self.context.config.teacher  # type: ignore[attr-defined]
        self.build_engine(optimizer=None, path=settings.path)

    @register(Protocol.THREE_D, uneven="balance", spread=by_work)
    def log_probs(self, batch: DataProto) -> DataProto | None:
        """``teacher_log_probs`` of every response token.

        Args:
            batch: jagged int64 ``prompts`` and ``responses``; ``meta_info["temperature"]`` divides the logits.

        Returns:
            ``teacher_log_probs``: jagged float32, the responses' lengths.
        """
        scored = self.score_tokens(batch)
        return None if scored is None else DataProto.from_dict(tensors={"teacher_log_probs": scored[0]})
