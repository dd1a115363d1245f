"""`slurm-watchdog diagnose`: who keeps the others waiting in a running job; and what files say that someone sent."""

from __future__ import annotations

import gc
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence

import click
from msgspec import to_builtins

from slurm_watchdog.base import clock
from slurm_watchdog.base.loop import wait_readable
from slurm_watchdog.base.text import plural
from slurm_watchdog.cli import options
from slurm_watchdog.cli.client import Client, find
from slurm_watchdog.cli.group_stacks import read_stacks
from slurm_watchdog.cli.options import Answer, Asked, ClientError, command, configured
from slurm_watchdog.cli.scan_log import read_kernel_logs, read_logs
from slurm_watchdog.cli.terminal import sentence, show
from slurm_watchdog.diagnose.logs.report import digest_of
from slurm_watchdog.diagnose.logs.tracebacks import find_errors
from slurm_watchdog.model.documents import DiagnosisProgress, JobRequest
from slurm_watchdog.parse.given_files import files_in, is_archive, is_flight_record, is_log_name, read_records
from slurm_watchdog.parse.kernel_log import is_kernel_log
from slurm_watchdog.parse.stacks.text import parse_stacks
from slurm_watchdog.parse.text_input import Unreadable, read_start, text_of

POLL_S = 0.5
MEMORY_BYTES = 2 << 30  # Beyond what this process has when it begins: a hostile dump ends with a reason.
COLLECTION_LIMIT_S = 300.0
"""The controller gives up on a node long before; this is for one that does not come back itself."""
LOOKED_AT = 1 << 20  # Bytes of a file that show what it is.
LOGS, STACKS, COLLECTIVES, KERNEL = "logs", "stacks", "collectives", "kernel"
"""The sorts of files, as `--json` names what was found in them."""


@command("given JOB|PATH…", options.KNOWLEDGE, options.ASKS)
def diagnose(asked: Asked, given: tuple[str, ...]) -> Answer:
    """JOB: asks every node of a running job for the stacks and the state of its ranks, several times in some 20 s, and
    says in one sentence whether it hangs and who keeps the others waiting. Nothing is stopped for it.

    PATH: reads files, or those in a directory (`-` is standard input), and finds out what each is: the log of a job,
    stacks (py-spy, faulthandler, gdb), dumps of PyTorch's Flight Recorder (one of each rank; nothing in them is
    executed), a kernel log. No controller is asked. `scan-log` and `group-stacks` have options for one sort of file.

    Exit code 0 nothing is wrong, 1 something is, 2 a file cannot be read, 3 unknown: no answer of the controller, the
    job is not known, its ranks could not be asked, no dump could be read.

    \b
    Examples:
      slurm-watchdog diagnose 4711 --json | jq .culprits
      slurm-watchdog diagnose slurm-4711.out stacks/
    """
    for each in given:
        if each != "-" and not os.path.exists(each) and (len(given) > 1 or not options.JOB_ID.fullmatch(each)):
            raise click.BadParameter(f"{each!r} is neither a job id nor a file or directory that you may read")
    if not options.JOB_ID.fullmatch(given[0]) or os.path.exists(given[0]):
        return _diagnose_files(given, asked)

    try:
        found = _collect(find(asked), given[0], quiet=asked.json)
    except ClientError as error:
        error.end_with(options.EXIT_USAGE if error.http_status in (400, 403) else options.EXIT_UNKNOWN)
        raise
    diagnosis = found.diagnosis
    if diagnosis is None:
        what = f"Job {given[0]} has ended or was restarted while its ranks were asked."
        raise ClientError(what, "See: slurm-watchdog status")

    def print_all() -> None:
        for node in found.nodes:
            if node.state == "failed":
                sentence(f"No evidence from {node.node}: {node.error or 'no answer'}", "yellow")
        show("diagnosis", found=diagnosis)

    document = to_builtins(diagnosis) | {"job_id": given[0], "took_s": found.age_s}
    return Answer(document, print_all, options.EXIT_UNKNOWN if diagnosis.is_hang is None else diagnosis.is_hang)


