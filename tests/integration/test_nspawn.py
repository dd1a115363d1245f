"""The `.deb` on a Debian that was just installed: services under a real systemd, killed, hung, reloaded,
upgraded, removed."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.integration import shipped_attacks
from tests.integration.nspawn import ADDRESS, Machine, in_memory, make_image, need_tools
from tools.packaging.build import VERSION, make
from tools.packaging.layout import units

NEXT = f"{VERSION}+1"
CONTROLLER, AGENT, COURIER = (f"slurm-watchdog-{name}.service" for name in ("controller", "agent", "courier"))
SERVICES = (CONTROLLER, AGENT, COURIER)
CONFIG = "/etc/slurm-watchdog/config.yaml"
DEADLINE_S = 120.0
pytestmark = pytest.mark.timeout(900)

TRAINER = """
import itertools, os, time
for step in itertools.count(1):
    print(f"iteration {step}/ 90000 | loss 2.5", flush=True)
    time.sleep(0.5)
"""
JOB = """#!/bin/bash
#SBATCH --job-name=m4 --output=/home/ann/train.log
srun python3 /home/ann/train.py
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Machine, str, str]]:
    """(a machine that runs, its paths of this version's packages, the directory of a later one's)."""
    need_tools()
    folder = tmp_path_factory.mktemp("nspawn")
    image = folder / "debian"
    with in_memory(folder):
        with ThreadPoolExecutor() as side_by_side:
            packing = side_by_side.submit(make, ["deb"], folder, [VERSION, NEXT], fast=True)
            make_image(image)
            packages = packing.result()
        (image / "srv/later").mkdir()
        for number, package in enumerate(packages):
            shutil.copy(package, image / ("srv" if number < 2 else "srv/later"))
        with Machine(image) as machine:
            for commands in of_the_page()[:-1]:
                machine.shell(f"set -e\n{commands}", timeout_s=280)
            yield machine, "/srv/slurm-watchdog*.deb", "/srv/later"


PAGE = (Path(__file__).parents[2] / "docs/install.md").read_text()


