"""What a cluster's Slurm and controller lack to protect jobs. Pure: facts in, advice out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.base.text import duration, fold, plural
from slurm_watchdog.doctor.finding import Advice, Level, Rule
from slurm_watchdog.doctor.job_facts import SlurmSettings

OLDEST_TESTED = (22, 5)
SHORT_JOB_AGE_S = 60
"""A job that is forgotten so soon may have ended between two looks."""


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


def settings_of(config: Mapping[str, str] | None) -> SlurmSettings:
    """What of slurm.conf matters for a job's script."""
    if config is None:
        return SlurmSettings()
    return SlurmSettings(
        requeue=_flag(config.get("JobRequeue")),
        append=_flag(config.get("JobFileAppend")),
        kill_on_bad_exit=_flag(config.get("KillOnBadExit")),
    )


def parse_slurm_config(text: str) -> dict[str, str]:
    """`Key = value` of each line of `scontrol show config`."""
    pairs = (line.split("=", 1) for line in text.splitlines() if "=" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def _flag(value: str | None) -> bool | None:
    first = (value or "").split()[:1]
    return None if not first else first[0].lower() in ("1", "yes", "true")


def _seconds(value: str | None) -> int | None:
    first = (value or "").split()[:1]
    return int(first[0]) if first and first[0].isdecimal() else None


def _controller(facts: ClusterFacts) -> Iterator[Advice]:
    if facts.controller_problem is not None:
        yield Advice(
            rule="controller", level=Level.UNKNOWN,
            sentence="The controller gives no answer: whether anything is watched is not known.",
            evidence=facts.controller_problem,
            add="systemctl status slurm-watchdog-controller  # on its machine; ask there, too",
        )  # fmt: skip
        return
    if facts.blind is not None:
        yield Advice(
            rule="blind", level=Level.CRITICAL,
            sentence="The controller runs and does not see, or can't write: nothing will be done.",
            evidence=facts.blind, add="journalctl -u slurm-watchdog-controller -n 50",
        )  # fmt: skip
    if facts.paused is not None:
        yield Advice(
            rule="paused", level=Level.WARNING, sentence="All actions are paused.",
            evidence=facts.paused or "no reason given", add="slurm-watchdog resume",
        )  # fmt: skip
    if facts.mode == "off":
        yield Advice(
            rule="mode", level=Level.WARNING, sentence="Nothing is judged.", evidence="mode: off",
            add="mode: observe",
        )  # fmt: skip
    elif facts.mode == "observe":
        yield Advice(
            rule="mode", level=Level.HINT, sentence="The watchdog only says what it would do.",
            evidence="mode: observe", add="detectors: {lingering_job: {mode: act}}  # one detector at a time",
        )  # fmt: skip


def _agents(facts: ClusterFacts) -> Iterator[Advice]:
    if facts.controller_problem is not None:
        return
    if facts.silent:
        yield Advice(
            rule="silent_agents", level=Level.WARNING,
            sentence=f"{plural(len(facts.silent), 'agent')} no longer "
            f"{'reports' if len(facts.silent) == 1 else 'report'}.",
            evidence=_some(facts.silent), add="slurm-watchdog doctor --node  # there",
        )  # fmt: skip
    known = {*facts.reporting, *facts.silent}
    without = tuple(node for node in facts.slurm_nodes if node not in known)
    if without and not facts.reporting:
        yield Advice(
            rule="no_agents", level=Level.CRITICAL, sentence="No agent reports: nothing is watched.",
            evidence=f"{len(facts.slurm_nodes)} nodes in Slurm",
            add="systemctl enable --now slurm-watchdog-agent  # on compute nodes",
        )  # fmt: skip
    elif without:
        yield Advice(
            rule="nodes_without_agent", level=Level.WARNING,
            sentence=f"{len(without)} of {plural(len(facts.slurm_nodes), 'node')} in Slurm never reported: "
            "jobs there are not watched.",
            evidence=_some(without), add="systemctl enable --now slurm-watchdog-agent  # on these nodes",
        )  # fmt: skip


def _slurm(facts: ClusterFacts) -> Iterator[Advice]:
    config = facts.slurm
    if config is None:
        yield Advice(
            rule="slurm", level=Level.UNKNOWN, sentence="Slurm does not answer.", evidence=facts.slurm_problem,
            add="scontrol ping",
        )  # fmt: skip
        return
    if _flag(config.get("JobRequeue")) is False:
        yield Advice(
            rule="job_requeue", level=Level.HINT,
            sentence="Jobs can be restarted only if they ask for it with --requeue.",
            evidence="JobRequeue=0", add="JobRequeue=1  # slurm.conf",
        )  # fmt: skip
    if "slurm-watchdog" not in config.get("TaskProlog", "") and "watchdog" not in config.get("TaskProlog", ""):
        yield Advice(
            rule="task_prolog", level=Level.HINT,
            sentence="Jobs are not told where their kill switch is: graceful restarts work for those only "
            "that set it themselves.",
            evidence=f"TaskProlog={config.get('TaskProlog') or '(null)'}",
            add="TaskProlog=/etc/slurm/slurm-watchdog-task-prolog.sh  # slurm.conf, see deploy/slurm",
        )  # fmt: skip
    age_s = _seconds(config.get("MinJobAge"))
    if age_s is not None and 0 < age_s < SHORT_JOB_AGE_S:
        yield Advice(
            rule="min_job_age", level=Level.WARNING,
            sentence="Slurm forgets a job soon after its end: how it ended may never be seen.",
            evidence=f"MinJobAge={age_s}", add="MinJobAge=300  # slurm.conf",
        )  # fmt: skip
    if "linuxproc" in config.get("ProctrackType", "") or "pgid" in config.get("ProctrackType", ""):
        yield Advice(
            rule="proctrack", level=Level.HINT,
            sentence="Processes that leave their session outlive their job, and keep its GPUs.",
            evidence=f"ProctrackType={config['ProctrackType']}",
            add="ProctrackType=proctrack/cgroup  # slurm.conf",
        )  # fmt: skip
    version = _version(config.get("SLURM_VERSION", ""))
    if version is not None and version < OLDEST_TESTED:
        yield Advice(
            rule="slurm_version", level=Level.WARNING,
            sentence="This release of Slurm is older than those that were tested.",
            evidence=config["SLURM_VERSION"], add="try in mode: observe first",
        )  # fmt: skip


def _version(text: str) -> tuple[int, int] | None:
    parts = text.split(".")
    return (int(parts[0]), int(parts[1])) if len(parts) > 1 and parts[0].isdecimal() and parts[1].isdecimal() else None


def _rights(facts: ClusterFacts) -> Iterator[Advice]:
    if facts.operator is False:
        yield Advice(
            rule="operator", level=Level.CRITICAL if facts.mode == "act" else Level.WARNING,
            sentence="The controller's user may not requeue other users' jobs: every action will fail.",
            evidence=f"sacctmgr has {facts.user} without AdminLevel Operator",
            add=f"sacctmgr -i add user {facts.user} account=root adminlevel=operator",
        )  # fmt: skip


def _deliveries(facts: ClusterFacts) -> Iterator[Advice]:
    for each in facts.deliveries:
        waiting = f"; {plural(each.waiting, 'notification')} waiting" if each.waiting else ""
        yield Advice(
            rule="deliveries", level=Level.WARNING,
            sentence=f"No notification has reached {each.channel} for {duration(each.failing_s)}{waiting}.",
            evidence=each.error, add="slurm-watchdog notify test  # after mending it",
        )  # fmt: skip


def _unjudged(facts: ClusterFacts) -> Iterator[Advice]:
    for each in facts.unjudged:
        yield Advice(
            rule="not_judged", level=Level.WARNING,
            sentence=f"{plural(len(each.job_ids), 'job')} cannot be judged: {each.reason}.",
            evidence=f"job {_some(each.job_ids)}", add=each.todo,
        )  # fmt: skip


def _sight(facts: ClusterFacts) -> Iterator[Advice]:
    """What Slurm hides, or will: as the controller sees it, or as slurm.conf says where it does not answer."""
    for note in facts.notes:
        what, _, todo = note.partition("; ")
        yield Advice(
            rule="slurm_access", level=Level.WARNING, sentence=f"{what[:1].upper()}{what[1:].rstrip('.')}.",
            evidence="the controller, of how it asks Slurm",
            add=todo or "slurm-watchdog status  # says it until it is mended",
        )  # fmt: skip
    hidden = ((facts.slurm or {}).get("PrivateData", "")).lower()
    if facts.controller_problem is not None and "jobs" in hidden.replace(",", " ").split():
        yield Advice(
            rule="slurm_access", level=Level.WARNING,
            sentence="Slurm hides other users' jobs from a user who is no operator: the controller may not "
            "see all jobs.",
            evidence=f"PrivateData={hidden}", add="sacctmgr modify user slurm-watchdog set adminlevel=operator",
        )  # fmt: skip


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(fold(names))[:200]


CLUSTER_RULES: tuple[Rule[ClusterFacts], ...] = (
    _controller,
    _agents,
    _slurm,
    _rights,
    _sight,
    _deliveries,
    _unjudged,
)
