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
from typing import TYPE_CHECKING, Any

import click
from msgspec.structs import replace

from slurm_watchdog.cli.client import Client, ClientError
from slurm_watchdog.cli.options import (
    EXIT_FINE,
    EXIT_FOUND,
    EXIT_UNKNOWN,
    EXIT_USAGE,
    FiniteRange,
    config_option,
    find_socket,
    json_option,
    load_or_exit,
    print_json,
    removed_option,
    service_paths,
)
from slurm_watchdog.cli.terminal import clean, count, duration, fold_nodes, sentence, table
from slurm_watchdog.model.incidents import Truth
from slurm_watchdog.model.node_documents import NodeEventRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from slurm_watchdog.nodetest.conduct import Report

WORDS = {Truth.BAD: "bad", Truth.OK: "well", Truth.UNKNOWN: "unknown"}
STYLES = {Truth.BAD: "bold red", Truth.OK: "", Truth.UNKNOWN: "magenta"}
MOST_PASSED = 200
"""Healthy nodes that are reported to the controller: it takes 2,000 events a day."""
FABRIC = "the way between nodes is that of their addresses; for another fabric see node_tests.program"


@click.command(short_help="Measure nodes and the links between them; name the slow one.")
@click.argument("nodes", nargs=-1, metavar="[NODES]…")
@click.option("--idle", is_flag=True, help="Only idle nodes: of those given, or of all.")
@click.option("--partition", default="", metavar="P", help="Nodes of this partition, in which the jobs are submitted.")
@click.option(
    "--drained-by-us",
    is_flag=True,
    help="Nodes that slurm-watchdog drained or reserved, as an administrator; of NODES also idle ones, as peers.",
)
@click.option(
    "--only", metavar="PART,…", help="Only these parts, of: cpu memory disk mount gpu network. [default: all]"
)
@click.option("--seconds", type=FiniteRange(0.2, 20), metavar="S", help="Time for each measurement. [default: 2]")
@click.option("--local", metavar="DIR", multiple=True, help="A local disk to measure. [default: /tmp]")
@click.option("--shared", metavar="DIR", multiple=True, help="A shared filesystem to measure.")
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
@click.option("--account", default="", metavar="A", help="Account of the test jobs.")
@click.option("--reservation", default="", metavar="R", help="Reservation of the test jobs.")
@removed_option("--directory", "each test is a salloc, whose output comes by itself", metavar="DIR")
@removed_option("--interface", FABRIC, metavar="IF")
@removed_option("--job", "name the nodes, such as those of scontrol show job", metavar="JOB")
@removed_option("--no-second-look", "what looks bad is measured twice", is_flag=True)
@config_option("Configuration with the section node_tests. [default: the site's, where it can be read]")
@json_option
def test_nodes(**asked: Any) -> None:
    """Measures nodes, and the network between pairs of them, by bounded jobs: exclusive, at low priority, never
    on a node where another job runs. Without arguments nothing is tested.

    A node is named if it is slower than nodes that are alike (four or more), than itself in earlier tests, or than
    the site accepts, in two measurements; a slow link names one of its nodes only if another link tells which.
    Root is not needed. Ctrl-C cancels the jobs, and so does the end of this program however it comes.

    Exit code 0 all nodes are well, 1 a node is named, 2 wrong usage, 3 a node could not be tested or compared, and
    none is named.

    \b
    Examples:
      slurm-watchdog test-nodes n[1-8]
      slurm-watchdog test-nodes --partition gpu --idle --shared /scratch
      slurm-watchdog test-nodes n7 n8 n[20-24] --only cpu,memory,network --json
    """
    from slurm_watchdog.slurm.client import SlurmRefused, SlurmUnavailable

    try:
        report, left = asyncio.run(_test(asked))
    except (SlurmUnavailable, SlurmRefused) as error:
        click.echo(f"Nothing was tested: {clean(error)}", err=True)
        sys.exit(EXIT_UNKNOWN)
    except (ValueError, OSError) as error:
        click.echo(f"Nothing was tested: {clean(error)}", err=True)
        sys.exit(EXIT_USAGE)
    except (KeyboardInterrupt, asyncio.CancelledError):
        click.echo("Interrupted: the test jobs are cancelled.", err=True)
        sys.exit(130)
    if asked["as_json"]:
        print_json(document(report, left))
    else:
        print_report(report, left)
    tell_controller(report, asked["config_file"])
    truths = {each.truth for each in report.verdicts}
    sys.exit(EXIT_FOUND if Truth.BAD in truths else EXIT_UNKNOWN if Truth.UNKNOWN in truths or left else EXIT_FINE)