def of_the_page() -> list[str]:
    """What the page tells an administrator to type, the look at the result last; for this machine, which is
    node and management node."""
    blocks = re.findall(r"^<!-- tried -->\n```\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return [block.replace("mgmt1", "wd1").replace("10.0.0.1", ADDRESS) for block in blocks]


def lines_below(heading: str) -> list[str]:
    """The commands of the first block below a heading of the page, without their comments."""
    block = PAGE.partition(f"\n## {heading}\n")[2].split("```")[1]
    return [line.partition("  #")[0].strip() for line in block.strip().splitlines()]


@pytest.fixture
def machine(made: tuple[Machine, str, str]) -> Machine:
    """The machine with this version installed and its services running, as an administrator leaves it who has
    followed the page."""
    machine, package, _ = made
    if version(machine) != VERSION:
        machine.shell(f"dpkg --install {package}", timeout_s=280)
    machine.run("systemctl", "enable", CONTROLLER, AGENT)
    machine.run("systemctl", "start", "--no-block", CONTROLLER, AGENT)
    wait_for_report(machine)
    return machine


def version(machine: Machine) -> str | None:
    """Of the package that is installed; None: it is not."""
    done = machine.run("dpkg-query", "-W", "-f", "${db:Status-Status} ${Version}", "slurm-watchdog", check=False)
    status, _, number = done.stdout.partition(" ")
    return number if status == "installed" else None


def status(machine: Machine) -> dict[str, Any]:
    """`slurm-watchdog status --json`; empty if the controller does not answer."""
    said = machine.run("slurm-watchdog", "status", "--json", check=False).stdout
    return json.loads(said) if said.startswith("{") else {}


def wait_for_report(machine: Machine) -> None:
    """Both services are active, and the agent's reports arrive."""
    for unit in SERVICES:
        machine.wait(
            lambda unit=unit: machine.show(unit, "ActiveState") == "active",
            DEADLINE_S,
            f"{unit} to be active",
        )
    reporting = lambda: "wd1" in status(machine).get("nodes", {}).get("reporting", [])  # noqa: E731
    machine.wait(reporting, DEADLINE_S, "the agent's report")


def main_pid(machine: Machine, unit: str) -> int:
    return int(machine.show(unit, "MainPID"))


def came_back(machine: Machine, unit: str, before: int) -> bool:
    """Whether the unit runs again, as another process."""
    return machine.show(unit, "ActiveState") == "active" and main_pid(machine, unit) not in (0, before)


def test_what_the_page_looks_at_in_the_end_answers_and_sees_the_node(machine: Machine) -> None:
    status_line, *doctors = of_the_page()[-1].splitlines()
    assert "1 node reporting" in machine.shell(status_line, check=False)
    for line in doctors:  # 0 to 2: it says what is missing; 3: it could not see it
        done = machine.run("sh", "-c", line, check=False)
        assert done.returncode in (0, 1, 2), f"{line}: {done.stdout}{done.stderr}"


def test_the_services_watch_a_real_job(machine: Machine) -> None:
    # All were started at once, and none stood in another's way.
    assert {machine.show(unit, "NRestarts") for unit in SERVICES} == {"0"}, machine.journal(CONTROLLER)
    machine.file("/home/ann/train.py").write_text(TRAINER)
    machine.file("/home/ann/job.sh").write_text(JOB)
    job = machine.run("sbatch", "--parsable", "job.sh", user="ann").stdout.strip()
    try:

        def steps() -> bool:
            jobs = {each["job_id"]: each for each in status(machine).get("jobs", [])}
            return (jobs.get(job, {}).get("step") or 0) > 3

        machine.wait(steps, DEADLINE_S, "a step of the job in `slurm-watchdog status`")
        shown = machine.run("slurm-watchdog", "status", check=False).stdout
        assert job in shown and "ann" in shown, shown
        # Another user's stack, by a child that has become that user.
        stacks = lambda: "train.py" in machine.run("slurm-watchdog", "diagnose", job, check=False).stdout  # noqa: E731
        machine.wait(stacks, DEADLINE_S, "the rank's stack in `slurm-watchdog diagnose`")
    finally:
        machine.run("scancel", job)


@pytest.fixture
def eve(machine: Machine) -> str:
    """Another ordinary user, who is in no group of ours."""
    if machine.run("id", "eve", check=False).returncode != 0:
        machine.run("useradd", "-m", "eve")
    return "eve"


@pytest.mark.thorough
@pytest.mark.parametrize("name", shipped_attacks.ROWS)
def test_a_user_attacks_what_is_installed_in_vain_and_not_without_its_defence(
    machine: Machine, eve: str, name: str
) -> None:
    row = shipped_attacks.ROWS[name]

    def attack() -> bool:
        done = machine.run("sh", "-c", shipped_attacks.PRELUDE + row.attack, check=False, user=row.by)
        said.append(done.stdout + done.stderr)
        return done.returncode == 0

    def as_root(text: str) -> None:
        machine.shell(f"{shipped_attacks.PRELUDE}set -e\n{text}")

    said: list[str] = []
    as_root(row.given)
    try:
        assert not attack(), said
        as_root(row.weaken)
        assert attack(), said
    finally:
        as_root(row.mend)
    assert not attack(), said


@pytest.mark.thorough
def test_a_users_process_counts_for_nobody_elses_job_and_at_the_controllers_port_he_gets_no_report(
    machine: Machine, eve: str
) -> None:
    prelude = shipped_attacks.PRELUDE
    machine.file("/home/eve/squat.py").write_text(shipped_attacks.SQUATTER)
    heard = machine.file("/home/eve/heard")
    machine.shell(prelude + "configure 's/^agent:/&\\n  interval: 1s/' agent")
    job = machine.run(
        "sbatch", "--parsable", "--wrap", "exec python3 -c 'import time; time.sleep(600)'", user="ann"
    ).stdout.strip()
    machine.shell(
        f"SLURM_JOB_ID={job} SLURM_PROCID=7 SLURM_NTASKS=9 setpriv --reuid=eve --regid=eve --clear-groups setsid "
        "python3 -c 'import time; time.sleep(600)' > /dev/null 2>&1 &"
    )

    def ranks() -> int:
        return next((each["ranks"] for each in status(machine).get("jobs", []) if each["job_id"] == job), 0)

    def port_is_taken(sign: bytes, what: str) -> None:
        """Eve has it as soon as the controller is away for a moment, until the agent has sent `sign` there."""
        heard.unlink(missing_ok=True)
        machine.run("systemctl", "stop", CONTROLLER, timeout_s=200)
        machine.shell(
            "setpriv --reuid=eve --regid=eve --clear-groups setsid python3 /home/eve/squat.py > /dev/null 2>&1 &"
        )
        machine.wait(lambda: heard.exists() and sign in heard.read_bytes(), DEADLINE_S, what)
        machine.shell("pkill -u eve -f squat.py")
        machine.run("systemctl", "start", CONTROLLER, timeout_s=200)

    try:
        machine.wait(lambda: ranks() >= 1, DEADLINE_S, "the rank of the job's owner")
        assert ranks() == 1
        port_is_taken(b"slurm-watchdog", "the agent to call")
        assert b"boot_id" not in heard.read_bytes()
        machine.wait(lambda: ranks() >= 1, DEADLINE_S, "the next report")
        assert ranks() == 1
        machine.shell(f"{prelude}set -e\n{shipped_attacks.CREDULOUS}; systemctl restart {CONTROLLER} {AGENT}")
        machine.wait(
            lambda: ranks() == 2,
            DEADLINE_S,
            "a rank of Eve's, with an agent and a controller that believe her",
        )
        port_is_taken(b"boot_id", "a report, of an agent that believes anybody")
    finally:
        machine.run("scancel", job)
        machine.shell(
            f"{prelude}pkill -u eve; {shipped_attacks.WARY}; no_configure agent; systemctl restart {CONTROLLER}",
            check=False,
        )
    wait_for_report(machine)


def test_a_service_that_is_killed_is_started_again(machine: Machine) -> None:
    before = {unit: main_pid(machine, unit) for unit in SERVICES}
    for pid in before.values():
        machine.run("kill", "-KILL", str(pid))
    for unit, pid in before.items():
        machine.wait(lambda unit=unit, pid=pid: came_back(machine, unit, pid), DEADLINE_S, f"{unit} to come back")
    wait_for_report(machine)


@pytest.mark.thorough
def test_a_service_that_hangs_is_ended_by_systemd_and_started_again(machine: Machine) -> None:
    # Shorter than shipped (30 and 60 s), and longer than a slow machine takes for a tick.
    for unit in SERVICES:
        machine.shell(
            f"mkdir -p /run/systemd/system/{unit}.d; printf '[Service]\\nWatchdogSec=20s\\n' > /run/systemd/system/{unit}.d/t.conf"
        )
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "restart", *SERVICES, timeout_s=200)
    wait_for_report(machine)
    before = {unit: main_pid(machine, unit) for unit in SERVICES}
    for pid in before.values():
        machine.run("kill", "-STOP", str(pid))
    for unit, pid in before.items():
        machine.wait(
            lambda unit=unit, pid=pid: came_back(machine, unit, pid),
            DEADLINE_S,
            f"{unit} to be ended and started again",
        )
        assert "Watchdog timeout" in machine.journal(unit)
    machine.shell("rm -r /run/systemd/system/slurm-watchdog-*.d; systemctl daemon-reload")
    wait_for_report(machine)


