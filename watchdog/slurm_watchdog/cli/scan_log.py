"""`slurm-watchdog scan-log`: what logs alone say about a run."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from slurm_watchdog.cli.input_progress import reading, size_of
from slurm_watchdog.cli.options import (
    EXIT_FINE,
    EXIT_FOUND,
    EXIT_USAGE,
    Refusal,
    config_option,
    json_option,
    knowledge_option,
    load_or_exit,
    print_json,
)
from slurm_watchdog.cli.terminal import clean, count, duration, sentence, table

if TYPE_CHECKING:
    from slurm_watchdog.diagnose.logs.digest import Digest
    from slurm_watchdog.diagnose.logs.report import RunReport, Settings
    from slurm_watchdog.knowledge.progress_patterns import Pattern

SHOWN_ERRORS: Final = 8
FIRST_LINE, LEAST_QUOTED = 160, 80
"""Characters of the first sentence, and of the line in it at least."""
QUOTED: Final = 200
"""Of which a verdict quotes so many."""
BLIND: Final = ", and no progress either: whether it trains cannot be read in it."
LOG_NAME: Final = re.compile(
    r"(?:\.(?:log|out|err|txt|jsonl?|[oe]\d+)|(?:^|[._-])(?:stdout|stderr|log|out|err))(?:\.\d{1,3})?(?:\.(?:gz|bz2|xz|zst))?$"
)
"""Of the files in a directory those that a job's output is in: beside them there may be checkpoints."""
MARKDOWN: Final = (".md", ".markdown")
MARKDOWN_BYTES: Final = 4 * 1024**2


@click.command("scan-log", short_help="What logs alone say: progress, cause and cascade, verdict.")
@click.argument("files", metavar="FILE|DIR…", nargs=-1, required=True, type=click.Path(allow_dash=True))
@click.option(
    "--at",
    metavar="TIME",
    help="When the log was seen last, as it writes times, or in seconds since 1970. A silent log is a hang "
    "only if enough time has passed. [default: its last line's time]",
)
@click.option("--kernel", is_flag=True, help="The files are kernel logs (dmesg, journalctl -k).")
@config_option(
    "Configuration file: its jobs.progress_patterns and the limits of its detectors. [default: every setting's default]"
)
@knowledge_option
@json_option
def scan_log(files: tuple[str, ...], at: str | None, kernel: bool, config_file: str | None, as_json: bool) -> None:
    """Reads logs of training jobs (plain, gzip, bzip2, xz; `-` is standard input; pasted text, Markdown) and
    says how far the run came, what ended it, which rank failed first, and what only followed. Files of one job
    (standard output and error, one a rank or node) are judged together; a directory stands for the logs in it.
    It needs no Slurm, no configuration and no root.

    \b
    Exit code: 0 nothing found, 1 something found, 2 a file can't be read, or not to its end, and nothing was found; or
    nothing in it was recognised as a job's log.

    \b
    Examples:
      slurm-watchdog scan-log slurm-1234.out
      slurm-watchdog scan-log logs/rank_*.log                 files of one job are judged together
      slurm-watchdog scan-log --at "2024-05-01 12:00" train.log
      slurm-watchdog scan-log --config my.yaml slurm-1234.out   to try jobs.progress_patterns
      slurm-watchdog scan-log --kernel dmesg.txt
    """
    if kernel:
        from slurm_watchdog.cli.scan_kernel import scan_kernel

        sys.exit(scan_kernel(files, as_json))
    from slurm_watchdog.diagnose.logs.timestamps import parse_time

    if at is not None and parse_time(at, None) is None:
        raise Refusal([f"--at {at}: not a time; write it as 2024-05-01T12:00:00, or in seconds since 1970"])
    settings = _settings(config_file)
    read = {path: _read(path, settings.own) for path in dict.fromkeys(_with_folders(files))}
    digests = {path: digest for path, (digest, _) in read.items()}
    readable = [path for path, digest in digests.items() if digest is not None]
    judged = _judge_jobs(readable, digests, at, settings)
    _warn_of_kernel_logs(readable, digests)
    if as_json:
        print_json({"files": [row for each in judged for row in each.rows()]})
    else:
        for each in judged:
            _print(each)
    found = any(each.verdict for each in judged)
    blind = len(readable) < len(digests) or (not found and not all(whole for _, whole in read.values()))
    unread = any(each.unread is not None for each in judged) and not found
    sys.exit(EXIT_USAGE if blind or unread else EXIT_FOUND if found else EXIT_FINE)


def _warn_of_kernel_logs(paths: Sequence[str], digests: Mapping[str, Digest | None]) -> None:
    """One sentence for each file that is a kernel's log: it is read as a job's all the same."""
    from slurm_watchdog.parse.kernel_log.file import is_kernel_log

    for path in paths:
        digest = digests[path]
        if digest is not None and is_kernel_log(line.raw for line in digest.lines):
            name = clean(path)
            click.echo(
                f"{name} looks like a kernel log; for what the kernel says: slurm-watchdog scan-log --kernel {name}",
                err=True,
            )


