"""Files for administrators fit the program: units start real commands, the task prolog names the configured path."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from slurm_watchdog.agent.children.become_user import NEEDED
from slurm_watchdog.agent.delivery.courier_link import SOCKET as COURIER_SOCKET
from slurm_watchdog.cli.main import main
from slurm_watchdog.config.loading import parse_config
from slurm_watchdog.config.schema import Config
from slurm_watchdog.model.kill_switch import KILL_SWITCH_BASE
from tests.rig.rights import CAPABILITIES

UNITS = ["slurm-watchdog-agent", "slurm-watchdog-controller", "slurm-watchdog-courier"]
EXPOSURE = {"slurm-watchdog-controller": 1.5, "slurm-watchdog-agent": 2.8, "slurm-watchdog-courier": 1.6}
"""As systemd-analyze counts it, from 0 (nothing) to 10: no more than this."""


def prolog(checkout: Path, **environment: str) -> str:
    done = subprocess.run(
        ["sh", str(checkout / "deploy/slurm/task_prolog.sh")],
        env=environment, capture_output=True, text=True, timeout=180, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    for place in re.findall(r"^export SLURM_WATCHDOG_HEARTBEAT=(/dev/shm/.*)/heartbeat$", done.stdout, re.MULTILINE):
        assert stat.S_IMODE(os.stat(place).st_mode) == 0o700
        os.rmdir(place)
    return done.stdout


def test_a_heartbeats_place_that_another_user_has_made_is_not_named(checkout: Path) -> None:
    place = Path("/dev/shm/slurm-watchdog-94711.0")
    place.symlink_to("/tmp")
    try:
        assert "HEARTBEAT" not in prolog(checkout, SLURM_JOB_ID="94711")
    finally:
        place.unlink()


def default_switch(job_id: str, restarts: int) -> str:
    path = Config().jobs.kill_switch.replace("{job_id}", job_id).replace("{restarts}", str(restarts))
    heartbeat = f"/dev/shm/slurm-watchdog-{job_id}.{restarts}/heartbeat"
    return f"export SLURM_WATCHDOG_KILL_SWITCH={path}\nexport SLURM_WATCHDOG_HEARTBEAT={heartbeat}\n"


@pytest.mark.parametrize(
    ("environment", "job_id", "restarts"),
    [
        ({"SLURM_JOB_ID": "7"}, "7", 0),
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}, "7", 2),
        ({"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}, "9", 0),
        ({"SLURM_JOB_ID": "7", "SLURM_WATCHDOG_KILL_SWITCH": "/run/slurm-watchdog/jobs/6.0/kill"}, "7", 0),
    ],
)
def test_the_task_prolog_names_the_path_that_the_configuration_has(
    checkout: Path, environment: dict[str, str], job_id: str, restarts: int
) -> None:
    assert prolog(checkout, **environment) == default_switch(job_id, restarts)


def test_a_path_of_the_users_own_is_kept_and_without_a_job_nothing_is_said(checkout: Path) -> None:
    assert prolog(checkout, SLURM_JOB_ID="7", SLURM_WATCHDOG_KILL_SWITCH="/shared/me/kill") == ""
    assert prolog(checkout) == ""


def test_a_task_prolog_that_records_collectives_sets_what_the_page_names_and_keeps_what_the_job_sets(
    checkout: Path, tmp_path: Path
) -> None:
    script = tmp_path / "deploy/slurm/task_prolog.sh"
    script.parent.mkdir(parents=True)
    text = (checkout / "deploy/slurm/task_prolog.sh").read_text()
    script.write_text(text.replace("\nRECORD_COLLECTIVES=no\n", "\nRECORD_COLLECTIVES=yes\n"))
    documented = re.findall(r"^export (\w+)=(\S+)", (checkout / "docs/evidence.md").read_text(), re.MULTILINE)
    wanted = {name: value.replace("${SLURM_JOB_ID}", "7") for name, value in documented if name.startswith("TORCH_")}
    said = dict(re.findall(r"^export (TORCH_\w+)=(.*)$", prolog(tmp_path, SLURM_JOB_ID="7"), re.MULTILINE))
    assert said == wanted and len(wanted) == 5
    own = prolog(tmp_path, SLURM_JOB_ID="7", TORCH_FR_BUFFER_SIZE="0", TORCH_NCCL_DEBUG_INFO_TEMP_FILE="/mine/fr_")
    assert set(re.findall(r"TORCH_\w+(?==)", own)) == wanted.keys() - {
        "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
    }  # fmt: skip


@pytest.mark.parametrize("unit", UNITS)
def test_a_unit_starts_a_command_that_exists(checkout: Path, unit: str) -> None:
    text = (checkout / "systemd" / f"{unit}.service").read_text()
    (line,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    program, command, *options = shlex.split(line)
    assert program == "/opt/slurm-watchdog/bin/slurm-watchdog"
    known = {name for option in main.commands[command].params for name in option.opts}
    assert {option for option in options if option.startswith("-")} <= known
    for setting in ("Type=notify", "WatchdogSec=", "Restart=always", "NoNewPrivileges=yes"):
        assert f"\n{setting}" in text


@pytest.mark.parametrize("unit", UNITS)
def test_systemd_understands_the_unit(checkout: Path, tmp_path: Path, unit: str) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    for each in (checkout / "systemd").glob("slurm-watchdog-*"):  # together: they name each other
        text = re.sub(r"^(Exec\w+)=\S+", r"\1=/bin/true", each.read_text(), flags=re.MULTILINE)
        users = r"^((?:Socket)?(?:User|Group))=slurm-watchdog(-\w+)?$"
        (tmp_path / each.name).write_text(re.sub(users, r"\1=root", text, flags=re.MULTILINE))
    file = tmp_path / f"{unit}.service"
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(file)],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    about_us = [line for line in done.stderr.splitlines() if unit in line]
    assert not about_us


@pytest.mark.parametrize("unit", UNITS)
def test_a_unit_leaves_little_open(checkout: Path, unit: str) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", str(checkout / "systemd" / f"{unit}.service")],
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    found = re.search(r"Overall exposure level for \S+: ([0-9.]+)", done.stdout)
    assert found is not None, done.stdout + done.stderr
    assert float(found[1]) <= EXPOSURE[unit]


def settings_of(checkout: Path, name: str) -> list[tuple[str, str]]:
    lines = (checkout / "systemd" / name).read_text().splitlines()
    return [(key, value) for line in lines if line[:1] not in ("#", "[", "") for key, _, value in [line.partition("=")]]


def test_the_agent_has_the_capabilities_that_are_tested_and_that_it_takes(checkout: Path) -> None:
    agent = dict(settings_of(checkout, "slurm-watchdog-agent.service"))
    held = set(agent["CapabilityBoundingSet"].split())
    assert held == {f"CAP_{each.upper()}" for each in CAPABILITIES} == set(NEEDED)
    assert agent["AmbientCapabilities"] == agent["CapabilityBoundingSet"]


def test_no_group_reads_what_the_controller_keeps_and_people_are_in_a_group_of_their_own(
    checkout: Path,
) -> None:
    controller = dict(settings_of(checkout, "slurm-watchdog-controller.service"))
    assert (controller["UMask"], controller["StateDirectoryMode"]) == ("0077", "0700")
    people = controller["SupplementaryGroups"]
    assert people == Config().controller.socket_group != controller["Group"]
    made = (checkout / "systemd/sysusers.d/slurm-watchdog.conf").read_text()
    assert f"\ng {people} -\n" in made
    assert not [line for line in made.splitlines() if line.startswith("m ")], "and nobody is put into it"
    for unit in UNITS:
        settings = dict(settings_of(checkout, f"{unit}.service"))
        assert (settings["LimitCORE"], settings["OOMPolicy"], settings["UMask"]) == ("0", "continue", "0077")


def test_users_socket_and_directories_fit_together(checkout: Path) -> None:
    users = re.findall(r"^u (\S+)", (checkout / "systemd/sysusers.d/slurm-watchdog.conf").read_text(), re.MULTILINE)
    for unit in UNITS:
        settings = dict(settings_of(checkout, f"{unit}.service"))
        assert settings["User"] == settings["Group"]
        assert settings["User"] in users
    agent = dict(settings_of(checkout, "slurm-watchdog-agent.service"))
    assert agent["Requires"] == "slurm-watchdog-courier.socket"
    sock = dict(settings_of(checkout, "slurm-watchdog-courier.socket"))
    assert (sock["ListenStream"], sock["SocketGroup"], sock["SocketMode"]) == (COURIER_SOCKET, agent["Group"], "0660")


def test_the_network_is_the_courier_s_alone_and_so_are_the_keys(checkout: Path) -> None:
    agent, courier = (settings_of(checkout, f"slurm-watchdog-{each}.service") for each in ("agent", "courier"))
    assert dict(agent)["RestrictAddressFamilies"] == "AF_UNIX" and dict(agent)["IPAddressDeny"] == "any"
    assert dict(courier)["RestrictAddressFamilies"] == "AF_UNIX AF_INET AF_INET6"
    assert dict(courier)["CapabilityBoundingSet"] == ""
    assert dict(courier)["User"] == Config().security.agent_user != dict(agent)["User"]
    assert "LoadCredential" not in dict(agent) and ("LoadCredential", "agent.key:slurm-watchdog.agent.key") in courier


def test_what_the_packages_make_for_switches_and_state_is_the_agent_s(checkout: Path) -> None:
    agent = dict(settings_of(checkout, "slurm-watchdog-agent.service"))
    made = [
        line.split()[1:5]
        for line in (checkout / "systemd/tmpfiles.d/slurm-watchdog.conf").read_text().splitlines()
        if line[:1] == "d"
    ]
    assert made[-1] == [KILL_SWITCH_BASE, "0755", agent["User"], agent["User"]]
    kept = [f"/run/{each}" for each in agent["RuntimeDirectory"].split()]
    assert kept == [Config().agent.state_directory, KILL_SWITCH_BASE]
    assert agent["RuntimeDirectoryPreserve"] == "yes"
    assert "StateDirectory" not in agent


@pytest.mark.parametrize("unit", ["slurm-watchdog-agent", "slurm-watchdog-courier"])
def test_no_unit_of_a_compute_node_makes_systemd_walk_into_mounts_that_may_hang(checkout: Path, unit: str) -> None:
    settings = settings_of(checkout, f"{unit}.service")
    names = {key for key, _ in settings}
    assert not names & {
        "ProtectHome",
        "ReadOnlyPaths",
        "InaccessiblePaths",
        "TemporaryFileSystem",
        "RootDirectory",
        "DynamicUser",
    }
    assert dict(settings).get("ProtectSystem") in (None, "full", "true", "yes")
    assert dict(settings)["MountFlags"] == "slave"


def test_a_path_among_the_credentials_is_where_systemd_puts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'security: {page_token_file: "${CREDENTIALS_DIRECTORY}/token"}'
    assert parse_config(text).security.page_token_file == "/run/credentials/token"  # by hand: nothing can be read there
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", "/run/credentials/slurm-watchdog-agent.service")
    token = parse_config(text).security.page_token_file
    assert token == "/run/credentials/slurm-watchdog-agent.service/token"
