"""Who may know whom. Read from the source, so a module that does not exist yet breaks nothing.

An import counts wherever it stands: in a function, under TYPE_CHECKING, or behind another module of ours.
Importing `a.b` also runs `a/__init__.py`, so that counts, too.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Contract:
    """`modules` (with all below them) reach none of `forbidden`, directly or through other modules of ours."""

    name: str
    modules: tuple[str, ...]
    forbidden: tuple[str, ...]
    declares: tuple[str, ...] = ()
    """Rooms that import what is forbidden for what it declares, and call nothing of it: it may be reached
    through them."""


EDGES = (
    "slurm_watchdog.config.loading", "slurm_watchdog.config.knowledge_files", "slurm_watchdog.base.log_setup", "slurm_watchdog.base.clock", "slurm_watchdog.base.loop",
)  # fmt: skip
WORLD = (
    "os", "socket", "subprocess", "time", "asyncio", "threading", "aiohttp", "sqlalchemy", "prometheus_client",
    "psutil", "pynvml", "pyslurm", "urllib.request", "http.client",
)  # fmt: skip
CONTROLLER_PACKAGES = ("aiohttp", "uvloop", "sqlalchemy")
PURE = re.compile(r"\bPure\b")
"""The word by which a module's docstring promises that it reaches nothing of the world: no file, no clock, no
process, no library that does."""

CONTRACTS = (
    Contract(
        "the agent observes and never judges",
        ("slurm_watchdog.agent",),
        (
            "slurm_watchdog.controller",
            "slurm_watchdog.detect",
            "slurm_watchdog.notify",
            *CONTROLLER_PACKAGES,
            "pyslurm",
        ),
        declares=("slurm_watchdog.config",),  # its schema has the options of every detector
    ),
    Contract(
        "actuators and notifiers don't judge",
        ("slurm_watchdog.actuate", "slurm_watchdog.notify"),
        (
            "slurm_watchdog.detect",
            "slurm_watchdog.controller.policy",
            "slurm_watchdog.controller.actions",
        ),
        declares=("slurm_watchdog.config",),
    ),
)


def within(module: str, package: str) -> bool:
    """Whether `module` is `package` or lies below it."""
    return module == package or module.startswith(package + ".")


def parse_imports(source: str) -> Iterator[str]:
    """Every dotted name that `source` imports; for `from a import b` both `a` and `a.b`, for b may be a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def read_sources() -> dict[str, str]:
    """Module name to its text, for every module of the package."""
    found = {}
    for path in sorted((CHECKOUT / "watchdog/slurm_watchdog").rglob("*.py")):
        parts = path.relative_to(CHECKOUT / "watchdog").with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return found


@cache
def read_modules() -> dict[str, tuple[str, ...]]:
    """Module name to what it imports, for every module of the package."""
    return {name: tuple(parse_imports(source)) for name, source in read_sources().items()}


@cache
def read_all_imports() -> dict[str, tuple[str, ...]]:
    """File below the checkout to what it imports, for the package, its tools and its tests."""
    return {
        str(path.relative_to(CHECKOUT)): tuple(parse_imports(path.read_text()))
        for folder in ("watchdog", "deploy", "tests", "lab", "tools")
        for path in sorted((CHECKOUT / folder).rglob("*.py"))
    }


def parents(name: str) -> list[str]:
    """`a.b.c` gives a, a.b and a.b.c: importing the last runs all of them."""
    parts = name.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]


def chains_to(start: str, forbidden: tuple[str, ...], modules: dict[str, tuple[str, ...]]) -> list[str]:
    """How `start` reaches something forbidden, one line each ("a -> b -> os"); empty if it does not."""
    bad, seen, todo = [], {start}, [(start,)]
    while todo:
        chain = todo.pop()
        for imported in modules[chain[-1]]:
            if any(within(imported, name) for name in forbidden):
                bad.append(" -> ".join((*chain, imported)))
                continue
            for name in parents(imported):
                if name in modules and name not in seen:
                    seen.add(name)
                    todo.append((*chain, name))
    return bad


def without_declarations(contract: Contract, modules: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """The imports, but for those of what is forbidden that stand in the contract's `declares` rooms themselves."""
    return {
        name: tuple(each for each in imported if not any(within(each, room) for room in contract.forbidden))
        if any(within(name, room) for room in contract.declares)
        else imported
        for name, imported in modules.items()
    }


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.name)
def test_a_contract_holds(contract: Contract) -> None:
    modules = without_declarations(contract, read_modules())
    ours = [name for name in (*contract.modules, *contract.forbidden) if name.startswith("slurm_watchdog")]
    assert [name for name in ours if name not in modules] == [], "a name that is no module's forbids nothing"
    bad = [
        chain
        for module in modules
        if any(within(module, name) for name in contract.modules)
        for chain in chains_to(module, contract.forbidden, modules)
    ]
    assert not bad, f"{contract.name}:\n" + "\n".join(sorted(set(bad)))


