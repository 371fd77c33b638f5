"""Model FLOPs of a step: what the mathematics asks for, whatever an engine computes again or throws away.

Of one token in a forward pass 2P + 2 * layers * T * q, with P the weights that multiply it, T the tokens of its row and
q the width of all query heads (Kaplan et al., 2020, arXiv 2001.08361, section 2.1: causal attention looks at half of
the row on average). A backward pass costs twice a forward.
"""

from __future__ import annotations

from hybridflow.models.spec import ModelSpec
from hybridflow.models.tables import hf_table


def active_parameters(spec: ModelSpec) -> int:
    """Weights that multiply one token: matrices and the output layer, of experts only those that compute it."""
    total = 0
    for name, shape in hf_table(spec).items():
        if len(shape) == 2 and not name.startswith("model.embed_tokens"):
            share = spec.experts_per_token / spec.num_experts if ".experts." in name else 1.0
            total += int(shape[0] * shape[1] * share)
    return total + (spec.vocab_size * spec.hidden_size if spec.tied else 0)


def forward_flops(spec: ModelSpec, tokens: float, row_tokens: float) -> float:
    """Of a forward pass.

    Args:
        tokens: in all.
        row_tokens: of a row, on average.
    """
    attention = 2 * spec.num_layers * row_tokens * spec.num_heads * spec.head_dim
    return tokens * (2 * active_parameters(spec) + attention)


def step_flops(forward: float, *, epochs: int, num_scored: int, generates: bool) -> float:
    """Of a training step.

    Args:
        forward: of one pass over the step's tokens.
        epochs: passes that train, each with a backward.
        num_scored: passes that only score (old log-probabilities, the reference's).
        generates: whether the tokens were generated, which costs a forward pass too.
    """
    return forward * (3 * epochs + num_scored + generates)
