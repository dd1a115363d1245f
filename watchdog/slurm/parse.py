"""Pure: what Slurm's commands print, into values. Measured on Slurm 22.05.8.

A user chooses the job's name, comment and paths, line breaks and `JobState=COMPLETED` included, and the listing prints
them raw. So every field ends with a mark that is drawn anew for each call (`Marks`), and what stands between two marks
is data. The mark is a *suffix* of the field (`name:0MARK`; width 0 means as long as it is). For a field that squeue does not
know it prints an empty column without a title and still exits with 0: so the header is asked for and must have a title for
each field (which title differs between releases), and an answer without a header is no empty queue.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from functools import lru_cache

from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException
from ClusterShell.RangeSet import RangeSet
from msgspec.structs import replace

from watchdog.masking_values import mask_words
from watchdog.model.slurm import SlurmJob, SlurmNode
from watchdog.slurm.states import is_held

JOB_ID = re.compile(r"\d{1,10}(_\d{1,10})?", re.ASCII)
"""One job, or one element of an array, as scontrol takes it."""
NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}", re.ASCII)

JOB_FIELDS = (
    "jobid", "jobarrayid", "state", "restartcnt", "batchflag", "requeue", "prioritylong", "starttime", "userid",
    "username", "batchhost", "nodelist", "partition", "arrayjobid", "arraytaskid", "hetjobid", "hetjoboffset",
    "numnodes", "timelimit", "submittime", "eligibletime", "qos", "reservation", "reqnodes",
    # From here on a user has a hand in it.
    "dependency", "reason", "account", "workdir", "command", "stdout", "stderr", "comment", "name",
)  # fmt: skip
"""What squeue -O is asked for, in this order."""
STATE, ARRAY, ELEMENT = (JOB_FIELDS.index(name) for name in ("state", "arrayjobid", "arraytaskid"))
REST_LIMIT = 200
"""Characters of a list of elements that have not started."""
EXCLUDED_FIELDS = ("%i", "%x")
"""The excluded nodes exist in squeue -o only, the restart count in squeue -O only."""
NODE_FIELDS = ("nodelist", "nodeaddr", "statecomplete", "partitionname", "timestamp", "user", "reason")
"""What sinfo -O is asked for."""
FIRST_TITLES = frozenset({"JOBID", "NODELIST"})

SMALLEST_NO_VALUE = 0xFFFFFFFD
"""From here on a number means that there is none (slurm.h: NO_CONSUME_VAL, NO_VAL, INFINITE)."""
NO_VAL = "4294967294"
"""What Slurm writes for the array index of a job that is no array."""


class ParseError(ValueError):
    """Output that is cut short, or not what was asked for. Never take it for an empty answer."""


@dataclass(frozen=True)
class Marks:
    """Ends of a field and of a record: letters and digits, the first no digit, that nobody can guess."""

    field: str
    record: str


# ------------------------------------------------------------------------------------------------- formats


def long_format(fields: tuple[str, ...], marks: Marks) -> str:
    """The argument of `-O` (squeue, sinfo) that prints `fields` unpadded, each with its mark."""
    *others, last = fields
    return ",".join([*(f"{name}:0{marks.field}" for name in others), f"{last}:0{marks.record}"])


def short_format(fields: tuple[str, ...], marks: Marks) -> str:
    """The same for squeue `-o`."""
    return marks.field.join(fields) + marks.record


def parse_table(text: str, fields: tuple[str, ...], marks: Marks) -> list[list[str]]:
    """Output with header into rows of raw fields; raises ParseError unless it is whole and as asked for."""
    *records, rest = text.split(marks.record + "\n")
    if rest:
        raise ParseError(f"the answer ends in the middle of a record: {rest[-80:]!r}")
    if not records:
        raise ParseError("the answer is empty, even its header is missing")
    rows = [record.split(marks.field) for record in records]
    if len(rows[0]) != len(fields) or rows[0][0] not in FIRST_TITLES or not all(rows[0]):
        raise ParseError(f"{len(fields)} fields were asked for, and the header is {rows[0]!r}")
    for row in rows[1:]:
        if len(row) != len(fields):
            raise ParseError(f"a record has {len(row)} fields, not {len(fields)}: {row[:2]!r}")
    return rows[1:]


# ------------------------------------------------------------------------------------------------- jobs


def parse_jobs(text: str, marks: Marks) -> tuple[SlurmJob, ...]:
    """The listing of jobs (`JOB_FIELDS`, times as seconds since the epoch), without excluded nodes.

    The elements of an array that have not started share one record in Slurm, and become one job here: `6_[2-9]`.
    Raises ParseError.
    """
    jobs: list[SlurmJob] = []
    unstarted: dict[str, list[str]] = {}
    for row in parse_table(text, JOB_FIELDS, marks):
        array, element = row[ARRAY], row[ELEMENT]
        if row[0] == array and row[STATE] == "PENDING" and element.isdigit():
            elements = unstarted.setdefault(array, [])
            elements.append(element)
            if len(elements) > 1:
                continue
        jobs.append(_job(dict(zip(JOB_FIELDS, row, strict=True))))
    return tuple(
        _rest(job, unstarted[job.raw_id])
        if len(unstarted.get(job.raw_id, ())) > 1 and job.state == "PENDING"
        else job
        for job in jobs
    )


def _rest(job: SlurmJob, elements: list[str]) -> SlurmJob:
    """The job that stands for several elements, from the first of them."""
    tasks = str(RangeSet.fromlist(elements))
    if len(tasks) > REST_LIMIT:
        tasks = tasks[: tasks.rindex(",", 0, REST_LIMIT) + 1] + "..."
    return replace(job, job_id=f"{job.array_job_id}_[{tasks}]", array_tasks=tasks, stdout=None, stderr=None)


def parse_excluded(text: str, marks: Marks, job_id: str) -> tuple[str, ...]:
    """The excluded nodes of one job in a listing of `EXCLUDED_FIELDS`. Raises ParseError, also if it isn't in it."""
    found = {checked_id(shown): excluded for shown, excluded in parse_table(text, EXCLUDED_FIELDS, marks)}
    if job_id not in found:
        raise ParseError(f"the answer for job {job_id} is about {sorted(found)[:5]}")
    return expand_nodes(found[job_id])


