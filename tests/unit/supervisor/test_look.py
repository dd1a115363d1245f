"""What a node says of itself, by the real program: directories, the site's command, what hangs, an agent's metrics."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from slurm_watchdog.supervisor import look
from slurm_watchdog.supervisor.look import XID, listeners
from slurm_watchdog.supervisor.preflight import NodeLook, parse_look


def looked(*directories: str, command: str = "", **environ: str) -> NodeLook:
    question: dict[str, Any] = {"directories": directories, "command": command}
    done = subprocess.run(
        [sys.executable, "-m", "slurm_watchdog.supervisor.look", json.dumps(question)], capture_output=True, text=True,
        check=True, timeout=60, env={**os.environ, "SLURMD_NODENAME": "n1", **environ},
    )  # fmt: skip
    (look,) = (each for line in done.stdout.splitlines() if (each := parse_look(line)) is not None)
    return look


def test_a_directory_that_answers_and_one_that_is_gone(tmp_path: Path) -> None:
    look = looked(str(tmp_path), str(tmp_path / "gone"), SLURM_GPUS_ON_NODE="8")
    assert look.directories[str(tmp_path)] == ""
    assert look.directories[str(tmp_path / "gone")] == "No such file or directory"
    assert (look.node, look.expected, look.late, list(tmp_path.iterdir())) == ("n1", 8, (), [])


def test_the_sites_command_says_its_code_and_last_line_and_one_that_hangs_is_ended() -> None:
    assert looked(command="echo a; echo no cable >&2; exit 3").command == (3, "no cable")
    assert looked(command="sleep 600").command == (124, "no end within 3.5 s")


def test_xids_are_read_from_the_agents_metrics_and_those_that_were_not_seen_are_none() -> None:
    text = (
        b"# TYPE slurm_watchdog_gpu_xid_total counter\n"
        b'slurm_watchdog_gpu_xid_total{gpu="0",gpu_uuid="GPU-1",xid="79"} 2.0\n'
        b'slurm_watchdog_gpu_xid_total{gpu="1",gpu_uuid="GPU-2",xid="48"} 0.0\n'
        b'slurm_watchdog_other_total{xid="94"} 1\n'
    )
    assert XID.findall(text) == [b"79"]


def test_an_agent_is_found_at_every_address_that_it_may_listen_at() -> None:
    with (
        socket.create_server(("127.0.0.2", 0)) as own,
        socket.create_server(("", 0)) as everywhere,
    ):
        tcp = Path("/proc/net/tcp").read_text()
        uid = os.geteuid()
        assert listeners(tcp, own.getsockname()[1]) == [("127.0.0.2", uid)]
        assert listeners(tcp, everywhere.getsockname()[1]) == [("127.0.0.1", uid)]
        assert listeners(tcp, 1) == []
    row = (
        "head\n 0: {}:2626 00000000000000000000000000000000:0000 0A 00000000:00000000 00:00000000 00000000 105 0 1 1\n"
    )
    one = f"{int.from_bytes(bytes([0, 0, 0, 1]), sys.byteorder):08X}"
    assert listeners(row.format("0" * 24 + one), 9766) == [("::1", 105)]
    assert listeners(row.format("0" * 32), 9766) == [("::1", 105)]


@pytest.mark.parametrize(("first_user", "xids"), [(os.geteuid() + 1, [79]), (os.geteuid(), [])])
def test_xids_are_asked_for_at_every_address_of_a_service_and_at_none_of_a_user(
    first_user: int, xids: list[int]
) -> None:
    answers: dict[str, object] = {"xids": []}
    with (
        socket.create_server(("127.0.0.3", 0)) as silent,
        socket.create_server(("127.0.0.2", silent.getsockname()[1])) as server,
    ):
        for each, answer in ((silent, b""), (server, LINE)):
            threading.Thread(target=_serve, args=(each, answer), daemon=True).start()
        look._ask_agent(answers, silent.getsockname()[1], first_user)
    assert answers["xids"] == xids


LINE = b'slurm_watchdog_gpu_xid_total{gpu="0",xid="79"} 2\n'


def _serve(server: socket.socket, answer: bytes) -> None:
    server.settimeout(5)
    with contextlib.suppress(OSError):
        connection, _ = server.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(answer)
