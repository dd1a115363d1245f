"""A cascade of collectives that timed out: who is missing from it, who is behind, who ran something else. Pure.

The ranks that say so waited; the one they waited for is often the one that says nothing. It is named only
where nearly all others did say so, or where one is behind all the others of the same group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from slurm_watchdog.base.late_regex import late_regex
from slurm_watchdog.diagnose.logs.ranks import Ranks
from slurm_watchdog.diagnose.logs.tracebacks import FoundError
from slurm_watchdog.knowledge.log_signatures import LOST_A_RANK

FEW_SILENT = 0.25  # Those that say nothing in a cascade are named if they are at most this share of the ranks.
LEAST_SAID = 2
LEAST_OF_A_GROUP = 3
FEW_TASKS = 2
ALIKE_SHARE = 0.5
"""Where JAX's coordinator misses the heartbeats of more than half of the tasks, it is itself what was not reached."""
SURELY_MANY = 7
"""So many ranks that say the same are hardly an excerpt: a gap among their numbers is a rank that said nothing."""
_WORK = late_regex(r"SeqNum=(?P<seq>\d+), OpType=(?P<op>\w+)(?:, NumelIn=(?P<numel>\d+))?")
_RAN = late_regex(r"WorkNCCL\(.{1,300}?\) ran for \d+")
_LAST = late_regex(
    r"last enqueued (?:NCCL )?work: (?P<enqueued>-?\d+), last completed (?:NCCL )?work: (?P<completed>-?\d+)"
)
_GROUP = late_regex(r"\[PG (?:ID )?(?P<id>\d+)(?: PG GUID (?P<guid>[^\s\]]+))? Rank \d+\]")
_EQUAL_SIZES = frozenset(
    {"ALLREDUCE", "BROADCAST", "_ALLGATHER_BASE", "_REDUCE_SCATTER_BASE", "ALLGATHER", "REDUCE_SCATTER"}
)
_RANK_LIST = late_regex(r"\b[Rr]anks? (?P<ranks>\d+(?:, ?\d+)*) failed to pass monitoredBarrier")
_DESYNC = late_regex(r"-\s*\[(?P<ranks>\d+(?:, ?\d+)*)\] (?:joined|finished)")
_MISSING_LIST = late_regex(
    r"missing (?:ranks?|tasks?|processes):? ?[\[{(]?(?P<ranks>\d+(?:, ?\d+)*)[\]})]"
    r"|[Rr]anks? [\[{(]?(?P<ranks2>\d+(?:, ?\d+)*)[\]})]? "
    r"(?:ha(?:s|ve) not (?:joined|reached|arrived)|did(?: not|n't) (?:join|reach|arrive))\b"
    r"|has not received .{1,60} from remote rank \[(?P<ranks3>\d+)\]"
)
_STALLED = late_regex(r"^(?:Missing|Stalled) ranks:$")
_STALLED_RANK = late_regex(r"^(?P<rank>\d{1,6}): ?\[")
"""Horovod's own word, a line for each rank that has not handed in its tensors."""
_JAX_CAME = late_regex(r"[Ff]irst task at the barrier: \S+")  # It was there, and waited.
_JAX_TASK = late_regex(r"/job:(?:jax_worker|worker|tpu_worker)/replica:\d+/task:(?P<task>\d+)")
_STOPPED = late_regex(r"heartbeat timeout|stopped sending heartbeats|unhealthy")
_NOT_COME = late_regex(
    r"[Tt]imed out task names|\b[Mm]issing tasks?\b|\b[Ww]aiting for (?:the following )?tasks?\b"
    r"|\b(?:tasks?|processes)\b.{0,60} (?:(?:did|have|has) not|didn't|never|failed to) "
    r"(?:reach|arriv|join|pass|connect|regist)"
)
"""The coordinator's list of those that it waited for at a start or a barrier, however many they are."""
_RUNNING = late_regex(
    r"\bRank (?P<own>\d{1,6}) is running collective: (?P<mine>.{1,600}?), but Rank (?P<other>\d{1,6}) is running "
    r"collective: (?P<theirs>.{1,600}?)(?:\.? ?Collectives differ|\.?\s*$)"
)
_OP_TYPE = late_regex(r"\bOpType=(\w+)")