async def _test(asked: Mapping[str, Any]) -> tuple[Report, dict[str, str]]:
    """What came of it, and why some nodes were not tested. SIGINT and SIGTERM cancel it, and with it its jobs."""
    from slurm_watchdog.config.schema import Config
    from slurm_watchdog.config.types import parse_duration
    from slurm_watchdog.model.quarantine import RESERVED_MARK, TESTED_MARK
    from slurm_watchdog.nodetest import conduct, drained
    from slurm_watchdog.nodetest.jobs import Placement, Salloc
    from slurm_watchdog.slurm.commands import Commands
    from slurm_watchdog.slurm.factory import make_client
    from slurm_watchdog.slurm.node_names import expand_nodes
    from slurm_watchdog.slurm.reservation import Reservations
    from slurm_watchdog.standalone.own_runs import home_directory, state_home

    path = asked["config_file"] or (service_paths().config if os.access(service_paths().config, os.R_OK) else "")
    config = load_or_exit(path, with_knowledge=False) if path else Config()
    names = [name for words in asked["nodes"] for name in expand_nodes(words)]
    if not (names or asked["idle"] or asked["partition"] or asked["drained_by_us"]):
        raise click.UsageError("name the nodes, or give --idle, --partition or --drained-by-us")
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    client = make_client("command_line", bin_directory=config.slurm.bin_directory)
    commands = Commands(config.slurm.bin_directory, os.environ)
    place, reservations = state_home(home_directory(), os.environ), Reservations(commands, user := _user())
    await drained.put_back_what_was_left(client, reservations, place, _say)
    reserved: set[str] = set()
    if asked["drained_by_us"]:
        ours = [each for each in await client.read_reservations() if each.name.startswith(RESERVED_MARK)]
        reserved = {node for each in ours for node in each.nodes}
    known = {node.name: node for node in (await client.read_view()).nodes}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"Slurm knows no node {', '.join(unknown)}")
    chosen, left = [], {}
    for node in (known[name] for name in dict.fromkeys(names or known)):
        if asked["partition"] and asked["partition"] not in node.partitions:
            continue
        why = drained.why_not(
            node, idle=asked["idle"], drained_by_us=asked["drained_by_us"], reserved=reserved, named=bool(names)
        )
        if not why:
            chosen.append(node)
        elif names:
            left[node.name] = why
    if not chosen and not left:
        raise ValueError("No node fits: see sinfo")
    parts = (asked["only"] or "").split(",")
    words = list(config.node_tests.options)
    words += ["--only", asked["only"]] if asked["only"] else []
    words += [f"--seconds={asked['seconds']}"] if asked["seconds"] else []
    words += [f"--{name}={each}" for name in ("local", "shared") for each in asked[name]]
    terms = conduct.Terms(
        words=tuple(words), pairs=not asked["only"] or "network" in parts, at_once=asked["at_once"],
        wait_s=parse_duration(asked["wait"]), partition=asked["partition"], floors=config.node_tests.floors,
        cluster=config.cluster_name, place=place,
    )  # fmt: skip
    placement = Placement(
        comment=f"slurm-watchdog test-nodes of {user}@{socket.gethostname()} pid {os.getpid()}",
        program=config.node_tests.program, account=asked["account"], reservation=asked["reservation"],
    )  # fmt: skip
    async with contextlib.AsyncExitStack() as stack:
        if asked["drained_by_us"] and chosen:
            name = f"{TESTED_MARK}{secrets.token_hex(4)}"
            placement = replace(placement, reservation=name)
            await stack.enter_async_context(drained.lifted(client, reservations, chosen, name, place, _say))
        return await conduct.conduct(chosen, terms, Salloc(client, commands, placement), _say), left
    raise AssertionError("an exit stack lets each exception pass")


