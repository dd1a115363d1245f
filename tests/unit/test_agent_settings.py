"""The agent's settings: one schema, of which the agent gets plain values, and none of the memory that checking it takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from watchdog.agent.settings import (
    AgentSettings,
    SecuritySettings,
    read_settings,
    settings_of,
    split_listen,
    write_settings,
)
from watchdog.config import Agent, parse_config

TEXT = """
agent: {interval: 250ms, spool_bytes: 1MiB, log_patterns: ['{workdir}/a.log'], metrics_listen: '[::1]:9766', mount_probe_write: [/x]}
security: {token_file: /etc/token}
"""


def test_every_field_of_the_configuration_is_in_the_settings() -> None:
    assert set(AgentSettings.__struct_fields__) == set(Agent.model_fields)


def test_settings_are_the_values_of_the_checked_configuration() -> None:
    config = parse_config(TEXT)
    settings = settings_of(config)
    for name in AgentSettings.__struct_fields__:
        value, expected = getattr(settings.agent, name), getattr(config.agent, name)
        assert value == (tuple(expected) if isinstance(expected, list) else expected)
    assert (settings.agent.interval, settings.agent.spool_bytes) == (0.25, 1024**2)
    assert settings.security == SecuritySettings(token_file="/etc/token", mode="token")


def test_settings_survive_being_handed_over() -> None:
    settings = settings_of(parse_config(TEXT))
    assert read_settings(write_settings(settings)) == settings


def test_an_address_is_split() -> None:
    assert split_listen("127.0.0.1:9766") == ("127.0.0.1", 9766)
    assert split_listen("[::1]:9766") == ("::1", 9766)


def test_the_agent_loads_nothing_that_only_checking_or_serving_needs() -> None:
    heavy = {
        "pydantic", "yaml", "click", "rich", "asyncio", "prometheus_client", "http.client", "email", "ssl", "pynvml", "json",
        "typing_extensions", "statistics", "random",
    }  # fmt: skip
    program = "import sys, watchdog.agent.__main__, watchdog.agent.sender, watchdog.agent.metrics; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert not heavy & set(done.stdout.split())


def test_the_command_becomes_the_agent_and_keeps_its_pid(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("agent: {node_name: n7, interval: 200ms, metrics_listen: '', state_directory: ''}\n")
    command = [
        sys.executable,
        "-c",
        "from watchdog.cli.main import main; main()",
        "agent",
        "--config",
        str(file),
    ]
    with subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as agent:
        assert agent.stdout is not None
        try:
            report = json.loads(agent.stdout.readline())
            assert report["node"] == "n7"
            assert Path(f"/proc/{agent.pid}/comm").read_text() == "slurm-watchdog\n"
            assert b"watchdog.agent" in Path(f"/proc/{agent.pid}/cmdline").read_bytes()
        finally:
            agent.terminate()
        assert agent.wait(10) == 0
