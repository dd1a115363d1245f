"""What the supervisor does next: a pure function of its state, of what has happened, and of the time. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Concatenate, ParamSpec

from msgspec.structs import replace

from slurm_watchdog.model.supervisor import (
    BATCH_STEP,
    GRACE_S,
    ORDER_LIFETIME_S,
    OrderAnswer,
    RestartOrder,
    step_words,
)
from slurm_watchdog.supervisor.endings import code_words
from slurm_watchdog.supervisor.placement import NoSpare, choose
from slurm_watchdog.supervisor.preflight import look_s
from slurm_watchdog.supervisor.state import (
    Action,
    Begin,
    Forward,
    Look,
    Phase,
    Requeue,
    Run,
    Say,
    Settings,
    SignalSteps,
    SignalTree,
)  # fmt: skip

LAST_S = 60.0  # Before the end of the job's time nothing is started again.
TOLD_S = 600.0
"""A command that ends so long after SIGUSR1 or SIGUSR2 was passed to it has saved because of that, a checkpoint of many
GPUs included. A judgement."""
TREE_S = 1.0  # Between KILL of the steps, with TERM of what runs on this host, and KILL of that.
GIVE_UP_S = 10.0  # After the order: what has not ended by then stands in state D, and the next start overlaps it.
WAIT_S = 120.0  # For an order, after a command that ended because of our kill switch.
SWITCH_GONE_S = 30.0  # After the kill switch was taken away, that no order came: it was no restart.
LOOK_MORE_S = 3.0  # Beside look_s(), for slurmctld, which is asked before, and the end of a look that is given up.
SIGINT = 2
FINISHED = "the command has ended well"
INTERRUPTED, TERMINATED = 130, 143  # 128 + SIGINT, 128 + SIGTERM: as a shell has them.

Next = tuple[Run, tuple[Action, ...]]
Event = Callable[[Run, float, float], Next]
"""What has happened: it takes the state, `now` on the monotonic clock, and `wall` since the epoch."""
P = ParamSpec("P")


def event(happened: Callable[Concatenate[Run, float, float, P], Next], *about: P.args, **more: P.kwargs) -> Event:
    """One of the functions below, with what is known of it."""
    return lambda run, now, wall: happened(run, now, wall, *about, **more)


def first(settings: Settings, now: float) -> Next:
    """The state before the first start. Raises NoSpare where the job has too few nodes."""
    choose(settings.allocation, settings.count)
    run = Run(settings=settings, phase=Phase.LOOKING, since=now, began=now, words="looks at the nodes")
    return run, (Look(settings.allocation.nodes),)


def next_state(run: Run, happened: Event, now: float, wall: float) -> Next:
    """What is so after it, and what is to be done."""
    return (run, ()) if run.phase is Phase.OVER else happened(run, now, wall)


def is_about_time(run: Run, happened: Event, now: float, wall: float) -> bool:
    """Whether what `happened` leads to depends on the end of the job's time, which Slurm may have moved."""
    if _seconds_left(run, wall) >= LAST_S + GIVE_UP_S:
        return False
    unlimited = with_end(run, float("inf"))
    return next_state(run, happened, now, wall)[1] != next_state(unlimited, happened, now, wall)[1]


def with_end(run: Run, end_at: float | None) -> Run:
    """The same with another end of the job's time; None: Slurm does not say, what is known holds."""
    if end_at is None:
        return run
    allocation = replace(run.settings.allocation, end_at=end_at)
    return replace(run, settings=replace(run.settings, allocation=allocation))


def tick(run: Run, now: float, wall: float) -> Next:
    """Time has passed."""
    age_s = now - run.since
    look_ends_s = look_s(len(run.settings.allocation.nodes)) + LOOK_MORE_S
    if run.phase is Phase.LOOKING and age_s > look_ends_s and not run.settings.patient:
        return _start(run, now, wall)
    if run.phase is Phase.PAUSING and age_s >= run.settings.restart_delay_s:
        return _look(run, now)
    if run.phase is Phase.WAITING:
        gone = run.switch_gone_at is not None and now - run.switch_gone_at >= SWITCH_GONE_S
        if gone or age_s >= WAIT_S:
            why = "the kill switch was taken away" if gone else f"no order came within {WAIT_S:.0f} s"
            return _over(run, now, run.exit_code, f"the command is not started again: {why}")
    settings = run.settings
    if run.phase is Phase.RUNNING and run.asked_at is not None:
        return _end_further(run, now - run.asked_at, settings.kill_wait_s, GRACE_S)
    if run.phase is Phase.ENDING and age_s >= GIVE_UP_S and not settings.patient:
        return _after_end(run, now, wall)
    if run.phase is Phase.ENDING:
        grace_s = GRACE_S if run.order is None else min(GRACE_S, run.order.grace_s)
        return _end_further(run, age_s, settings.kill_wait_s if settings.patient else grace_s, TREE_S)
    return run, ()


