"""The direction of imports: pure rooms at the bottom, drivers at the top, and nothing imports upwards.

Two proofs: statically, every import statement of the package and the examples is read (also those inside functions);
dynamically, one fresh interpreter imports the pure modules and shows that no heavy library came along.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Lower never imports higher. Rooms of one rank may import one another.
RANKS = [
    ("errors", "config", "importing", "settings", "compose", "platform", "timing", "trace"),
    ("algorithms", "protocol", "resharding"),
    ("models", "data", "rewards"),
    ("planner",),
    ("checks", "checkpoint", "tracking", "sinks", "report"),
    ("engines",),
    ("workers",),
    ("controller",),
    ("bench", "cli", "hybridflow", "examples"),  # "hybridflow" is the package itself: what `import hybridflow` offers
]
RANK = {room: rank for rank, rooms in enumerate(RANKS) for room in rooms}

# Who may import a heavy library at all; None means everybody, inside functions.
HEAVY = {"megatron": {"engines"}, "vllm": {"engines"}, "ray": {"controller", "cli"}, "transformers": None}
# Who may import one when the module itself is imported.
EAGER = {"engines", "workers", "controller", "cli", "examples"}

# Importable without ray, vllm, megatron and transformers: the pure half of the system.
PURE = (
    *("errors", "config", "importing", "settings", "compose", "checks", "platform", "timing", "trace"),
    *("algorithms", "protocol", "resharding/layout", "resharding/plan", "planner"),
)


def sources() -> list[Path]:
    """Every module that has a room."""
    return sorted((ROOT / "hybridflow").rglob("*.py")) + sorted((ROOT / "examples").rglob("*.py"))


def room_of(path: Path) -> str:
    """``hybridflow/data/batching.py`` lives in ``data``, ``hybridflow/timing.py`` in ``timing``."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] == "examples":
        return "examples"
    return "hybridflow" if parts[1] == "__init__" else parts[1]


def absolute(node: ast.ImportFrom, path: Path) -> str:
    """The module a ``from ... import`` names, with leading dots resolved."""
    if node.level == 0:
        return node.module or ""
    package = path.relative_to(ROOT).parts[:-1]
    base = package[: len(package) - node.level + 1]
    return ".".join([*base, node.module] if node.module else base)


def imported_modules(tree: ast.Module, path: Path) -> Iterator[tuple[str, int, bool]]:
    """(dotted module, line, eager) of every import; eager ones run when the module itself is imported."""
    later = {
        id(inner)
        for outer in ast.walk(tree)
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef)
        or (isinstance(outer, ast.If) and "TYPE_CHECKING" in ast.unparse(outer.test))
        for inner in ast.walk(outer)
    }
    for node in ast.walk(tree):
        eager = id(node) not in later
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, eager
        elif isinstance(node, ast.ImportFrom):
            module = absolute(node, path)
            for alias in node.names if module == "hybridflow" else ():
                yield offered_by(alias.name), node.lineno, eager
            if module != "hybridflow":
                yield module, node.lineno, eager


def offered_by(name: str) -> str:
    """``from hybridflow import errors`` names a room; a name that is no module is offered by the package itself."""
    module = ROOT / "hybridflow" / name
    return f"hybridflow.{name}" if module.is_dir() or module.with_suffix(".py").exists() else "hybridflow"


def faults(path: Path, text: str) -> list[str]:
    """Every import of one module that breaks the direction, as lines for the reader."""
    room = room_of(path)
    found = []
    for module, line, eager in imported_modules(ast.parse(text), path):
        where = f"{path.relative_to(ROOT)}:{line}"
        top = module.split(".")[0]
        if top == "hybridflow":
            target = module.split(".")[1] if "." in module else "hybridflow"
            if RANK.get(target, -1) > RANK[room]:
                found.append(f"{where}: {room} (rank {RANK[room]}) imports upwards from {target} (rank {RANK[target]})")
        elif top in HEAVY:
            allowed = HEAVY[top]
            if allowed is not None and room not in allowed:
                found.append(f"{where}: {room} imports {top}; only {', '.join(sorted(allowed))} may")
            elif eager and room not in EAGER:
                found.append(f"{where}: {room} imports {top} at module level; import it in the function that needs it")
    return found


def test_every_room_has_a_rank():
    without = {room_of(path) for path in sources()} - set(RANK)
    assert not without, f"no rank for {sorted(without)}: add each room to RANKS in {Path(__file__).name}, low to high"


def test_no_module_imports_upwards_or_a_library_it_may_not():
    found = [fault for path in sources() if room_of(path) in RANK for fault in faults(path, path.read_text("utf-8"))]
    assert not found, "imports against the direction (design: config <- data <- engines <- ...):\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("path", "text", "fault"),
    [
        ("hybridflow/data/a.py", "from hybridflow.controller import pool", "imports upwards from controller"),
        ("hybridflow/data/a.py", "from ..controller import pool", "imports upwards from controller"),
        ("hybridflow/data/a.py", "def f():\n    import hybridflow.workers.base", "imports upwards from workers"),
        ("hybridflow/data/a.py", "from hybridflow import engines", "imports upwards from engines"),
        ("hybridflow/workers/a.py", "from hybridflow import launch", "imports upwards from hybridflow"),
        ("hybridflow/workers/a.py", "def f():\n    import vllm", "only engines may"),
        ("hybridflow/engines/a.py", "import ray", "only cli, controller may"),
        ("examples/a.py", "from megatron.core import mpu", "only engines may"),
        ("hybridflow/data/a.py", "import transformers", "at module level"),
    ],
)
def test_a_wrong_import_is_found(path: str, text: str, fault: str):
    found = faults(ROOT / path, text)
    assert len(found) == 1 and fault in found[0]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("hybridflow/engines/a.py", "import vllm\nfrom megatron.core import mpu\nfrom hybridflow.models import spec"),
        ("hybridflow/controller/a.py", "import ray\nfrom hybridflow import errors"),
        ("hybridflow/data/a.py", "def f():\n    from transformers import AutoTokenizer"),
        ("hybridflow/data/a.py", "if TYPE_CHECKING:\n    from transformers import AutoTokenizer"),
        ("hybridflow/data/a.py", "from . import b\nfrom ..errors import DataError"),
        ("examples/a.py", "import hybridflow\nfrom hybridflow import launch"),
    ],
)
def test_a_right_import_is_left_alone(path: str, text: str):
    assert faults(ROOT / path, text) == []


def test_pure_modules_bring_no_heavy_library():
    roots = [ROOT / "hybridflow" / name for name in PURE]
    paths = [p for root in roots for p in ([*root.rglob("*.py")] if root.is_dir() else [root.with_suffix(".py")])]
    modules = sorted({".".join(p.relative_to(ROOT).with_suffix("").parts) for p in paths if p.exists()})
    modules = [m.removesuffix(".__init__") for m in modules]
    assert "hybridflow.config" in modules and "hybridflow.resharding.layout" in modules
    program = "\n".join(
        [
            "import importlib, sys",
            f"for name in {modules!r}:",
            "    importlib.import_module(name)",
            f"    heavy = sorted(set({sorted(HEAVY)!r}) & set(sys.modules))",
            "    assert not heavy, f'importing {name} brought {heavy} along'",
        ]
    )
    child = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert child.returncode == 0, child.stderr
