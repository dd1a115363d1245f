"""The Ansible role as far as it can be judged without a machine: what it names is there. tests/integration
tries the package that it installs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ANSIBLE = Path(__file__).parents[3] / "deploy/ansible"
ROLE = ANSIBLE / "roles/slurm_watchdog"
FILES = sorted(ANSIBLE.rglob("*.yaml"))
KEYWORDS = {
    "name", "when", "vars", "loop", "loop_control", "register", "no_log", "notify", "delegate_to", "throttle", "changed_when", "check_mode", "environment",
}  # fmt: skip


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ANSIBLE)))
def test_a_file_of_the_role_is_yaml(path: Path) -> None:
    assert load(path), path


@pytest.mark.parametrize("path", sorted(ROLE.glob("tasks/*.yaml")), ids=lambda path: path.name)
def test_a_task_has_a_name_and_one_module_that_comes_with_ansible(path: Path) -> None:
    for task in load(path):
        (module,) = set(task) - KEYWORDS
        assert module.startswith("ansible.builtin."), f"{path.name}: {module}"
        assert task["name"]
        if module.endswith("include_tasks"):
            assert (ROLE / "tasks" / task[module]).exists()
        if module.endswith("template"):
            assert (ROLE / "templates" / task[module]["src"]).exists()
            assert "doctor --config %s" in task[module]["validate"]


def test_a_handler_that_is_notified_exists() -> None:
    known = {each["name"] for each in load(ROLE / "handlers/main.yaml")}
    wanted = {name for path in ROLE.glob("tasks/*.yaml") for task in load(path) for name in task.get("notify", [])}
    assert wanted == known


def test_what_holds_a_secret_is_not_logged() -> None:
    for path in ROLE.glob("tasks/*.yaml"):
        for task in load(path):
            text = yaml.safe_dump(task)
            if "copy" in text and "content" in text:
                assert task.get("no_log") is True, task["name"]


def test_every_variable_of_the_page_has_a_default_and_every_one_that_is_used_is_set() -> None:
    defaults = set(load(ROLE / "defaults/main.yaml"))
    page = set(re.findall(r"`(slurm_watchdog_\w+)`", (ANSIBLE / "README.md").read_text()))
    groups = {"slurm_watchdog_controller", "slurm_watchdog_agents", "slurm_watchdog_serial"}
    assert page - groups <= defaults
    text = "\n".join(path.read_text() for path in FILES if ROLE in path.parents)
    set_in_tasks = {
        "slurm_watchdog_base", "slurm_watchdog_users", "slurm_watchdog_admin_level",
        "slurm_watchdog_is_controller", "slurm_watchdog_is_agent", "slurm_watchdog_packages", "slurm_watchdog_installed",
    }  # fmt: skip
    assert set(re.findall(r"slurm_watchdog_\w+", text)) <= defaults | groups | set_in_tasks


def test_ansible_understands_the_playbook(tmp_path: Path) -> None:
    if shutil.which("ansible-playbook") is None:
        pytest.skip("ansible-playbook is not installed")
    done = subprocess.run(
        ["ansible-playbook", "--syntax-check", "-i", str(ANSIBLE / "inventory.example.yaml"), str(ANSIBLE / "site.yaml")],
        capture_output=True, text=True, timeout=120, env=os.environ | {"ANSIBLE_LOCAL_TEMP": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
