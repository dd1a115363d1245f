"""`slurm-watchdog test-nodes`: bounded jobs measure nodes and the links between them; a sentence names the bad one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

import click
from msgspec.structs import replace

from slurm_watchdog.cli import options
from slurm_watchdog.cli.client import Client, find_socket
from slurm_watchdog.cli.options import Answer, Asked, ClientError, command, warn
from slurm_watchdog.cli.terminal import show
from slurm_watchdog.config.schema import Config
from slurm_watchdog.model.incidents import Truth
from slurm_watchdog.model.node_events import TESTED_MARK
from slurm_watchdog.nodetest.conduct import Report, Terms, choose, conduct_jobs, events
from slurm_watchdog.nodetest.judge import NodeVerdict
from slurm_watchdog.slurm.client import SlurmRefused, SlurmUnavailable
from slurm_watchdog.slurm.pyslurm_child import user_name
from slurm_watchdog.slurm.pyslurm_client import make_client
from slurm_watchdog.standalone.own_runs import home_directory, state_home


@command(
    """
    nodes [NODES]…
    --idle  Only idle nodes: of those given, or of all.
    -p, --partition P  Nodes of this partition, in which the jobs are submitted.
    --drained-by-us  Nodes that slurm-watchdog drained; of NODES idle ones, as peers.
    --only PARTS  Only cpu, memory, disk, mount, gpu or network; several with commas.
    --seconds S<0.2..20>  Duration of each measurement. [default: 2]
    --local DIRECTORY…  A local disk to measure. [default: /tmp]
    --shared DIRECTORY…  A shared filesystem to measure.
    --at-once K<1..1000>=8  Jobs at a time.
    --wait TIME=10min  Maximum wait for free nodes.
    -A, --account A  Account of the test jobs.
    --reservation R  Reservation of the test jobs.
    --job J  removed: name the nodes, such as those of scontrol show job
    --directory DIR  ignored: each test is a salloc, which prints its output
    --interface IF  ignored: the way between nodes is that of their addresses; else see node_tests.program
    --no-second-look  ignored: what looks bad is measured twice
    --config F  Configuration with the section node_tests. [default: the site's, where it can be read]
    """,
    options.JSON,
)
def test_nodes(asked: Asked, **given: Any) -> Answer:
    """Measures nodes, and the network between pairs of them, by bounded jobs: exclusive, at low priority, never
    on a node where another job runs. Without arguments nothing is tested.

    A node is named if it is slower than nodes that are alike (four or more), than itself in earlier tests, or than
    the site accepts, in two measurements; a slow link names one of its nodes only if another link shows which.
    Root is not needed. Ctrl-C cancels the jobs, and so does the end of this program however it comes.

    Exit code 0 all nodes are well, 1 a node is named, 2 wrong usage, 3 none is named, and one could not be tested or
    compared.

    \b
    Examples:
      slurm-watchdog test-nodes --partition gpu --idle --shared /scratch
      slurm-watchdog test-nodes n7 n8 n[20-24] --only cpu,memory,network --json
    """
    try:
        report = asyncio.run(_test(asked, given))
    except (SlurmUnavailable, SlurmRefused, ValueError, OSError, TimeoutError) as error:
        warn(f"Nothing was tested: {str(error) or 'it did not end within an hour'}")
        sys.exit(options.EXIT_USAGE if isinstance(error, (ValueError, OSError)) else options.EXIT_UNKNOWN)
    except (KeyboardInterrupt, asyncio.CancelledError):
        warn("Interrupted: the test jobs are cancelled.")
        sys.exit(130)
    truths = {each.truth for each in report.verdicts}
    code = options.EXIT_UNKNOWN if Truth.UNKNOWN in truths and Truth.BAD not in truths else Truth.BAD in truths
    tell = partial(tell_controller, report, asked)
    return Answer(report, partial(show, "test_nodes", report=report), code, then=tell)


async def _test(asked: Asked, given: Mapping[str, Any]) -> Report:
    """What came of it. SIGINT and SIGTERM cancel it, and with it its jobs."""
    path = asked.config or options.readable_config()
    config = options.load_or_exit(path, with_knowledge=False) if path else Config()
    if not any(given[name] for name in ("nodes", "idle", "partition", "drained_by_us")):
        raise click.UsageError("name the nodes, or give --idle, --partition or --drained-by-us")
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    client = make_client("command_line", bin_directory=config.slurm.bin_directory)
    chosen, left = choose((await client.read_view()).nodes, given)
    words = [f"--{name}={given[name]}" for name in ("only", "seconds") if given[name]]
    words += [f"--{name}={each}" for name in ("local", "shared") for each in given[name]]
    terms = Terms(
        comment=f"slurm-watchdog test-nodes of {user_name(os.geteuid())}@{socket.gethostname()} pid {os.getpid()}",
        words=tuple(words),
        at_once=given["at_once"],
        wait_s=given["wait"],
        partition=given["partition"] or "",
        account=given["account"] or "",
        reservation=f"{TESTED_MARK}{secrets.token_hex(4)}" if given["drained_by_us"] else given["reservation"] or "",
        place=state_home(home_directory(), os.environ),
    )
    lifts = bool(given["drained_by_us"] and chosen)
    report = await conduct_jobs(config, client, chosen, terms, _say, lifts=lifts)
    not_tested = (NodeVerdict(node=n, truth=Truth.UNKNOWN, unsure=(f"not tested: {why}",)) for n, why in left.items())
    return replace(report, verdicts=(*report.verdicts, *not_tested))


def _say(text: str) -> None:
    """Progress, on standard error."""
    with contextlib.suppress(OSError):  # who would read it may be what has died
        warn(text)


def tell_controller(report: Report, asked: Asked) -> None:
    """Where one runs, it keeps what was found as events of the nodes. What it refuses is said on standard error."""
    path = find_socket(Asked(config=asked.config))
    if not os.path.exists(path):
        return
    client = Client(path)
    try:
        for node, event in events(report):
            client.post(dict, "/v1/nodes/{}/events", node, body=event)
    except ClientError as error:
        warn(f"The controller does not remember all of it: {error.what}")