def _few(all_: int) -> int:
    return max(1, int(FEW_SILENT * all_))


class Suspects(msgspec.Struct, frozen=True):
    ranks: tuple[int, ...]
    reason: str  # Half a sentence.
    line: int | None = None
    silent: bool = False  # They are named because they said nothing.


def suspects_of(
    errors: Sequence[FoundError],
    rank_of: dict[int, int | None],
    known: Iterable[int],
    world: int | None,
    more: frozenset[int] = frozenset(),
) -> Suspects | None:
    """The rank that a cascade points at. `rank_of` has for the place of each error the rank that said it, or None;
    `known`: ranks seen anywhere in the log; `world`: how many there are, if the log says so; `more`: ranks
    that said so as well, in lines that were not kept."""
    suspects = _named_by_library(errors, world)
    if suspects is not None:
        return suspects
    timeouts = [place for place, error in enumerate(errors) if error.name in ("nccl_watchdog", "collective_timeout")]
    ranks_that_said = {rank for place in timeouts if (rank := rank_of.get(place)) is not None} | more
    speakers = {rank for rank in rank_of.values() if rank is not None}
    seen = world or max([*known, *ranks_that_said, *speakers], default=0) + 1
    stuck = _stuck(errors, rank_of, ranks_that_said, seen)
    if stuck is not None:
        return stuck
    if len(ranks_that_said) < LEAST_SAID:
        return None
    return (
        _mismatched(errors, timeouts, rank_of)
        or _behind(errors, timeouts, rank_of, len(ranks_that_said))
        or _missing(ranks_that_said, set(known), world)
    )


def _named_by_library(errors: Sequence[FoundError], world: int | None) -> Suspects | None:
    """Someone says it: a monitored barrier, NCCL's report of a desync, JAX's coordinator."""
    for error in errors:
        for text in (error.raw_text, *error.detail):
            match = _RANK_LIST.search(text) or _DESYNC.search(text) or _MISSING_LIST.search(text)
            if match:
                numbers = next(group for group in match.groups() if group)
                ranks = tuple(sorted({int(number) for number in numbers.split(",")}))
                return Suspects(ranks, "did not join what the others waited in", error.line)
        stalled = _stalled(error.detail)
        if stalled:
            return Suspects(stalled, "had not joined what the others waited in", error.line)
    return _named_by_coordinator(errors, world)


def _named_by_coordinator(errors: Sequence[FoundError], world: int | None) -> Suspects | None:
    stopped: dict[int, int] = {}
    not_come: dict[int, int] = {}
    for error in errors:
        if error.name not in ("heartbeat_lost", "collective_timeout", "barrier_timeout"):
            continue
        texts = (error.text, *error.detail)
        listed = any(_NOT_COME.search(text) for text in texts)
        if listed or any(_STOPPED.search(text) for text in texts):
            for text in texts:
                for match in _JAX_TASK.finditer(_JAX_CAME.sub("", text)):
                    (not_come if listed else stopped).setdefault(int(match["task"]), error.line)
    few = max(FEW_TASKS, ALIKE_SHARE * max(world or 0, max(stopped, default=0) + 1))
    if stopped and len(stopped) <= few:
        reason = "stopped answering the coordinator, which calls such a task unhealthy"
        return Suspects(tuple(sorted(stopped)), reason, min(stopped.values()))
    if not_come:
        reason = "did not come to what the others waited at, as the coordinator says"
        return Suspects(tuple(sorted(not_come)), reason, min(not_come.values()))
    return None


