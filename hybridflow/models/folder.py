"""Whether a model folder's files belong together, before anything is started.

Where it stands: between the rules on settings (:mod:`hybridflow.checks`, which read config.json alone) and the device
processes, which would find the same faults minutes later. Reads headers of weight files, no weights.
"""

from __future__ import annotations

import logging

from hybridflow.config import RunConfig
from hybridflow.data.chat import Tokenizer, check_tokenizer
from hybridflow.errors import ModelError
from hybridflow.models.hf_io import Checkpoint
from hybridflow.models.spec import ModelSpec
from hybridflow.models.tables import hf_table
from hybridflow.models.tokenizer import load_tokenizer, vocabulary_size

log = logging.getLogger(__name__)


def check_model(config: RunConfig) -> Tokenizer:
    """Read what a run needs of its model besides the weights themselves.

    Returns:
        The tokenizer.

    Raises:
        ModelError: a weight file or tensor is missing, damaged, of another shape or dtype than config.json says; the
            tokenizer (or that of a judge) cannot be used, or is not the model's; no id that can be drawn ends an
            answer.
    """
    folder, tokenizer_folder = config.model.path, config.model.tokenizer_path or config.model.path
    spec = ModelSpec.from_folder(folder)
    try:
        with Checkpoint(folder) as checkpoint:
            checkpoint.check(hf_table(spec))
    except ModelError as error:
        raise ModelError(f"model.path={folder!r}: {error}") from error
    tokenizer = load_tokenizer(tokenizer_folder)
    check_tokenizer(tokenizer)
    for role in ("reward", "cost"):
        scoring = getattr(config, role, None)
        if config.roles.get(role) is not None and scoring is not None and scoring.judge.path:
            check_tokenizer(load_tokenizer(scoring.judge.path))
    known = vocabulary_size(tokenizer_folder, spec.vocab_size)
    if config.roles.get("rollout") is not None:
        _check_ends(config, spec, tokenizer, known)
    return tokenizer


def _check_ends(config: RunConfig, spec: ModelSpec, tokenizer: Tokenizer, known: int) -> None:
    ends = {*spec.eos_token_ids, *config.rollout.stop_token_ids}
    own = f"{tokenizer.eos_token_id} (the tokenizer's eos_token {tokenizer.eos_token!r})"
    if not any(0 <= end < known for end in ends):
        said = f"the ids that end an answer are {sorted(ends)}, and the tokenizer has ids below {known}"
        raise ModelError(
            f"model.path={config.model.path!r}: {said if ends else 'no id ends an answer'}: every answer would go on "
            "to rollout.max_tokens. Mend eos_token_id in generation_config.json (or config.json), or add "
            f"{own} to rollout.stop_token_ids."
        )
    if tokenizer.eos_token_id not in ends:
        log.warning("Generation does not stop at %s. If it should, add it to rollout.stop_token_ids.", own)