def _end_further(run: Run, age_s: float, grace_s: float, more_s: float) -> Next:
    """What was told to end, and does not. The sruns of steps that are killed are left a moment to end by that."""
    if run.ends == "TERM" and age_s >= grace_s:
        said = (Say(f"the command did not end within {grace_s:.0f} s of SIGTERM: SIGKILL"),)
        return replace(run, ends="KILL"), (*(said if run.settings.patient else ()), *_signal(run, "KILL", "TERM"))
    if age_s >= grace_s + more_s and (run.ends == "KILL" or run.settings.patient):
        return replace(run, ends="TREE"), _signal(run, "KILL", "KILL")
    return run, ()


def _signal(run: Run, name: str, tree: str = "") -> tuple[Action, ...]:
    """To the steps, and `tree` to all that the command has started on this host. Steps of a command in the batch script
    are its processes."""
    steps = SignalTree(name) if run.in_batch or not run.steps else SignalSteps(name, run.steps)
    return (steps, SignalTree(tree)) if tree and not run.in_batch else (steps,)


def _look(run: Run, now: float) -> Next:
    nodes = tuple(node for node in run.settings.allocation.nodes if node not in run.avoided)
    return replace(run, phase=Phase.LOOKING, since=now, looked=False), (Look(nodes),)


def taken_out(run: Run, now: float, wall: float, lost: Collection[str]) -> Next:
    """Slurm has taken these nodes out of the job."""
    said = (Say(f"Slurm has lost {', '.join(sorted(lost))}: it is left out"),) if lost else ()
    return replace(run, lost=run.lost | set(lost), avoided=run.avoided | set(lost)), said


def looked(run: Run, now: float, wall: float, suspects: Mapping[str, str], lost: Collection[str] = ()) -> Next:
    """The look at the nodes is over; `suspects`: node to what is wrong there, a part of a sentence. `lost`: nodes that
    Slurm has taken out of the job."""
    run, said = taken_out(replace(run, suspects=suspects, looked=True), now, wall, lost)
    run, actions = _start(run, now, wall) if run.phase is Phase.LOOKING else (run, ())
    return run, (*said, *actions)


def not_begun(run: Run, now: float, wall: float, why: str) -> Next:
    """The command could not be started."""
    return _over(run, now, 127, f"the command cannot be started: {why}")


def _start(run: Run, now: float, wall: float) -> Next:
    settings = run.settings
    if run.held:
        return replace(run, phase=Phase.LOOKING, looked=True), ()
    if not run.requeued and _has_lost_its_nodes(run) and (why := _used_up(run) or late(run, wall, of="it is ")):
        return _without(run, now, why)
    if run.starts and (why := late(run, wall)):
        return _over(run, now, run.exit_code or TERMINATED, f"nothing is started again {why}")
    # A command in the batch script stays where that is, whatever its node looks like.
    suspects = () if run.in_batch else run.suspects.keys()
    try:
        placement = choose(
            settings.allocation, _count(run), avoided=run.avoided, suspects=suspects, previous=run.placement.nodes
        )
    except NoSpare as error:
        return _without(run, now, str(error))
    said = tuple(
        Say(f"{node} is used all the same, for no spare is left: {why}" if node in placement.nodes else
            f"{node} is left out: {why}")
        for node, why in run.suspects.items()
    )  # fmt: skip
    # Nothing that the command started outlives it: a server in the background, a step beside the one that failed.
    left = _signal(run, "KILL", "KILL") if run.starts else ()
    begin = Begin(placement, in_batch=run.in_batch, resume_from=run.resume_from)
    run = replace(
        run, phase=Phase.RUNNING, since=now, starts=run.starts + 1, placement=placement, ends="",
        steps=(BATCH_STEP,) if settings.patient else (),
        elsewhere=(), told=0, told_at=None, requeued=False, begun_ticks=0, switch_gone_at=None, looked=False,
        words=f"start {run.starts + 1} on {len(placement.nodes)} nodes",
    )  # fmt: skip
    return run, (*said, *left, begin)


