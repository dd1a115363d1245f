"""The scripts that Slurm starts: they end well whatever they find, and ask Slurm for nothing that was not wanted."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

SLURM = Path(__file__).parents[3] / "deploy/slurm"
SCRIPTS = sorted(SLURM.glob("*.sh"))
FOUND = """CRITICAL: node n1: 2 findings.

CRITICAL: There are GPUs and NVML does not answer: no clock, no fault, no process of a GPU is seen.
  seen:  8 devices in /dev
  where: n1

WARNING: The clock is not synchronised.
"""


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """A directory with stand-ins for the commands that the scripts call; each writes down how it was called."""
    for name, answer in {
        "slurm-watchdog": "cat \"$DIRECTORY/found\"; exit \"$(cat \"$DIRECTORY/code\")\"",
        "sinfo": "echo \"${NODE_STATE:-idle}\"", "scontrol": "", "logger": "", "systemctl": "exit 0",
    }.items():  # fmt: skip
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\nprintf "%s\\n" "{name} $*" >>"$DIRECTORY/calls"\n{answer}\n')
        program.chmod(0o755)
    (tmp_path / "found").write_text(FOUND)
    (tmp_path / "code").write_text("2")
    return tmp_path


def run(script: str | Path, commands: Path, **environment: str) -> list[str]:
    """Runs a script to its end, which has to be good; gives the calls that it made."""
    path = script if isinstance(script, Path) else commands / "script.sh"
    if not isinstance(script, Path):  # this machine's own health check may be at work
        path.write_text((SLURM / script).read_text().replace("/run/slurm-watchdog-health", f"{commands}/health"))
    done = subprocess.run(
        ["sh", str(path)], capture_output=True, text=True, timeout=60, check=False,
        env={"PATH": f"{commands}:/usr/bin:/bin", "DIRECTORY": str(commands), "SLURMD_NODENAME": "n1", **environment},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    calls = commands / "calls"
    return calls.read_text().splitlines() if calls.exists() else []


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_valid_may_be_executed_and_is_named_in_the_lines_for_slurm_conf(script: Path) -> None:
    assert subprocess.run(["sh", "-n", str(script)], timeout=20).returncode == 0
    assert os.access(script, os.X_OK)
    assert f"/etc/slurm/slurm-watchdog-{script.stem.replace('_', '-')}.sh" in (SLURM / "slurm.conf.example").read_text()
    assert f"/etc/slurm/slurm-watchdog-{script.stem.replace('_', '-')}.sh" in script.read_text()


@pytest.mark.parametrize("script", ["prolog.sh", "epilog.sh", "task_prolog.sh"])
def test_what_runs_with_every_job_asks_slurm_nothing(script: str) -> None:
    code = "\n".join(line for line in (SLURM / script).read_text().splitlines() if not line.startswith("#"))
    assert not re.search(r"\b(scontrol|squeue|sinfo|sacct|scancel|sbatch)\b", code)


def test_a_health_check_tells_and_by_itself_drains_nothing(commands: Path) -> None:
    calls = run("health_check.sh", commands)
    assert calls[0] == "slurm-watchdog doctor --node --deadline 20s"
    assert calls[1].startswith("logger -t slurm-watchdog-health-check")
    assert "NVML does not answer" in calls[1]
    assert len(calls) == 2


def test_a_node_that_is_well_costs_one_look(commands: Path) -> None:
    (commands / "code").write_text("0")
    assert run("health_check.sh", commands, SLURM_WATCHDOG_DRAIN_ON="nvml") == [
        "slurm-watchdog doctor --node --deadline 20s"
    ]


def test_a_node_is_drained_for_what_was_asked_for_with_the_sentence_as_the_reason(commands: Path) -> None:
    calls = run("health_check.sh", commands, SLURM_WATCHDOG_DRAIN_ON="nvml")
    assert "slurm-watchdog doctor --node --deadline 9s --only nvml" in calls
    assert calls[-1] == (
        "scontrol update NodeName=n1 State=DRAIN Reason=health check: There are GPUs and NVML does not answer: no clock, no fault, "
        "no process of a GPU is seen."
    )


@pytest.mark.parametrize("code", ["1", "3"])
def test_a_node_that_could_not_be_seen_or_has_only_a_warning_is_not_drained(commands: Path, code: str) -> None:
    (commands / "code").write_text(code)
    calls = run("health_check.sh", commands, SLURM_WATCHDOG_DRAIN_ON="nvml")
    assert not [call for call in calls if call.startswith("scontrol")]


def test_a_configuration_that_is_refused_drains_no_node_and_is_logged(commands: Path) -> None:
    """Its code is 2, as that of something critical; it may be on every node at once."""
    (commands / "found").write_text("/etc/slurm-watchdog/config.yaml:3: agent.intervall: unknown key\n")
    calls = run("health_check.sh", commands, SLURM_WATCHDOG_DRAIN_ON="nvml")
    assert not [call for call in calls if call.startswith("scontrol")]
    assert "agent.intervall: unknown key" in calls[1]


def test_looks_that_do_not_end_are_not_heaped_up(commands: Path) -> None:
    with open(commands / "health-check.lock", "w") as before:
        fcntl.flock(before, fcntl.LOCK_EX)
        assert run("health_check.sh", commands) == [
            "logger -t slurm-watchdog-health-check -p daemon.warning -- the look before has not ended yet"
        ]
    assert run("health_check.sh", commands)[1] == "slurm-watchdog doctor --node --deadline 20s"


def test_without_a_path_of_its_own_it_finds_the_commands_that_are_beside_slurmd(commands: Path) -> None:
    """slurmd gives a health check no PATH."""
    text = (SLURM / "health_check.sh").read_text().replace("/run/slurm-watchdog-health", f"{commands}/health")
    script = commands / "check.sh"
    script.write_text(text.replace("/opt/slurm-watchdog/bin", str(commands)))
    slurmd = commands / "slurm" / "sbin" / "slurmd"
    slurmd.parent.mkdir(parents=True)
    shutil.copy(os.path.realpath("/bin/sh"), slurmd)
    (commands / "slurm" / "bin").mkdir()
    for name in ("sinfo", "scontrol"):
        (commands / name).rename(commands / "slurm" / "bin" / name)
    environment = {"DIRECTORY": str(commands), "SLURMD_NODENAME": "n1", "SLURM_WATCHDOG_DRAIN_ON": "nvml"}
    subprocess.run([str(slurmd), "-c", f"sh {script}; :"], env=environment, timeout=60, check=True, capture_output=True)
    assert "scontrol update NodeName=n1 State=DRAIN" in (commands / "calls").read_text()


def test_a_node_that_slurm_says_nothing_of_is_not_drained_and_that_is_said(commands: Path) -> None:
    (commands / "sinfo").write_text("#!/bin/sh\nexit 1\n")
    calls = run("health_check.sh", commands, SLURM_WATCHDOG_DRAIN_ON="nvml")
    assert calls[-1].endswith("n1 is not drained, for Slurm does not answer: There are GPUs and NVML does not answer: no clock, "
                              "no fault, no process of a GPU is seen.")  # fmt: skip


@pytest.mark.parametrize("state", ["drained", "draining", "down*", "drained*"])
def test_a_node_that_somebody_drained_keeps_its_reason(commands: Path, state: str) -> None:
    calls = run("health_check.sh", commands, SLURM_WATCHDOG_DRAIN_ON="nvml", NODE_STATE=state)
    assert not [call for call in calls if call.startswith("scontrol")]


def epilog_for(place: Path) -> Path:
    """The epilog for another directory than the node's own."""
    script = place / "epilog.sh"
    script.write_text((SLURM / "epilog.sh").read_text().replace("/run/slurm-watchdog/jobs", str(place / "jobs")))
    return script


def test_the_epilog_removes_the_kill_switches_of_its_job_and_of_no_other(commands: Path, tmp_path: Path) -> None:
    jobs = tmp_path / "jobs"
    for name in ("7.0", "7.1", "77.0"):
        (jobs / name).mkdir(parents=True)
        (jobs / name / "kill").write_text("{}")
    (jobs / "7.1" / "theirs").write_text("")
    (jobs / "7.2").symlink_to(jobs / "77.0")
    script = epilog_for(tmp_path)
    assert run(script, commands, SLURM_JOB_ID="7") == []
    assert sorted(str(path.relative_to(jobs)) for path in jobs.rglob("*")) == [
        "7.1",
        "7.1/theirs",
        "7.2",
        "77.0",
        "77.0/kill",
    ]
    for odd in ("", "../..", "*", "7 77"):
        run(script, commands, SLURM_JOB_ID=odd)
    assert (jobs / "77.0" / "kill").exists()
