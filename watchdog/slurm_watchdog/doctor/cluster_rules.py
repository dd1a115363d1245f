"""What a cluster's Slurm and controller lack to protect jobs. Pure: facts in, advice out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.base.text import duration, fold, plural
from slurm_watchdog.doctor.finding import Advice, Level, Rule

OLDEST_TESTED = (22, 5)
SHORT_JOB_AGE_S = 60
"""A job that is forgotten so soon may have ended between two looks."""
KILL_WAIT_S, UNKILLABLE_S = 30, 180
"""Slurm's default; three times Slurm's default, which a process with memory of several GPUs passes when it ends."""


class Undelivered(Struct, frozen=True, kw_only=True):
    """A channel whose notifications do not arrive."""

    channel: str
    failing_s: float
    error: str
    waiting: int


class Unjudged(Struct, frozen=True, kw_only=True):
    """Jobs of which it cannot be seen whether they progress, all for one reason."""

    reason: str
    todo: str
    job_ids: tuple[str, ...]


class ClusterFacts(Struct, frozen=True, kw_only=True):
    """What Slurm and the controller said."""

    slurm: Mapping[str, str] | None = None
    """`scontrol show config`; None: it did not answer."""
    slurm_problem: str = ""
    slurm_nodes: tuple[str, ...] = ()
    controller_problem: str | None = None
    """Why the controller does not answer on its socket; None: it does."""
    mode: str = ""
    paused: str | None = None
    reporting: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    blind: str | None = None
    """What keeps the controller from seeing, or from writing."""
    operator: bool | None = None
    """Whether the controller's user may requeue others' jobs; None: not known."""
    user: str = ""
    notes: tuple[str, ...] = ()
    """What is not as it should be in how the controller asks Slurm, a sentence each."""
    deliveries: tuple[Undelivered, ...] = ()
    """Channels that fail."""
    unjudged: tuple[Unjudged, ...] = ()
    partitions: tuple[str, ...] = ()
    """Slurm's; none: not known."""
    for_partitions: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """(part of the configuration, the partitions that it is for, names or globs)."""


