"""The agent as a service: its loop, its end, and one look for `--once`."""

from __future__ import annotations

import logging
import os
import sys
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from slurm_watchdog.agent.agent import Agent
from slurm_watchdog.agent.children.become_user import serve_alone, why_too_mighty
from slurm_watchdog.agent.collectors.usage import parse_meminfo
from slurm_watchdog.agent.frames import Frames
from slurm_watchdog.agent.memory import Memory
from slurm_watchdog.agent.proc.files import read_file
from slurm_watchdog.agent.processes.exit_watch import Exits
from slurm_watchdog.agent.reload import Reload
from slurm_watchdog.agent.settings import NO_CONTROLLER, Settings, become_agent
from slurm_watchdog.base import clock, loop
from slurm_watchdog.base.commit import JSON_SCHEMA_VERSION
from slurm_watchdog.base.redact import masked
from slurm_watchdog.config.knowledge_files import put_in_force
from slurm_watchdog.model.observations import Process
from slurm_watchdog.model.protocol import CollectEvidence, CommandResult, DumpStacks, Reply
from slurm_watchdog.model.report import Report
from slurm_watchdog.wire.codec import WireError

if TYPE_CHECKING:
    from slurm_watchdog.agent.delivery.sender import Sender
    from slurm_watchdog.agent.metrics import AgentMetrics

from slurm_watchdog.base.structs import named, printable
from slurm_watchdog.base.text import duration, one_line

MAX_CELL = 500  # Characters of a value: a path, a line of the kernel's log.
MAX_EVENTS = 50  # The newest of what logs say: a first look finds thousands.


def show_report(report: Report) -> None:
    """Prints every row of a report as `field=value`, without usual and unknown values; what is wrong last."""
    lines = [_node_line(report)]
    for name in report.__struct_fields__:
        rows = getattr(report, name)
        rows = (rows,) if isinstance(rows, msgspec.Struct) else rows
        if isinstance(rows, tuple) and rows and isinstance(rows[0], msgspec.Struct):
            shown = rows[-MAX_EVENTS:] if name == "events" else rows
            lines += ["", name.replace("_", " "), *(f"  {words}" for words in map(_fields, shown) if words)]
    if not report.processes:
        lines.append(f"No process of a Slurm job is seen on {report.node}.")
    lines += [f"problem: {problem}" for problem in report.problems]
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def _fields(row: msgspec.Struct) -> str:
    found = ((each, getattr(row, each.name)) for each in msgspec.structs.fields(row))
    wanted = ((each.name, value) for each, value in found if value not in (None, "", (), each.default))
    return " ".join(f"{name}={_value(value)}" for name, value in wanted)


def _value(value: object) -> str:
    if isinstance(value, msgspec.Struct):
        return f"({_fields(value)})"
    if isinstance(value, tuple):
        return ",".join(map(_value, value))
    text = f"{value:.6g}" if isinstance(value, float) else one_line(str(value), MAX_CELL)
    return f'"{text}"' if " " in text else text


def _node_line(report: Report) -> str:
    """How the node itself fares, in one line. It is this machine that is asked, so only for a report of its own."""
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    memory, up_s = parse_meminfo(read_file("/proc/meminfo")), float(read_file("/proc/uptime").split()[0])
    used, total = (memory.used, memory.limit or 0) if memory is not None else (0, 0)
    gib = f"{used / 2**30:.0f} of {total / 2**30:.0f} GiB memory in use"
    return f"{report.node}: {os.cpu_count()} CPUs, load {load}; {gib}; up {duration(up_s)}"


log = logging.getLogger(__name__)

OUT_OF_TURN_S = 1.0  # Between a report and one out of turn: where ranks end all the time, two a second at worst.
LOST_AFTER_S = 15.0
"""After such a silence of the controller reports may have been too old to be judged (`Config.report_lifetime_s`),
or had no room to wait: what they said last is said again."""
ONCE_PAUSE_S = 1.0  # Between the two ticks of `--once`: whether a process is blocked shows only in two looks.
ONCE_GPU_S = 5.0  # `--once` waits so long for NVML: without a client that stays, the driver takes seconds to begin.
FEW_EVENTS = 200
LONGEST_NAME = 1024  # Characters of a path in a report that was too large otherwise.
EXIT_USAGE = 2  # It can't start like this: systemd does not try again (RestartPreventExitStatus=).


