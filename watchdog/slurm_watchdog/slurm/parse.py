"""Pure: what Slurm's commands print, into values. Measured on Slurm 22.05.8.

A user chooses the job's name, comment and paths, line breaks and `JobState=COMPLETED` included, and the
listing prints them raw. So every field ends with a mark that is random for each call (`Marks`), and what is
between two marks is data. The mark is a *suffix* of the field (`name:0MARK`; width 0 means as long as it is).
For a field that squeue does not know it prints an empty column without a title and still exits with 0: so the
header is asked for and must have a title for each field (which title differs between releases), and an answer
without a header is no empty queue.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from ClusterShell.RangeSet import RangeSet
from msgspec.structs import replace

from slurm_watchdog.base.redact import mask_words
from slurm_watchdog.model.slurm import SlurmJob, SlurmNode
from slurm_watchdog.model.slurm_states import HELD, REQUEUED
from slurm_watchdog.slurm.node_names import Fields, Listed, Names, ParseError, all_or_none, expand_nodes

JOB_ID = re.compile(r"\d{1,10}(_\d{1,10})?", re.ASCII)  # One job, or one element of an array, as scontrol takes it.
NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}", re.ASCII)

JOB_FIELDS = (
    "jobid", "jobarrayid", "state", "restartcnt", "batchflag", "requeue", "prioritylong", "starttime", "userid",
    "username", "batchhost", "nodelist", "partition", "arrayjobid", "arraytaskid", "hetjobid", "hetjoboffset",
    "numnodes", "timelimit", "submittime", "eligibletime", "qos", "reservation", "reqnodes",
    # From here on a user has a hand in it.
    "dependency", "reason", "account", "workdir", "command", "stdout", "stderr", "comment", "name",
)  # fmt: skip
"""What squeue -O is asked for, in this order."""
ELEMENT_NUMBER = re.compile(r"\d{1,10}", re.ASCII)
STATE, ARRAY, ELEMENT = (JOB_FIELDS.index(name) for name in ("state", "arrayjobid", "arraytaskid"))
REST_LIMIT = 200  # Characters of a list of elements that have not started.
EXCLUDED_FIELDS = ("%i", "%x")  # The excluded nodes exist in squeue -o only, the restart count in squeue -O only.
NODE_FIELDS = ("nodelist", "nodeaddr", "statecomplete", "partitionname", "timestamp", "user", "reason")
"""What sinfo -O is asked for."""
FIRST_TITLES = frozenset({"JOBID", "NODELIST"})

KNOWN_ROWS = 65_536  # Of a listing of nodes, one for each partition of each, are not read again.
SMALLEST_NO_VALUE = 0xFFFFFFFD  # From here on a number means none (slurm.h: NO_CONSUME_VAL, NO_VAL, INFINITE).
LARGEST_UID = 0xFFFFFFFE  # From here on a number is no user's (setresuid(2): -1 means that nothing is changed).
NO_VAL = "4294967294"  # What Slurm writes for the array index of a job that is no array.
REQUEUED_HELD = "job requeued in held state"
UNREADABLE = "UNREADABLE"  # A state that cannot be read: nothing is done to such a job, or concluded from it.


@dataclass(frozen=True)
class Marks:
    """Ends of a field and of a record: letters and digits, the first no digit, that cannot be guessed."""

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


def split_table(text: str, fields: tuple[str, ...], marks: Marks) -> Listed[list[str]]:
    """The rows that have as many fields as were asked for, and a sentence about each other one. Raises
    ParseError if the header is not as asked for, or if the end is missing."""
    *records, rest = text.split(marks.record + "\n")
    if rest:
        raise ParseError(f"the answer ends in the middle of a record: {rest[-80:]!r}")
    if not records:
        raise ParseError("the answer is empty, even its header is missing")
    rows = [record.split(marks.field) for record in records]
    if len(rows[0]) != len(fields) or rows[0][0] not in FIRST_TITLES or not all(rows[0]):
        raise ParseError(f"{len(fields)} fields were asked for, and the header is {rows[0]!r}")
    whole = tuple(row for row in rows[1:] if len(row) == len(fields))
    dropped = tuple(
        f"a record has {len(row)} fields, not {len(fields)}: {[part[:40] for part in row[:2]]!r}"
        for row in rows[1:]
        if len(row) != len(fields)
    )
    return whole, dropped


# ------------------------------------------------------------------------------------------------- jobs


def list_jobs(text: str, marks: Marks) -> Listed[SlurmJob]:
    """The listing of jobs (`JOB_FIELDS`, times as seconds since the epoch), without excluded nodes, and without the
    rows of which not even the id can be read. Raises ParseError.

    The elements of an array that have not started share one record in Slurm, and become one job here: `6_[2-9]`.
    """
    jobs: list[SlurmJob] = []
    unstarted: dict[str, list[str]] = {}
    rows, cut = split_table(text, JOB_FIELDS, marks)
    dropped = list(cut)
    for row in rows:
        array, element = row[ARRAY], row[ELEMENT]
        if row[0] == array and row[STATE] == "PENDING" and ELEMENT_NUMBER.fullmatch(element):
            elements = unstarted.setdefault(array, [])
            elements.append(element)
            if len(elements) > 1:
                continue
        try:
            jobs.append(read_job(dict(zip(JOB_FIELDS, row, strict=True))))
        except ParseError as error:
            dropped.append(str(error))
    listed = tuple(
        _unstarted_rest(job, unstarted[job.raw_id])
        if len(unstarted.get(job.raw_id, ())) > 1 and job.state == "PENDING"
        else job
        for job in jobs
    )
    return listed, tuple(dropped)


def _unstarted_rest(job: SlurmJob, elements: list[str]) -> SlurmJob:
    """The one job for all unstarted elements of an array, from the first of them."""
    tasks = cut_rest(str(RangeSet.fromlist(elements)))
    if not tasks.endswith("...") and _may_lack_the_last([int(element) for element in elements]):
        tasks += ",..."
    return replace(job, job_id=f"{job.array_job_id}_[{tasks}]", array_tasks=tasks, stdout=None, stderr=None)


def _may_lack_the_last(elements: Sequence[int]) -> bool:
    """Of more than five elements that are equally far apart, and not next to each other, squeue leaves out the last
    (22.05 to 25.11; bitfmt2int in Slurm's bitstring.c): whether these may be such."""
    steps = {after - before for before, after in pairwise(elements)}
    return len(elements) >= 5 and len(steps) == 1 and steps != {1}


def cut_rest(tasks: str) -> str:
    """A list of elements, `2-9,12`; of one that is too long the beginning: `2-9,12,...`."""
    return tasks if len(tasks) <= REST_LIMIT else tasks[: tasks.rindex(",", 0, REST_LIMIT) + 1] + "..."


def parse_excluded(text: str, marks: Marks, job_id: str) -> tuple[str, ...]:
    """The excluded nodes of one job in a listing of `EXCLUDED_FIELDS`. Raises ParseError, also if it isn't in it."""
    rows = all_or_none(split_table(text, EXCLUDED_FIELDS, marks))
    found = {checked_id(shown): excluded for shown, excluded in rows}
    if job_id not in found:
        raise ParseError(f"the answer for job {job_id} is about {sorted(found)[:5]}")
    return expand_nodes(found[job_id])


def read_job(row: Mapping[str, str]) -> SlurmJob:
    """One job from the text of each of JOB_FIELDS, unknown where unreadable. Raises ParseError without an id."""
    job_id, fields = checked_id(row["jobarrayid"]), Fields()
    if not ELEMENT_NUMBER.fullmatch(row["jobid"]):
        raise ParseError(f"job {job_id}: no number of a job: {row['jobid'][:80]!r}")
    state = fields.read("state", checked_state, row["state"], UNREADABLE)
    # A count: one more for each launch that failed (slurmctld, job_mgr.c: batch_flag++).
    is_batch = fields.read("is_batch", _number, row["batchflag"], 1) > 0
    priority = fields.read("priority", _number, row["prioritylong"], None)
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
        uid=fields.read("uid", _uid, row["userid"], -1),
        account=_given(row["account"]),
        partition=row["partition"],
        nodes=fields.read("nodes", expand_nodes, row["nodelist"], ()),
        batch_host=batch_host,
        restarts=fields.read("restarts", _number, row["restartcnt"], 0),
        # Before a start it is only a plan, which changes from listing to listing.
        start_at=None if state == "PENDING" else fields.read("start_at", _time, row["starttime"], None),
        is_batch=is_batch,
        requeueable=fields.read("requeueable", _flag, row["requeue"], None),
        held=is_held(state, row["reason"], priority),
        stdout=expand_path(stdout, row["workdir"], names) if is_batch else None,
        # 22.05 repeats the path of the output for the errors; later releases say (null).
        stderr=expand_path(stderr or stdout, row["workdir"], names) if is_batch else None,
        workdir=_given(row["workdir"]) or None,
        comment=_given(row["comment"]),
        required_nodes=fields.read("required_nodes", expand_nodes, row["reqnodes"], ()),
        node_count=fields.read("node_count", parse_count, row["numnodes"], None),
        time_limit_s=fields.read("time_limit_s", parse_time_limit, row["timelimit"], None),
        qos=_given(row["qos"]),
        reservation=_given(row["reservation"]),
        dependency=_given(row["dependency"]),
        submit_at=fields.read("submit_at", _time, row["submittime"], None),
        eligible_at=fields.read("eligible_at", _time, row["eligibletime"], None),
        array_job_id=row["arrayjobid"] if in_array else "",
        array_tasks=row["arraytaskid"] if in_array else "",
        het_job_id="" if row["hetjobid"] in {"N/A", "0"} else row["hetjobid"],
        het_offset=fields.read("het_offset", _offset, offset, None),
        unreadable=tuple(fields.unreadable),
    )