def _job(row: dict[str, str]) -> SlurmJob:
    job_id = checked_id(row["jobarrayid"])
    state = checked_state(row["state"], job_id)
    is_batch = _number(row["batchflag"], job_id) > 0  # a count: one more for each launch that failed
    priority = _number(row["prioritylong"], job_id)
    name, user, host = row["name"], row["username"], row["batchhost"]
    batch_host = host if is_batch and NODE_NAME.fullmatch(host) else None
    names = Names(row["jobid"], job_id, user, name, batch_host or "")
    in_array = row["arraytaskid"] != "N/A"
    offset = row["hetjoboffset"]
    stdout, stderr = (output_of(_given(row[name]), row, in_array) for name in ("stdout", "stderr"))
    return SlurmJob(
        job_id=job_id,
        raw_id=row["jobid"],
        state=state,
        reason=mask_words(row["reason"]),
        name=mask_words(name),
        user=user,
        uid=_number(row["userid"], job_id),
        account=_given(row["account"]),
        partition=row["partition"],
        nodes=expand_nodes(row["nodelist"]),
        batch_host=batch_host,
        restarts=_number(row["restartcnt"], job_id),
        # Before a start it is only a plan, which changes from listing to listing.
        start_at=None if state == "PENDING" else _time(row["starttime"], job_id),
        is_batch=is_batch,
        requeueable=_flag(row["requeue"], job_id),
        held=is_held(state, row["reason"], priority),
        stdout=expand_path(stdout, row["workdir"], names) if is_batch else None,
        # 22.05 repeats the path of the output for the errors; later releases say (null).
        stderr=expand_path(stderr or stdout, row["workdir"], names) if is_batch else None,
        workdir=_given(row["workdir"]) or None,
        comment=_given(row["comment"]),
        required_nodes=nodes_if_any(row["reqnodes"]),
        node_count=parse_count(row["numnodes"]),
        time_limit_s=parse_time_limit(row["timelimit"]),
        qos=_given(row["qos"]),
        reservation=_given(row["reservation"]),
        dependency=_given(row["dependency"]),
        submit_at=_time(row["submittime"], job_id),
        eligible_at=_time(row["eligibletime"], job_id),
        array_job_id=row["arrayjobid"] if in_array else "",
        array_tasks=row["arraytaskid"] if in_array else "",
        het_job_id="" if row["hetjobid"] in {"N/A", "0"} else row["hetjobid"],
        het_offset=None if offset == "N/A" else _number(offset, job_id),
        script_path=_given(row["command"]),
    )


