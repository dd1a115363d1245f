"""`slurm-watchdog test-nodes`: bounded jobs measure nodes and the links between them; a sentence names the bad one."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import os
import secrets
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec.structs import replace

from slurm_watchdog.base.deadline import timeout
from slurm_watchdog.cli.options import (
    EXIT_UNKNOWN,
    EXIT_USAGE,
    FiniteRange,
    config_option,
    json_option,
    load_or_exit,
    print_json,
    service_paths,
)
from slurm_watchdog.cli.terminal import clean
from slurm_watchdog.cli.test_nodes_ledger import tell_controller
from slurm_watchdog.cli.test_nodes_text import Shown, document, exit_code, print_report

if TYPE_CHECKING:
    from slurm_watchdog.config.schema import Config
    from slurm_watchdog.nodetest.conduct import Report
    from slurm_watchdog.nodetest.jobs import Launcher
    from slurm_watchdog.nodetest.plan import Placement, Wanted
    from slurm_watchdog.nodetest.select import Chosen, Selection
    from slurm_watchdog.slurm.client import SlurmClient
    from slurm_watchdog.slurm.commands import Commands


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line."""

    nodes: tuple[str, ...]
    idle: bool
    partition: str | None
    job_id: str | None
    drained_by_us: bool
    only: str | None
    seconds: float
    at_once: int
    wait: str
    account: str | None
    reservation: str | None
    directory: str | None
    local: tuple[str, ...]
    shared: tuple[str, ...]
    interface: str | None
    no_second_look: bool
    named: str
    limit: float | None
    config_file: str | None
    as_json: bool


@click.command(short_help="Measure nodes and the links between them; name the slow one.")
@click.argument("nodes", nargs=-1, metavar="[NODES]…")
@click.option("--idle", is_flag=True, help="Only idle nodes: of those given, or of all.")
@click.option("--partition", metavar="P", help="Nodes of this partition, in which the jobs are submitted, too.")
@click.option("--job", "job_id", metavar="J", help="The nodes of job J, after its end.")
@click.option(
    "--drained-by-us",
    is_flag=True,
    help="Nodes that slurm-watchdog drained or reserved, as an administrator; of NODES also idle ones, as peers.",
)
@click.option(
    "--only",
    metavar="PART,…",
    help="Only these parts, of: cpu memory disk mount gpu site_check network. [default: all]",
)
@click.option("--seconds", type=FiniteRange(0.2, 60), default=2.0, show_default=True, help="Time for each measurement.")
@click.option(
    "--at-once",
    type=click.IntRange(1, 1000),
    default=8,
    show_default=True,
    metavar="K",
    help="Test jobs that run at the same time.",
)
@click.option(
    "--wait",
    metavar="TIME",
    default="10min",
    show_default=True,
    help="How long to wait for the nodes of a job to be free.",
)
@click.option("--account", metavar="A", help="Account of the test jobs.")
@click.option("--reservation", metavar="R", help="Reservation of the test jobs.")
@click.option(
    "--directory",
    metavar="DIR",
    type=click.Path(file_okay=False, exists=True),
    help="Directory that all nodes share: tests are then batch jobs that write there. [default: a salloc for each]",
)
@click.option("--local", metavar="DIR", multiple=True, help="A local disk to measure. [default: /tmp]")
@click.option("--shared", metavar="DIR", multiple=True, help="A shared filesystem to measure.")
@click.option(
    "--interface", metavar="IF", help="Network interface of the fabric. [default: the one of the nodes' addresses]"
)
@click.option("--no-second-look", is_flag=True, help="Report what looks bad at once, without a second measurement.")
@click.option("--named", default="", hidden=True, help="By the controller: reservation, and mark of the jobs.")
@click.option("--limit", type=float, hidden=True, metavar="SECONDS", help="By the controller: then all is cancelled.")
@config_option("Configuration with the section node_tests. [default: the site's, where it can be read]")
@json_option
def test_nodes(**given: Any) -> None:
    """Measures nodes, and the network between pairs of them, by bounded jobs: exclusive, at low priority, never
    on a node where another job runs. Without arguments nothing is tested.

    A node is named if it is slower than nodes of its model (four or more), than itself in earlier tests, or than
    the site accepts, in two measurements; a slow link names one of its nodes only if another link tells which.
    Root is not needed. Ctrl-C cancels the jobs; without this program they end by their limits.

    Exit code 0 all nodes are well, 1 a node is named, 2 wrong usage, 3 a node could not be tested or compared, and
    none is named.

    \b
    Examples:
      slurm-watchdog test-nodes n[1-8]
      slurm-watchdog test-nodes --partition gpu --idle --shared /scratch
      slurm-watchdog test-nodes --job 4711 --only cpu,memory,network
      slurm-watchdog test-nodes n7 n8 n[20-24] --json
    """
    asked = Options(**given)
    from slurm_watchdog.slurm.client import SlurmRefused, SlurmUnavailable

    config = _configuration(asked.config_file)
    wanted = _wanted(asked, config)
    try:
        chosen, report = asyncio.run(_test(asked, config, wanted))
    except (SlurmUnavailable, SlurmRefused) as error:
        click.echo(f"Nothing was tested: {clean(error)}", err=True)
        sys.exit(EXIT_UNKNOWN)
    except TimeoutError:
        click.echo(f"The test did not end within {asked.limit:g} s: its jobs are cancelled.", err=True)
        sys.exit(EXIT_UNKNOWN)
    except (ValueError, OSError) as error:
        click.echo(f"Nothing was tested: {clean(error)}", err=True)
        sys.exit(EXIT_USAGE)
    except (KeyboardInterrupt, asyncio.CancelledError):
        click.echo("Interrupted: the test jobs are cancelled.", err=True)
        sys.exit(130)
    if asked.as_json:
        print_json(document(report, chosen))
    else:
        print_report(report, chosen)
    sys.exit(exit_code(report, chosen))