def test_a_configuration_with_an_error_is_refused_whole_and_a_good_one_is_taken(machine: Machine) -> None:
    before = main_pid(machine, CONTROLLER)
    running = machine.file(CONFIG).read_text()
    try:
        machine.file(CONFIG).write_text("restart: all\ncluster_name: other\nagent:\n  intervall: 5s\n")
        refused = machine.run("systemctl", "reload", CONTROLLER, check=False)
        assert refused.returncode != 0  # who types it sees that it failed, and the log says why
        assert "did you mean 'interval'?" in machine.journal(CONTROLLER)
        machine.run("kill", "-HUP", str(before))  # and who signals it himself
        kept = lambda: "the one before stays, whole" in machine.journal(CONTROLLER)  # noqa: E731
        machine.wait(kept, DEADLINE_S, "the controller's word about it")
        assert status(machine)["mode"] == "observe"
        machine.file(CONFIG).write_text(re.sub("(?m)^(mode|restart):.*$", "", running) + "restart: all\n")
        machine.run("systemctl", "reload", CONTROLLER)
        machine.wait(lambda: status(machine).get("mode") == "act", DEADLINE_S, "the new mode")
        assert main_pid(machine, CONTROLLER) == before
    finally:
        machine.file(CONFIG).write_text(running)
        machine.run("systemctl", "restart", CONTROLLER, timeout_s=200)
    wait_for_report(machine)


@pytest.mark.thorough
def test_the_agent_takes_a_configuration_whole_or_not_at_all_as_the_same_process(machine: Machine) -> None:
    before = main_pid(machine, AGENT)
    running = machine.file(CONFIG).read_text()
    try:
        machine.file(CONFIG).write_text("agent:\n  intervall: 5s\n")
        assert machine.run("systemctl", "reload", AGENT, check=False).returncode != 0
        machine.run("kill", "-HUP", str(before))
        kept = lambda: "the one before stays, whole" in machine.journal(AGENT)  # noqa: E731
        machine.wait(kept, DEADLINE_S, "the agent's word about it")
        machine.file(CONFIG).write_text(running.replace("expert:\n", "expert:\n  agent: {interval: 3s}\n"))
        machine.run("systemctl", "reload", AGENT)
        taken = lambda: "every 3 s" in machine.journal(AGENT)  # noqa: E731
        machine.wait(taken, DEADLINE_S, "the agent's second life")
        settled = lambda: machine.show(AGENT, "SubState") == "running"  # noqa: E731
        machine.wait(settled, DEADLINE_S, "the end of the reload, as systemd has it")
        assert main_pid(machine, AGENT) == before
    finally:
        machine.file(CONFIG).write_text(running)
        machine.run("systemctl", "restart", AGENT, timeout_s=200)
    wait_for_report(machine)


