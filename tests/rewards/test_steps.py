"""Which step of an answer a token belongs to."""

import pytest

from hybridflow.rewards.steps import step_numbers


@pytest.mark.parametrize(
    ("pieces", "end", "wanted"),
    [
        (["a", "\n", "b", "\n", "c"], "\n", [0, 0, 1, 1, 2]),
        (["a\n", "b", "\n\n", "c"], "\n", [0, 1, 1, 3]),
        # A token that begins inside an end, or holds one, begins in the step before it.
        (["a", "\n", "\n", "b"], "\n\n", [0, 0, 0, 1]),
        (["a.\n\nb", "c"], "\n\n", [0, 1]),
        (["a\n\n\n", "b"], "\n\n", [0, 1]),
        (["", "a", "", "\n", "", "b"], "\n", [0, 0, 0, 0, 1, 1]),
        (["abc"], "\n", [0]),
        ([], "\n", []),
    ],
)
def test_a_token_belongs_to_the_step_in_which_it_begins(pieces: list[str], end: str, wanted: list[int]) -> None:
    assert step_numbers(pieces, end) == wanted