def _judge_jobs(
    paths: list[str], digests: dict[str, Digest | None], at: str | None, settings: Settings
) -> list[RunReport]:
    from slurm_watchdog.diagnose.logs.grouping import group
    from slurm_watchdog.diagnose.logs.report import judge_job

    judged = []
    for places in group(paths):
        mine = [paths[place] for place in places]
        kept = [digest for path in mine if (digest := digests[path]) is not None]
        judged.append(judge_job(mine, kept, settings, at, [_written_at(path) for path in mine]))
    return judged


def _with_folders(paths: Sequence[str]) -> Iterator[str]:
    """The paths, for each directory the logs in it. Raises Refusal for one without any."""
    from slurm_watchdog.cli.stack_files import files_in

    for path in paths:
        if path == "-" or not os.path.isdir(path):
            yield path
            continue
        left_out: list[str] = []
        found = [each for _, each in files_in([path], left_out) if LOG_NAME.search(os.path.basename(each))]
        for words in left_out:
            click.echo(words, err=True)
        if not found:
            raise Refusal(
                [f"{clean(path)}: no file in it is named like a log (.log, .out, .err, .txt, .json); name them"]
            )
        yield from found


def _settings(config_file: str | None) -> Settings:
    """The detectors' of a configuration, their defaults without one. Ends the process with code 2 if the file
    is wrong."""
    from slurm_watchdog.detect.collective_hang import CollectiveHang
    from slurm_watchdog.detect.loss_nan import LossNan
    from slurm_watchdog.detect.loss_spike import LossSpike
    from slurm_watchdog.diagnose.logs.report import Settings

    if config_file is None:
        return Settings(CollectiveHang(), LossNan().steps)
    from slurm_watchdog.config.knowledge_files import put_in_force
    from slurm_watchdog.parse.training_log.site_patterns import compile_patterns

    config = load_or_exit(config_file)
    put_in_force(config.site_texts)
    own = compile_patterns(config.jobs.progress_patterns)
    spike = config.detectors.of(LossSpike)
    steps = config.detectors.of(LossNan).steps
    return Settings(config.detectors.of(CollectiveHang), steps, spike.deviations, spike.percent, own)


def _read(path: str, own: tuple[Pattern, ...]) -> tuple[Digest | None, bool]:
    """(what is kept of one file, whether it could be read to its end); no digest, after saying why, if it
    can't be read or is no text."""
    from slurm_watchdog.diagnose.logs.digest import Collector
    from slurm_watchdog.parse.text_input import Unreadable, is_text

    size = size_of(path)
    markdown = path.endswith(MARKDOWN) or (0 < size <= MARKDOWN_BYTES) or path == "-"
    collector, text = Collector(markdown=markdown, own=own), True
    try:
        with reading(path) as file:
            for block in file.blocks:
                text = is_text(block.data) if block.first_line == 1 else text
                if not text:
                    break
                collector.add(block.data, block.first_line, block.numbers)
    except Unreadable as error:
        click.echo(clean(error), err=True)
        return None, False
    if not text:
        click.echo(
            f"{clean(path)} is not text (a program, an image?): give the file that the job writes its output to",
            err=True,
        )
        return None, False
    return collector.digest(), not file.damaged


def _written_at(path: str) -> float | None:
    """The file's modification time as local time, the way logs write it."""
    from datetime import datetime, timezone

    try:
        local = datetime.fromtimestamp(os.stat(path).st_mtime)  # noqa: DTZ006 - logs write local time
    except (OSError, ValueError, OverflowError):  # no such file, or a date that is none
        return None
    return local.replace(tzinfo=timezone.utc).timestamp()


def _print(judged: RunReport) -> None:
    rows = judged.rows()
    first = "standard input" if rows[0]["path"] == "-" else rows[0]["path"]
    name = first if len(rows) == 1 else f"{first} and {count(len(rows) - 1, 'more file')} of the same job"
    verdict = judged.verdict
    if judged.unread is not None:
        sentence(f"{name}: the run cannot be judged: {judged.unread}", "yellow")
    elif verdict is None:
        sentence(f"{name}: {_healthy_words(rows)}", "green")
        for line in _evidence(rows, [_of_a_node(row) for row in rows]):
            sentence(f"  {line}")
        if _is_blind(rows):
            from slurm_watchdog.knowledge.frameworks import what_to_do

            sentence(f"  try next: {what_to_do(rows[0]['framework'])}")
    else:
        sentence(f"{name}: {_first_line(verdict.summary, verdict.text)}", "bold red")
        for other in judged.excerpts[:SHOWN_ERRORS]:
            sentence(f"  also     line {other.line:<7} {_first_line(other.summary, other.text)}")
        named = [[error for error in row["errors"] if error["role"] != "noise"] for row in rows]
        cause = [[error for error in each if error["role"] == "cause"] for each in named]
        rest = [[error for error in each if error["role"] != "cause"] for each in named]
        shown = [*_evidence(rows, cause), *_hints(verdict.name, verdict.text), *_evidence(rows, rest)]
        for line in shown:
            sentence(f"  {line}")
    table(
        ["file", "framework", "steps", "of", "s a step", "lines", "changes of speed"],
        [_progress_row(row) for row in rows if row["progress"]["lines"]],
    )