def parse_slurm_config(text: str) -> dict[str, str]:
    """`Key = value` of each line of `scontrol show config`."""
    pairs = (line.split("=", 1) for line in text.splitlines() if "=" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def flag(config: Mapping[str, str] | None, key: str) -> bool | None:
    """A setting that is on or off; None: not known."""
    first = (config or {}).get(key, "").split()[:1]
    return None if not first else first[0].lower() in ("1", "yes", "true")


def _seconds(facts: ClusterFacts, key: str) -> int | None:
    first = _setting(facts, key).split()[:1]
    return int(first[0]) if first and first[0].isdecimal() else None


def _version(text: str) -> tuple[int, int] | None:
    parts = text.split(".")
    return (int(parts[0]), int(parts[1])) if len(parts) > 1 and parts[0].isdecimal() and parts[1].isdecimal() else None


def _setting(facts: ClusterFacts, key: str) -> str:
    """Of `scontrol show config`; empty where it does not have it."""
    return (facts.slurm or {}).get(key, "")


def _is_below(facts: ClusterFacts, key: str, seconds: int) -> bool:
    """Whether a time is set, and is shorter; 0 is none."""
    return 0 < (_seconds(facts, key) or 0) < seconds


def _settled(f: ClusterFacts) -> Iterator[Advice]:
    """What is one advice; what may be several is a function below."""
    answers, version = f.controller_problem is None, _version(_setting(f, "SLURM_VERSION"))
    known = {*f.reporting, *f.silent}
    without = tuple(node for node in f.slurm_nodes if node not in known) if answers else ()
    rows = (
        (not answers, Advice("controller", Level.UNKNOWN,
          "The controller gives no answer: whether anything is watched is not known.", f"{f.controller_problem}",
          "systemctl status slurm-watchdog-controller  # on its machine; ask there, too")),
        (answers and f.blind is not None, Advice("blind", Level.CRITICAL,
          "The controller runs and does not see, or can't write: nothing will be done.", f"{f.blind}",
          "journalctl -u slurm-watchdog-controller -n 50")),
        (answers and f.paused is not None, Advice("paused", Level.WARNING, "All actions are paused.",
          f.paused or "no reason given", "slurm-watchdog resume")),
        (answers and f.mode == "off", Advice("mode", Level.WARNING, "Nothing is judged.", "mode: off",
          "mode: observe")),
        (answers and f.mode == "observe", Advice("mode", Level.HINT, "The watchdog only says what it would do.",
          "mode: observe", "detectors: {lingering_job: {mode: act}}  # one detector at a time")),
        (answers and f.silent, Advice("silent_agents", Level.WARNING,
          f"{plural(len(f.silent), 'agent')} no longer {'reports' if len(f.silent) == 1 else 'report'}.",
          _some(f.silent), "slurm-watchdog doctor --node  # there")),
        (without and not f.reporting, Advice("no_agents", Level.CRITICAL, "No agent reports: nothing is watched.",
          f"{len(f.slurm_nodes)} nodes in Slurm",
          "systemctl enable --now slurm-watchdog-agent  # on compute nodes")),
        (without and f.reporting, Advice("nodes_without_agent", Level.WARNING,
          f"{len(without)} of {plural(len(f.slurm_nodes), 'node')} in Slurm never reported: "
          "jobs there are not watched.", _some(without),
          "systemctl enable --now slurm-watchdog-agent  # on these nodes")),
        (f.slurm is None, Advice("slurm", Level.UNKNOWN, "Slurm does not answer.", f.slurm_problem, "scontrol ping")),
        (flag(f.slurm, "JobRequeue") is False, Advice("job_requeue", Level.HINT,
          "Jobs can be restarted only if they ask for it with --requeue.", "JobRequeue=0",
          "JobRequeue=1  # slurm.conf")),
        (f.slurm is not None and "watchdog" not in _setting(f, "TaskProlog"), Advice("task_prolog", Level.HINT,
          "Jobs are not told where their kill switch is: graceful restarts work for those only that set it themselves.",
          f"TaskProlog={_setting(f, 'TaskProlog') or '(null)'}",
          "TaskProlog=/etc/slurm/slurm-watchdog-task-prolog.sh  # slurm.conf, see deploy/slurm")),
        (_is_below(f, "MinJobAge", SHORT_JOB_AGE_S), Advice("min_job_age", Level.WARNING,
          "Slurm forgets a job soon after its end: how it ended may never be seen.",
          f"MinJobAge={_seconds(f, 'MinJobAge')}", "MinJobAge=300  # slurm.conf")),
        (_is_below(f, "KillWait", KILL_WAIT_S), Advice("kill_wait", Level.HINT,
          "A job that is ended has little time between SIGTERM and SIGKILL: it can't save.",
          f"KillWait={_seconds(f, 'KillWait')}", f"KillWait={KILL_WAIT_S}  # slurm.conf")),
        (_is_below(f, "UnkillableStepTimeout", UNKILLABLE_S), Advice("unkillable_step", Level.HINT,
          "A process that takes a while to end (a core dump, the memory of 8 GPUs) drains its node: Kill task failed.",
          f"UnkillableStepTimeout={_seconds(f, 'UnkillableStepTimeout')}",
          f"UnkillableStepTimeout={UNKILLABLE_S}  # slurm.conf")),
        (re.search("linuxproc|pgid", _setting(f, "ProctrackType")), Advice("proctrack", Level.HINT,
          "Processes that leave their session outlive their job, and keep its GPUs.",
          f"ProctrackType={_setting(f, 'ProctrackType')}", "ProctrackType=proctrack/cgroup  # slurm.conf")),
        (version is not None and version < OLDEST_TESTED, Advice("slurm_version", Level.WARNING,
          "This release of Slurm is older than those that were tested.", _setting(f, "SLURM_VERSION"),
          "try in mode: observe first")),
        (f.operator is False, Advice("operator", Level.CRITICAL if f.mode == "act" else Level.WARNING,
          "The controller's user may not requeue other users' jobs: every action will fail.",
          f"sacctmgr has {f.user} without AdminLevel Operator",
          f"sacctmgr -i add user {f.user} account=root adminlevel=operator")),
    )  # fmt: skip
    yield from (advice for holds, advice in rows if holds)


def _deliveries(facts: ClusterFacts) -> Iterator[Advice]:
    for each in facts.deliveries:
        waiting = f"; {plural(each.waiting, 'notification')} waiting" if each.waiting else ""
        yield Advice(
            "deliveries",
            Level.WARNING,
            f"No notification has reached {each.channel} for {duration(each.failing_s)}{waiting}.",
            each.error,
            "slurm-watchdog notify test  # after mending it",
        )


def _unjudged(facts: ClusterFacts) -> Iterator[Advice]:
    for each in facts.unjudged:
        yield Advice(
            "not_judged",
            Level.WARNING,
            f"{plural(len(each.job_ids), 'job')} cannot be judged: {each.reason}.",
            f"job {_some(each.job_ids)}",
            each.todo,
        )


def _matches_nothing(facts: ClusterFacts) -> Iterator[Advice]:
    for where, globs in facts.for_partitions if facts.partitions else ():
        if not any(fnmatchcase(name, glob) for name in facts.partitions for glob in globs):
            yield Advice(
                "no_partition",
                Level.WARNING,
                f"{where} is for partitions that Slurm does not have: it never holds.",
                f"{_some(globs)}; Slurm has {_some(facts.partitions)}",
                "correct the name there",
            )


def _sight(facts: ClusterFacts) -> Iterator[Advice]:
    """What Slurm hides, or will: as the controller sees it, or as slurm.conf says where it does not answer."""
    for note in facts.notes:
        what, _, todo = note.partition("; ")
        yield Advice(
            "slurm_access",
            Level.WARNING,
            f"{what[:1].upper()}{what[1:].rstrip('.')}.",
            "the controller, of how it asks Slurm",
            todo or "slurm-watchdog status  # says it until it is mended",
        )
    hidden = ((facts.slurm or {}).get("PrivateData", "")).lower()
    if facts.controller_problem is not None and "jobs" in hidden.replace(",", " ").split():
        yield Advice(
            "slurm_access",
            Level.WARNING,
            "Slurm hides other users' jobs from a user who is no operator: the controller may not see all jobs.",
            f"PrivateData={hidden}",
            "sacctmgr modify user slurm-watchdog set adminlevel=operator",
        )


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(fold(names))[:200]


CLUSTER_RULES: tuple[Rule[ClusterFacts], ...] = (_settled, _sight, _deliveries, _matches_nothing, _unjudged)