def odd_ranks(errors: Sequence[FoundError]) -> Suspects | None:
    """Of ranks whose collectives torch compared (TORCH_DISTRIBUTED_DEBUG=DETAIL) the few that ran another one than all
    others that are known; without ranks where that cannot be told. None if no line compares any.

    A rank compares its own with each in turn, so that all before the first that differs ran what it ran.
    """
    ran: dict[int, str] = {}
    line = None
    for error in errors:
        match = _RUNNING.search(error.text)
        if match is None:
            continue
        line = line or error.line
        own, other = int(match["own"]), int(match["other"])
        if error.who.rank not in (None, own):
            return Suspects((), "", error.line)  # the numbers of a group
        ran |= {**dict.fromkeys(range(other), match["mine"]), own: match["mine"], other: match["theirs"]}
    if line is None:
        return None
    counted = Counter(ran.values()).most_common()
    odd = tuple(sorted(rank for rank, what in ran.items() if what != counted[0][0]))
    if len(ran) < LEAST_OF_A_GROUP or len(odd) > _few(len(ran)):
        return Suspects((), "", line)
    beside = [found[1] if (found := _OP_TYPE.search(what)) else "" for what in (ran[odd[0]], counted[0][0])]
    which = f" ({beside[0]} beside {beside[1]})" if all(beside) and beside[0] != beside[1] else ""
    return Suspects(odd, f"ran another collective than the others{which}", line)


def _stuck(
    errors: Sequence[FoundError], rank_of: dict[int, int | None], ranks_that_said: set[int], known: int
) -> Suspects | None:
    """The few whose watchdog threads are stuck by torch's word. Who reported a collective got stuck in aborting it."""
    places = [place for place, error in enumerate(errors) if error.name == "watchdog_stuck"]
    stuck = {rank for place in places if (rank := rank_of.get(place)) is not None} - ranks_that_said
    if not stuck or len(stuck) > _few(known):
        return None
    line = next(errors[place].line for place in places if rank_of.get(place) in stuck)
    reason = "reports it for its own thread" if len(stuck) == 1 else "report it for their own threads"
    return Suspects(tuple(sorted(stuck)), reason, line)


def _stalled(detail: Sequence[str]) -> tuple[int, ...]:
    begins = next((place for place, text in enumerate(detail) if _STALLED.match(text)), None)
    if begins is None:
        return ()
    found = (_STALLED_RANK.match(text) for text in detail[begins + 1 :])
    return tuple(sorted({int(match["rank"]) for match in found if match}))


def _group_of(text: str) -> str:
    match = _GROUP.search(text)
    return (match["guid"] or match["id"]) if match else ""


def _mismatched(errors: Sequence[FoundError], places: list[int], rank_of: dict[int, int | None]) -> Suspects | None:
    """The few that ran another operation, or one of another size, under the same number in the group of all."""
    works: dict[tuple[str, int], dict[int, tuple[str, str | None]]] = {}
    for place in places:
        rank, match = rank_of.get(place), _WORK.search(errors[place].text)
        if rank is None or match is None:
            continue
        if errors[place].group_rank is not None and errors[place].group_rank != rank:
            return None  # groups of some of the ranks: what differs may be right
        size = match["numel"] if match["op"] in _EQUAL_SIZES else None
        works.setdefault((_group_of(errors[place].raw_text), int(match["seq"])), {})[rank] = (match["op"], size)
    for by_rank in works.values():
        counted = Counter(by_rank.values()).most_common()
        if len(counted) < 2 or len(by_rank) < 3:
            continue
        usual = counted[0][0]
        odd = tuple(sorted(rank for rank, work in by_rank.items() if work != usual))
        if len(odd) <= _few(len(by_rank)):
            return Suspects(odd, f"ran another collective than the others ({by_rank[odd[0]][0]} beside {usual[0]})")
    return None


def _behind(
    errors: Sequence[FoundError], places: list[int], rank_of: dict[int, int | None], ranks_that_said: int
) -> Suspects | None:
    enqueued: dict[str, dict[int, int]] = {}
    completed: dict[str, dict[int, int]] = {}
    numbers: dict[str, dict[int, int]] = {}
    for place in places:
        rank, text = rank_of.get(place), errors[place].raw_text
        if rank is None:
            continue
        last, work, group = _LAST.search(text), _WORK.search(text), _group_of(text)
        if last:
            enqueued.setdefault(group, {})[rank] = int(last["enqueued"])
            completed.setdefault(group, {})[rank] = int(last["completed"])
        if work and errors[place].group_rank in (None, rank):
            numbers.setdefault(group, {}).setdefault(rank, int(work["seq"]))
    for table in (completed, enqueued, numbers):
        for by_rank in table.values():
            odd = _lower_than_all(by_rank)
            if odd and len(by_rank) == ranks_that_said:
                return Suspects(odd, "is behind: its last collective is before that of all others")
    return None


