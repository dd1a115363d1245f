"""What of the environment belongs to the package for nodes, and what to the one on top for management and login nodes.

A module is the node's if its commands reach it, and if nothing that it imports when it is loaded is missing there.
"""

from __future__ import annotations

import ast
import importlib.metadata
import sys
from collections.abc import Iterator
from pathlib import Path

from tools.packaging.environment import OURS, needed

NODE, CONTROLLER = "slurm-watchdog", "slurm-watchdog-controller"
PACKAGE = "slurm_watchdog"
COMMANDS = ("services", "run", "doctor")
"""Of cli/: what is typed or started on a compute node."""
PROGRAMS = ("cli.main", "agent.__main__", "agent.courier.process", "agent.validate_config")
"""Started as programs of their own (`run_module`), which no import shows."""
NODE_SHARE = ("LICENSE", "config.example.yaml", "systemd", "deploy/config.yaml", "deploy/slurm")
"""Below share/; the rest are pages and files for the management node."""


def node_modules(library: Path) -> set[str]:
    """Names of our modules that the node's package has, of those in `library`."""
    tree = {name: ast.parse(path.read_bytes()) for name, path in _modules(library)}
    there = _third_party_names() | {PACKAGE}
    absent: set[str] = set()
    while True:
        found = {
            name
            for name, module in tree.items()
            if name not in absent
            for each in _imports(module, tree, late=False)
            if each in absent or not _is_there(each, there)
        }
        if not found:
            break
        absent |= found
    waiting = [f"{PACKAGE}.cli.{name}" for name in COMMANDS] + [f"{PACKAGE}.{name}" for name in PROGRAMS]
    reached: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in reached or name in absent or name not in tree:
            continue
        reached.add(name)
        waiting += [name.rpartition(".")[0], *_imports(tree[name], tree, late=True)]
    return reached


def _modules(library: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted((library / PACKAGE).rglob("*.py")):
        words = path.relative_to(library).with_suffix("").parts
        yield ".".join(words[:-1] if words[-1] == "__init__" else words), path


def _third_party_names() -> set[str]:
    """Top-level packages that the node's distributions bring."""
    provided = importlib.metadata.packages_distributions()
    wanted = {name.lower().replace("_", "-") for name in needed(frozenset())}
    return {top for top, names in provided.items() if wanted & {name.lower().replace("_", "-") for name in names}}


def _is_there(name: str, there: set[str]) -> bool:
    top = name.partition(".")[0]
    return top in sys.stdlib_module_names or top in there


def _imports(node: ast.AST, ours: dict[str, ast.Module], *, late: bool) -> Iterator[str]:
    """Modules that are imported: when this one is loaded, with `late` also in its functions; never those for types."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and not late:
            continue
        if isinstance(child, ast.Import):
            yield from (each.name for each in child.names)
        elif isinstance(child, ast.ImportFrom) and child.module:
            yield child.module
            yield from (full for each in child.names if (full := f"{child.module}.{each.name}") in ours)
        yield from _imports(child, ours, late=late)


def is_nodes(place: Path, library: Path, modules: set[str], files: set[str]) -> bool:
    """Whether a file of `library` is the node's: `files` are those of its distributions, by `node_files`."""
    inside = place.relative_to(library)
    if inside.parts[0] != PACKAGE:
        source = inside.parent.parent / f"{place.name.partition('.')[0]}.py" if place.suffix == ".pyc" else inside
        return inside.parts[0].startswith(f"{OURS.replace('-', '_')}-") or source.as_posix() in files
    folder = inside.parent.parent if inside.parent.name == "__pycache__" else inside.parent
    stem = place.name.partition(".")[0]
    if place.suffix in (".py", ".pyc"):
        name = ".".join(folder.parts if stem == "__init__" else (*folder.parts, stem))
        return name in modules
    if place.suffix == ".j2":
        return False  # templates: what nodes print has none
    return any(f"{'.'.join(folder.parts[:length])}" in modules for length in range(len(folder.parts), 1, -1)) or (
        len(folder.parts) == 1
    )


def node_files() -> set[str]:
    """Files of the distributions that the node's package has, below its site-packages."""
    distributions = [importlib.metadata.distribution(name) for name in needed(frozenset())]
    return {str(file) for each in distributions for file in each.files or ()}
