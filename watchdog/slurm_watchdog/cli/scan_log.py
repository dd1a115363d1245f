"""`slurm-watchdog scan-log`: how far a run came and what ended it, from the logs of its job."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from slurm_watchdog.cli import options
from slurm_watchdog.cli.options import Answer, Asked, Refusal, command, configured, warn
from slurm_watchdog.cli.terminal import show
from slurm_watchdog.diagnose.logs.digest import Collector
from slurm_watchdog.diagnose.logs.report import Settings, digest_of, judge_jobs
from slurm_watchdog.knowledge.limits import PhaseLimits
from slurm_watchdog.parse import given_files
from slurm_watchdog.parse.kernel_log import is_kernel_log
from slurm_watchdog.parse.text_input import BLOCK_BYTES, read_file
from slurm_watchdog.parse.timestamps import parse_time
from slurm_watchdog.parse.training_log.text import clean_line

TOLD_EVERY_BYTES = 512 * 1024**2  # Some seconds.

if TYPE_CHECKING:
    from slurm_watchdog.config.schema import Config


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
        found = [each for _, each in given_files.files_in([path], problems) if given_files.is_log_name(each)]
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
    read = {}
    for path in dict.fromkeys(files):
        markdown = given_files.may_be_markdown(path)
        take = partial(digest_of, own=settings.own, markdown=markdown, watch=_tell_of_long(path))
        read[path] = read_file(path, take, only_text=True)
        if problem := read[path][1]:
            warn(problem)
    digests = {path: digest for path, (digest, _) in read.items() if digest is not None}
    judged = judge_jobs(digests, settings, at, given_files.written_at)
    for path, digest in digests.items():
        if is_kernel_log(line.raw for line in digest.lines):
            warn(f"{path} looks like a kernel log; for what the kernel says: slurm-watchdog scan-log --kernel {path}")
    found = any(each.verdict for each in judged)
    blind = len(digests) < len(read) or (not found and any(problem for _, problem in read.values()))
    unread = not found and any(each.unread is not None for each in judged)
    rows = [each.rows() for each in judged]

    def show_all() -> None:
        for each, mine in zip(judged, rows, strict=True):
            show("log", found=each, rows=mine)

    code = options.EXIT_USAGE if blind or unread else found
    return Answer({"files": [row for mine in rows for row in mine]}, show_all, code)


def _tell_of_long(path: str) -> Callable[[Collector], None]:
    """Of a file that takes its time: the first line that looks like an error once it is read, and how far it is."""
    told_bytes, told_error = BLOCK_BYTES, False

    def watch(seen: Collector) -> None:
        nonlocal told_bytes, told_error
        if seen.bytes <= BLOCK_BYTES:
            return  # most files end here, with their verdict
        if seen.first_error is not None and not told_error:
            told_error = True
            warn(f"{path}, line {seen.first_error[0]}, the first error so far: {clean_line(seen.first_error[1])}")
        if seen.bytes >= told_bytes + TOLD_EVERY_BYTES:
            told_bytes = seen.bytes
            warn(f"{path}: {seen.bytes / 1e6:.0f} MB read")

    return watch


def read_kernel_logs(paths: Sequence[str]) -> Answer:
    """What the kernel reported in each file."""
    from slurm_watchdog.diagnose.kernel_log.report import document_of, judge_blocks, rows_of, summary_of

    read = [(path, *read_file(path, judge_blocks)) for path in paths]
    problems = [problem for *_, problem in read if problem]
    for problem in problems:
        warn(problem)
    found = [(path, verdict) for path, verdict, _ in read if verdict is not None]

    def show_all() -> None:
        for path, verdict in found:
            name = "standard input" if path == "-" else path
            show("kernel_log", name=name, summary=summary_of(verdict), rows=rows_of(verdict), dropped=verdict.dropped)

    lines = [document_of(path, each) for path, verdict in found for each in verdict.lines]
    something = any(line["role"] != "news" for line in lines)
    unread = len(found) < len(read) or (problems and not something)
    return Answer({"lines": lines}, show_all, options.EXIT_USAGE if unread else something)