def _without(run: Run, now: float, why: str) -> Next:
    """Too few nodes are left, or no restart. But for `--no-kill` Slurm would requeue a job that has lost a node: so is
    it done here, and asked for again after another look where Slurm does not answer."""
    if not run.lost:
        return _over(run, now, run.exit_code or TERMINATED, why)
    lost = ", ".join(node for node in run.settings.allocation.nodes if node in run.lost)
    words = f"Slurm has lost {lost}, and the command cannot be started again here ({why}): the job is requeued"
    said = () if words == run.words else (Say(words),)
    return replace(run, phase=Phase.PAUSING, since=now, words=words), (*said, Requeue())


def _has_lost_its_nodes(run: Run) -> bool:
    """Whether Slurm has taken a node of the last start out of the job."""
    return not run.lost.isdisjoint(run.placement.nodes)


def not_requeued(run: Run, now: float, wall: float) -> Next:
    """Slurm does not requeue the job."""
    if run.phase is not Phase.PAUSING:
        return run, ()
    return _over(run, now, run.exit_code or TERMINATED, "Slurm does not requeue the job")


def _count(run: Run) -> int:
    """Nodes of the next start: fewer where the command can run on these, and no more are left."""
    settings = run.settings
    usable = sum(node not in run.avoided for node in settings.allocation.nodes)
    return max(min(settings.count, usable), min(settings.least, settings.count))


def steps_seen(run: Run, now: float, wall: float, steps: tuple[str, ...], nodes: tuple[str, ...] = ()) -> Next:
    """Steps that the present start has begun, all of them, oldest first (BATCH_STEP alone: Slurm lists none), and where
    they run, as far as Slurm says."""
    ours = run.placement.nodes
    elsewhere = tuple(node for node in run.settings.allocation.nodes if node in nodes and node not in ours)
    if run.phase is not Phase.RUNNING or not steps or (steps == run.steps and elsewhere == run.elsewhere):
        return run, ()
    if steps == (BATCH_STEP,) and (run.steps or ours != (run.settings.allocation.batch_host,)):
        return run, ()  # on several nodes it starts its ranks in a way that is not known here
    said = () if elsewhere == run.elsewhere else (Say(_elsewhere(run, elsewhere)),)
    run = replace(run, steps=steps, elsewhere=elsewhere)
    if run.order is None:
        return run, said
    if any(node in run.avoided for node in elsewhere):
        return replace(run, order=None, answer=OrderAnswer.FAILED, words=_elsewhere(run, elsewhere)), said
    words = f"the command runs again as {step_words(steps[-1])}"
    return replace(run, order=None, answer=OrderAnswer.STARTED, words=words), (*said, Say(words))


def _elsewhere(run: Run, nodes: Sequence[str]) -> str:
    return (
        f"start {run.starts} runs on {','.join(nodes)}, too, which it was to leave out: an srun of it was not called "
        "by its name alone (a path, another PATH), or has options that cannot be adapted"
    )


def _beside(pid: int) -> str:
    return f"another `slurm-watchdog run` of this job is under way (process {pid})"


def beside(run: Run, now: float, wall: float, pid: int) -> Next:
    """Another supervisor of this job lives; 0: none any more."""
    run, before = replace(run, beside=pid), run.beside
    if not pid or before:
        return run, ()
    return run, (
        Say(f"{_beside(pid)}: until one of them has ended, a command that fails is started again, and no hang is "
            "answered in this allocation"),
    )  # fmt: skip


# ------------------------------------------------------------------------------------ orders


