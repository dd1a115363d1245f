"""SIGHUP at the controller: the file is taken whole, or the configuration before stays whole, and the log
says which."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from slurm_watchdog.base.descriptors import why_not_address
from slurm_watchdog.base.python310 import run_code
from slurm_watchdog.config.loading import load_config, parse_config
from slurm_watchdog.config.schema import Config
from slurm_watchdog.controller.standby import reload_config, why_not
from tests.builders.identity_files import controller_files, make_authority


def test_a_file_with_errors_is_not_taken_and_each_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("mode: obey\nagent:\n  intervall: 5s\n")
    assert not reload_config(str(file), Config())
    assert f"{file}:1: mode: must be" in caplog.text
    assert "did you mean 'interval'?" in caplog.text
    assert "the one before stays, whole" in caplog.text
    assert not reload_config(str(tmp_path / "none"), Config())


def test_a_file_that_says_the_same_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("mode: observe\n")
    with caplog.at_level(logging.WARNING):
        assert not reload_config(str(file), Config())
    assert "is unchanged" in caplog.text
    file.write_text("mode: act\n")
    assert reload_config(str(file), Config())


def test_a_knowledge_file_that_changed_is_taken_and_a_broken_one_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, row = tmp_path / "config.yaml", tmp_path / "a.conf"
    tmp_path.chmod(0o755)
    file.write_text(f"knowledge: {{directory: {tmp_path}}}\n")
    running = load_config(str(file))
    row.write_text("[xid 901]\nname: acme\nmeans: A number of this site\nblame: driver\nseverity: loud\nsource: ACME\n")
    assert not reload_config(str(file), running)
    assert f"{row}:1: [xid 901]: `severity` is one of info, warning, error, critical, not 'loud'" in caplog.text
    row.write_text(row.read_text().replace("loud", "warning"))
    assert reload_config(str(file), running)


def test_what_would_keep_it_from_starting_is_found_before(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("short")
    token.chmod(0o600)
    for file in (token, tmp_path / "none"):
        assert len(why_not(parse_config(f"security: {{page_token_file: {file}}}\n"), Config())) == 1
    tls = parse_config(f"security: {{tls_directory: {tmp_path}}}\nagent: {{controller_url: 'https://m:1'}}\n")
    assert why_not(tls, Config())[0].startswith("security.tls_directory: ")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        address = f"127.0.0.1:{port}"
        config = parse_config(f"controller: {{listen: '{address}'}}\n")
        assert "in use" in why_not(config, Config())[0]
        assert why_not(config, config) == []  # its own port is its own
    assert why_not_address("127.0.0.1", port) is None
    assert "cannot be listened on" in str(why_not_address("192.0.2.1", 80))


def test_a_controller_goes_on_with_the_old_file_and_starts_anew_with_the_new_one(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    file, log = tmp_path / "config.yaml", tmp_path / "log"
    tls = controller_files(make_authority(tmp_path / "ca", time.time())).directory

    def text(mode: str) -> str:
        controller = (
            f"{{listen: '127.0.0.1:{port}', page_listen: '', socket: {tmp_path}/s, state_directory: {tmp_path}/state}}"
        )
        security = f"{{tls_directory: {tls}}}"
        return f"mode: {mode}\ncontroller: {controller}\nsecurity: {security}\nslurm: {{client: command_line, bin_directory: {tmp_path}}}\n"

    file.write_text(text("observe"))
    program = "from slurm_watchdog.cli.main import main; main()"
    with log.open("wb") as out:
        process = subprocess.Popen([*run_code(program), "controller", "--config", str(file)], stdout=out, stderr=out)
    try:
        wait_for(log, "mode observe", process)
        file.write_text(text("obey"))
        os.kill(process.pid, signal.SIGHUP)
        wait_for(log, "the one before stays", process)
        file.write_text(text("act"))
        os.kill(process.pid, signal.SIGHUP)
        wait_for(log, "mode act", process)
    finally:
        process.terminate()
        code = process.wait(60)
    assert code == 0
    assert log.read_text().count("mode observe") == 1


def wait_for(log: Path, words: str, process: subprocess.Popen[bytes]) -> None:
    """Until the log has `words`; fails with all of it when the process ends or a minute is over."""
    deadline = time.monotonic() + 60
    while words not in log.read_text():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
