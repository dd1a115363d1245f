"""Whether the command has lost a node for good, by Slurm, by the nodes themselves, and by the command's own log. Under
`--no-kill` Slurm takes a node that is DOWN out of the job and leaves the rest to run. Its word alone ends nothing: its
slurmd may have died alone, the ranks may have another network, or the trainer may continue without the node."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence

from slurm_watchdog.base import clock
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.knowledge.launch_options import NODES
from slurm_watchdog.supervisor.endings import TAIL_BYTES
from slurm_watchdog.supervisor.job_questions import JobQuestions
from slurm_watchdog.supervisor.look import MOST, REACH_S
from slurm_watchdog.supervisor.srun import own_program

LOOK_S = 30.0  # Between two questions to Slurm for the job's nodes: it is one job's row.
AGAIN_S = 5.0  # The same once one is missing.
LISTINGS = 2  # Answers in a row without the node, as `node_down` wants them.
TRIES = 3  # Connections to its slurmd in vain, in a row: as `node_down` wants them.
STILL_S = 15.0
"""Since the last new step, where the node is gone for certain. Slurm has waited for its SlurmdTimeout before."""
STILL_LINES = 3.0
"""The same in times between two lines that say a step: the ranks may reach each other by another network."""
UNKNOWN_S = 180.0
"""The same where that time is not known: longer than most. A judgement. Where the log has said no step at all, waiting
shows nothing: STILL_S."""
PATIENT_S = 900.0
"""The same where the node still answers, or where the trainer can continue with fewer nodes: more than the 10 min after
which NCCL's own limit ends what waits for a lost rank. A judgement."""

_NAMES = "|".join(sorted(each.replace("_", "[_-]") for each in NODES))
_LEAST = re.compile(rf"(?:^|[\s\"'])--?(?:{_NAMES})(?:=|\s+)[\"']?(\d{{1,6}}):(\d{{1,6}})\b")


class Watch(Struct, kw_only=False):
    """What was seen of the present start."""

    missing: Mapping[str, tuple[int, int]] = {}
    """Nodes of the command that Slurm has taken out of the job: (answers in a row without it, connections in vain)."""
    counts: Mapping[str, float] = {}  # Steps, by what prints them, when one was new last; none: the log says none.
    line_s: float | None = None  # Between two lines that say a step; None: not known.
    still_since: float = 0.0  # When that was, or when the first node was missing.


def seen(
    watch: Watch, missing: Sequence[str], answering: Collection[str], counts: Mapping[str, float], now: float, *,
    line_s: float | None = None,
) -> Watch:  # fmt: skip
    """After one more answer of Slurm's. `answering`: those of `missing` whose slurmd, or kernel, answers; `counts` and
    `line_s`: the newest steps of the command, and the time between two lines with one."""
    line_s = watch.line_s if line_s is None else line_s
    if not missing:
        return Watch(counts={**watch.counts, **counts}, line_s=line_s)
    nodes = {}
    for node in missing:
        listings, tries = watch.missing.get(node, (0, 0))
        nodes[node] = (listings + 1, 0 if node in answering else tries + 1)
    # A trainer that continues without the node may begin at its last checkpoint.
    moves = any(count != watch.counts.get(name, count) for name, count in counts.items())
    new = moves or not watch.missing
    return Watch(nodes, {**watch.counts, **counts}, line_s, now if new else watch.still_since)


def lost(watch: Watch, now: float, *, elastic: bool) -> tuple[str, ...]:
    """The nodes without which the command has to be started again; none while it may still do well."""
    listed = tuple(node for node, (listings, _) in watch.missing.items() if listings >= LISTINGS)
    gone = any(watch.missing[node][1] >= TRIES for node in listed)
    limit_s = PATIENT_S
    if gone and not elastic:
        unknown_s = UNKNOWN_S if watch.counts else STILL_S
        limit_s = unknown_s if watch.line_s is None else min(PATIENT_S, max(STILL_S, STILL_LINES * watch.line_s))
    return listed if listed and now - watch.still_since >= limit_s else ()


def least_nodes(command: Sequence[str], count: int) -> int:
    """On how few nodes the command can run by its own words (torchrun's --nnodes=MIN:MAX), or `count`."""
    found = _LEAST.search(" ".join(command))
    return min(count, max(1, int(found[1]))) if found is not None and int(found[1]) < int(found[2]) else count


# ------------------------------------------------------------------------------------ questions

