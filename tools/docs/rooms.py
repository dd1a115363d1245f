"""Writes docs/development/rooms.md, the folders of the package and what each imports, from the code: `python
-m tools.docs rooms` (`make rooms`).

`make rooms` prints the picture, too. tests/architecture/test_rooms.py holds the code to `ORDER`: no arrow
goes up, and nothing goes in a circle.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
PACKAGE = CHECKOUT / "watchdog/slurm_watchdog"
FILE = CHECKOUT / "docs/development/rooms.md"

ORDER = (
    "slurm_watchdog", "base", "model", "knowledge", "identity",
    "parse", "parse/kernel_log", "parse/stacks", "parse/training_log", "wire",
    "diagnose/stacks", "analysis", "diagnose/kernel_log", "diagnose/logs", "diagnose", "detect", "config",
    "agent/courier", "agent/proc", "agent/children", "agent/delivery", "agent/gpu", "agent/processes", "agent/files",
    "agent/logs", "agent/checkpoints", "agent/collectors", "agent/evidence",
    "agent",
    "journal", "controller/state", "controller/incidents", "controller/actions/ladder", "controller/policy",
    "notify", "controller/health",
    "controller/ingest", "slurm", "nodetest", "actuate", "recording", "controller/node_history", "controller/evidence",
    "controller/actions", "controller/api", "controller",
    "replay", "doctor", "supervisor", "standalone", "report", "cli",
)  # fmt: skip
"""Every folder with code, from the ground up: each imports only from those before it."""

Imports = Mapping[str, frozenset[str]]
"""Module -> the modules of the package that it imports, wherever the import stands: in a function, or under
TYPE_CHECKING."""


def read_imports(package: Path = PACKAGE) -> Imports:
    """All modules below `package`, by dotted name."""
    sources = {_name(path, package): path.read_text(encoding="utf-8") for path in sorted(package.rglob("*.py"))}
    return {name: frozenset(_imported(text, sources.keys())) - {name} for name, text in sources.items()}


def _name(path: Path, package: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(source: str, modules: Iterable[str]) -> Iterator[str]:
    known = frozenset(modules)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                yield module if module in known else node.module or ""


def room_of(module: str, imports: Imports) -> str:
    """The folder that a module lies in, from below the package: `agent/gpu`; the package's own is `slurm_watchdog`."""
    parts = module.split(".")[1:]
    is_package = any(name.startswith(module + ".") for name in imports)
    return "/".join(parts if is_package else parts[:-1]) or "slurm_watchdog"


def arrows(imports: Imports) -> dict[tuple[str, str], int]:
    """(room, room that it imports from) -> how many imports."""
    found: dict[tuple[str, str], int] = {}
    for module, imported in imports.items():
        here = room_of(module, imports)
        for other in imported:
            there = room_of(other, imports)
            if here != there:
                found[here, there] = found.get((here, there), 0) + 1
    return found


def upward(imports: Imports, order: tuple[str, ...] = ORDER) -> list[str]:
    """A line for each import of a room that is not below: `low.module -> high.module`."""
    rank = {room: at for at, room in enumerate(order)}
    return sorted(
        f"{module} -> {other}"
        for module, imported in imports.items()
        for other in imported
        if rank[room_of(module, imports)] < rank[room_of(other, imports)]
    )


def circles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Sets of nodes that reach each other, of two or more: what is left when all that has no way in or no way
    out is taken away, again and again, grouped by which reach each other."""
    below = {node: set(others) & graph.keys() for node, others in graph.items()}
    while ends := {n for n, others in below.items() if not others} | (below.keys() - set().union(*below.values())):
        below = {n: others - ends for n, others in below.items() if n not in ends}
        if not below:
            return []

    def reached(start: str) -> frozenset[str]:
        seen, todo = set[str](), [start]
        while todo:
            todo.extend(new := below[todo.pop()] - seen)
            seen |= new
        return frozenset(seen)

    reach = {node: reached(node) for node in below}
    groups = {frozenset(b for b in reach[a] if a in reach[b]) for a in reach if a in reach[a]}
    return sorted(sorted(group) for group in groups)


def picture(imports: Imports) -> str:
    """One line a room, from the ground up: its modules, its lines, and the rooms that it imports from."""
    between = arrows(imports)
    rows = []
    for room in ORDER:
        folder = PACKAGE if room == "slurm_watchdog" else PACKAGE / room
        files = sorted(folder.glob("*.py"))
        if not files:
            continue
        lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
        below = sorted((there for here, there in between if here == room), key=ORDER.index)
        rows.append(
            f"{room:28} {len(files):3} files {lines:6} lines   {'<- ' + ', '.join(below) if below else ''}".rstrip()
        )
    return "\n".join(rows)


def write() -> str:
    """The whole page."""
    return page(read_imports())


def page(imports: Imports) -> str:
    """The page of these imports."""
    known = sorted({room_of(module, imports) for module in imports}, key=ORDER.index)
    rows = []
    for room in known:
        init = (PACKAGE if room == "slurm_watchdog" else PACKAGE / room) / "__init__.py"
        if init.exists() and "/" not in room:
            text = ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))) or ""
            says = text.partition("\n\n")[0].replace("\n", " ").partition(". ")[0].removesuffix(".")
            rows.append(f"| `{room}` | {says} |")
    return (
        "# The rooms of the package\n\nGenerated from the imports by `make rooms`; `make test` fails when "
        "it is out of date, when an import goes up, or when two rooms\nor two modules import each other. "
        f"From the ground up, each imports only from those before it: {', '.join(known)}\n"
        "(`make rooms` prints from which; a folder's `__init__.py` says what is in it).\n\n"
        "| room (below `watchdog/slurm_watchdog/`) | what is in it |\n|---|---|\n" + "\n".join(rows) + "\n"
    )
