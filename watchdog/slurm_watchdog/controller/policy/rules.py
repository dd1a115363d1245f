"""Which rule holds for one job and one kind of incident: what is shipped, then the site's, then the job's own
wish. Pure.

A later layer replaces single fields of the ones before. The job's owner can only take away: see `permit`.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from slurm_watchdog.config.policy import Values, values_for
from slurm_watchdog.config.schema import Config
from slurm_watchdog.controller.policy.owner_directives import OwnerDirectives
from slurm_watchdog.detect.registry import MAY_ACT, spec_of
from slurm_watchdog.knowledge.rungs import ENDINGS, GENTLE, HARMLESS
from slurm_watchdog.model.actions import Action, Rung, Wish
from slurm_watchdog.model.slurm import SlurmJob

NAMED = 4  # Kinds that a headline names.


class Rule(Values, frozen=True):
    """What holds for one kind of incident of one job."""

    acts: bool = False
    ladder: tuple[Rung, ...] = ()
    source: str = ""  # The part of the configuration that gave it, for people.
    may_ask: bool = True  # False: what the job would save is damaged, and its owner has it asked in vain.
    refused: str = ""  # Why the job's owner wants nothing done; a guard says it.
    planned: bool = False  # It would come to its end at about this time anyway, and what waits for that would start.


def rule_for(config: Config, kind: str, job: SlurmJob | None) -> Rule:
    """The rule of the administrator: shipped, then what is different for the kind and the job."""
    own, source = values_for(config.exceptions, job, kind, () if job is None else job.nodes)
    general = {name: getattr(config.policy, name) for name in Values.__struct_fields__}
    return Rule(
        **{name: own.get(name, value) for name, value in general.items()},
        acts=config.acts_on(kind, own.get("restart")),
        ladder=own.get("ladder", spec_of(kind).ladder),
        may_ask=spec_of(kind).asks is not False,
        source=source or f"what is shipped for {kind}",
    )


def mode_words(config: Config) -> str:
    """What is done, with the kinds that are treated otherwise: `observe, but acts on collective_hang`."""
    watched = [kind for kind in MAY_ACT if config.detectors.is_enabled(kind) and rule_for(config, kind, None).ladder]
    acting = [kind for kind in watched if rule_for(config, kind, None).acts]
    usual = [kind for kind in watched if config.acts_on(kind)]
    jobs = [each.restart for each in config.exceptions if each.match.of_jobs]
    more = ["some jobs (except)"] if config.restart == "never" and {"hangs", "all"}.intersection(jobs) else []
    also = " and ".join(filter(None, (_names([kind for kind in acting if kind not in usual]), *more)))
    less = _names([kind for kind in usual if kind not in acting])
    words = {"never": "observe", "hangs": "act on hangs", "all": "act"}[config.restart]
    return words + (f", but acts on {also}" if also else "") + (f", but not on {less}" if less else "")


def _names(kinds: Sequence[str]) -> str:
    more = f" and {len(kinds) - NAMED} more kinds" if len(kinds) > NAMED else ""
    return ", ".join(kinds[:NAMED]) + more


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


WISHED: dict[Wish, tuple[Rung, ...]] = {Wish.SAVE: (Rung.KILL_SWITCH,), Wish.HOLD: (Rung.KILL_SWITCH, Rung.REQUEUE)}
"""The ladders of what a person asks for, beside a restart, which has the rule's."""


def wished(rule: Rule, wish: Wish, within_s: float | None) -> Rule:
    """The rule for what a person asks for; `within_s`: for so long the checkpoint is waited for, None: as usual."""
    limit_s = rule.checkpoint_limit if within_s is None else within_s
    rule = replace(rule, checkpoint_limit=limit_s, planned=wish is Wish.HOLD)  # planned: before maintenance
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
    return {Rung.RESUBMIT: Action.RESUBMIT, Rung.CHAIN: Action.LEAVE_TO_CHAIN, Rung.CANCEL: Action.CANCEL}[ending]
