"""Lines of a job's log that look like an error. A row: name, what may be in the lower-cased line, and the proof.

Each matches something that programs print when they fail, never the bare word "error", which healthy logs are full of.
A row is tried only if one of its `needles` is in the line. The scanner (watchdog.log_scan) looks for the letters of all
needles of all tables in whole blocks of a log: the fewer different ones there are, the faster it reads. A needle that
contains another one ("cuda error: " contains "error") costs it nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Signature:
    name: str
    needles: tuple[str, ...]
    """In lower case, without digits at their ends; one of them is in every line that matches."""
    regex: re.Pattern[str]
    consequence: bool = False
    """It follows from something else, which is to be looked for before it."""


def _row(name: str, needles: tuple[str, ...], regex: str, *, consequence: bool = False) -> Signature:
    return Signature(name, needles, re.compile(regex, re.IGNORECASE), consequence)


# The first that matches names the line: what says most stands first.
SIGNATURES: tuple[Signature, ...] = (
    _row("cuda_oom", ("out of memory",), r"CUDA out of memory|CUDA error: out of memory|torch\.(?:cuda\.)?OutOfMemoryError"),
    _row("gpu_ecc", ("ecc error", "error_ecc"), r"uncorrectable ECC error|CUDA_ERROR_ECC_UNCORRECTABLE"),
    _row("cuda_error", ("cuda error: ", "cudaerror", "cuda_error_", "cuda driver error"), r"CUDA error: |c10::CUDAError|CUDA_ERROR_[A-Z_]+|CUDA driver error|cudaError[A-Z]\w+"),
    _row("nccl_watchdog", ("watchdog",), r"Watchdog caught collective operation timeout", consequence=True),
    _row("nccl_watchdog", ("watchdog",), r"NCCL watchdog thread terminated|ProcessGroupNCCL's watchdog got stuck", consequence=True),
    _row("peer_lost", ("remoteerror",), r"ncclRemoteError", consequence=True),
    _row("nccl_error", ("nccl error", "systemerror", "internalerror", "remoteerror", "cudaerror"), r"NCCL error|ncclSystemError|ncclInternalError|ncclRemoteError|ncclUnhandledCudaError", consequence=True),
    _row("infiniband", ("with error ",), r"NET/IB : Got completion .*with error \d+"),
    _row("port_in_use", ("already in use",), r"Address already in use|EADDRINUSE"),
    _row("disk_full", ("no space left",), r"No space left on device"),
    _row("quota", ("quota exceeded",), r"Disk quota exceeded"),
    _row("stale_file_handle", ("stale file handle",), r"Stale file handle"),
    _row("read_only", ("read-only file system",), r"Read-only file system"),
    _row("io_error", ("input/output error",), r"\bInput/output error\b"),
    _row("dataloader_worker", ("dataloader worker",), r"DataLoader worker \(pid\(?s?\)? .*?(?:killed by signal|exited unexpectedly)"),
    _row("segmentation_fault", ("segmentation fault",), r"Segmentation fault"),
    _row("bus_error", ("bus error",), r"\bBus error\b"),
    _row("abort", ("terminate called",), r"terminate called after throwing an instance of"),
    _row("oom_kill", ("oom-kill", "oom_kill", "oom kill", "out of memory"), r"oom[-_ ]kill|Detected \d+ oom_kill event|srun: error: .*: tasks? [\d,-]+: Out Of Memory"),
    _row("host_oom", ("cannot allocate memory", "bad_alloc", "memoryerror"), r"Cannot allocate memory|std::bad_alloc|\bMemoryError\b"),
    _row("time_limit", ("due to",), r"CANCELLED AT .* DUE TO TIME LIMIT", consequence=True),
    _row("preempted", ("due to",), r"CANCELLED AT .* DUE TO PREEMPTION", consequence=True),
    _row("requeued", ("due to",), r"CANCELLED AT .* DUE TO JOB REQUEUE", consequence=True),
    _row("node_failure", ("due to",), r"CANCELLED AT .* DUE TO NODE FAILURE"),
    _row("cancelled", ("cancelled at", "step aborted", "force terminated"), r"\*\*\* (?:JOB|STEP) \S+ ON \S+ CANCELLED AT |srun: Job step aborted|srun: .*\bForce Terminated\b", consequence=True),
    _row("terminated", ("signalexception", "death signal"), r"SignalException: Process \d+ got signal: \d+|Received \d+ death signal, shutting down", consequence=True),
    _row("interrupted", ("keyboardinterrupt",), r"^\s*KeyboardInterrupt\b", consequence=True),
    _row("task_exit", ("srun: error",), r"srun: error: .*(?:Exited with exit code|Segmentation fault|Killed|Aborted|Bus error|Terminated)", consequence=True),
    _row("launcher", ("childfailederror",), r"ChildFailedError", consequence=True),
    _row("launcher", ("failed (exitcode",), r"failed \(exitcode: -?\d+\)", consequence=True),
    _row("peer_lost", ("connection", "broken pipe"), r"Connection closed by peer \[|Connection reset by peer|Socket closed|recvValue failed|\bBroken pipe\b", consequence=True),
    _row("traceback", ("traceback (most recent",), r"Traceback \(most recent call last\)"),
    # The last line of a Python traceback: an exception's dotted name at the start, and what it says.
    _row("python_exception", ("error", "exception", "interrupt", "timeout"), r"^\s*(?:[a-z_][\w]*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Timeout)(?:: .+)?$"),
)  # fmt: skip

# Harmless although a row matches: what says that it goes on by itself, or only talks about an error.
HARMLESS = re.compile(
    r"\bwill (?:be )?retr|\bretrying\b|\bretry \d|\bignored\b|\bnon-fatal\b|\bhandled\b|\brecovered\b|\bno error|\b0 errors\b",
    re.IGNORECASE,
)
HARMLESS_NEEDLES = ("retr", "ignored", "non-fatal", "handled", "recovered", "no error", "0 errors")
"""One of them is in each lower-cased line that HARMLESS matches: to search for these is much quicker."""

CONSEQUENCES: frozenset[str] = frozenset(row.name for row in SIGNATURES if row.consequence)
"""Names of the rows that never are a cause."""
FROM_OUTSIDE: frozenset[str] = frozenset({"time_limit", "preempted", "requeued", "cancelled", "interrupted"})
"""Somebody ends the run: whatever comes after such a line follows from it."""
NORMAL_ENDS: frozenset[str] = frozenset({"time_limit", "preempted", "requeued"})
"""Of these, the ones that say why."""
HEADERS: frozenset[str] = frozenset({"traceback", "abort"})
"""They announce an error; what it is stands in the lines after them."""
STORAGE_FULL: frozenset[str] = frozenset({"disk_full", "quota"})
GPU_ERRORS: frozenset[str] = frozenset({"gpu_ecc", "cuda_error"})

WORDS: dict[str, str] = {
    "cuda_oom": "a GPU ran out of memory",
    "gpu_ecc": "a GPU's memory had an error that could not be corrected",
    "cuda_error": "an error of CUDA",
    "nccl_watchdog": "a collective timed out",
    "nccl_error": "an error of NCCL",
    "infiniband": "a transfer over InfiniBand failed",
    "port_in_use": "the port of the rendezvous is in use",
    "disk_full": "no space was left",
    "quota": "the quota is used up",
    "stale_file_handle": "a file's server lost it (stale handle)",
    "read_only": "the filesystem is read-only",
    "io_error": "an input/output error",
    "dataloader_worker": "a DataLoader worker died",
    "segmentation_fault": "a segmentation fault",
    "bus_error": "a bus error (often shared memory is full)",
    "abort": "an uncaught C++ exception",
    "oom_kill": "the kernel killed it: out of memory",
    "host_oom": "the node ran out of memory",
    "time_limit": "the time limit",
    "preempted": "preemption",
    "requeued": "a requeue",
    "node_failure": "Slurm lost a node",
    "cancelled": "Slurm ended it",
    "terminated": "it was terminated",
    "interrupted": "it was interrupted",
    "task_exit": "a task ended",
    "launcher": "the launcher saw a worker fail",
    "peer_lost": "the connection to another rank was lost",
    "traceback": "a Python exception",
    "python_exception": "a Python exception",
}
"""What each row means, half a sentence."""