def _first_line(summary: str, quoted: str) -> str:
    """The sentence, with so much of the line that it quotes as there is room for: the whole line is shown below."""
    from slurm_watchdog.base.shortened import shortened

    whole = shortened(quoted, QUOTED)
    if len(summary) <= FIRST_LINE or not whole or whole not in summary:
        return summary
    return summary.replace(whole, shortened(quoted, max(LEAST_QUOTED, FIRST_LINE - len(summary) + len(whole))))


def _is_blind(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether nothing in them shows progress."""
    return not any(row["finished"] or row["progress"]["lines"] for row in rows)


def _healthy_words(rows: Sequence[dict[str, Any]]) -> str:
    notes = "".join(f"; {note}" for note in dict.fromkeys(note for row in rows for note in row["notes"]))
    found = "training was done" if notes else "nothing wrong found; training was done"
    if any(row["finished"] for row in rows):
        return f"{found}{notes}."
    steps = [row["progress"]["last_step"] for row in rows if row["progress"]["last_step"] is not None]
    if _is_blind(rows):
        return f"no error found{_ended_words(rows)}{BLIND}"
    none = "; it made progress, in steps of unknown number."  # of samples, or in an epoch of unknown length
    last = f"; its last step is {max(steps)}." if steps else none
    return f"{'no error' if notes else 'nothing wrong'} found{_ended_words(rows)}{notes}{last}"


def _ended_words(rows: Sequence[dict[str, Any]]) -> str:
    """What ended the run from outside, such as its time limit, and in which line; empty if nothing did."""
    from slurm_watchdog.diagnose.logs.verdict import TOLD_TO_END
    from slurm_watchdog.knowledge.log_signatures import log_table

    for row in rows:
        for error in row["errors"]:
            told = error["class"] == "terminated" and TOLD_TO_END.search(error["text"])
            if error["role"] == "teardown" and (told or error["class"] in log_table().from_outside):
                return f"; ended from outside (line {error['line']}): {log_table().means[error['class']]}"
    return ""


def _of_a_node(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Errors of an earlier run in the same log, or that the run survived, which a node can cause: somebody may have to
    look at it even so."""
    from slurm_watchdog.diagnose.logs.survived import OF_CHILDREN, SOFT
    from slurm_watchdog.knowledge.log_signatures import log_table

    names = log_table().node_can_cause - log_table().consequences - OF_CHILDREN - SOFT
    return [error | {"role": "earlier"} for error in row["errors"] if error["class"] in names]


def _evidence(rows: Sequence[dict[str, Any]], errors: Sequence[list[dict[str, Any]]]) -> list[str]:
    """Lines with `errors` of each row, few of all files together."""
    several = len(rows) > 1
    found = [
        (error, row["path"])
        for row, mine in zip(rows, errors, strict=True)
        for error in sorted(mine, key=lambda error: int(error["line"]))
    ]
    lines = []
    for error, path in found[:SHOWN_ERRORS]:
        who = f"rank {error['rank']}" if error["rank"] is not None else ""
        who = " ".join(word for word in (who, f"on {error['host']}" if error["host"] else "") if word)
        where = f"{os.path.basename(path)}:{error['line']}" if several else f"line {error['line']}"
        lines.append(f"{error['role']:<9}{where:<12} {who + ': ' if who else ''}{error['text'][:180]}")
        if error["role"] == "cause":
            lines += [f"{'':<22}{text[:180]}" for text in error["more"]]
    if len(found) > SHOWN_ERRORS:
        lines.append(f"… and {len(found) - SHOWN_ERRORS} more (--json has them)")
    return lines


def _hints(name: str, text: str) -> list[str]:
    """What it usually is, and what to try next."""
    from slurm_watchdog.knowledge.remediation_hints import hints_for

    lines = []
    for hint in hints_for(name, text)[:2]:
        said = (("usually", hint.usually), ("try next", hint.try_next), ("see", hint.documented))
        lines += [f"{label}: {words}" for label, words in said if words]
    return lines


def _progress_row(row: dict[str, Any]) -> list[str]:
    progress = row["progress"]
    changes = ", ".join(f"{c['percent']:+.1f} % at step {c['step']}" for c in row["throughput_changes"][:3])
    steps = f"{progress['first_step']}–{progress['last_step']}" if progress["last_step"] is not None else "-"
    total = str(progress["total_steps"]) if progress["total_steps"] is not None else "-"
    return [
        os.path.basename(row["path"]), row["framework"] or "-", steps, total, duration(progress["step_seconds_median"]),
        str(progress["lines"]), changes or "-",
    ]  # fmt: skip
