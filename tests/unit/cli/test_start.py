"""What a command imports when it starts: `make bench ARGS=commands` measures what that costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from slurm_watchdog.base.late_regex import LateRegex, late_regex
from tests.builders.cli import FakeController, job, status

EVERYWHERE = {
    "aiohttp", "asyncio", "importlib.metadata", "logging", "prometheus_client", "sqlalchemy", "statistics",
    "typing_extensions", "uvloop", "yaml",
}  # fmt: skip
HELP = {"email", "http.client", "jinja2", "msgspec", "pkgutil", "subprocess"}
JUDGES = {
    f"slurm_watchdog.{name}"
    for name in ("controller", "detect", "config", "model.cluster_view", "diagnose.stacks", "diagnose.kernel_log")
}
MOST_COMPILED = 160
"""Regular expressions of `scan-log`, those of click and jinja2 included: there are a thousand."""


def started(*arguments: str) -> tuple[set[str], int]:
    """The modules that a command loads, and how many regular expressions it compiles."""
    program = (
        "import atexit, re, sys; from slurm_watchdog.cli.main import main; "
        "atexit.register(lambda: print(len(re._cache), *sys.modules, file=sys.stderr)); main(prog_name='slurm-watchdog')"
    )
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    compiled, *modules = done.stderr.split()
    return set(modules), int(compiled)


def test_the_list_of_commands_loads_none_of_them() -> None:
    places = {
        f"slurm_watchdog.{name}"
        for name in ("cli.status", "cli.diagnose", "cli.run", "cli.client", "cli.munge_exchange")
    }
    assert started("--help")[0] & (EVERYWHERE | HELP | places) == set()


def test_status_loads_what_it_shows(tmp_path: Path) -> None:
    controller = FakeController(tmp_path / "c.sock")
    controller.answers["GET", "/v1/status"] = status(jobs=[job(job_id="4711")])
    try:
        loaded, _ = started("status", "--socket", str(controller.path))
    finally:
        controller.close()
    assert loaded & (EVERYWHERE | JUDGES | {"slurm_watchdog.cli.munge_exchange", "subprocess"}) == set()


def test_a_short_log_needs_few_of_the_expressions_and_no_detector(tmp_path: Path) -> None:
    log = tmp_path / "one.log"
    log.write_text("step 1 loss 2.0\n")
    loaded, compiled = started("scan-log", str(log))
    assert loaded & (EVERYWHERE | JUDGES | {"http.client", "subprocess"}) == set()
    assert compiled < MOST_COMPILED


def test_a_late_expression_is_compiled_at_its_first_use() -> None:
    late = late_regex(r"step (?P<step>\d+)")
    assert isinstance(late, LateRegex) and "search" not in vars(late)
    match = late.search("at step 7")
    assert match is not None and match["step"] == "7" and late.groupindex == {"step": 1}
    assert "search" in vars(late) and late.pattern == r"step (?P<step>\d+)"
