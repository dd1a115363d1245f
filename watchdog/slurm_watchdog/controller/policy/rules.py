"""Which rule holds for one job and one kind of incident: what is shipped, then the site's, then the job's own
wish. Pure.

A later layer replaces single fields of the ones before. The job's owner can only take away: see `permit`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.controller.policy.owner_directives import OwnerDirectives
from slurm_watchdog.detect.registry import MAY_ACT, spec_of
from slurm_watchdog.knowledge.rungs import ENDINGS, GENTLE, HARMLESS
from slurm_watchdog.model.actions import Action, Rung, Wish
from slurm_watchdog.model.job_match import JobMatch
from slurm_watchdog.model.slurm import SlurmJob

NAMED = 4  # Kinds that a headline names.


class Rule(Struct, frozen=True, kw_only=True):
    """What holds for one kind of incident of one job."""

    mode: str
    ladder: tuple[Rung, ...]
    source: str  # The part of the configuration that gave it, for people.
    exclude_nodes: bool = True  # Whether the restart avoids the nodes that the evidence blames.
    drain: bool = False
    signal_to: str = "steps"
    lose_work: bool = False
    cooldown_s: float | None = None
    attempts: int | None = None
    no_action: tuple[str, ...] = ()
    """Times of the week at which nothing is done by itself: see slurm_watchdog.base.hours."""
    rung_limits: tuple[tuple[str, float], ...] = ()
    may_ask: bool = True  # False: what the job would save is damaged, and its owner has it asked in vain.
    refused: str = ""  # Why the job's owner wants nothing done; a guard says it.
    planned: bool = False
    """The job would come to its end at about this time anyway, and whatever waits for that end would start."""


class RuleChange(Struct, frozen=True, kw_only=True):
    """Fields of a rule that one layer replaces; None leaves what was there."""

    source: str
    mode: str | None = None
    ladder: tuple[Rung, ...] | None = None
    exclude_nodes: bool | None = None
    drain: bool | None = None
    signal_to: str | None = None
    lose_work: bool | None = None
    cooldown_s: float | None = None
    attempts: int | None = None
    no_action: tuple[str, ...] | None = None
    rung_limits: tuple[tuple[str, float], ...] = ()


class Override(Struct, frozen=True, kw_only=True):
    """What is different for some jobs, and for these kinds (none named: all)."""

    match: JobMatch
    kinds: tuple[str, ...] = ()
    change: RuleChange


class RuleBook(Struct, frozen=True, kw_only=True):
    """The configuration's policy, as it stands there."""

    modes: Mapping[str, str]  # Kind -> mode by the general setting and the detector's own.
    kinds: Mapping[str, RuleChange] = {}
    overrides: tuple[Override, ...] = ()
    no_action: tuple[str, ...] = ()


def rule_for(book: RuleBook, kind: str, job: SlurmJob | None) -> Rule:
    """The rule of the administrator: shipped, then the kind's block, then the first override that matches."""
    rule = Rule(
        mode=book.modes.get(kind, "observe"),
        ladder=spec_of(kind).ladder,
        no_action=book.no_action,
        may_ask=spec_of(kind).asks is not False,
        source=f"what is shipped for {kind}",
    )
    if kind in book.kinds:
        rule = _change(rule, book.kinds[kind])
    of_kind = (each for each in book.overrides if not each.kinds or kind in each.kinds)
    override = next((each for each in of_kind if job is not None and each.match.matches(job)), None)
    return rule if override is None else _change(rule, override.change)


def mode_words(book: RuleBook, mode: str) -> str:
    """The general mode, with the kinds that the policy treats otherwise: `observe, but acts on collective_hang`."""
    watched = [kind for kind in MAY_ACT if book.modes.get(kind) != "off"]
    with_ladder = [kind for kind in watched if rule_for(book, kind, None).ladder]
    acting = [kind for kind in with_ladder if rule_for(book, kind, None).mode == "act"]
    others = [each.change.mode for each in book.overrides if each.change.mode not in (None, mode)]
    if mode == "act":
        idle = _names([kind for kind in with_ladder if kind not in acting])
        return f"act, but not on {idle}" if idle else "act"
    some = "some jobs (policy.overrides)" if "act" in others else ""
    on = " and ".join(filter(None, (_names(acting), some)))
    return f"{mode}, but acts on {on}" if on else mode


