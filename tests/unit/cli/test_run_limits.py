"""Limits of `run` that the job's environment sets, and the command line overrides."""

from __future__ import annotations

from pathlib import Path

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


JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}


@pytest.mark.parametrize(
    ("words", "environ", "comment", "said"),
    [
        ((), JOB, "watchdog: spares=7", "--spares=7 takes more than the 2 nodes"),
        ((), JOB, "watchdog: max_restarts=many", "max_restarts: 'many' is not a number from 0 to 1000"),
        (("--spares", "8"), JOB, "watchdog: spares=7", "--spares=8 takes more than the 2 nodes"),
        ((), {**JOB, "SLURM_WATCHDOG_SPARES": "8"}, "watchdog: spares=7", "--spares=8 takes more than the 2 nodes"),
        (("--spares", "8"), {}, "", "--nodes and --spares are for a batch script"),
    ],
)
def test_limits_of_the_comment_hold_where_neither_line_nor_environment_has_them(
    words: tuple[str, ...], environ: dict[str, str], comment: str, said: str, tmp_path: Path
) -> None:
    squeue = tmp_path / "squeue"
    squeue.write_text(f"#!/bin/sh\ncase $* in *--jobs=7*%k*) echo '{comment}';; esac\n")
    squeue.chmod(0o755)
    path = f"{tmp_path}:/usr/bin:/bin"
    result = CliRunner().invoke(run, [*words, "--", "true"], env={"SLURM_JOB_ID": None, **environ, "PATH": path})
    assert (result.exit_code, said in result.output) == (2, True), result.output


def test_spares_of_the_environment_are_for_jobs_and_refuse_no_other_command(tmp_path: Path) -> None:
    words = ["--config", str(tmp_path / "missing.yaml"), "--", "true"]
    result = CliRunner().invoke(run, words, env={"SLURM_JOB_ID": None, "SLURM_WATCHDOG_SPARES": "1"})
    assert result.exit_code != 0
    assert "missing.yaml" in result.output
