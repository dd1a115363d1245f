"""What a case proves, by what is known to be true of it. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lab.frameworks.catalogue import Fault, fault_named
from lab.frameworks.outcome import Outcome, RankRun, Said

FALSE_OF_ALL = re.compile(r"out of memory|checkpoint is damaged|disk is full|XID|node .* is down", re.IGNORECASE)
"""Nothing of that is ever done to a training here."""
EXACT = 1
"""A step may be under way when the fault begins: counts may differ by so many."""


@dataclass(frozen=True)
class Verdict:
    """One row of the table."""

    framework: str
    fault: str
    found_s: float | None
    """From the fault to the first sentence about it."""
    kind: str
    rank: str
    """`right`, `nobody`, `WRONG (rank 0)`; `-` where nobody had to be named."""
    cause: str
    """`right`, `not said`, `-`."""
    restart_s: float | None
    """From the fault to the first step of the next run."""
    resumed_at: int | None
    """Step of the checkpoint from which the next run went on; 0: from the beginning."""
    lost: int | None
    """Steps that were made and had to be made again."""
    lost_said: str
    false: tuple[str, ...]
    """Every sentence that is not true."""
    ended: bool
    """The training came to its last step and `slurm-watchdog run` to exit code 0."""
    broke: str = ""

    @property
    def ok(self) -> bool:
        """Whether the target is met: found, nobody wrong, nothing false, restarted from its own checkpoint."""
        if self.broke or self.false or not self.ended:
            return False
        if not fault_named(self.fault).kinds:
            return True
        return self.found_s is not None and bool(self.resumed_at) and self.rank in ("right", "nobody")


def judge(outcome: Outcome) -> Verdict:
    """The verdict on one case."""
    fault = fault_named(outcome.fault)
    opened = [each for each in outcome.said if each.topic == "opened"]
    begun = outcome.fault_at
    about = [each for each in opened if fault.kinds and begun is not None and each.at >= begun - 1]
    first = about[0] if about else None
    again = first_of(outcome, 1)
    resumed = None if again is None else again.first - 1
    lost = None if resumed is None else max(0, last_of(outcome, 0) - resumed)
    return Verdict(
        framework=outcome.framework,
        fault=outcome.fault,
        found_s=None if first is None or begun is None else round(first.at - begun, 1),
        kind="" if first is None else first.kind,
        rank=rank_of(outcome, fault, about),
        cause=cause_of(outcome, fault),
        restart_s=None if again is None or begun is None else round(again.first_at - begun, 1),
        resumed_at=resumed,
        lost=lost,
        lost_said=lost_said(outcome),
        false=tuple(false_sentences(outcome, fault, lost)),
        ended=outcome.exit_code == 0 and made_all(outcome),
        broke=outcome.broke,
    )


def first_of(outcome: Outcome, run: int) -> RankRun | None:
    """The rank of a run that made a step first; None: it made none."""
    ranks = [each for each in outcome.runs if each.run == run and each.first > 0]
    return min(ranks, key=lambda each: each.first_at, default=None)


def last_of(outcome: Outcome, run: int) -> int:
    """The last step of a run, 0 if it made none."""
    return max((each.last for each in outcome.runs if each.run == run and each.last > 0), default=0)


def made_all(outcome: Outcome) -> bool:
    """Whether the last run came to the end of the training."""
    newest = max((each.run for each in outcome.runs), default=0)
    return last_of(outcome, newest) >= outcome.total


def rank_of(outcome: Outcome, fault: Fault, about: list[Said]) -> str:
    """Whom it named: the last word counts, and no wrong name may ever have been said."""
    if not fault.kinds:
        return "-"
    named = [each.ranks for each in said_before_restart(outcome) if each.kind in fault.kinds and each.ranks]
    wrong = sorted({rank for ranks in named for rank in ranks} - {outcome.rank})
    if wrong:
        return f"WRONG (rank {', '.join(map(str, wrong))})"
    if named:
        return "right"
    return "nobody" if about else "nothing said"


def cause_of(outcome: Outcome, fault: Fault) -> str:
    """Whether somebody who reads all of it knows the reason."""
    if not fault.cause:
        return "-"
    texts = [each.text for each in said_before_restart(outcome)]
    return "right" if any(re.search(fault.cause, text) for text in texts) else "not said"


def said_before_restart(outcome: Outcome) -> list[Said]:
    """What was said of the first run: until the next one makes its first step."""
    again = first_of(outcome, 1)
    return [each for each in outcome.said if again is None or each.at <= again.first_at]


def lost_said(outcome: Outcome) -> str:
    """`5`, `5-14`, or empty where nothing was said of it."""
    for each in outcome.said:
        if each.topic == "ended" and each.steps_lost is not None:
            most = each.steps_lost_at_most
            return f"{each.steps_lost}" if most is None else f"{each.steps_lost}-{most}"
    return ""


def false_sentences(outcome: Outcome, fault: Fault, lost: int | None) -> list[str]:
    """Each sentence that is not true, with the reason before it."""
    found = []
    for each in outcome.said:
        why = why_false(outcome, fault, each, lost)
        if why:
            found.append(f"{why}: {each.text}")
    return found


def why_false(outcome: Outcome, fault: Fault, each: Said, lost: int | None) -> str:
    """Why a sentence is not true; empty if it is."""
    again = first_of(outcome, 1)
    if each.topic == "opened":
        if not fault.kinds:
            return "nothing is wrong"
        if outcome.fault_at is None or each.at < outcome.fault_at - 1:
            return "before the fault"
        if again is not None and each.at > again.first_at:
            return "after the restart, when all is well"
        if each.kind not in fault.kinds:
            return f"{each.kind} is not what happened"
    if set(each.ranks) - {outcome.rank}:
        return "an innocent rank"
    if FALSE_OF_ALL.search(each.text):
        return "another cause"
    if each.topic == "ended":
        return why_end_false(outcome, each, lost)
    return ""


def why_end_false(outcome: Outcome, each: Said, lost: int | None) -> str:
    """The same of what is said at the end of an action."""
    again = first_of(outcome, 1)
    trains = again is not None and again.last > again.first
    if each.ok is False and not each.needless and trains and made_all(outcome):
        return "the restart worked"
    if each.ok and not trains:
        return "the restart did not work"
    if each.steps_lost is not None and lost is not None:
        most = each.steps_lost if each.steps_lost_at_most is None else each.steps_lost_at_most
        if not each.steps_lost - EXACT <= lost <= most + EXACT:
            return f"{lost} steps were lost"
    return ""