def is_held(state: str, reason: str, priority: int | None) -> bool:
    """Whether the job is held until a user releases it. Slurm gives held jobs the priority 0.

    A job that Slurm has held after a failure keeps REQUEUE_HOLD until it starts, also once it is released (22.05 to
    25.11): there the priority says it.
    """
    if state in HELD:
        return state != "REQUEUE_HOLD" or not priority
    return state in REQUEUED and (reason == REQUEUED_HELD or reason.startswith("JobHeld") or priority == 0)


def output_of(path: str, row: Mapping[str, str], in_array: bool) -> str:
    """The pattern of an output path. For an element of an array without --output 22.05 lists the default of a
    single job (`slurm-19.out`), while the file is `slurm-2_1.out`; later releases say so."""
    if in_array and path == f"{row['workdir'].rstrip('/')}/slurm-{row['jobid']}.out":
        return path.removesuffix(f"{row['jobid']}.out") + "%A_%a.out"
    return path


def checked_state(state: str) -> str:
    """`state` if it is one word in capitals, whether we know it or not; raises ParseError."""
    if not re.fullmatch(r"[A-Z_]{1,64}", state, re.ASCII):
        raise ParseError(f"no state of a job: {state[:80]!r}")
    return state


def parse_time_limit(text: str) -> float | None:
    """`2-03:04:05`, `03:04:05`, `04:05` in seconds; None for UNLIMITED, Partition_Limit, INVALID."""
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

    `16+1` and the unsplit rest of an array, `6_[2-9%2]`, stay as they are: no command takes them. Of a rest
    with many gaps squeue prints the first 64 characters (SLURM_BITSTR_LEN); it becomes `6_[0,2,4,...]`.
    """
    text = text.removesuffix("+0")
    if "[" in text and "]" not in text:
        text = re.sub(r"(?<=[\[,])[^,\[]*$", "...]", text)
    if not re.fullmatch(r"\d+(\+\d+|_\d+|_\[[0-9,:%.-]+\])?", text, re.ASCII):
        raise ParseError(f"no id of a job: {text[:80]!r}")
    return text


def _number(text: str) -> int:
    if not re.fullmatch(r"\d{1,20}", text, re.ASCII):
        raise ParseError(f"no number: {text[:80]!r}")
    return int(text)


def _uid(text: str) -> int:
    uid = _number(text)
    if uid >= LARGEST_UID:
        raise ParseError(f"no user's number: {text[:80]!r}")
    return uid


def _flag(text: str) -> bool:
    if text not in {"0", "1"}:
        raise ParseError(f"neither 0 nor 1: {text[:80]!r}")
    return text == "1"


def _time(text: str) -> float | None:
    if text in {"N/A", "Unknown", "NONE"}:
        return None
    return float(_number(text))


def _offset(text: str) -> int | None:
    return None if text == "N/A" else _number(text)


def _given(text: str) -> str:
    return "" if text == "(null)" else text


# ------------------------------------------------------------------------------------------------- log paths


def expand_path(path: str, workdir: str, names: Names) -> str | None:
    """The file that a batch script's output goes to, from its pattern (`--output`); None if there is no path.

    Patterns as 22.05 fills them in: %A %a %j %J %N %n %s %t %u %x %%, numbers padded by a width (`%4j`);
    others stay as they are. A path with a backslash has none and loses its backslashes. Later releases list
    the path filled in already.
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