def _say(text: str) -> None:
    """Progress, on standard error."""
    with contextlib.suppress(OSError):  # who would read it may be what has died
        click.echo(clean(text), err=True)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a number without a name
        return str(os.geteuid())


def summary(report: Report, left: Mapping[str, str]) -> str:
    """One sentence."""
    bad = [each for each in report.verdicts if each.truth is Truth.BAD]
    unknown = [each.node for each in report.verdicts if each.truth is Truth.UNKNOWN] + list(left)
    all_nodes = count(len(report.verdicts) + len(left), "node")
    took = duration(report.ended_at - report.began_at)
    if len(bad) == 1:
        return f"{bad[0].node} is bad, of {all_nodes} tested in {took}: {bad[0].reasons[0]}."
    if bad:
        return f"{fold_nodes([each.node for each in bad])} are bad, of {all_nodes} tested in {took}."
    if unknown:
        return f"No node is known to be bad, of {all_nodes} in {took}; not judged: {fold_nodes(unknown)}."
    return f"All {all_nodes} are well, tested in {took}."


def print_report(report: Report, left: Mapping[str, str]) -> None:
    """Sentence and table, and what is wrong between nodes where none is named."""
    sentence(summary(report, left))
    order = sorted(report.verdicts, key=lambda each: (each.truth is not Truth.BAD, each.truth is Truth.OK))
    rows = [[each.node, WORDS[each.truth], each.figures or "-", "; ".join(each.reasons) or "-"] for each in order]
    rows += [[node, WORDS[Truth.UNKNOWN], "-", f"not tested: {why}"] for node, why in left.items()]
    styles = [*(STYLES[each.truth] for each in order), *(STYLES[Truth.UNKNOWN] for _ in left)]
    table(["node", "verdict", "figures", "why"], rows, styles, wanted=[0, 1, 3, 2], wraps=3)
    for pair in report.slow_pairs:
        if not pair.culprit:
            sentence(f"Between {pair.nodes[0]} and {pair.nodes[1]}: {'; '.join(pair.reasons)}.")


def document(report: Report, left: Mapping[str, str]) -> dict[str, Any]:
    """All of it, for `--json`."""
    found = {each.name: each for each in (*report.nodes, *report.pairs)}

    def figures(name: str) -> dict[str, float]:
        return {key: each.value for key, each in found[name].figures.items()} if name in found else {}

    nodes = [
        {
            "node": each.node, "verdict": each.truth.value, "reasons": each.reasons, "peers": each.peers,
            "places": [place for place, _ in each.faults], "like": found[each.node].like, "figures": figures(each.node),
        }
        for each in report.verdicts
    ]  # fmt: skip
    pairs = [{"nodes": each.name.split(" "), "figures": figures(each.name)} for each in report.pairs]
    slow = [{"nodes": each.nodes, "reasons": each.reasons, "culprit": each.culprit} for each in report.slow_pairs]
    times = {"began_at": report.began_at, "ended_at": report.ended_at}
    return {
        "sentence": summary(report, left), **times, "nodes": nodes, "not_tested": dict(left), "pairs": pairs,
        "slow_pairs": slow,
    }  # fmt: skip


def tell_controller(report: Report, config_file: str | None) -> None:
    """Where one runs, it keeps what was found as events of the nodes. What it refuses is said on standard error."""
    path = find_socket(None, config_file)
    if not os.path.exists(path):
        return
    client, run, events = Client(path, 10.0), f"test-nodes-{secrets.token_hex(8)}", list[tuple[str, NodeEventRequest]]()
    for each in report.verdicts:
        by_place: dict[str, list[str]] = {}
        for place, what in each.faults:
            by_place.setdefault(place, []).append(what)
        for place, said in by_place.items():
            events.append((each.node, NodeEventRequest(kind="test_failed", id=run, place=place, what="; ".join(said))))
    for each in [each for each in report.verdicts if each.truth is Truth.OK][:MOST_PASSED]:
        what = f"test-nodes: well, beside {each.peers} peers"
        events.append((each.node, NodeEventRequest(kind="test_passed", id=run, what=what)))
    try:
        for node, event in events:
            client.add_node_event(node, event)
    except ClientError as error:
        click.echo(f"The controller does not remember all of it: {clean(error.what)}", err=True)
