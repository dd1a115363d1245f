"""What people give to `scan-log` that is no log of a job: how it looks, and what reads it instead. Pure.

A row is for a document in which so large a share of the lines matches; the first row that fits names it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import msgspec

from slurm_watchdog.base.late_regex import late_regex

MOST = 0.4
HEADING = 0.0
"""One line is enough, in a text without the lines of a log: many jobs print such a report when they begin."""


class Document(msgspec.Struct, frozen=True):
    """One row."""

    name: str
    looks_like: str  # Continues "it looks like".
    instead: str  # A sentence; empty where nothing reads it.
    pattern: re.Pattern[str]  # Of a line.
    share: float = MOST


def _row(name: str, looks_like: str, instead: str, pattern: str, share: float = MOST) -> Document:
    return Document(name, looks_like, instead, late_regex(pattern), share)


GIVE_OUTPUT = "Give the file that the job writes its output to."
_STACKS = "Use slurm-watchdog diagnose."
_STATE = r"(?:error|debug\d?|fatal|verbose|info|warning)"

DOCUMENTS: Final[tuple[Document, ...]] = (
    _row("stacks", "stacks of Python processes", _STACKS,
         r"^Thread (?:0x)?[\dA-Fa-f]+ \((?:active|idle)|^Process \d+: |^(?:Current thread|Thread) 0x[\da-f]{6,} \(most recent call first\)", HEADING),
    _row("gdb", "a backtrace of gdb", _STACKS, r"^(?:\(gdb\) |#\d+ +(?:0x[\da-f]+ in |\w))"),
    _row("kernel_log", "a kernel log", "Use slurm-watchdog diagnose.",
         r"^(?:<\d+>)?\[ *\d+\.\d{6}\] (?!\[[\w.-]+:\d+ )|^\[\w{3} \w{3} +\d+ \d\d:\d\d:\d\d \d{4}\] |^\w{3} [ \d]\d \d\d:\d\d:\d\d \S+ kernel: "),
    _row("nvidia_smi", "a report of nvidia-smi", GIVE_OUTPUT, r"\bNVIDIA-SMI \d|=+NVSMI LOG=+|^\| +\d+ +N/A +N/A +\d+ |^\s*GPU0\s+X\s", HEADING),
    _row("rocm_smi", "a report of rocm-smi", GIVE_OUTPUT, r"ROCm System Management Interface|^=+ ROCm SMI|^GPU\[\d+\]\s*: ", HEADING),
    _row("slurm_table", "a table of Slurm (squeue, sacct, sinfo, scontrol)", GIVE_OUTPUT,
         r"^\s*(?:JOBID|JobID\w*|ACCOUNT|PARTITION|NODELIST|HOSTNAMES)[ |]+[A-Za-z(%][\w(%]|^(?:JobId|NodeName|PartitionName|StepId|ReservationName)=\S+ \w+=|^ +\w+=\S+ \w+=\S", 0.05),
    _row("slurm_daemon", "a log of a daemon of Slurm", "It says nothing of a run's progress. " + GIVE_OUTPUT,
         rf"^(?:slurm(?:ctld|d|dbd|stepd|restd): )?\[20\d\d-\d\d-\d\dT[\d:.]+\] (?:{_STATE}: +|\[\d+\.\w+\] |sched|_?slurm_rpc|_job_complete|_pick|job_|backfill|cleanup|update_node|Node |node |Launching |launch task|Registering|agent|slurm\w* |CPU|Power|SchedulerParameters|cons_tres|gres|mpi/|topology/|auth/|cred/|select/|req_switch|powercapping|No \w+|Recovered|Running as|Reinitializing|killing|_\w+: )|^slurm(?:ctld|d|dbd|restd): "),
    _row("batch_script", "a batch script", "Use slurm-watchdog doctor.", r"^#!|^#SBATCH\b", 0.08),
    _row("patch", "a patch", GIVE_OUTPUT, r"^(?:diff --git |@@ -\d|\+\+\+ |--- [ab]/)", 0.05),
    _row("source", "source code", GIVE_OUTPUT, r"^\s*(?:import \w|from [\w.]+ import |def \w+\(|class \w+[(:]|return\b|if .*:$|for .* in .*:$|with .*:$|export \w+=|#include|[\w.]+ = \S)", 0.35),
    _row("system_calls", "system calls (strace)", GIVE_OUTPUT, r"^(?:\[pid +\d+\] |\d+ +)?(?:[\d:.]+ )?\w+\(.*\) += +(?:-?\d|0x|\?)|^strace: "),
    _row("processes", "a list of processes (ps, top)", GIVE_OUTPUT, r"^\s*(?:USER +PID|PID +(?:USER|TTY|COMMAND)|F S UID|UID +PID)\b|^(?:top - |%Cpu\(s\))", 0.03),
    _row("files", "a list of files", GIVE_OUTPUT, r"^[-dlcbps][r-][w-][xsS-][r-][w-][xsS-][r-][w-][xtT-][.+@]? |^total \d+$"),
    _row("interfaces", "a list of interfaces or ports of the network", GIVE_OUTPUT,
         r"^\w+: flags=\d+|^\d+: [\w@.-]+: <[\w,]+> mtu |^CA '\w+'|^\s+Port \d+:$|^hca_id:|^Infiniband device '|^\s+inet6? (?:addr:)?[\da-f.:]+|^PORT +STATE +SERVICE|^\d+/(?:tcp|udp) +\w+ ", 0.1),
    _row("devices", "a list of devices", GIVE_OUTPUT, r"^(?:[\da-f]{4}:)?[\da-f]{2}:[\da-f]{2}\.[\da-f] [A-Z]|^NAME +MAJ:MIN|^Filesystem +(?:1K-blocks|Size|Inodes|Type)\b", 0.1),
    _row("sensors", "a table of sensors", GIVE_OUTPUT, r"^[\w .+/-]{1,60}\|[ \w.]{1,40}\| {0,10}\w"),
    _row("settings", "a report of settings or hardware (name: value)", GIVE_OUTPUT, r"^\s*[A-Za-z][^:=|]{0,60}?\s[:=]\s+\S", 0.6),
    _row("html", "a page of HTML or XML", "Give the text alone.", r"^\s*</?[A-Za-z!?][^>]*>", 0.3),
    _row("numbers", "a table of numbers", GIVE_OUTPUT, r"^\s*[-+\d.eE%]+(?:[,;\t ]+[-+\d.eE%]+)+\s*$|^\s*[-+\d.]+$", 0.6),
)  # fmt: skip
_JSON = late_regex(r'\s*[\[{]\s*(?:["\[{}\]]|$)')


def looks_like(lines: Sequence[str], records: int) -> Document | None:
    """The row that enough of the lines (those that are not blank) belong to; as many as `records` look like a log's."""
    if lines and _JSON.match(lines[0]) and (not records or sum(map(bool, map(_JSON.match, lines))) > len(lines) / 2):
        return UNKNOWN_JSON
    for row in DOCUMENTS:
        hits = sum(1 for line in lines if row.pattern.search(line))
        if hits and hits >= row.share * len(lines) and (row.share >= MOST or hits >= records):
            return row
    return None


UNKNOWN_JSON = Document(
    "json",
    "JSON whose records are of no known form",
    "Give the messages as lines of text, or one record a line.",
    _JSON,
)
