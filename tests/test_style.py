"""The house rules a machine can check: module docstrings, lengths, and one spelling of ``log_probs``."""

import ast
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import SHARED_RUNS

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("hybridflow", "examples", "tools", "benchmarks", "tests")
MAX_FUNCTION_LINES = 60
MAX_MODULE_LINES = 500

# `log_probs` has one spelling; "logprobs" is the name of vLLM's own argument, so who calls vLLM may say it.
OTHER_SPELLING = re.compile(r"(?:^|_)(?:logprobs?|log_prob)(?:$|_)", re.IGNORECASE)
MAY_SPELL = re.compile(r"^hybridflow/engines/vllm/|^benchmarks/bare\.py$|^tests/.*vllm|^tests/test_style\.py$")


def modules() -> list[Path]:
    """Every Python module that rules apply to, relative to the repository."""
    return sorted(p.relative_to(ROOT) for folder in FOLDERS for p in (ROOT / folder).rglob("*.py"))


def names_in(path: Path) -> Iterator[tuple[int, str]]:
    """(line, name) of every identifier, and of every string that could be one: columns and settings have names too."""
    with (ROOT / path).open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.NAME:
                yield token.start[0], token.string
            elif token.type == tokenize.STRING:
                text = token.string.lstrip("rRbBuUfF").strip("\"'")
                if text.isidentifier():
                    yield token.start[0], text


def functions_in(path: Path) -> Iterator[tuple[str, int, int]]:
    """(name, line, number of lines) of every function, docstring included, decorators not."""
    for node in ast.walk(ast.parse((ROOT / path).read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno, (node.end_lineno or node.lineno) - node.lineno + 1


def test_every_module_says_what_it_is():
    silent = []
    for path in modules():
        tree = ast.parse((ROOT / path).read_text("utf-8"))
        if tree.body and path.parts[0] != "tests" and not ast.get_docstring(tree):
            silent.append(str(path))
    assert not silent, f"modules without a docstring: {silent}"


def test_functions_fit_on_a_screen():
    found = [
        f"{path}:{line}: {name} has {lines} lines"
        for path in modules()
        for name, line, lines in functions_in(path)
        if lines > MAX_FUNCTION_LINES
    ]
    assert not found, f"functions of more than {MAX_FUNCTION_LINES} lines:\n" + "\n".join(found)


def test_modules_stay_readable():
    lengths = {path: len((ROOT / path).read_text("utf-8").splitlines()) for path in modules()}
    found = [f"{path}: {lines} lines" for path, lines in lengths.items() if lines > MAX_MODULE_LINES]
    assert not found, f"modules of more than {MAX_MODULE_LINES} lines:\n" + "\n".join(found)


def test_log_probs_has_one_spelling():
    found = [
        f"{path}:{line}: {name}"
        for path in modules()
        if not MAY_SPELL.search(path.as_posix())
        for line, name in names_in(path)
        if OTHER_SPELLING.search(name)
    ]
    assert not found, "write `log_probs`:\n" + "\n".join(found)


@pytest.mark.parametrize("name", ["logprob", "logprobs", "log_prob", "old_log_prob", "log_prob_sum", "ref_logprobs"])
def test_other_spellings_are_recognised(name: str):
    assert OTHER_SPELLING.search(name)


@pytest.mark.parametrize("name", ["log_probs", "rollout_log_probs", "log_probability", "catalog_probe"])
def test_the_right_spelling_is_left_alone(name: str):
    assert not OTHER_SPELLING.search(name)


def test_files_that_share_whole_runs_are_there():
    assert [path for path in SHARED_RUNS if not (ROOT / path).is_file()] == []