def _configuration(config_file: str | None) -> Config:
    """As given, else the site's where it can be read, else the defaults."""
    from slurm_watchdog.config.schema import Config

    path = config_file or (service_paths().config if os.access(service_paths().config, os.R_OK) else "")
    return load_or_exit(path, with_knowledge=False) if path else Config()


def _wanted(asked: Options, config: Config) -> Wanted:
    from slurm_watchdog.nodetest.plan import PHASES, Wanted

    site = config.node_tests
    parts = frozenset(asked.only.split(",")) if asked.only else frozenset(site.parts or PHASES)
    if unknown := parts - set(PHASES):
        raise click.BadParameter(f"{', '.join(sorted(unknown))}; known: {', '.join(PHASES[1:])}", param_hint="--only")
    for path in (*asked.local, *asked.shared):
        if not path.startswith("/"):
            raise click.BadParameter(f"{path!r} is no absolute path", param_hint="--local, --shared")
    return Wanted(
        phases=parts,
        seconds=asked.seconds,
        local_directories=asked.local or tuple(site.local_directories),
        shared_directories=asked.shared or tuple(site.shared_directories),
        interface=asked.interface or site.interface,
        gpu_python=site.gpu_python,
        tools=site.tools,
        site_command=site.check,
        site_limit_s=site.check_limit,
    )


def _selection(asked: Options) -> Selection:
    """Raises UsageError and ValueError."""
    from slurm_watchdog.nodetest.select import Selection
    from slurm_watchdog.slurm.node_names import expand_nodes

    if not (asked.nodes or asked.idle or asked.partition or asked.job_id or asked.drained_by_us):
        raise click.UsageError("name the nodes, or give --idle, --partition, --job or --drained-by-us")
    if asked.drained_by_us and (asked.idle or asked.job_id):
        raise click.UsageError("--drained-by-us goes with NODES and --partition only")
    names = tuple(name for words in asked.nodes for name in expand_nodes(words))
    return Selection(
        names=names, idle=asked.idle, partition=asked.partition or "", job=asked.job_id or "",
        drained_by_us=asked.drained_by_us,
    )  # fmt: skip


async def _test(asked: Options, config: Config, wanted: Wanted) -> tuple[Chosen, Report]:
    """Within the limit, if there is one. Raises TimeoutError."""
    async with timeout(asked.limit):
        return await _choose_and_test(asked, config, wanted)


