"""Check that what the README tells a reader to type exists, and that its links lead somewhere.

Read are the fenced ``bash``, ``sh``, ``shell`` and ``console`` blocks, ``make X`` in inline code, and every link.
Nothing is run, except ``hybridflow SUBCOMMAND --help`` for each subcommand that is named. Checked are make targets,
scripts, ``-m`` modules, ``-r`` files, ``--config-name`` and ``group=option`` of drivers against ``configs/``, relative
links and ``#anchors``.

    python tools/check_readme.py                    # README.md and CONTRIBUTING.md
    python tools/check_readme.py docs/placement.md
"""

import functools
import importlib.util
import itertools
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHELL_FENCES = {"bash", "sh", "shell", "console"}
BUILTINS = {"cd", "export", "source", ".", "set", "echo", "true", "wait"}
PYTHON = re.compile(r"(.*/)?python(3(\.11)?)?$")
FENCE = re.compile(r"^\s*(?:```|~~~)\s*(\w*)")
LINK = re.compile(r"\[[^\]]*\]\(\s*<?([^)\s>]+)>?[^)]*\)|(?:src|href)=\"([^\"]+)\"")
INLINE_MAKE = re.compile(r"`(make [^`]+)`")


def split_blocks(text: str) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
    """(shell lines, prose lines), each with its line number; other fenced blocks are left out."""
    shell, prose, language = [], [], None
    for number, line in enumerate(text.splitlines(), start=1):
        fence = FENCE.match(line)
        if fence:
            language = (fence.group(1).lower() or "text") if language is None else None
        elif language in SHELL_FENCES:
            shell.append((number, line))
        elif language is None:
            prose.append((number, line))
    return shell, prose


def commands(shell: list[tuple[int, str]]) -> Iterator[tuple[int, list[str]]]:
    """(line, words) of every simple command: continuation lines joined, pipelines and lists taken apart."""
    pending, start = "", 0
    for number, line in shell:
        start = start if pending else number
        pending += re.sub(r"^\s*\$ ", "", line)
        if pending.endswith("\\"):
            pending = pending[:-1] + " "
            continue
        lexer = shlex.shlex(pending, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        lexer.commenters = "#"
        pending = ""
        words: list[str] = []
        for token in [*lexer, ";"]:
            if set(token) <= set("();<>|&"):
                if words:
                    yield start, words
                words = []
            else:
                words.append(token)


@functools.cache
def make_targets() -> frozenset[str]:
    """Every target the Makefile names."""
    text = (ROOT / "Makefile").read_text("utf-8")
    rules = re.findall(r"^([\w./ -]+):(?!=)", text, flags=re.MULTILINE)
    return frozenset(word for rule in rules for word in rule.split())


@functools.cache
def subcommand_fault(name: str) -> str | None:
    """Ask the command-line program itself whether it knows a subcommand."""
    words = [sys.executable, "-m", "hybridflow.cli", *([name] if name else []), "--help"]
    child = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    return f"`hybridflow {name} --help` fails: {child.stderr.strip()[-300:]}" if child.returncode else None


def check_make(arguments: list[str]) -> Iterator[str]:
    """Words that are neither options nor VARIABLE=value are targets."""
    for word in arguments:
        if not word.startswith("-") and "=" not in word and word not in make_targets():
            yield f"the Makefile has no target `{word}`; it has {', '.join(sorted(make_targets()))}"


def check_configs(arguments: list[str]) -> Iterator[str]:
    """``--config-name x`` and ``group=option`` of a driver name files under ``configs/``."""
    for i, word in enumerate(arguments):
        name, _, value = word.partition("=")
        if name in ("--config-name", "-cn"):
            value = value or (arguments[i + 1] if i + 1 < len(arguments) else "")
            if not (ROOT / "configs" / f"{value}.yaml").exists():
                yield f"configs/{value}.yaml does not exist"
        elif value and not word.startswith("-"):
            group = name.lstrip("+").partition("@")[0]
            folder = ROOT / "configs" / group
            for option in value.split(",") if folder.is_dir() else []:
                if not (folder / f"{option}.yaml").exists():
                    options = sorted(p.stem for p in folder.glob("*.yaml"))
                    yield f"configs/{group}/{option}.yaml does not exist; there are {', '.join(options)}"


def check_python(arguments: list[str]) -> Iterator[str]:
    """The script, or the module after ``-m``; ``-c`` has nothing to look up."""
    while arguments and arguments[0].startswith("-") and arguments[0] not in ("-m", "-c"):
        arguments = arguments[1:]
    if not arguments or arguments[0] == "-c":
        return
    if arguments[0] != "-m":
        yield from check_script(arguments[0], arguments[1:])
        return
    module = arguments[1] if len(arguments) > 1 else ""
    own = ROOT.joinpath(*module.split("."))
    if module.split(".")[0] == "hybridflow":
        if not own.with_suffix(".py").exists() and not (own / "__main__.py").exists():
            yield f"no module `{module}` to run"
        elif module == "hybridflow.cli":
            yield from check_subcommand(arguments[2:])
    elif not module or importlib.util.find_spec(module.split(".")[0]) is None:
        yield f"no module `{module}`"


def check_script(script: str, arguments: list[str]) -> Iterator[str]:
    """A script has to exist; what looks like a setting is checked as one."""
    if not (ROOT / script).exists():
        yield f"{script} does not exist"
    else:
        yield from check_configs(arguments)


def check_subcommand(arguments: list[str]) -> Iterator[str]:
    """The first word after ``hybridflow`` is a subcommand."""
    if not (ROOT / "hybridflow" / "cli.py").exists():
        yield "hybridflow/cli.py does not exist"
        return
    fault = subcommand_fault(next((word for word in arguments if not word.startswith("-")), ""))
    if fault:
        yield fault


def check_command(words: list[str]) -> Iterator[str]:
    """Every fault of one simple command."""
    while words and re.match(r"^\w+=", words[0]):
        words = words[1:]
    if not words:
        return
    program, arguments = words[0], words[1:]
    for flag, value in itertools.pairwise(arguments):
        if flag == "-r" and value.endswith(".txt") and not (ROOT / value).exists():
            yield f"{value} does not exist"
    if program == "make":
        yield from check_make(arguments)
    elif PYTHON.match(program):
        yield from check_python(arguments)
    elif program == "hybridflow" or program.endswith("/hybridflow"):
        yield from check_subcommand(arguments)
    elif program.startswith(".venv/bin/"):
        if not (ROOT / program).exists():
            yield f"{program} does not exist"
    elif "/" in program:
        yield from check_script(program, arguments)
    elif program in ("bash", "sh") and arguments and not arguments[0].startswith("-"):
        yield from check_script(arguments[0], arguments[1:])
    elif program not in BUILTINS and not (shutil.which(program) or (Path(sys.executable).parent / program).exists()):
        yield f"no program `{program}`"


@functools.cache
def anchors(path: Path) -> frozenset[str]:
    """The anchors of a Markdown file's headings, spelled as on GitHub."""
    _, prose = split_blocks(path.read_text("utf-8"))
    found: list[str] = []
    for _, line in prose:
        heading = re.match(r"#{1,6}\s+(.*?)\s*#*$", line)
        if heading:
            text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.group(1)).lower()
            slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
            seen = sum(slug == other or bool(re.fullmatch(re.escape(slug) + r"-\d+", other)) for other in found)
            found.append(f"{slug}-{seen}" if seen else slug)
    return frozenset(found)