def output_of(path: str, row: dict[str, str], in_array: bool) -> str:
    """The pattern of an output path. For an element of an array without --output 22.05 lists the default of a single job
    (`slurm-19.out`), while the file is `slurm-2_1.out`; later releases say so."""
    if in_array and path == f"{row['workdir'].rstrip('/')}/slurm-{row['jobid']}.out":
        return path.removesuffix(f"{row['jobid']}.out") + "%A_%a.out"
    return path


def checked_state(state: str, job_id: str) -> str:
    """`state` if it is one word in capitals, whether we know it or not; raises ParseError."""
    if not re.fullmatch(r"[A-Z_]+", state):
        raise ParseError(f"job {job_id} is in the state {state[:80]!r}")
    return state


def parse_time_limit(text: str) -> float | None:
    """`2-03:04:05`, `03:04:05`, `04:05` in seconds; None for what is no duration: UNLIMITED, Partition_Limit, INVALID."""
    match = re.fullmatch(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)", text, re.ASCII)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def parse_count(text: str) -> int | None:
    """`16`, `4-8` (the least) or `1.5K`, as Slurm writes numbers of nodes; None for what is none."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KM]?)(?:-\d+(?:\.\d+)?[KM]?)?", text, re.ASCII)
    if match is None:
        return None
    count = int(float(match.group(1)) * {"": 1, "K": 1024, "M": 1024**2}[match.group(2)])
    return count if count < SMALLEST_NO_VALUE else None


def checked_id(text: str) -> str:
    """squeue's own id as scontrol takes it: the first component of a heterogeneous job, `16+0`, is `16` there.

    `16+1` and the unsplit rest of an array, `6_[2-9%2]`, stay as they are: no command takes them. Of a rest with many gaps
    squeue prints the first 64 characters (SLURM_BITSTR_LEN); it becomes `6_[0,2,4,...]`.
    """
    text = text.removesuffix("+0")
    if "[" in text and "]" not in text:
        text = re.sub(r"(?<=[\[,])[^,\[]*$", "...]", text)
    if not re.fullmatch(r"\d+(\+\d+|_\d+|_\[[0-9,:%.-]+\])?", text, re.ASCII):
        raise ParseError(f"no id of a job: {text[:80]!r}")
    return text


def _number(text: str, job_id: str) -> int:
    if not re.fullmatch(r"\d{1,20}", text, re.ASCII):
        raise ParseError(f"job {job_id}: {text[:80]!r} is no number")
    return int(text)


def _flag(text: str, job_id: str) -> bool:
    if text not in {"0", "1"}:
        raise ParseError(f"job {job_id}: {text[:80]!r} is neither 0 nor 1")
    return text == "1"


def _time(text: str, job_id: str) -> float | None:
    if text in {"N/A", "Unknown", "NONE"}:
        return None
    return float(_number(text, job_id))


def _given(text: str) -> str:
    return "" if text == "(null)" else text


@lru_cache(maxsize=16384)
def expand_nodes(text: str) -> tuple[str, ...]:
    """`n[1-2],x` gives n1, n2, x; nothing, or Slurm's words for nothing, gives no nodes. Raises ParseError.

    Groups (`@name`) are not looked up: that would run whatever the groups of this machine are configured to run.
    """
    if text in {"", "(null)", "n/a", "None", "None assigned"}:
        return ()
    try:
        # The names are shared by all jobs that have had these nodes: what is kept stays small on 10,000 of them.
        return tuple(sys.intern(str(node)) for node in NodeSet(text, resolver=RESOLVER_NOGROUP))
    except NodeSetException as error:
        raise ParseError(f"no list of nodes: {text[:80]!r} ({error})") from error


def nodes_if_any(text: str) -> tuple[str, ...]:
    """As `expand_nodes`, for what nothing depends on: one job's odd list spoils no listing."""
    try:
        return expand_nodes(text)
    except ParseError:
        return ()