@pytest.mark.thorough
def test_what_can_not_start_like_this_is_told_and_not_tried_again_and_again(machine: Machine) -> None:
    running = machine.file(CONFIG).read_text()
    machine.run("systemctl", "stop", AGENT, CONTROLLER, timeout_s=200)
    try:
        machine.file(CONFIG).write_text("mode: obey\n")
        for unit, words in dict.fromkeys((AGENT, CONTROLLER), ":1: mode: must be").items():
            assert machine.run("systemctl", "start", unit, check=False).returncode != 0
            assert (machine.show(unit, "SubState"), machine.show(unit, "ExecMainStatus")) == ("failed", "2")
            assert words in machine.journal(unit)
    finally:
        machine.file(CONFIG).write_text(running)
    machine.run("systemctl", "start", CONTROLLER, AGENT, timeout_s=200)
    wait_for_report(machine)


def test_the_manual_page_and_the_completion_of_bash_are_there(machine: Machine) -> None:
    where = machine.run(
        "sh",
        "-c",
        "command -v man > /dev/null && man -w slurm-watchdog || echo /usr/share/man/man1/slurm-watchdog.1.gz",
    ).stdout.strip()
    assert "slurm\\-watchdog \\- " in machine.run("zcat", where).stdout
    words = (
        "COMP_WORDS=(slurm-watchdog pa); COMP_CWORD=1; _slurm_watchdog_completion slurm-watchdog; echo ${COMPREPLY[@]}"
    )
    text = f". /usr/share/bash-completion/completions/slurm-watchdog; {words}"
    assert machine.run("bash", "-c", text).stdout == "pause\n"


@pytest.mark.thorough
def test_an_upgrade_keeps_configuration_and_journal_and_brings_the_services_back(
    machine: Machine, made: tuple[Machine, str, str]
) -> None:
    pause, install, check, look, resume, install_on_nodes = lines_below("Upgrade")
    running = machine.file(CONFIG).read_text()
    machine.file(CONFIG).write_text(running + "# ours\n")
    machine.run("systemctl", "restart", CONTROLLER, timeout_s=200)
    wait_for_report(machine)
    machine.shell(pause)
    before = {unit: main_pid(machine, unit) for unit in (CONTROLLER, AGENT)}
    assert install == install_on_nodes.replace("slurm-watchdog_*", "slurm-watchdog*")
    machine.shell(f"cd {made[2]} && {install}", timeout_s=280)
    assert version(machine) == NEXT
    for unit, pid in before.items():
        machine.wait(lambda unit=unit, pid=pid: came_back(machine, unit, pid), DEADLINE_S, f"{unit} to come back")
    wait_for_report(machine)
    assert machine.file(CONFIG).read_text() == running + "# ours\n"
    machine.shell(check)
    assert "paused" in machine.shell(look, check=False)
    assert status(machine)["paused"]["reason"] == "upgrade"
    machine.shell(resume)


def test_a_removal_keeps_configuration_and_journal_and_a_purge_leaves_nothing(
    machine: Machine,
) -> None:
    pause, remove, purge = lines_below("Uninstall")
    machine.shell(f"{pause} && {remove}", timeout_s=280)
    assert version(machine) is None
    assert machine.file(CONFIG).exists()
    assert machine.file("/var/lib/slurm-watchdog/journal.sqlite").exists()
    machine.wait(lambda: ours(machine) == [], DEADLINE_S, "every process of ours to end")
    assert machine.show(CONTROLLER, "LoadState") == "not-found"
    machine.shell(purge, timeout_s=280)
    assert machine.shell("systemctl list-unit-files --no-legend 'slurm-watchdog*'", check=False).strip() == ""
    left = machine.shell(
        "find / -xdev -name '*slurm*watchdog*'; find /run -name '*slurm*watchdog*'", check=False
    ).splitlines()
    packages = re.compile(
        r"/srv/(later/)?slurm-watchdog.*\.deb|/run/host/.*|/run/systemd/propagate.*|/run/log/.*|/home/eve/planted/.*"
    )
    assert [path for path in left if not packages.fullmatch(path)] == []
    assert "slurm-watchdog" in machine.file("/etc/passwd").read_text()  # as Debian has it: files elsewhere may be its


def ours(machine: Machine) -> list[str]:
    """Processes in the machine that were started from the package."""
    return [line for line in machine.run("ps", "-eo", "args").stdout.splitlines() if "/opt/slurm-watchdog" in line]


def test_the_package_names_every_unit() -> None:
    assert set(SERVICES) <= set(units())