FILE_S = 2.0  # For a file on someone's filesystem.
WITNESSES = 2  # Nodes that are still of the job: where none of these answers either, it is our own network.
SLURMD_PORT = re.compile(r"^SlurmdPort\s*=\s*(\d{1,5})", re.MULTILINE)
ADDRESS = re.compile(r"\bNodeName=(\S+) .*?\bNodeAddr=(\S+)")
USUAL_PORT = "6818"  # Of slurmd (slurm.conf(5)).


class JobNodes:
    """The nodes of one command; all of it belongs to one event loop."""

    def __init__(self, ask: JobQuestions, logs: Sequence[str], *, elastic: bool):
        """`logs`: files in which the command says how far it is. `elastic`: it can continue with fewer nodes."""
        self._ask, self._logs, self._elastic, self._port = ask, tuple(logs), elastic, ""
        self._watch = Watch()
        self._first: dict[str, tuple[float, float]] = {}
        """Kind of line -> how far the command was when one was read first, and when."""

    def begun(self) -> None:
        """Another start of the command runs."""
        self._first.clear()
        self._watch = Watch(line_s=self._watch.line_s)

    @property
    def wait_s(self) -> float:
        """Until the next look."""
        return AGAIN_S if self._watch.missing else LOOK_S

    async def look(self, needed: Sequence[str]) -> tuple[str, ...]:
        """Looks once; the nodes of `needed` without which the command has to be started again."""
        if present := await self._ask.nodes():
            await self._see([node for node in needed if node not in present], [n for n in needed if n in present])
            return lost(self._watch, clock.monotonic(), elastic=self._elastic)
        return ()

    async def _see(self, missing: Sequence[str], others: Sequence[str]) -> None:
        answering = await self._answering(missing, others) if missing else set[str]()
        counts, line_s = dict[str, float](), None
        if self._logs and (missing or self._watch.line_s is None):
            argv = ("tail", "-q", "-c", str(TAIL_BYTES), "--", *self._logs)
            counts, line_s = self._read((await self._ask.run(*argv, deadline_s=FILE_S)).output)
        self._watch = seen(self._watch, missing, answering, counts, clock.monotonic(), line_s=line_s)

    async def _answering(self, missing: Sequence[str], others: Sequence[str]) -> set[str]:
        """Those that are not known to be gone."""
        witnesses = others[:WITNESSES]
        asked = [*witnesses, *missing[: MOST - WITNESSES]]
        listed = await self._ask.run("scontrol", "--oneliner", "show", "node", ",".join(asked))
        if not self._port:
            found = SLURMD_PORT.search((await self._ask.run("scontrol", "show", "config")).output)
            self._port = found[1] if found is not None else ""
        pairs = [f"{node}={address}" for node, address in ADDRESS.findall(listed.output) if node in asked]
        argv = (*own_program("look", "reach"), self._port or USUAL_PORT, *pairs)
        answer = await self._ask.run(*argv, deadline_s=2 * REACH_S)
        gone = set(answer.output.split()) if answer.code == 0 else set()
        return set(missing) if witnesses and gone.issuperset(witnesses) else set(missing) - gone

    def _read(self, text: str) -> tuple[dict[str, float], float | None]:
        """(how far the command has come, by the last line of each kind that says so; the time between two of these
        lines, as they say themselves, or from the first look at them and this one)."""
        # Loaded until that time is known, and where a node is missing: it is much.
        from slurm_watchdog.parse.training_log.line_scan import scan

        counts: dict[str, float] = {}
        strides: dict[str, float] = {}  # From the last but one of these lines to the last.
        line_s: float | None = None
        for fact in scan(text.encode()).facts:
            count = fact.count if fact.step is None else float(fact.step)
            if count is None or fact.initial:
                continue
            stride = count - counts.get(fact.pattern, count)
            counts[fact.pattern] = count
            if stride > 0:
                strides[fact.pattern] = stride
            if fact.step_s and fact.step is not None and fact.pattern in strides:
                line_s = fact.step_s * strides[fact.pattern]
        now, found = clock.monotonic(), list[float]()
        for name, count in counts.items():
            before, at = self._first.setdefault(name, (count, now))
            if count > before and name in strides:
                found.append((now - at) / (count - before) * strides[name])
        return counts, line_s or self._watch.line_s or max(found, default=None)


def log_files(fds: Collection[int] = (1, 2)) -> list[str]:
    """The files that these descriptors of ours are; a terminal and a pipe are none."""
    found: list[str] = []
    for fd in fds:
        try:
            path = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if path.startswith("/") and not path.startswith("/dev/") and path not in found:
            found.append(path)
    return found