def _collect(client: Client, job_id: str, *, quiet: bool) -> DiagnosisProgress:
    """Asks the nodes, and waits until all have answered or it is over. Raises ClientError."""
    started = client.post(DiagnosisProgress, "/v1/diagnose", body=JobRequest(job_id=job_id))
    began, nodes = clock.monotonic(), plural(len(started.nodes), "node")
    with click.progressbar(length=len(started.nodes), label=f"Asking {nodes}", file=sys.stderr, hidden=quiet) as bar:
        while True:
            found = client.get(DiagnosisProgress, "/v1/diagnose/{}", started.id)
            bar.update(sum(node.state != "asked" for node in found.nodes) - bar.pos)
            if found.state == "done":
                return found
            if clock.monotonic() - began > COLLECTION_LIMIT_S:
                raise ClientError(f"The evidence of job {job_id} was not complete within {COLLECTION_LIMIT_S:.0f} s.")
            wait_readable((), POLL_S)


def _diagnose_files(given: Sequence[str], asked: Asked) -> Answer:
    """Each file by what reads it."""
    config = configured(asked.config)
    if "-" in given:  # it is read twice
        copy = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        shutil.copyfileobj(sys.stdin.buffer, copy)
        sys.stdin = io.TextIOWrapper(copy)
    sorts: dict[str, list[str]] = {}
    strange: list[str] = []
    for _, path in files_in(given, strange):
        if path == "-":
            sys.stdin.buffer.seek(0)
        sort = sort_of(path)
        if sort == LOGS and path not in given and not is_log_name(path):
            strange.append(path)
        else:
            sorts.setdefault(sort, []).append(path)
    if "-" in given:
        sys.stdin.buffer.seek(0)
    if not sorts:
        what = f"Nothing was recognised in {', '.join(given[:3])}: neither logs nor stacks nor dumps."
        raise ClientError(what, f"Looked at: {', '.join(strange[:8]) or 'no file'}")
    readers: dict[str, Callable[[list[str]], Answer]] = {
        LOGS: lambda paths: read_logs(paths, config),
        STACKS: lambda paths: read_stacks(paths, config, {}),
        COLLECTIVES: read_dumps,
        KERNEL: read_kernel_logs,
    }
    answers = {sort: read(sorts[sort]) for sort, read in readers.items() if sort in sorts}
    codes = {answer.code for answer in answers.values()}

    def print_all() -> None:
        for sort, answer in answers.items():
            if len(answers) > 1:
                sentence("")
                sentence(f"{sort}: {plural(len(sorts[sort]), 'file')}".capitalize(), "bold")
            answer.tell()

    document = {sort: answer.document for sort, answer in answers.items()}
    return Answer(document, print_all, True in codes or max(codes))


def sort_of(path: str) -> str:
    """What reads a file; what is in no form that is known is read as a log, which says why it is none."""
    try:
        data = read_start(path, LOOKED_AT)
    except Unreadable:
        return LOGS
    if is_flight_record(data):
        return COLLECTIVES
    text = text_of(data)
    if is_kernel_log(text.splitlines()):
        return KERNEL
    digest = digest_of([(text.encode(errors="replace"), 1, None)], (), markdown=True)
    is_log = digest.facts or find_errors(digest.lines)
    return STACKS if is_archive(data) or (not is_log and parse_stacks(text)) else LOGS


def read_dumps(paths: Sequence[str]) -> Answer:
    """Who keeps the others waiting: code 0: no rank waits; 1: a rank is named; 3: neither is known."""
    from slurm_watchdog.agent.children.child import limit_address_space
    from slurm_watchdog.analysis.collective_order import order_of, words_of

    limit_address_space(MEMORY_BYTES)
    gc.disable()  # what dumps hold is no cycle, and walking over it again and again takes most of the time
    problems: list[str] = []
    records = read_records(paths, problems)
    order = order_of(records)
    summary = words_of(order) if records else "No dump could be read."

    def print_all() -> None:
        sentence(summary, "bold red" if order.odd else "")
        show("list", title="Communicators", lines=order.facts)
        show("list", title="Not read, or not certain", lines=problems)

    document = {**to_builtins(order), "summary": summary, "problems": problems}
    unknown = order.waiting or not records
    return Answer(document, print_all, True if order.odd else options.EXIT_UNKNOWN if unknown else False)
