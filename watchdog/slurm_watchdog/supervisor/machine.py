"""What the supervisor does next: a pure function of its state, of what has happened, and of the time. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from slurm_watchdog.supervisor.endings import (
    INTERRUPTED,
    KILL_WAIT_S,
    LAST_S,
    RESTART_DELAY_S,
    TERMINATED,
    TOLD_S,
    again_words,
    beside_words,
    code_words,
    elsewhere_words,
    late_words,
    not_again_words,
    restarting_words,
    told_words,
    used_up_words,
)
from slurm_watchdog.supervisor.placement import NoSpare, choose
from slurm_watchdog.supervisor.preflight import look_s
from slurm_watchdog.supervisor.state import (
    Action,
    Begin,
    Ends,
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

TREE_S = 1.0  # Between KILL of the steps, with TERM of what runs on this host, and KILL of that.
GIVE_UP_S = 10.0  # After the order: what has not ended by then stands in state D, and the next start overlaps it.
WAIT_S = 120.0  # For an order, after a command that ended because of our kill switch.
SWITCH_GONE_S = 30.0  # After the kill switch was taken away, that no order came: it was no restart.
LOOK_MORE_S = 3.0  # Beside look_s(), for slurmctld, which is asked before, and the end of a look that is given up.
SIGINT = 2

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
    allocation = replace(run.settings.allocation, end_at=None)
    unlimited = replace(run, settings=replace(run.settings, allocation=allocation))
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
    if run.phase is Phase.LOOKING and age_s > look_s(len(run.settings.allocation.nodes)) + LOOK_MORE_S:
        return _start(run, now, wall)
    if run.phase is Phase.PAUSING and age_s >= RESTART_DELAY_S:
        return _look(run, now)
    if run.phase is Phase.WAITING:
        gone = run.switch_gone_at is not None and now - run.switch_gone_at >= SWITCH_GONE_S
        if gone or age_s >= WAIT_S:
            why = "the kill switch was taken away" if gone else f"no order came within {WAIT_S:.0f} s"
            return _over(run, now, run.exit_code, f"the command is not started again: {why}")
    if run.phase is Phase.ENDING:
        return _end_further(run, age_s, now, wall)
    if run.phase is Phase.RUNNING and run.asked_at is not None:
        return _kill_after(run, now - run.asked_at)
    return run, ()


def _kill_after(run: Run, age_s: float) -> Next:
    """What was asked to end, and does not."""
    if run.ends is Ends.TERM and age_s >= KILL_WAIT_S:
        return replace(run, ends=Ends.KILL), _kill(run)
    if run.ends is Ends.KILL and age_s >= KILL_WAIT_S + GRACE_S:
        return replace(run, ends=Ends.TREE), (SignalTree("KILL"),)
    return run, ()


def _end_further(run: Run, age_s: float, now: float, wall: float) -> Next:
    grace_s = GRACE_S if run.order is None else min(GRACE_S, run.order.grace_s)
    if run.ends is Ends.TERM and age_s >= grace_s:
        return replace(run, ends=Ends.KILL), _kill(run)
    if run.ends is Ends.KILL and age_s >= grace_s + TREE_S:
        return replace(run, ends=Ends.TREE), _end_all(run, "KILL")
    if age_s >= GIVE_UP_S:
        return _after_end(run, now, wall)
    return run, ()


def _signal(run: Run, name: str) -> tuple[Action, ...]:
    """To the steps: those of a command in the batch script are its processes."""
    return (SignalTree(name),) if run.in_batch else (SignalSteps(name, run.steps),)


def _end_all(run: Run, name: str) -> tuple[Action, ...]:
    """To the steps, and to all that the command has started on this host."""
    return (SignalTree(name),) if run.in_batch else (SignalSteps(name, run.steps), SignalTree(name))


def _kill(run: Run) -> tuple[Action, ...]:
    """What ends the steps for certain; their sruns are left a moment to end by that."""
    return (SignalTree("KILL"),) if run.in_batch else (SignalSteps("KILL", run.steps), SignalTree("TERM"))


def _look(run: Run, now: float) -> Next:
    nodes = tuple(node for node in run.settings.allocation.nodes if node not in run.avoided)
    return replace(run, phase=Phase.LOOKING, since=now, looked=False), (Look(nodes),)


def looked(run: Run, now: float, wall: float, suspects: Mapping[str, str]) -> Next:
    """The look at the nodes is over; `suspects`: node to what is wrong there, a part of a sentence."""
    run = replace(run, suspects=suspects, looked=True)
    return _start(run, now, wall) if run.phase is Phase.LOOKING else (run, ())


def not_begun(run: Run, now: float, wall: float, why: str) -> Next:
    """The command could not be started."""
    return _over(run, now, 127, f"the command cannot be started: {why}")


def begun(run: Run, now: float, wall: float, ticks: int) -> Next:
    """The command runs since then: see SupervisorStatus.begun_ticks."""
    return replace(run, begun_ticks=ticks), ()


def _start(run: Run, now: float, wall: float) -> Next:
    settings = run.settings
    if run.starts and _seconds_left(run, wall) < LAST_S:
        return _over(run, now, run.exit_code or TERMINATED, f"nothing is started again {_late(run, wall)}")
    # A command in the batch script stays where that is, whatever its node looks like.
    suspects = () if run.in_batch else run.suspects.keys()
    try:
        placement = choose(
            settings.allocation, _count(run), avoided=run.avoided, suspects=suspects, previous=run.placement.nodes
        )
    except NoSpare as error:
        return _over(run, now, run.exit_code or TERMINATED, str(error))
    said = tuple(
        Say(f"{node} is used all the same, for no spare is left: {why}" if node in placement.nodes else
            f"{node} is left out: {why}")
        for node, why in run.suspects.items()
    )  # fmt: skip
    # Nothing that the command started outlives it: a server in the background, a step beside the one that failed.
    left = _end_all(run, "KILL") if run.starts else ()
    begin = Begin(placement, in_batch=run.in_batch, resume_from=run.resume_from)
    run = replace(
        run, phase=Phase.RUNNING, since=now, starts=run.starts + 1, placement=placement, steps=(), ends=Ends.NOT,
        elsewhere=(), told_at=None, begun_ticks=0, switch_gone_at=None, looked=False,
        words=f"start {run.starts + 1} on {len(placement.nodes)} nodes",
    )  # fmt: skip
    return run, (*said, *left, begin)


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
    said = () if elsewhere == run.elsewhere else (Say(elsewhere_words(run.starts, elsewhere)),)
    run = replace(run, steps=steps, elsewhere=elsewhere)
    if run.order is None:
        return run, said
    if any(node in run.avoided for node in elsewhere):
        return replace(run, order=None, answer=OrderAnswer.FAILED, words=elsewhere_words(run.starts, elsewhere)), said
    words = f"the command runs again as {step_words(steps[-1])}"
    return replace(run, order=None, answer=OrderAnswer.STARTED, words=words), (*said, Say(words))


def beside(run: Run, now: float, wall: float, pid: int) -> Next:
    """Another supervisor of this job lives; 0: none any more."""
    run, before = replace(run, beside=pid), run.beside
    if not pid or before:
        return run, ()
    return run, (
        Say(f"{beside_words(pid)}: until one of them has ended, a command that fails is started again, and no hang is "
            "answered in this allocation"),
    )  # fmt: skip


# ------------------------------------------------------------------------------------ orders


def ordered(run: Run, now: float, wall: float, order: RestartOrder, written_at: float) -> Next:
    """An order was found; `written_at`: since the epoch, as its file says."""
    age_s = wall - written_at
    if order.decision in run.seen:
        return run, ()
    run = replace(run, seen=run.seen | {order.decision})
    if age_s > now - run.began:
        return run, ()  # to a `run` before this one in the same script
    run = replace(run, answered=order.decision)
    if refusal := _refusal(run, order, age_s, wall):
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
    looking, actions = _look(run, now)
    if run.phase is not Phase.RUNNING:
        return looking, (said, *actions)
    # The nodes are looked at while the steps end.
    ending = replace(looking, phase=Phase.ENDING, ends=Ends.TERM)
    return ending, (said, *_signal(run, "TERM"), *actions)


def _refusal(run: Run, order: RestartOrder, age_s: float, wall: float) -> str:
    """Why an order is not carried out; empty if it is."""
    present = run.steps[-1] if run.steps else ""
    if age_s > ORDER_LIFETIME_S:
        return f"the order is older than {ORDER_LIFETIME_S:.0f} s"
    if run.asked_at is not None:
        return "the job was asked to end"
    if run.beside:
        return beside_words(run.beside)
    if run.phase is Phase.ENDING and run.order is not None:
        return "the command is being ended for another order"
    if order.step_id != present:
        now_runs = f"{step_words(present)} runs" if present and run.phase is Phase.RUNNING else "no step is known yet"
        return f"{step_words(order.step_id)} is over: {now_runs}"
    if order.start != run.starts:
        return f"start {order.start} of the command is over: start {run.starts} runs"
    if run.in_batch and run.settings.allocation.batch_host in order.avoid:
        return f"the command runs in the batch script, which cannot leave {run.settings.allocation.batch_host}"
    return _not_without(replace(run, avoided=run.avoided | set(order.avoid)), wall)


# ------------------------------------------------------------------------------------ lost nodes


def lost(run: Run, now: float, wall: float, nodes: tuple[str, ...]) -> Next:
    """The command cannot continue without these nodes. But for `--no-kill` Slurm would end the job and requeue it:
    what it leaves to us is done in every mode."""
    if run.phase is not Phase.RUNNING or run.asked_at is not None:
        return run, ()
    run = replace(run, avoided=run.avoided | set(nodes))
    gone = f"Slurm has lost {', '.join(nodes)}"
    if why := _not_without(run, wall):
        words = f"{gone}, and the command cannot be started again here ({why}): the job is requeued"
        said = () if words == run.words else (Say(words),)
        return replace(run, words=words), (*said, Requeue())
    words = (
        f"{gone}: the command is ended and started again without {'it' if len(nodes) == 1 else 'them'} "
        f"(restart {run.starts} of at most {run.settings.max_restarts})"
    )
    looking, actions = _look(run, now)
    failed = f"{gone}, and its command is {_restarting(run)}"
    ending = replace(looking, phase=Phase.ENDING, ends=Ends.TERM, words=words, failed=failed)
    return ending, (Say(words), *_signal(run, "TERM"), *actions)


def _not_without(run: Run, wall: float) -> str:
    """Why the command is not started again on the nodes that are left; empty: it is."""
    if run.restarts_left <= 0:
        return used_up_words(run.settings.max_restarts)
    if _seconds_left(run, wall) < LAST_S + GIVE_UP_S:  # what is ended now is not started again any more
        return f"it is {_late(run, wall)}"
    try:
        choose(run.settings.allocation, _count(run), avoided=run.avoided)
    except NoSpare as error:
        return str(error)
    return ""


def not_requeued(run: Run, now: float, wall: float) -> Next:
    """Slurm does not requeue the job. It would end such a job, too."""
    if run.phase is not Phase.RUNNING or run.asked_at is not None:
        return run, ()
    words = "Slurm does not requeue the job: it is ended"
    ends = SignalTree("TERM") if run.in_batch or not run.steps else SignalSteps("TERM", run.steps)
    return replace(run, asked_at=now, ends=Ends.TERM, words=words), (Say(words), ends)


# ------------------------------------------------------------------------------------ ends


def ended(
    run: Run, now: float, wall: float, start: int, code: int, *, switched: bool = False, stopped: str = ""
) -> Next:
    """The command has ended, or what was left of it has. `start`: its number, from 1; `switched`: our kill switch is
    there; `stopped`: who ended its step, where that was not itself: a part of a sentence."""
    if start != run.starts:
        return run, ()
    run = replace(run, exit_code=code)
    if run.phase is Phase.ENDING:
        return _after_end(run, now, wall)
    if run.phase is not Phase.RUNNING:
        return run, ()
    if run.asked_at is not None:
        return _over(run, now, code, "the command has ended, as it was asked to")
    if switched:
        words = "the command has ended by our kill switch: an order to start it again is waited for"
        return replace(run, phase=Phase.WAITING, since=now, words=words), (Say(words),)
    why = _not_again(run, code, stopped, now, wall)
    if why is not None:
        return _over(run, now, code, why)
    words = again_words(code_words(code), RESTART_DELAY_S, run.starts, run.settings.max_restarts)
    left = _end_all(run, "TERM")
    failed = f"its command ended with {code_words(code)}, {_restarting(run)}"
    return replace(run, phase=Phase.PAUSING, since=now, words=words, failed=failed), (Say(words), *left)


def _restarting(run: Run) -> str:
    return restarting_words(run.starts, run.settings.max_restarts)


def _not_again(run: Run, code: int, stopped: str, now: float, wall: float) -> str | None:
    """Why a command that has ended by itself is not started again; None: it is."""
    if code == 0:
        return "the command has ended well"
    why = stopped
    if not why and run.told_at is not None and now - run.told_at <= TOLD_S:
        why = told_words(now - run.told_at)
    if not why and code == INTERRUPTED:
        why = "it was interrupted"
    if not why and run.restarts_left <= 0:
        why = used_up_words(run.settings.max_restarts)
    if not why and _seconds_left(run, wall) < LAST_S:
        why = f"it is {_late(run, wall)}"
    return not_again_words(code_words(code), why) if why else None


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
    gone_at = None if present else run.switch_gone_at if run.switch_gone_at is not None else now
    return replace(run, switch_gone_at=gone_at), ()


def asked(run: Run, now: float, wall: float, number: int, ends: bool) -> Next:
    """A signal came. One that ends goes to the steps first: srun itself answers it by killing them at once."""
    if not ends:
        if run.phase is not Phase.RUNNING:
            return run, ()
        return replace(run, told_at=now), (Forward(number),)
    if run.phase in (Phase.RUNNING, Phase.ENDING):
        once = run.asked_at is None and bool(run.steps)
        run = replace(run, asked_at=now if run.asked_at is None else run.asked_at)
        if run.phase is Phase.ENDING:
            return run, ()
        name = "INT" if number == SIGINT else "TERM"
        action = SignalSteps(name, run.steps) if once and not run.in_batch else Forward(number)
        return replace(run, ends=Ends.TERM if run.ends is Ends.NOT else run.ends), (action,)
    return _over(run, now, run.exit_code or 128 + number, "the job was asked to end")


def _over(run: Run, now: float, code: int, words: str) -> Next:
    answer = OrderAnswer.FAILED if run.order is not None else run.answer
    run = replace(run, phase=Phase.OVER, since=now, exit_code=code, words=words, answer=answer, order=None)
    return run, () if code == 0 else (Say(words),)


def _seconds_left(run: Run, wall: float) -> float:
    end_at = run.settings.allocation.end_at
    return float("inf") if end_at is None else end_at - wall


def _late(run: Run, wall: float) -> str:
    return late_words(_seconds_left(run, wall))
