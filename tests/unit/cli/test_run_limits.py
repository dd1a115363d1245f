"""Limits of `run` that the job's environment sets, and the command line overrides."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from slurm_watchdog.cli.run import run


@pytest.mark.parametrize(
    ("words", "environ", "code", "said"),
    [
        ((), {"SLURM_WATCHDOG_MAX_RESTARTS": "many"}, 2, "'many' is not a valid integer"),
        (("--max-restarts", "1"), {"SLURM_WATCHDOG_MAX_RESTARTS": "many"}, 2, "There is no program"),
        ((), {"SLURM_WATCHDOG_SPARES": "-1"}, 2, "-1 is not in the range"),
        (("--spares", "0"), {"SLURM_WATCHDOG_SPARES": "-1"}, 2, "There is no program"),
    ],
)
def test_limits_of_the_environment_hold_where_the_command_line_has_none(
    words: tuple[str, ...], environ: dict[str, str], code: int, said: str
) -> None:
    result = CliRunner().invoke(run, [*words, "--", "no-such-program-anywhere"], env=environ)
    assert (result.exit_code, said in result.output) == (code, True), result.output