def _lower_than_all(by_rank: dict[int, int]) -> tuple[int, ...]:
    if len(by_rank) < 3:
        return ()
    usual, times = Counter(by_rank.values()).most_common(1)[0]
    odd = tuple(sorted(rank for rank, number in by_rank.items() if number < usual))
    few = len(odd) <= _few(len(by_rank))
    return odd if few and times + len(odd) == len(by_rank) else ()


def _missing(ranks_that_said: set[int], known: set[int], world: int | None) -> Suspects | None:
    everybody = set(range(world)) if world is not None else set(range(max(known | ranks_that_said) + 1))
    if not ranks_that_said <= everybody:
        return None
    missing = tuple(sorted(everybody - ranks_that_said))
    if world is None and not set(missing) <= known and len(ranks_that_said) < SURELY_MANY:
        # An excerpt, perhaps; that leaves out the first of all is hardly one.
        first = missing == (0,) and len(ranks_that_said) >= LEAST_OF_A_GROUP
        return Suspects(missing, "is the only one that does not report it", silent=True) if first else None
    if not missing or len(missing) > _few(len(everybody)) or len(ranks_that_said) < LEAST_SAID:
        return None
    return Suspects(missing, "logged nothing while the collective of all others timed out", silent=True)


def group_is_all(timeouts: Sequence[FoundError], ranks: Ranks) -> bool:
    """Whether the ranks that ProcessGroupNCCL writes are those of the group of all: each says it of itself,
    or there are more than half of all, for other groups divide them."""
    named = [e for e in timeouts if e.who.rank is not None and e.group_rank is not None]
    if named:
        return all(e.who.rank == e.group_rank for e in named)
    groups_are_named = any("[PG" in e.raw_text for e in timeouts)
    works = _works_of_ranks(timeouts)
    if not groups_are_named and any(len(each) > 1 for each in works.values()):
        return False  # ranks of several groups with the same numbers
    if ranks.world is not None and max(e.group_rank or 0 for e in timeouts) >= ranks.world / 2:
        return True
    if not groups_are_named and ranks.world is None and not ranks.excerpt and len(works) >= LEAST_OF_A_GROUP:
        return True
    return any("default_pg" in e.raw_text for e in timeouts) and all(
        "default_pg" in e.raw_text or "[PG" not in e.raw_text for e in timeouts
    )


def _works_of_ranks(timeouts: Sequence[FoundError]) -> dict[int, set[str]]:
    """Of each rank in its group what it waited for, and for how long: of one process it is the same in all lines."""
    works: dict[int, set[str]] = {}
    for error in timeouts:
        if error.group_rank is not None and (work := _RAN.search(error.raw_text)) is not None:
            works.setdefault(error.group_rank, set()).add(work[0])
    return works


SPEAKERS = 2
"""So many ranks have to say that they lost one, where any of them is named; rank 0 may be the only one that logs."""


def lost_rank(errors: Sequence[FoundError], ranks: Ranks) -> Suspects | None:
    """Whom all of `errors` that name a lost rank, in a program's own words, name; None if they differ, are too few, or
    if that rank speaks itself: who says so lost a connection, and it may be his own end of it that broke."""
    lines_with_peer = [
        (error, int(next(n for n in match.groups() if n)))
        for error in errors
        if (match := LOST_A_RANK.search(error.text))
    ]
    peers = {peer for _, peer in lines_with_peer}
    if len(peers) != 1:
        return None
    peer = peers.pop()
    spoke = {ranks.rank_of(error.who) for error in errors}
    speakers = {rank for error, _ in lines_with_peer if (rank := ranks.rank_of(error.who)) is not None}
    enough = not speakers or len(speakers) >= SPEAKERS or speakers == {0}
    unknown = ranks.excerpt and ranks.world is None
    if not enough or unknown or peer in spoke or (ranks.world is not None and peer >= ranks.world):
        return None
    return Suspects(
        (peer,),
        "is suspect, for it is the one that they say they lost, and it says nothing itself",
        lines_with_peer[0][0].line,
    )