def list_nodes(text: str, marks: Marks) -> Listed[SlurmNode]:
    """The listing of nodes (`NODE_FIELDS`), each once, states in capitals with their flags: IDLE+DRAIN, DOWN*; without
    the rows that have no name. sinfo prints a node once for each of its partitions, and those of no partition not at
    all. Raises ParseError."""
    nodes: dict[str, SlurmNode] = {}
    rows, cut = split_table(text, NODE_FIELDS, marks)
    dropped = list(cut)
    for row in rows:
        try:
            node = _node_of(*row)
        except ParseError as error:
            dropped.append(str(error))
            continue
        before = nodes.get(node.name)
        if before is not None:
            node = replace(node, partitions=tuple(sorted({*before.partitions, *node.partitions})))
        nodes[node.name] = node
    return tuple(nodes.values()), tuple(dropped)


@lru_cache(maxsize=KNOWN_ROWS)
def _node_of(*row: str) -> SlurmNode:
    """Most rows are those of the listing before."""
    return read_node(dict(zip(NODE_FIELDS, row, strict=True)))


def read_node(row: Mapping[str, str]) -> SlurmNode:
    """One node from the text of each of NODE_FIELDS. Raises ParseError if it has no name."""
    name, reason, fields = row["nodelist"], row["reason"], Fields()
    if not NODE_NAME.fullmatch(name):
        raise ParseError(f"no name of a node: {name[:80]!r}")
    no_reason = reason == "none"  # 25.11 says root of no reason
    return SlurmNode(
        name=name,
        address=row["nodeaddr"],
        state=row["statecomplete"].upper(),
        reason="" if no_reason else mask_words(reason),
        reason_at=fields.read("reason_at", _time, row["timestamp"], None),
        reason_user="" if no_reason or row["user"] == "Unknown" else row["user"],
        partitions=tuple(filter(None, (row["partitionname"],))),
        unreadable=tuple(fields.unreadable),
    )


# ------------------------------------------------------------------------------------------------- outcomes


def is_unknown_job(stderr: str) -> bool:
    """Whether the answer is, positively, that there is no such job."""
    return "Invalid job id specified" in stderr


def parse_submitted(text: str) -> str:
    """The id that `sbatch --parsable` prints, without the name of the cluster behind it. Raises ParseError."""
    last = (text.splitlines() or [""])[-1]
    match = re.fullmatch(r"(\d+)(;.*)?", last, re.ASCII)
    if match is None:
        raise ParseError(f"sbatch ended well and named no job: {last[:80]!r}")
    return match.group(1)
