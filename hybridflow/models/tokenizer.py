"""The tokenizer of a Hugging Face folder, and which ids it can mean.

Invariant: rollout and trainer both normalise over :func:`vocabulary_size` ids, so a model whose embedding is larger
than its tokenizer never shifts one side's log-probabilities against the other's.
"""

from __future__ import annotations

import functools
from typing import Any

from hybridflow.errors import ModelError


@functools.cache
def load_tokenizer(folder: str) -> Any:
    """The folder's tokenizer; ModelError names the folder and the reason where it cannot be read."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever a damaged file makes it raise
        raise ModelError(
            f"model.tokenizer_path (or model.path)={folder!r} holds no tokenizer that transformers can read "
            f"({error}). Put tokenizer.json and tokenizer_config.json there."
        ) from error


def vocabulary_size(folder: str, model_vocab_size: int) -> int:
    """How many ids can be drawn: the tokenizer's highest id + 1, at most the model's vocabulary.

    Raises:
        ModelError: where the tokenizer knows ids that the model has no embedding for.
    """
    known = max(load_tokenizer(folder).get_vocab().values()) + 1
    if known > model_vocab_size:
        raise ModelError(
            f"the tokenizer in {folder!r} has ids up to {known - 1}, the model's vocab_size is {model_vocab_size}: "
            "they do not belong together. Set model.tokenizer_path to the model's own tokenizer."
        )
    return known