def check_links(path: Path, line: str) -> Iterator[str]:
    """Relative targets exist inside the repository, anchors are headings of the file they point into."""
    for match in LINK.finditer(re.sub(r"`[^`]*`", "", line)):
        target = match.group(1) or match.group(2)
        if re.match(r"^[a-z][a-z0-9+.-]*:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path.resolve()
        if not file.is_relative_to(ROOT) or not file.exists():
            yield f"the link `{target}` leads nowhere"
        elif anchor and file.suffix == ".md" and anchor not in anchors(file):
            yield f"{file.relative_to(ROOT)} has no heading for `#{anchor}`"


def check_file(path: Path) -> tuple[list[str], int]:
    """(faults with file and line, number of commands and links looked at)."""
    shell, prose = split_blocks(path.read_text("utf-8"))
    found, looked_at = [], 0
    inline = [(number, code) for number, line in prose for code in INLINE_MAKE.findall(line)]
    for number, words in [*commands(shell), *commands(inline)]:
        looked_at += 1
        found += [f"{path.name}:{number}: {fault}" for fault in check_command(words)]
    for number, line in prose:
        looked_at += len(LINK.findall(line))
        found += [f"{path.name}:{number}: {fault}" for fault in check_links(path, line)]
    return found, looked_at


def main(arguments: list[str]) -> int:
    """Check the named files, or README.md and CONTRIBUTING.md; 1 where anything is wrong."""
    paths = [Path(name).resolve() for name in arguments] or [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    found, total = [], 0
    for path in paths:
        if not path.exists():
            found.append(f"{path.name} does not exist")
            continue
        faults, looked_at = check_file(path)
        found += faults
        total += looked_at
    print("\n".join(found) if found else f"{', '.join(p.name for p in paths)}: {total} commands and links exist")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