def _names(kinds: Sequence[str]) -> str:
    more = f" and {len(kinds) - NAMED} more kinds" if len(kinds) > NAMED else ""
    return ", ".join(kinds[:NAMED]) + more


def _change(rule: Rule, change: RuleChange) -> Rule:
    fields = {
        name: value
        for name in (
            "mode", "ladder", "exclude_nodes", "drain", "signal_to", "lose_work", "cooldown_s", "attempts",
            "no_action",
        )
        if (value := getattr(change, name)) is not None
    }  # fmt: skip
    limits = dict(rule.rung_limits) | dict(change.rung_limits)
    return replace(rule, **fields, source=change.source, rung_limits=tuple(sorted(limits.items())))


def permit(rule: Rule, wish: OwnerDirectives) -> Rule:
    """The rule with the wish of the job's owner, who can take steps away or have the job asked before, and
    nothing else."""
    if wish.problem:
        return replace(rule, refused=f"the job's request cannot be read, so no action: {wish.problem}")
    if wish.leave_alone:
        return replace(rule, refused=f"its owner opted out ({wish.source})")
    if wish.ladder is None:
        return rule
    wanted = [
        rung for rung in wish.ladder if rung in rule.ladder or (rule.ladder and rule.may_ask and rung in HARMLESS)
    ]
    dropped = [rung for rung in wish.ladder if rung not in wanted]
    if rule.ladder and not wanted:
        wants = "nothing done" if not wish.ladder else f"{', '.join(dropped)}, which is not permitted"
        return replace(rule, refused=f"its owner asked for {wants} ({wish.source})")
    kept = [rung for rung in rule.ladder if rung is Rung.EVIDENCE]
    source = f"{rule.source}, and its owner's request ({wish.source})"
    if dropped:
        source += f"; not permitted: {', '.join(dropped)}"
    return replace(rule, ladder=tuple(dict.fromkeys((*kept, *wanted))), source=source)


WISHED: dict[Wish, tuple[Rung, ...]] = {
    Wish.SAVE: (Rung.KILL_SWITCH,),
    Wish.HOLD: (Rung.KILL_SWITCH, Rung.REQUEUE),
}
"""The ladders of what a person asks for, beside a restart, which has the rule's."""


def wished(rule: Rule, wish: Wish, within_s: float | None) -> Rule:
    """The rule for what a person asks for; `within_s`: for so long the checkpoint is waited for, None: as usual."""
    limits = dict(rule.rung_limits) | ({} if within_s is None else {"checkpoint_s": within_s})
    rule = replace(rule, rung_limits=tuple(sorted(limits.items())))
    rule = replace(rule, planned=wish is Wish.HOLD)  # before maintenance
    return replace(rule, ladder=WISHED[wish], lose_work=False) if wish in WISHED else rule


def action_of(ladder: tuple[Rung, ...], loop_turns: bool | None) -> Action:
    """The name that a ladder has in messages and counters."""
    asks = any(rung in GENTLE for rung in ladder)
    ending = next((rung for rung in ladder if rung in ENDINGS), None)
    if Rung.HOLD in ladder:
        return Action.HOLD
    if Rung.END_PROCESS in ladder:
        return Action.END_PROCESS
    if ending is None:
        return Action.ASK_TO_SAVE if asks else Action.NONE
    if ending is Rung.RESTART_STEP:
        return Action.RESTART_STEP
    if ending is Rung.REQUEUE:
        graceful = Rung.KILL_SWITCH in ladder and loop_turns is not False
        return Action.GRACEFUL_RESTART if graceful else Action.REQUEUE
    return {
        Rung.RESUBMIT: Action.RESUBMIT,
        Rung.CHAIN: Action.LEAVE_TO_CHAIN,
        Rung.CANCEL: Action.CANCEL,
    }[ending]