def ordered(
    run: Run, now: float, wall: float, order: RestartOrder, written_at: float, *, has_finished: bool = False
) -> Next:
    """An order came; `written_at`: since the epoch, when the agent got it. `has_finished`: the command has ended well,
    by itself, which `ended` says next."""
    age_s = wall - written_at
    if order.decision in run.seen:
        return run, ()
    run = replace(run, seen=run.seen | {order.decision})
    if age_s > now - run.began:
        return run, ()  # to a `run` before this one in the same script
    run = replace(run, answered=order.decision)
    if refusal := FINISHED if has_finished else _refusal(run, order, age_s, wall):
        return replace(run, answer=OrderAnswer.REFUSED, words=refusal), (Say(f"an order was refused: {refusal}"),)
    avoid = tuple(node for node in run.settings.allocation.nodes if node in order.avoid)
    words = f"{step_words(order.step_id)} is ended and the command started again" if run.phase is Phase.RUNNING else (
        "the command is started again"
    )  # fmt: skip
    words += f" without {','.join(avoid)}" if avoid else ""
    words += f", from {order.resume_from}" if order.resume_from else ""
    run = replace(
        run, order=order, avoided=run.avoided | set(avoid), resume_from=order.resume_from,
        answer=OrderAnswer.TAKEN, words=words, failed="",
    )  # fmt: skip
    said = Say(f"{words}: {order.why}" if order.why else words)
    if run.phase in (Phase.LOOKING, Phase.ENDING):
        return run, (said,)
    return _end_for_next(run, now, said)


def _end_for_next(run: Run, now: float, *said: Action) -> Next:
    """The nodes are looked at while the steps end."""
    looking, actions = _look(run, now)
    if run.phase is not Phase.RUNNING:
        return looking, (*said, *actions)
    return replace(looking, phase=Phase.ENDING, ends="TERM"), (*said, *_signal(run, "TERM"), *actions)


def _refusal(run: Run, order: RestartOrder, age_s: float, wall: float) -> str:
    """Why an order is not carried out; empty if it is."""
    present = run.steps[-1] if run.steps else ""
    if age_s > ORDER_LIFETIME_S:
        return f"the order is older than {ORDER_LIFETIME_S:.0f} s"
    if run.asked_at is not None:
        return "the job was asked to end"
    if run.beside:
        return _beside(run.beside)
    if run.phase is Phase.ENDING and run.order is not None:
        return "the command is being ended for another order"
    if order.step_id != present:
        now_runs = f"{step_words(present)} runs" if present and run.phase is Phase.RUNNING else "no step is known yet"
        return f"{step_words(order.step_id)} is over: {now_runs}"
    if order.start != run.starts:
        return f"start {order.start} of the command is over: start {run.starts} runs"
    if run.in_batch and run.settings.allocation.batch_host in order.avoid:
        return f"the command runs in the batch script, which cannot leave {run.settings.allocation.batch_host}"
    if why := _used_up(run) or late(run, wall, LAST_S + GIVE_UP_S, "it is "):  # what ends now is not started again
        return why
    avoided = run.avoided | set(order.avoid)
    try:
        choose(run.settings.allocation, _count(replace(run, avoided=avoided)), avoided=avoided)
    except NoSpare as error:
        return str(error)
    return ""


def requeued(run: Run, now: float, wall: float, resume_from: str) -> Next:
    """Our own controller wants the command to be started again, after `released`."""
    run = replace(run, requeued=True, held=True, resume_from=resume_from, failed="")
    return (run, ()) if run.phase is Phase.ENDING else _end_for_next(run, now)


def released(run: Run, now: float, wall: float) -> Next:
    """It may be started."""
    run = replace(run, held=False)
    return _start(run, now, wall) if run.phase is Phase.LOOKING and run.looked else (run, ())


def _used_up(run: Run) -> str:
    return "" if run.restarts_left > 0 else f"all of its {run.settings.max_restarts} restarts are used up"


# ------------------------------------------------------------------------------------ ends


