"""What a command imports when it starts: `make bench ARGS=commands` measures what that costs."""

from __future__ import annotations

import subprocess
import sys

EVERYWHERE = {
    "aiohttp", "asyncio", "importlib.metadata", "logging", "prometheus_client", "sqlalchemy", "yaml", "uvloop",
}  # fmt: skip
HELP = {"msgspec", "jinja2", "http.client", "email", "subprocess", "pkgutil"}


def started(*arguments: str, forbidden: set[str]) -> set[str]:
    """Those of the modules `forbidden` that the command loads."""
    program = (
        "import atexit, sys; from slurm_watchdog.cli.main import main; "
        "atexit.register(lambda: print(*sys.modules, file=sys.stderr)); main(prog_name='slurm-watchdog')"
    )
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split()) & forbidden


def test_the_list_of_commands_loads_none_of_them() -> None:
    places = {f"slurm_watchdog.cli.{name}" for name in ("status", "diagnose", "run", "client", "munge_exchange")}
    assert started("--help", forbidden=EVERYWHERE | HELP | places) == set()