def says_that_it_is_pure(module: str) -> bool:
    """Whether its docstring has the word."""
    path = CHECKOUT / "watchdog" / module.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return PURE.search(ast.get_docstring(ast.parse(path.read_text())) or "") is not None


def test_what_says_that_it_is_pure_reaches_nothing_of_the_world() -> None:
    modules = read_modules()
    pure = [module for module in modules if says_that_it_is_pure(module)]
    assert len(pure) > 100
    bad = [chain for module in pure for chain in chains_to(module, EDGES + WORLD, modules)]
    assert not bad, "\n".join(sorted(set(bad)))


@pytest.mark.parametrize(
    "room",
    [
        "model",
        "analysis",
        "detect",
        "diagnose",
        "controller.policy",
        "controller.actions.ladder",
        "parse.training_log",
    ],
)
def test_rooms_that_judge_are_pure_in_all_their_modules(room: str) -> None:
    modules = read_modules()
    bad = [
        chain
        for module in modules
        if within(module, f"slurm_watchdog.{room}")
        for chain in chains_to(module, EDGES + WORLD, modules)
    ]
    assert not bad, "\n".join(sorted(set(bad)))


def test_a_forbidden_import_is_found_through_other_modules() -> None:
    modules = {
        "slurm_watchdog": (),
        "slurm_watchdog.detect": ("watchdog.helper.deep",),
        "watchdog.helper": ("os.path",),
        "watchdog.helper.deep": ("re",),
    }
    assert chains_to("slurm_watchdog.detect", ("os",), modules) == [
        "slurm_watchdog.detect -> watchdog.helper -> os.path"
    ]
    assert chains_to("slurm_watchdog.detect", ("ossify",), modules) == []


def test_what_is_declared_may_be_known_and_used_by_nobody_else() -> None:
    modules = {
        "p.agent": ("p.config",),
        "p.config": ("p.detect", "p.helper"),
        "p.helper": ("p.detect",),
        "p.detect": (),
    }
    contract = Contract("", ("p.agent",), ("p.detect",), declares=("p.config",))
    assert chains_to("p.agent", contract.forbidden, without_declarations(contract, modules)) == [
        "p.agent -> p.config -> p.helper -> p.detect"
    ]


def test_every_form_of_import_counts() -> None:
    source = "import a.b as c\nfrom d import e\ndef f():\n    import g\n"
    assert list(parse_imports(source)) == ["a.b", "d", "d.e", "g"]


def standard_library_only() -> list[Path]:
    """Files that run inside someone else's Python: a training environment, a container, a compute node."""
    return [
        *sorted((CHECKOUT / "hooks").rglob("*.py")),
        *(CHECKOUT / "tests/rig").glob("trainer.py"),
    ]


ITS_OWN_FRAMEWORK = {
    "agreement.py": ("jax", "numpy"),  # where jax is loaded already
    "huggingface.py": ("transformers",),
    "lightning.py": ("lightning", "pytorch_lightning"),
    "composer.py": ("composer",),
    "keras.py": ("keras", "tensorflow"),
}
"""A callback is a class of the framework's: that one is there where the file is used."""


def test_code_for_training_environments_imports_the_standard_library_and_its_framework_only() -> None:
    bad = [
        f"{path.relative_to(CHECKOUT)}: {name}"
        for path in standard_library_only()
        for name in parse_imports(path.read_text())
        if name.split(".")[0]
        not in ("slurm_watchdog_hooks", *sys.stdlib_module_names, *ITS_OWN_FRAMEWORK.get(path.name, ()))
    ]
    assert not bad, "\n".join(bad)


def test_nothing_is_mocked() -> None:
    bad = [
        f"{path}: {name}"
        for path, names in read_all_imports().items()
        for name in names
        if within(name, "unittest.mock") or within(name, "mock")
    ]
    assert not bad, "Write a fake that implements the Protocol:\n" + "\n".join(bad)


def test_no_test_imports_another_test() -> None:
    bad = [
        f"{path}: {name}"
        for path, names in read_all_imports().items()
        for name in sorted(set(names))
        if re.match(r"tests\..*\btest_\w+$", name)
    ]
    assert not bad, "What tests share goes to tests/builders/:\n" + "\n".join(bad)


@pytest.mark.parametrize("module", ["slurm_watchdog.cli.main", "slurm_watchdog.agent.service"])
def test_a_compute_node_needs_no_package_of_the_controller(module: str) -> None:
    blocked = "".join(f"sys.modules[{name!r}] = None; " for name in (*CONTROLLER_PACKAGES, "pyslurm"))
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {blocked}import {module}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


PORT_USERS = ("actions.decider", "actions.manager", "evidence.collector", "api.doors", "api.web_page")


@pytest.mark.parametrize("user", PORT_USERS)
def test_who_takes_ports_does_not_know_the_whole_controller(user: str) -> None:
    modules = read_modules()
    assert chains_to(f"slurm_watchdog.controller.{user}", ("slurm_watchdog.controller.controller",), modules) == []