class Service:
    """An agent that reports: what happens in and between the ticks of the daemon."""

    def __init__(
        self,
        agent: Agent,
        sender: Sender,
        metrics: AgentMetrics,
        signals: loop.Signals,
        echo: bool = False,
        file: str = "",
    ):
        """With `echo` each report is also a line on standard output. `file` is read again at SIGHUP."""
        self.agent, self.sender, self.metrics, self.signals = agent, sender, metrics, signals
        self.echo = echo
        self.exits = Exits(agent.context.processes.table.is_there)
        self.controller_id = agent.before.controller_id
        self.frames = Frames()
        self._replied_at = float("inf")  # When the controller last took a report.
        self._lost = self._breaks = 0
        self._news = False  # Something happened that is not to wait for the next tick.
        self._ticked_at = float("-inf")
        self.reload = Reload(file, agent.config, sender.renew)

    def wanted_at(self) -> float:
        """When `between` is to be called though nothing wakes it: a report out of turn is due then, or a dump."""
        report_at = self._ticked_at + OUT_OF_TURN_S if self._news else float("inf")
        link, reload_at = self.agent.context.supervisors, self.reload.due_at(clock.monotonic())
        due = self.agent.commands.due_at(), link.due_at(clock.monotonic()), self.sender.due_at()
        return min(report_at, reload_at, *due)

    def tick(self, now: float) -> bool:
        """Makes a report and hands it to the sender; False if this tick could not see."""
        whole = self._tick(now)
        self._follow_controller(now)
        if whole:  # before the first whole tick it is not reported as well, by a reload neither
            self._follow_reload(now)
        return whole

    def last_tick(self) -> None:
        """What is known and not told yet goes out before this process ends, or is kept for the next."""
        self.agent.commands.answer_pending()
        self._tick(clock.monotonic())

    def _tick(self, now: float) -> bool:
        self._news, self._ticked_at = False, now
        self._take_replies(now)
        report = self.agent.tick(now)
        self.exits.follow(report.processes)
        self.metrics.update(report, self.agent.seen, self.sender.spool_bytes, self.agent.gpus.driver_s)
        self.metrics.write(now)
        if not self.agent.could_see:
            return False
        if self.echo:
            _print_json(masked(report), pretty=False)
        if self.sender.breaks != self._breaks:
            self._breaks = self.sender.breaks
            self.frames.forget()
        frame = masked(self.frames.frame(self.agent.sums.add(report, now), now))
        if not frame.same_as:
            self.agent.sums.begin()
        try:
            self.sender.put(frame)
        except WireError as error:
            self._put_less(frame, str(error))
        return True

    def _put_less(self, report: Report, why: str) -> None:
        """Of a report that is too large what matters most. One user's names or processes must not end the agent for
        all on the node: at worst the controller hears nothing for a while."""
        log.error("this report is too large to be sent whole: %s", why)
        try:
            self.sender.put(reduced(report, why))
        except WireError as error:
            log.error("nor can it be sent without long names: %s", error)
            self.frames.forget()

    def between(self, now: float) -> None:
        """Takes what children and controller said meanwhile; results of commands, and that a rank has ended,
        go out at once."""
        self.agent.children.poll(now)
        link = self.agent.context.supervisors
        loop.isolate("supervisors", partial(link.serve, now), None, loop.Isolated())
        self._take_replies(now)
        loop.isolate("commands", partial(self.agent.commands.advance, now), None, loop.Isolated())
        self._news |= self.exits.any_ended(now) or self.agent.commands.has_results or link.has_news
        link.has_news = False
        if self._news and now - self._ticked_at >= OUT_OF_TURN_S:
            self.tick(now)
        elif self.agent.sequence:
            self._follow_reload(now)

    def _follow_controller(self, now: float) -> None:
        """An agent that belongs to one controller only (attach) ends after it: no one else would end it."""
        limit_s = self.agent.config.agent.give_up_after
        if limit_s and now - self.sender.heard_at > limit_s and not self.signals.stop:
            log.error("the controller has not answered for %.0f s (agent.give_up_after): ending", limit_s)
            self.signals.stop = True

    def _follow_reload(self, now: float) -> None:
        if self.signals.reload:
            self.signals.reload = False
            self.reload.ask(now)
        self.reload.follow(now)
        if self.reload.wants_restart(now, busy=bool(self.agent.commands.under_way)):
            self.signals.restart = True

    def wake_fds(self) -> list[int]:
        """Descriptors for which `between` is called when they can be read."""
        others = (*self.exits.filenos(), *self.agent.context.supervisors.filenos(clock.monotonic()))
        return [self.sender.link.fileno(), *self.agent.children.filenos(), *others]

    def _take_replies(self, now: float) -> None:
        self.sender.pump()
        for reply in self.sender.replies():
            late = now - self._replied_at > max(LOST_AFTER_S, 2 * self.agent.interval_s)
            if late or self.sender.lost != self._lost or reply.controller_id != self.controller_id:
                self.agent.collectors.retell()
                self.frames.forget()
            if reply.controller_id != self.controller_id:
                self.frames.closely = False  # the one before wanted it
            self.controller_id, self._replied_at, self._lost = reply.controller_id, now, self.sender.lost
            loop.isolate("reply", partial(self.agent.hear, reply, now), None, loop.Isolated())
            self._heed(reply)
        for order in self.sender.orders():
            loop.isolate("orders", partial(self.agent.obey, order.commands, now), None, loop.Isolated())
            self._heed(order)

    def _heed(self, reply: Reply) -> None:
        if reply.closely is not None:
            self._news |= reply.closely and not self.frames.closely
            self.frames.closely = reply.closely
        if any(isinstance(command, DumpStacks | CollectEvidence) for command in reply.commands):
            self.agent.gpus.want_processes()  # a job is under suspicion: whose GPU is whose has to be known now


