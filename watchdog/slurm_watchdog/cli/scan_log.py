"""`slurm-watchdog scan-log`: how far a run came and what ended it, from the logs of its job."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from functools import partial
from typing import TYPE_CHECKING, Any

from slurm_watchdog.cli import options
from slurm_watchdog.cli.files import configured, files_in, read_file, read_kernel_logs
from slurm_watchdog.cli.options import Answer, Asked, Refusal, command, warn
from slurm_watchdog.cli.terminal import show
from slurm_watchdog.diagnose.logs.case import OF_CHILDREN, SOFT
from slurm_watchdog.diagnose.logs.digest import Collector, Digest
from slurm_watchdog.diagnose.logs.grouping import group
from slurm_watchdog.diagnose.logs.report import RunReport, Settings, judge_job
from slurm_watchdog.diagnose.logs.verdict import TOLD_TO_END
from slurm_watchdog.knowledge.frameworks import what_to_do
from slurm_watchdog.knowledge.limits import PhaseLimits
from slurm_watchdog.knowledge.log_signatures import log_table
from slurm_watchdog.parse.kernel_log import is_kernel_log
from slurm_watchdog.parse.text_input import Block, Unreadable, is_text
from slurm_watchdog.parse.timestamps import parse_time

if TYPE_CHECKING:
    from slurm_watchdog.config.schema import Config

BLIND = ", and no progress either: whether it trains cannot be read in it."
LOG_NAME = re.compile(
    r"(?:\.(?:log|out|err|txt|jsonl?|[oe]\d+)|(?:^|[._-])(?:stdout|stderr|log|out|err))(?:\.\d{1,3})?(?:\.(?:gz|bz2|xz|zst))?$"
)
"""Of the files in a directory those that a job's output is in: beside them there may be checkpoints."""
MARKDOWN = (".md", ".markdown")
MARKDOWN_BYTES = 4 * 1024**2


@command(
    """
    files FILE|DIR…
    --at T  When the log was seen last, as it writes times, or in seconds since 1970. A silent log is a hang only if
      enough time has passed. [default: its last line's time]
    --kernel  The files are kernel logs (dmesg, journalctl -k).
    --config F  Configuration file: its jobs.progress_patterns and the limits of its detectors. [default: every
      setting's default]
    """,
    options.KNOWLEDGE,
    options.JSON,
)
def scan_log(asked: Asked, files: tuple[str, ...], at: str | None, kernel: bool) -> Answer:
    """Reads logs of training jobs (plain, gzip, bzip2, xz; `-` is standard input; pasted text, Markdown): how far the
    run came, what ended it, which rank failed first, what only followed. Files of one job (standard output and error,
    one a rank or node) are judged together; a directory stands for the logs in it. It needs no Slurm and no root.

    Exit code 0 nothing found, 1 something found, 2 a file cannot be read, or not to its end, and nothing was found; or
    nothing in it was recognised as a job's log.

    \b
    Examples:
      slurm-watchdog scan-log logs/rank_*.log                   files of one job are judged together
      slurm-watchdog scan-log --at "2024-05-01 12:00" train.log
      slurm-watchdog scan-log --config my.yaml slurm-1234.out   to try jobs.progress_patterns
    """
    if kernel:
        return read_kernel_logs(files)
    return read_logs(list(_with_folders(files)), configured(asked.config), at)


def _with_folders(paths: Sequence[str]) -> Iterator[str]:
    """The paths, for each directory the logs in it. Raises Refusal for one without any."""
    for path in paths:
        if path == "-" or not os.path.isdir(path):
            yield path
            continue
        problems: list[str] = []
        found = [each for _, each in files_in([path], problems) if LOG_NAME.search(os.path.basename(each))]
        for problem in problems:
            warn(problem)
        if not found:
            raise Refusal([f"{path}: no file in it is named like a log (.log, .out, .err, .txt, .json); name them"])
        yield from found


