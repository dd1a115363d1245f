"""Which report of a tick goes out: a whole one, with all that was seen, or a small one, which says that the node is as
the last whole one said (`same_as`). Pure: the moments are arguments.

| part | its class: news when it changes | not calm: reported whole in each tick |
|---|---|---|
| rank | who it is; what it is stuck in; computes or fell quiet | blocked, in D for 10 s, stopped, traced, zombie |
| worker | what it is stuck in; gone, if it lived for long | blocked, in D for 10 s, stopped, traced |
| helper | what it is stuck in | blocked, in D for 10 s |
| GPU | who computes on it; errors of memory; links; idle, busy or both; throttled; clock within 5 % | error |
| mount | answers, and with which error | does not answer |
| checkpoint | step, path, error | is being written |
| link | up, rate, how often it went down | |
| limit | how many were refused; 80 %, 95 % of it in use, or memory waited for | |
| child of the agent | which hang | one hangs |
| directives, GPU holders without a job, problems, rows left out | as they are, without ages and counts | |

Results of commands and lines of the kernel or the driver are news by themselves; 15 s from then on all is reported
whole, for what they did to processes shows in the next looks. All else can wait for the sums of 30 s. Jobs that
are late, start or are asked about are followed by the controller's order (`closely`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from slurm_watchdog.agent.sums import POLLS_CPU
from slurm_watchdog.model.observations import Gpu, MountProbe, Process, Resource, Role
from slurm_watchdog.model.report import HELD, Report

WHOLE_S = 30.0  # Between two whole reports at most.
AFTER_NEWS_S = 15.0
STUCK_S = 10.0  # In D at each look for so long: short waits for a disk are no news.
QUIET_S = 45.0  # Of a rank that used most of a core: two looks at its counters in which it did next to nothing.
LONG_LIVED_S = 300.0  # Workers that live so long are no loaders of one short epoch: that one of them ends is news.
TICKS_A_SECOND = 100  # USER_HZ of Linux, in which /proc counts.
IDLE_S, BUSY_S = 120.0, 600.0  # At every look for so long: less is a pause between steps, or a stretch without one.
CLOCK_SHARE = 0.05  # Of the clock under load as reported: half of what makes a card slower than its peers.
THROTTLED, THROTTLED_NO_MORE = 0.5, 0.25  # Share of the last five minutes for one reason.
CHOSEN = frozenset({"gpu_idle", "applications_clocks_setting", "sync_boost", "display_clock_setting"})
NEAR, FAR = (0.8, 0.95), 0.02  # Shares of a limit that are news, and how far below them it is over.
WAITED = (0.1, 0.2)  # Shares of a minute in which all waited for memory.
KEPT_MOUNT_S = 600.0  # A mount that was not probed for so long is used by no one any more.

Key = tuple[object, ...]
Classes = tuple[object, ...]
_NOTHING: dict[str, Any] = dict.fromkeys(HELD, ())


@dataclass
class Frames:
    """What one agent has reported whole, and what it is to report of the next look."""

    closely: bool = False  # The controller wants each report whole.
    made: int = 0  # Sequence of the last whole report; 0: none, or it may not have arrived.
    _made_at: float = float("-inf")
    _until: float = float("-inf")  # Until then all is reported whole.
    _classes: Classes = ()
    _changes: int = 0
    _levels: dict[Key, float] = field(default_factory=dict)  # What has hysteresis, as it was classed last,
    _before: dict[Key, float] = field(default_factory=dict)  # and in the look before.
    _workers: frozenset[Key] = frozenset()  # Long-lived ones in the last whole report.
    _answers: dict[Key, tuple[MountProbe, float]] = field(default_factory=dict)  # The newest of each, and when it came.

    def forget(self) -> None:
        """The next report is whole, with all mounts: what went before may not have arrived."""
        self.made, self._made_at = 0, float("-inf")

    def frame(self, report: Report, now: float) -> Report:
        """The report of this look as it is to be sent; given is all that was seen, with sums."""
        for probe in report.mounts:
            self._answers.pop((probe.mount, probe.uid), None)
            self._answers[probe.mount, probe.uid] = probe, now
        self._answers = {key: seen for key, seen in self._answers.items() if now - seen[1] <= KEPT_MOUNT_S}
        self._before, self._levels = self._levels, {}
        classes, alive = self._class_all(report), {(row.pid, row.start_ticks) for row in report.processes}
        if classes != self._classes or not self._workers <= alive:
            self._classes, self._changes, self.made = classes, self._changes + 1, 0
        if report.results or report.node_events or report.node_events_dropped:
            self._until = now + AFTER_NEWS_S
        state = f"{report.agent_id[:8]}.{self._changes}".encode()
        due = now - self._made_at >= WHOLE_S - report.interval_s / 2
        if self.made and not due and now >= self._until and not self.closely and is_calm(report):
            return replace(report, state=state, same_as=self.made, **_NOTHING)
        mounts = tuple(probe for probe, at in self._answers.values() if at > self._made_at)
        self.made, self._made_at, self._workers = report.sequence, now, frozenset(_long_lived(report))
        return replace(report, state=state, mounts=mounts)

    def _class_all(self, report: Report) -> Classes:
        return (
            frozenset(filter(None, map(self._class_process, report.processes))),
            frozenset(map(self._class_gpu, report.gpus)),
            frozenset((*key, row.responding, row.error) for key, (row, _) in self._answers.items()),
            frozenset(
                (row.job_id, row.directory, row.layout, row.step, row.path, row.writing, row.error)
                for row in report.checkpoints
            ),
            frozenset((row.name, row.kind, row.up, row.rate_bits_s, row.downs) for row in report.links),
            frozenset(self._class_limits(report)),
            frozenset(
                (*(row.pid, row.start_ticks, row.job_id, row.minors, row.gpu_uuids), row.orphan_for_s is None)
                for row in report.gpu_holders
            ),
            frozenset((row.job_id, row.uid) for row in report.left_out),
            frozenset(each.probe for each in report.hung_probes),
            report.wishes,
            report.problems,
        )

    def _class_process(self, row: Process) -> Key | None:
        key, stuck = (row.pid, row.start_ticks), stuck_in(row)
        if row.role is not Role.RANK:
            return (*key, stuck) if stuck else None
        computes = row.cpu_ratio is not None and row.cpu_ratio >= POLLS_CPU
        quiet = row.quiet_s is not None and (row.quiet_s >= QUIET_S or (key in self._before and not computes))
        if quiet:
            self._levels[key] = 1.0
        return (*key, row.job_id, row.step_id, row.rank, row.world_size, row.collective_timeout_s, stuck, quiet)

    def _class_gpu(self, gpu: Gpu) -> Key:
        key = gpu.uuid, gpu.index
        held_back = max((share for why, share in gpu.throttled if why not in CHOSEN), default=0.0)
        return (
            *key, gpu.pci_bus_id, gpu.name, bool(gpu.error), frozenset(gpu.pids or ()),
            gpu.ecc_uncorrected, gpu.remapped_rows_corrected, gpu.remapped_rows_uncorrected, gpu.remap_pending,
            gpu.remap_failed, gpu.retired_pages, gpu.retired_pages_pending, gpu.pcie_link_width, gpu.nvlinks_down,
            self._load(gpu),
            self._above((*key, "throttled"), held_back, (THROTTLED,), THROTTLED - THROTTLED_NO_MORE),
            self._clock((*key, "clock"), gpu.recent_sm_clock_hz),
        )  # fmt: skip

    def _load(self, gpu: Gpu) -> float | None:
        """-1 idle, 1 busy, 0 both by turns; None: it does not say."""
        if gpu.utilization_ratio is None:
            return None
        key = gpu.uuid, gpu.index, "load"
        load = self._before.get(key, 0.0)
        if gpu.idle_age_s is not None:
            load = -1.0 if gpu.idle_age_s >= IDLE_S else min(load, 0.0)
        elif gpu.busy_age_s is not None:
            load = 1.0 if gpu.busy_age_s >= BUSY_S else max(load, 0.0)
        else:
            load = 0.0
        self._levels[key] = load
        return load

    def _clock(self, key: Key, clock_hz: float | None) -> float | None:
        """The one that was news last, until it is another by CLOCK_SHARE; not to be known changes nothing."""
        was = self._before.get(key)
        if clock_hz is not None and (was is None or abs(clock_hz - was) > CLOCK_SHARE * was):
            was = clock_hz
        if was is not None:
            self._levels[key] = was
        return was

    def _class_limits(self, report: Report) -> Iterator[Key]:
        for row in report.usages:
            key = row.resource, row.job_id, row.step_id, row.pid
            level = self._above(key, row.ratio, NEAR, FAR)
            if level or row.refused:
                yield (*key, level, row.refused, row.by_limit)
        for each in report.pressures:
            if each.resource == Resource.MEMORY.value:
                waits = "waits", each.job_id
                yield (*waits, self._above(waits, each.full_ratio, WAITED, WAITED[0] / 2))

    def _above(self, key: Key, value: float, bounds: Sequence[float], slack: float) -> float:
        """How many of the bounds it is above; one that it was above, until it is below by `slack`."""
        was = self._before.get(key, 0.0)
        level = float(sum(value >= bound - (slack if number < was else 0.0) for number, bound in enumerate(bounds)))
        if level:
            self._levels[key] = level
        return level


def is_calm(report: Report) -> bool:
    """Whether nothing in it lasts that the controller may have to judge by how long it has."""
    return not (
        report.hung_probes
        or any(gpu.error for gpu in report.gpus)
        or any(not probe.responding for probe in report.mounts)
        or any(row.writing for row in report.checkpoints)
        or any(map(_is_in_trouble, report.processes))
    )


def _is_in_trouble(row: Process) -> bool:
    stuck = stuck_in(row)
    return bool(stuck) and (row.role is not Role.HELPER or stuck not in ("T", "t"))  # a shell may be so for days


def stuck_in(row: Process) -> object:
    """What holds a process up: the call that blocks it, or the letter of its state; empty: nothing."""
    if row.blocked is not None:
        return row.blocked.thread_id, row.blocked.syscall, row.blocked.path, row.blocked.mount
    if row.state == "D":
        return "D" if (row.state_age_s or 0.0) >= STUCK_S else ""
    # Children that no one has waited for come and go with the loaders of each epoch.
    return row.state if row.state in ("TtZX" if row.role is Role.RANK else "Tt") else ""


def _long_lived(report: Report) -> Iterator[Key]:
    for row in report.processes:
        if row.role is Role.WORKER and report.made_s - row.start_ticks / TICKS_A_SECOND >= LONG_LIVED_S:
            yield row.pid, row.start_ticks