def reduced(report: Report, why: str) -> Report:
    """The report without most of what may be long, for one that was too large to be sent. Every process that
    it names stays, for one that is missing looks dead; of what it waits for only short names stay."""
    return replace(
        report,
        processes=tuple(map(_shortened, report.processes)),
        events=report.events[-FEW_EVENTS:],
        events_dropped=report.events_dropped + max(0, len(report.events) - FEW_EVENTS),
        results=tuple(
            CommandResult(command_id=each.command_id, ok=False, error="the answer was too large to be sent")
            for each in report.results
        ),
        problems=(f"report: {why}", *report.problems),
    )


def _shortened(row: Process) -> Process:
    call = row.blocked
    if call is None:
        return row
    names = {
        name: value if (value := getattr(call, name)) is not None and len(value) <= LONGEST_NAME else None
        for name in ("path", "mount", "device")
    }
    return replace(row, blocked=replace(call, **names))


def run_agent(config: Settings, *, once: bool = False, as_json: bool = False, file: str = "") -> int:
    """The agent as a daemon until SIGTERM, or with `once` two ticks and their outcome on standard output. Returns the
    exit code. At SIGHUP `file` is read again, and this process restarts with it. Without `once` it is 2 for a process
    with more rights than an agent needs."""
    if not once and not config.controller_urls:
        log.critical("%s", NO_CONTROLLER)
        return EXIT_USAGE
    if not once and not config.personal and (mighty := why_too_mighty()) is not None:
        log.critical(
            "%s, which the agent must not have: start it by its unit (systemctl enable --now slurm-watchdog-agent); "
            "`slurm-watchdog agent --once` may be run by root",
            mighty,
        )
        return EXIT_USAGE
    if config.personal:
        serve_alone(os.geteuid())
    put_in_force(config.site_texts)  # before the children are forked
    agent = Agent(config, once)
    try:
        if once:
            return _show_once(agent, as_json)
        return _serve(agent, config, as_json, file)
    finally:
        agent.close()


def _serve(agent: Agent, config: Settings, echo: bool, file: str) -> int:
    # Imported only now: `--once` needs neither.
    from slurm_watchdog.agent.delivery.sender import Sender
    from slurm_watchdog.agent.delivery.spool import Spool
    from slurm_watchdog.agent.metrics import AgentMetrics

    agent.children.adopt()
    spool = Spool()
    spool.take_back(agent.before.reports, clock.monotonic())
    metrics = AgentMetrics(config.agent.metrics_directory, agent.node, lambda: agent.context.courier.expires)
    sender = Sender(spool, agent.context.courier, metrics.count_report)
    signals = loop.Signals()
    signals.install()
    service = Service(agent, sender, metrics, signals, echo, file)
    agent.before = Memory()  # what it knew is in use now
    log.info("watching %s for %s every %g s", agent.node, config.controller_urls[0], config.agent.interval)
    loop.run_cadence(
        service.tick,
        agent.interval_s,
        signals,
        loop.share_of(agent.node),
        service.wake_fds,
        service.between,
        metrics.count_tick,
        service.wanted_at,
    )
    service.last_tick()
    sender.stop()
    settings = service.reload.settings
    restarts = signals.restart and settings is not None
    if restarts:
        signals.hold()
    else:
        metrics.remove()
    agent.remember(sender.left(), service.controller_id)
    agent.close()
    if restarts and settings is not None and not signals.stop:
        become_agent(settings, as_json=echo, file=file)
    return 0


def _show_once(agent: Agent, as_json: bool) -> int:
    agent.gpus.want_processes()
    first = agent.tick(clock.monotonic())
    loop.sleep(ONCE_PAUSE_S)
    agent.gpus.settle(ONCE_GPU_S)
    report = agent.tick(clock.monotonic())
    whole = replace(
        report,
        events=(*first.events, *report.events),
        events_dropped=first.events_dropped + report.events_dropped,
        node_events=(*first.node_events, *report.node_events),
        node_events_dropped=first.node_events_dropped + report.node_events_dropped,
    )
    report = masked(whole)
    if as_json:
        _print_json(report, pretty=True)
    else:
        show_report(report)
    return 0 if agent.could_see else 1


def _print_json(report: Report, *, pretty: bool) -> None:
    data = b'{"schema_version":%d,' % JSON_SCHEMA_VERSION + _as_json(report).removeprefix(b"{")
    sys.stdout.write((msgspec.json.format(data) if pretty else data).decode() + "\n")
    sys.stdout.flush()


def _as_json(report: Report) -> bytes:
    try:
        return msgspec.json.encode(named(report))
    except UnicodeEncodeError:  # file names may be no UTF-8
        return msgspec.json.encode(named(printable(report)))
