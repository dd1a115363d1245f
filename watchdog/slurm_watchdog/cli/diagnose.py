"""`slurm-watchdog diagnose`: collects the stacks of every rank of a running job now, and names the rank that
the others wait for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from slurm_watchdog.base import clock
from slurm_watchdog.base.loop import wait_readable
from slurm_watchdog.cli.client import Client, ClientError
from slurm_watchdog.cli.diagnosis_text import print_diagnosis
from slurm_watchdog.cli.find_controller import choose
from slurm_watchdog.cli.flight_dumps import diagnose_dumps
from slurm_watchdog.cli.options import (
    EXIT_FINE,
    EXIT_FOUND,
    EXIT_UNKNOWN,
    fail,
    job_or_directory,
    operator_options,
    print_json,
)
from slurm_watchdog.cli.terminal import clean, count, screen, sentence
from slurm_watchdog.model.diagnosis_documents import DiagnosisProgress, NodeRow

if TYPE_CHECKING:
    from rich.table import Table

POLL_S: Final = 0.5
COLLECTION_LIMIT_S: Final = 300.0
"""The controller gives up on a node long before; this is for one that does not come back itself."""
MAX_ROWS: Final = 30

Show = Callable[[DiagnosisProgress], None]


@click.command(short_help="All ranks of a running job, now: where they are, who stands out.")
@job_or_directory
@operator_options
def diagnose(job_id: str, socket_path: str | None, config_file: str | None, as_json: bool) -> None:
    """Asks every node of a running job for the stacks and the state of its ranks, several times over some 20
    s, and says in one sentence whether it hangs and who keeps the others waiting. Nothing is stopped for it.

    Given a directory with dumps of PyTorch's Flight Recorder instead, one of each rank, it matches these: who has not
    entered which collective, who called another one. They are pickles, and are read without executing anything.

    Exit code 0 when no rank is stuck, 1 when one is, 3 when nothing can be said: the controller gives no
    answer, the job is unknown, or its ranks could not be asked.

    \b
    Examples:
      slurm-watchdog diagnose 4711
      slurm-watchdog diagnose 4711 --json | jq .culprits
      slurm-watchdog diagnose /shared/dumps/
    """
    if Path(job_id).is_dir():
        diagnose_dumps(Path(job_id), as_json=as_json)
    client = choose(socket_path, config_file)
    try:
        started, _ = client.start_diagnosis(job_id)
        found, document = _follow(client, started, quiet=as_json)
    except ClientError as error:
        wrong = error.http_status in (400, 403)
        fail(error, as_json, None if wrong else EXIT_UNKNOWN)
    if found.diagnosis is None:
        gone = ClientError(
            f"Job {job_id} has ended or was restarted while its ranks were asked.",
            "See: slurm-watchdog status",
        )
        fail(gone, as_json, EXIT_UNKNOWN)
    if as_json:
        print_json({"job_id": job_id, "took_s": found.age_s, **document["diagnosis"]})
    else:
        _print_silent(found.nodes)
        print_diagnosis(found.diagnosis)
    is_hang = found.diagnosis.is_hang
    sys.exit(EXIT_UNKNOWN if is_hang is None else EXIT_FOUND if is_hang else EXIT_FINE)


def _follow(client: Client, started: DiagnosisProgress, *, quiet: bool) -> tuple[DiagnosisProgress, Any]:
    """Shows how far the nodes are until it is over. Raises ClientError."""
    began = clock.monotonic()
    with _display(started, quiet=quiet) as show:
        while True:
            found, document = client.diagnosis(started.id)
            show(found)
            if found.state == "done":
                return found, document
            if clock.monotonic() - began > COLLECTION_LIMIT_S:
                raise ClientError(
                    f"The evidence of job {started.job_id} was not complete within {COLLECTION_LIMIT_S:.0f} s."
                )
            wait_readable((), POLL_S)


@contextmanager
def _display(started: DiagnosisProgress, *, quiet: bool) -> Iterator[Show]:
    """A redrawn table on a terminal; when piped, a line for each node that has answered; nothing for programs."""
    if quiet:
        yield lambda progress: None
    elif screen().is_terminal:
        from rich.live import Live

        with Live(_table(started), console=screen(), refresh_per_second=4, transient=True) as live:
            yield lambda progress: live.update(_table(progress))
    else:
        sentence(f"Asking {count(len(started.nodes), 'node')} of job {started.job_id}.")
        told: set[str] = set()
        yield lambda progress: _print_answered(progress, told)


def _print_answered(progress: DiagnosisProgress, told: set[str]) -> None:
    for node in progress.nodes:
        if node.state != "asked" and node.node not in told:
            told.add(node.node)
            sentence(f"{progress.age_s:4.0f} s  {node.node}: {_node_text(node)}")
            sys.stdout.flush()


def _node_text(node: NodeRow) -> str:
    if node.state == "failed":
        return node.error or "no answer"
    if node.state == "asked":
        return "asked"
    undumped = f", {node.undumped} could not be dumped" if node.undumped else ""
    return f"{count(node.ranks, 'rank')}{undumped}"


def _table(progress: DiagnosisProgress) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    done = sum(1 for node in progress.nodes if node.state != "asked")
    title = f"job {clean(progress.job_id)}: {done} of {count(len(progress.nodes), 'node')} after {progress.age_s:.0f} s"
    drawn = Table("NODE", "STATE", "WHAT", title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    order = {"failed": 0, "asked": 1, "answered": 2}
    styles = {"failed": "bold red", "asked": "yellow", "answered": "green"}
    for node in sorted(progress.nodes, key=lambda each: order.get(each.state, 3))[:MAX_ROWS]:
        cells = (node.node, node.state, _node_text(node))
        drawn.add_row(*(Text(clean(cell)) for cell in cells), style=styles.get(node.state))
    if len(progress.nodes) > MAX_ROWS:
        drawn.add_row(Text(f"… {len(progress.nodes) - MAX_ROWS} more"), Text(""), Text(""))
    return drawn


def _print_silent(nodes: tuple[NodeRow, ...]) -> None:
    for node in nodes:
        if node.state == "failed":
            sentence(f"No evidence from {node.node}: {node.error or 'no answer'}", "yellow")