def read_logs(files: Sequence[str], config: Config | None, at: str | None = None) -> Answer:
    """What logs say, those of one job together."""
    if at is not None and parse_time(at, None) is None:
        raise Refusal([f"--at {at}: not a time; write it as 2024-05-01T12:00:00, or in seconds since 1970"])
    settings = Settings(PhaseLimits())
    if config is not None:
        from slurm_watchdog.detect.collective_hang import CollectiveHang
        from slurm_watchdog.parse.training_log.site_patterns import compile_patterns

        own = compile_patterns(config.jobs.progress_patterns)
        settings = Settings(config.detectors.of(CollectiveHang), own)
    read = {path: read_file(path, partial(digest_of, path, settings)) for path in dict.fromkeys(files)}
    digests = {path: digest for path, (digest, _) in read.items() if digest is not None}
    paths = list(digests)
    judged = []
    for places in group(paths):
        mine = [paths[place] for place in places]
        written = [_written_at(path) for path in mine]
        judged.append(judge_job(mine, [digests[path] for path in mine], settings, at, written))
    for path, digest in digests.items():
        if is_kernel_log(line.raw for line in digest.lines):
            warn(f"{path} looks like a kernel log; for what the kernel says: slurm-watchdog scan-log --kernel {path}")
    found = any(each.verdict for each in judged)
    blind = len(paths) < len(read) or (not found and not all(whole for _, whole in read.values()))
    unread = not found and any(each.unread is not None for each in judged)
    rows = [each.rows() for each in judged]

    def show_all() -> None:
        for each, mine in zip(judged, rows, strict=True):
            _print_logs(each, mine)

    return Answer(
        {"files": [row for mine in rows for row in mine]}, show_all, options.EXIT_USAGE if blind or unread else found
    )


def digest_of(path: str, settings: Settings, blocks: Iterator[Block]) -> Digest:
    """What is kept of one file. Raises Unreadable for what is no text."""
    is_small = path != "-" and os.path.exists(path) and 0 < os.stat(path).st_size <= MARKDOWN_BYTES
    collector = Collector(markdown=path == "-" or path.endswith(MARKDOWN) or is_small, own=settings.own)
    for block in blocks:
        if block.first_line == 1 and not is_text(block.data):
            what = "is not text (a program, an image?): give the file that the job writes its output to"
            raise Unreadable(f"{path} {what}")
        collector.add(block.data, block.first_line, block.numbers)
    return collector.digest()


def _written_at(path: str) -> float | None:
    """The file's modification time as local time, the way logs write it."""
    try:
        local = datetime.fromtimestamp(os.stat(path).st_mtime)  # noqa: DTZ006 - logs write local time
    except (OSError, ValueError, OverflowError):  # no such file, or a date that is none
        return None
    return local.replace(tzinfo=timezone.utc).timestamp()


def _print_logs(judged: RunReport, rows: Sequence[dict[str, Any]]) -> None:
    errors = [(os.path.basename(row["path"]), error) for row in rows for error in row["errors"]]
    also, is_well = judged.excerpts if judged.verdict is not None else [], judged.unread is None
    if judged.verdict is not None:
        style, first, is_well = "bold red", judged.verdict.summary, False
        errors = sorted(
            (each for each in errors if each[1]["role"] != "noise"), key=lambda each: each[1]["role"] != "cause"
        )
    elif is_well:
        style, first = "green", _healthy_words(rows)
        # What a node can cause, and the run survived, or what is of an earlier run in the same log.
        of_nodes = log_table().node_can_cause - log_table().consequences - OF_CHILDREN - SOFT
        errors = [(path, error | {"role": "earlier"}) for path, error in errors if error["class"] in of_nodes]
    else:
        style, first, errors = "yellow", f"the run cannot be judged: {judged.unread}", []
    try_next = what_to_do(rows[0]["framework"]) if is_well and _is_blind(rows) else ""
    hints = judged.hints()[:2]
    show("log", rows=rows, style=style, first=first, also=also, errors=errors, hints=hints, try_next=try_next)


def _is_blind(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether nothing in them shows progress."""
    return not any(row["finished"] or row["progress"]["lines"] for row in rows)


def _healthy_words(rows: Sequence[dict[str, Any]]) -> str:
    notes = "".join(f"; {note}" for note in dict.fromkeys(note for row in rows for note in row["notes"]))
    if any(row["finished"] for row in rows):
        return f"{'' if notes else 'nothing wrong found; '}training was done{notes}."
    if _is_blind(rows):
        return f"no error found{_ended_words(rows)}{BLIND}"
    steps = [row["progress"]["last_step"] for row in rows if row["progress"]["last_step"] is not None]
    none = "it made progress, in steps of unknown number"  # of samples, or in an epoch of unknown length
    last = f"its last step is {max(steps)}" if steps else none
    return f"{'no error' if notes else 'nothing wrong'} found{_ended_words(rows)}{notes}; {last}."


def _ended_words(rows: Sequence[dict[str, Any]]) -> str:
    """What ended the run from outside, such as its time limit, and in which line; empty if nothing did."""
    for row in rows:
        for error in row["errors"]:
            told = error["class"] == "terminated" and TOLD_TO_END.search(error["text"])
            if error["role"] == "teardown" and (told or error["class"] in log_table().from_outside):
                return f"; ended from outside (line {error['line']}): {log_table().means[error['class']]}"
    return ""