async def _choose_and_test(asked: Options, config: Config, wanted: Wanted) -> tuple[Chosen, Report]:
    """Chooses the nodes and tests them; SIGINT and SIGTERM cancel it, and with it its jobs. What a test that has a name
    leaves behind when it is killed, the controller puts back, which has given the name."""
    from slurm_watchdog.config.types import parse_duration
    from slurm_watchdog.model.quarantine import RESERVED_MARK, TESTED_MARK
    from slurm_watchdog.nodetest import out_of_service, past
    from slurm_watchdog.nodetest.conduct import Terms, conduct
    from slurm_watchdog.nodetest.select import choose_nodes
    from slurm_watchdog.slurm.commands import Commands
    from slurm_watchdog.slurm.factory import make_client
    from slurm_watchdog.slurm.reservation import Reservations
    from slurm_watchdog.standalone.own_runs import home_directory, state_home

    task = asyncio.current_task()
    assert task is not None

    def end() -> None:
        task.cancel()
        with contextlib.suppress(OSError):  # the controller that would read it may be what has died
            _say("Ending: jobs are cancelled, drained nodes drained again; minutes where Slurm does not answer")

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, end)
    terms = Terms(at_once=asked.at_once, wait_s=parse_duration(asked.wait), partition=asked.partition or "",
                  again=not asked.no_second_look)  # fmt: skip
    client = make_client("command_line", bin_directory=config.slurm.bin_directory)
    commands = Commands(config.slurm.bin_directory, os.environ)
    place, cluster = state_home(home_directory(), os.environ), config.cluster_name
    reservations = Reservations(commands, _user())
    if not asked.named:
        await out_of_service.put_back_what_was_left(client, reservations, place, _say)
    selection, reserved = _selection(asked), frozenset[str]()
    if asked.drained_by_us:
        ours = [each for each in await client.read_reservations() if each.name.startswith(RESERVED_MARK)]
        reserved = frozenset(node for each in ours for node in each.nodes)
    chosen = choose_nodes(selection, await client.read_view(), reserved)
    placement = _placement(asked, chosen)

    def earlier(models: Mapping[str, str]) -> Mapping[str, list[Mapping[str, float]]]:
        return past.usual(past.read_tests(place), models, wanted.seconds, cluster)

    async with contextlib.AsyncExitStack() as stack:
        if asked.drained_by_us and chosen.nodes:
            name = asked.named or f"{TESTED_MARK}{secrets.token_hex(4)}"
            placement = replace(placement, reservation=name)
            await stack.enter_async_context(
                out_of_service.lifted(client, reservations, chosen.nodes, name, None if asked.named else place, _say)
            )
        shown = stack.enter_context(Shown())
        launcher = _launcher(asked, config, client, commands, placement)
        terms = replace(terms, waits_for_job=bool(chosen.after))
        report = await conduct(
            chosen.nodes, wanted, terms, launcher, shown, shown.heard, config.node_tests.floors, earlier
        )
    try:
        past.append_tests(place, past.tests_of(report, wanted.seconds, cluster))
    except OSError as error:
        _say(f"The results are not kept for later comparison: {error}")
    if not asked.named:
        tell_controller(report, asked.config_file)
    return chosen, report


def _say(text: str) -> None:
    click.echo(clean(text), err=True)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a number without a name
        return str(os.geteuid())


def _placement(asked: Options, chosen: Chosen) -> Placement:
    from slurm_watchdog.nodetest.plan import Placement

    mine = f"slurm-watchdog test-nodes of {_user()}@{socket.gethostname()} pid {os.getpid()}"
    return Placement(
        comment=f"{mine} {asked.named}" if asked.named else mine,
        account=asked.account or "", reservation=asked.reservation or "", after=chosen.after,
    )  # fmt: skip


def _launcher(
    asked: Options, config: Config, client: SlurmClient, commands: Commands, placement: Placement
) -> Launcher:
    from slurm_watchdog.nodetest.jobs import Salloc, Sbatch

    directory = asked.directory or config.node_tests.directory
    if directory:
        return Sbatch(client, commands, placement, Path(directory).absolute())
    return Salloc(client, commands, placement)