def ended(
    run: Run, now: float, wall: float, start: int, code: int, *, switched: bool = False, stopped: str = "",
    by_itself: bool = False,
) -> Next:  # fmt: skip
    """The command has ended, or what was left of it has. `start`: its number, from 1; `switched`: our kill switch is
    there; `stopped`: who ended its step, where that was not itself: a part of a sentence. `by_itself`: before it was
    told to end."""
    if start != run.starts:
        return run, ()
    run = replace(run, exit_code=code)
    if run.phase is Phase.ENDING:
        if run.order is not None and by_itself and code == 0 and not switched:  # taken between the end and this
            return _over(replace(run, order=None, answer=OrderAnswer.REFUSED), now, code, FINISHED)
        return _after_end(run, now, wall)
    if run.phase is not Phase.RUNNING:
        return run, ()
    if run.asked_at is not None:
        return _over(run, now, code, "the command has ended, as it was asked to")
    if switched:
        words = "the command has ended by our kill switch: an order to start it again is waited for"
        return replace(run, phase=Phase.WAITING, since=now, words=words), (Say(words),)
    if is_interrupted(run, now):  # who has pressed the keys knows
        code = INTERRUPTED if code == 1 else code  # a launcher reports it as an error of its own
        return _over(replace(run, cancelled=True), now, code, "it was interrupted")[0], ()
    if code == 0:
        return _over(run, now, code, FINISHED)
    if not stopped and run.told_at is not None and (age_s := now - run.told_at) <= TOLD_S:
        notice = "as a notice that its time is nearly over is"
        stopped = f"SIGUSR1 or SIGUSR2 was passed to it {age_s:.0f} s before, {notice}"
    if not stopped and code == INTERRUPTED and run.settings.in_slurm:
        stopped = "it was interrupted"
    run = replace(run, cancelled=bool(stopped))
    if why := stopped or _used_up(run) or late(run, wall, of="it is "):
        if _has_lost_its_nodes(run) and not stopped:
            return _without(run, now, why)
        return _over(run, now, code, f"the command ended with {code_words(code)}, and is not started again: {why}")
    words = (
        f"the command ended with {code_words(code)}; restarting in {run.settings.restart_delay_s:.0f} s "
        f"(restart {run.starts} of at most {run.settings.max_restarts})"
    )
    failed = f"its command ended with {code_words(code)}, {_restarting(run)}"
    return replace(run, phase=Phase.PAUSING, since=now, words=words, failed=failed), (
        Say(words),
        *_signal(run, "TERM", "TERM"),
    )


def _restarting(run: Run) -> str:
    return f"restarting ({run.starts} of {run.settings.max_restarts})"


def is_interrupted(run: Run, now: float) -> bool:
    """Whether Ctrl-C was passed to the present start not long ago: its end is the answer to that."""
    return run.told == SIGINT and run.told_at is not None and now - run.told_at <= TOLD_S


def _after_end(run: Run, now: float, wall: float) -> Next:
    """The command is gone, or given up: the next start, if its nodes have been looked at."""
    if run.asked_at is not None:
        return _over(run, now, run.exit_code or TERMINATED, "the command was ended, and the job was asked to end")
    if run.looked:
        return _start(run, now, wall)
    # The look has begun with the ending: its limit counts from there.
    return replace(run, phase=Phase.LOOKING), ()


def switch_seen(run: Run, now: float, wall: float, present: bool) -> Next:
    """Whether our kill switch is there."""
    if run.phase is not Phase.WAITING:
        return run, ()
    gone_at = now if run.switch_gone_at is None else run.switch_gone_at
    return replace(run, switch_gone_at=None if present else gone_at), ()


def asked(run: Run, now: float, wall: float, number: int, ends: bool) -> Next:
    """A signal came. One that ends goes to the steps first: srun itself answers it by killing them at once."""
    if not ends:
        if run.phase is not Phase.RUNNING:
            return run, ()
        if number == SIGINT or run.settings.in_slurm:
            run = replace(run, told=number, told_at=now)
        return run, (Forward(number),)
    if run.phase in (Phase.RUNNING, Phase.ENDING):
        once = run.asked_at is None and bool(run.steps)
        run = replace(run, asked_at=now if run.asked_at is None else run.asked_at)
        if run.phase is Phase.ENDING:
            return run, ()
        name = "INT" if number == SIGINT else "TERM"
        action = SignalSteps(name, run.steps) if once and not run.in_batch else Forward(number)
        return replace(run, ends="TERM" if not run.ends else run.ends), (action,)
    return _over(replace(run, cancelled=True), now, run.exit_code or 128 + number, "the job was asked to end")


def _over(run: Run, now: float, code: int, words: str) -> Next:
    answer = OrderAnswer.FAILED if run.order is not None else run.answer
    run = replace(run, phase=Phase.OVER, since=now, exit_code=code, words=words, answer=answer, order=None)
    return run, () if code == 0 else (Say(words),)


def _seconds_left(run: Run, wall: float) -> float:
    end_at = run.settings.allocation.end_at
    return float("inf") if end_at is None else end_at - wall


def late(run: Run, wall: float, least_s: float = LAST_S, of: str = "") -> str:
    """Why nothing is started any more, a part of a sentence behind `of`; empty: `least_s` are left."""
    left_s = _seconds_left(run, wall)
    return f"{of}{max(0.0, left_s):.0f} s before the end of the job's time" if left_s < least_s else ""