# ------------------------------------------------------------------------------------------------- log paths


@dataclass(frozen=True)
class Names:
    """What the patterns of an output path stand for."""

    raw_id: str
    """The id of this one job; for an array's element not the one with the underscore."""
    job_id: str
    user: str
    name: str
    batch_host: str


def expand_path(path: str, workdir: str, names: Names) -> str | None:
    """The file that a batch script's output goes to, from its pattern (`--output`); None if there is no path.

    Patterns as 22.05 fills them in: %A %a %j %J %N %n %s %t %u %x %%, numbers padded by a width (`%4j`); others stay as they
    are. A path with a backslash has none and loses its backslashes. Later releases list the path filled in already.
    """
    if path in {"", "(null)", "N/A"} or "\0" in path:
        return None
    array, _, index = names.job_id.partition("_")
    if not index or not index.isdigit():
        array, index = names.raw_id, NO_VAL
    host = names.batch_host.partition(".")[0]
    words = {
        "A": array, "a": index, "j": names.raw_id, "J": names.raw_id, "N": host, "n": "0", "s": "batch", "t": "0",
        "u": names.user, "x": names.name,
    }  # fmt: skip

    def fill(match: re.Match[str]) -> str:
        width, letter = match.groups()
        if letter == "%":
            return "%"
        if letter not in words:
            return match.group(0)
        word = words[letter]
        return word.zfill(min(int(width), 10)) if width and letter in "AajJnt" else word

    if "\\" in path:
        filled = re.sub(r"\\(.?)", r"\1", path, flags=re.DOTALL)
    else:
        filled = re.sub(r"%(\d*)([A-Za-z%])", fill, path)
    if filled.startswith("/") or not workdir.startswith("/"):
        return filled
    return f"{workdir.rstrip('/')}/{filled}"


# ------------------------------------------------------------------------------------------------- nodes


def parse_nodes(text: str, marks: Marks) -> tuple[SlurmNode, ...]:
    """The listing of nodes (`NODE_FIELDS`), each once, states in capitals with their flags: IDLE+DRAIN, DOWN*.

    sinfo prints a node once for each of its partitions, and those of no partition not at all. Raises ParseError.
    """
    nodes: dict[str, SlurmNode] = {}
    for name, address, state, partition, at, user, reason in parse_table(text, NODE_FIELDS, marks):
        if not NODE_NAME.fullmatch(name):
            raise ParseError(f"no name of a node: {name[:80]!r}")
        before = nodes[name].partitions if name in nodes else ()
        nodes[name] = SlurmNode(
            name=name,
            address=address,
            state=state.upper(),
            reason="" if reason == "none" else mask_words(reason),
            reason_at=_time(at, f"of node {name}"),
            reason_user="" if user == "Unknown" else user,
            partitions=tuple(sorted({*before, partition} - {""})),
        )
    return tuple(nodes.values())


# ------------------------------------------------------------------------------------------------- outcomes


def says_unknown_job(stderr: str) -> bool:
    """Whether the answer is, positively, that there is no such job."""
    return "Invalid job id specified" in stderr


def parse_submitted(text: str) -> str:
    """The id that `sbatch --parsable` prints, without the name of the cluster behind it. Raises ParseError."""
    last = (text.splitlines() or [""])[-1]
    match = re.fullmatch(r"(\d+)(;.*)?", last, re.ASCII)
    if match is None:
        raise ParseError(f"sbatch ended well and named no job: {last[:80]!r}")
    return match.group(1)
