"""Test files for what was changed since the branch left main, and what is not committed yet: `make check` runs them.

    python -m tools.changed              a file a line, the closest first; on standard error what is left to `make test`
    python -m tools.changed FILE...      the same for these files

A test file is meant if it was changed, if its name mirrors the module's, if it imports the module by itself, or if it
names the changed file (a page, a table). What reaches a test through a builder or another module is not followed.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
LIVE = ("tests/integration", "tests/attacks")
"""Tests of real parts take minutes: they are named, and left to `make test`."""
ALWAYS = (
    "tests/architecture/test_imports.py",
    "tests/architecture/test_sources.py",
    "tests/architecture/test_words.py",
)
"""What any change may break, in seconds."""
MOST = 30
"""So many files answer within a minute on two slow cores."""
SOURCES = ("watchdog/", "")
"""Where a module's name begins: those of the package, and those of the checkout."""


def git(*arguments: str) -> list[str]:
    """What git prints, a line each; none where it fails."""
    done = subprocess.run(["git", *arguments], cwd=CHECKOUT, capture_output=True, text=True, check=False)
    return done.stdout.split("\n")[:-1] if done.returncode == 0 else []


def changed() -> list[str]:
    """Files that differ from the commit at which this branch left main, and files that git does not know yet."""
    for main in ("@{upstream}", "upstream/main", "origin/main", "main"):
        base = git("merge-base", "HEAD", main)
        if base:
            break
    else:
        base = ["HEAD"]
    return sorted({*git("diff", "--name-only", base[0]), *git("ls-files", "--others", "--exclude-standard")})


def module_of(file: str) -> str | None:
    """The dotted name under which a Python file is imported."""
    if not file.endswith(".py"):
        return None
    root = next(each for each in SOURCES if file.startswith(each))
    return file.removeprefix(root).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports_of(text: str) -> Iterator[str]:
    """Modules that a source names in imports; of `from a import b` a and a.b."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{each.name}" for each in node.names)


def mirrors(test: str, module: str) -> bool:
    """Is this the test file of the module by its place and name?"""
    *rooms, name = module.split(".")
    return Path(test).stem == f"test_{name}" and (len(rooms) < 2 or rooms[1] in Path(test).parts)


def closest_first(files: Iterable[str]) -> list[str]:
    """Test files for the changed ones. Of two that import a module, the one that imports less is closer to it."""
    files = set(files)
    modules = {module for file in files if (module := module_of(file)) is not None}
    others = {file for file in files if module_of(file) is None}
    found: dict[str, tuple[int, int]] = {}
    for path in CHECKOUT.glob("tests/**/test_*.py"):
        test, text = str(path.relative_to(CHECKOUT)), path.read_text()
        imported = set(imports_of(text))
        if test in files:
            found[test] = (0, 0)
        elif any(mirrors(test, module) for module in modules):
            found[test] = (1, 0)
        elif imported & modules or any(Path(file).name in text for file in others):
            found[test] = (2, len(imported))
    return sorted(found, key=lambda test: (found[test], test))


def main(arguments: list[str]) -> None:
    """Prints the files for pytest."""
    files = arguments or changed()
    tests = closest_first(files)
    live = [each for each in tests if each.startswith(LIVE)]
    quick = [each for each in tests if each not in live]
    for each in dict.fromkeys((*quick[:MOST], *ALWAYS)):
        print(each)
    left = [*quick[MOST:], *live]
    print(f"{len(files)} changed files, {len(quick[:MOST])} test files for them.", file=sys.stderr)
    if left:
        print(f"Left to `make test`: {len(quick[MOST:])} more that import them, {len(live)} live ones", file=sys.stderr)
        print(*(f"  {each}" for each in left), sep="\n", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
