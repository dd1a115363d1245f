"""The agent's settings: one schema, of which the agent gets plain values, and none of the memory that
checking it takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from slurm_watchdog.agent.children.become_user import NEEDED
from slurm_watchdog.agent.service import run_agent
from slurm_watchdog.agent.settings import Settings, read_settings, settings_of, write_settings
from slurm_watchdog.cli.main import main
from slurm_watchdog.config.agent import Security
from slurm_watchdog.config.loading import parse_config
from tests import agent_place
from tests.rig.rights import CHECKOUT, as_user

TEXT = """
agent: {interval: 250ms, orphan_grace: 1min, log_patterns: ['{workdir}/a.log'], metrics_directory: /run/metrics, mount_probe_write: [/x]}
security: {tls_directory: /etc/tls}
"""


def test_settings_are_the_values_of_the_checked_configuration() -> None:
    config = parse_config(TEXT)
    settings = settings_of(config)
    assert settings.agent == config.agent
    assert (settings.agent.interval, settings.agent.orphan_grace) == (0.25, 60.0)
    assert settings.security == Security(mode="tls", tls_directory="/etc/tls")


def test_what_concerns_no_agent_does_not_make_it_start_again() -> None:
    more = "security: {tls_directory: /etc/tls, operators: [ann], may: {pause: [ann]}}"
    assert settings_of(parse_config(TEXT)) == settings_of(
        parse_config(TEXT.replace("security: {tls_directory: /etc/tls}", more))
    )


def test_settings_of_an_agent_of_a_release_with_more_options_are_read() -> None:
    settings = settings_of(parse_config(TEXT))
    text = msgspec.json.encode(settings).replace(b'"agent":{', b'"agent":{"spool_age":600.0,')
    assert msgspec.json.decode(text, type=Settings) == settings


def test_settings_survive_being_handed_over() -> None:
    settings = settings_of(parse_config(TEXT))
    assert read_settings(write_settings(settings)) == settings


def test_the_agent_loads_nothing_that_only_checking_or_serving_needs() -> None:
    heavy = {
        "yaml", "click", "jinja2", "asyncio", "prometheus_client", "http.client", "email", "ssl", "pynvml", "json",
        "typing_extensions", "statistics", "random",
    }  # fmt: skip
    modules = ("__main__", "delivery.sender", "metrics")
    program = f"import sys, {', '.join('slurm_watchdog.agent.' + each for each in modules)}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert not heavy & set(done.stdout.split())


def test_the_command_becomes_the_agent_and_keeps_its_pid(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    url = "controller_url: 'http://127.0.0.1:1'"
    file.write_text(f"agent: {{{url}, node_name: n7, interval: 200ms, metrics_directory: '', state_directory: ''}}\n")
    command = [
        sys.executable,
        "-c",
        "from slurm_watchdog.cli.main import main; main()",
        "agent",
        "--config",
        str(file),
    ]
    with subprocess.Popen([*command, "--once", "--json"], stdout=subprocess.PIPE) as agent:
        assert agent.stdout is not None
        while b"slurm_watchdog.agent" not in Path(f"/proc/{agent.pid}/cmdline").read_bytes():
            assert agent.poll() is None, "it has ended before it became the agent"
        report = json.loads(agent.stdout.read())
        assert report["node"] == "n7"
    assert agent.returncode == 0


def test_an_agent_without_a_controller_ends_with_2_and_says_what_to_set(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("mode: observe\n")  # as packages install it
    done = CliRunner().invoke(main, ["agent", "--config", str(file)])
    assert done.exit_code == 2
    assert "controller is not set: " in done.output and "http://mgmt1:9765" in done.output
    assert run_agent(settings_of(parse_config(file.read_text()))) == 2, "nor by itself"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, as whom no agent is to run")
def test_a_daemon_of_roots_ends_at_once_and_says_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "agent: {controller_url: 'http://mgmt1:9765', node_name: n7, metrics_directory: '', state_directory: ''}\n"
    )
    command = [
        sys.executable,
        "-c",
        "from slurm_watchdog.cli.main import main; main()",
        "agent",
        "--config",
        str(file),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "this process is root's" in done.stderr and "start it by its unit" in done.stderr


@pytest.mark.skipif(agent_place.why_impossible() is not None, reason="needs root and setpriv")
@pytest.mark.parametrize(
    ("more", "said"), [((), "None"), (("dac_override",), "more capabilities"), (("chown",), "0x1")]
)
def test_a_process_with_more_rights_than_an_agent_needs_is_no_agent(more: tuple[str, ...], said: str) -> None:
    program = f"import sys; sys.path.insert(0, {str(CHECKOUT / 'watchdog')!r})\nfrom slurm_watchdog.agent.children.become_user import why_too_mighty\nprint(why_too_mighty())"
    # dac_read_search, to read our code; an agent has no use for it.
    program = program.replace("print(", "become_user.NEEDED[''] = 2\nprint(").replace(
        "\nfrom", "\nfrom slurm_watchdog.agent.children import become_user\nfrom"
    )
    held = [*(name.removeprefix("CAP_").lower() for name in NEEDED), "dac_read_search", *more]
    words = as_user(64990, held, [sys.executable, "-c", program])
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert said in done.stdout
