"""Of thousands of processes of one job a few are looked at in every tick, the rest in turn; who hangs or
changes leaves the crowd."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from slurm_watchdog.agent.children.children import Children
from slurm_watchdog.agent.proc.entry import Entry, JobMember, JobStep, ProcessFacts, Stat
from slurm_watchdog.agent.proc.table import CROWD_TICKS, ProcessTable
from slurm_watchdog.agent.processes.reader import HELPERS_OF_JOB, RECONSIDER_EVERY, WATCHED, ProcessReader, pick_crowd
from slurm_watchdog.agent.processes.user_looks import UserLooks
from slurm_watchdog.model.observations import BY_SLURM, Role

MALLORY, VICTIM = 1500, 1501


def entry(pid: int, job: str = "7", uid: int = MALLORY, role: Role = Role.HELPER, state: str = "S") -> Entry:
    known = ProcessFacts(pid, pid, 1, "sleep", uid, JobStep(job, "0"), {})
    return Entry(known, Stat("sleep", state, 1, 0, 0, pid), member=JobMember(job, "0", role, by=BY_SLURM))


def test_a_crowd_is_what_a_job_has_beyond_its_ranks_and_some_helpers() -> None:
    ranks = [entry(pid, role=Role.RANK) for pid in range(1, 9)]
    helpers = [entry(pid) for pid in range(100, 100 + HELPERS_OF_JOB + 50)]
    assert pick_crowd([*ranks, *helpers[:HELPERS_OF_JOB]]) == set()
    assert pick_crowd([*ranks, *helpers]) == {each.known.pid for each in helpers[-50:]}


def test_a_crowd_is_none_of_another_users_and_none_that_hangs() -> None:
    many = [entry(pid, role=Role.RANK) for pid in range(10, 10 + 3 * WATCHED)]
    hanging = [entry(pid, role=Role.RANK, state="D") for pid in range(50_000, 50_010)]
    victims = [entry(pid, "8", VICTIM, Role.RANK) for pid in range(60_000, 60_064)]
    aside = pick_crowd([*many, *hanging, *victims])
    assert len(aside) == 3 * WATCHED + 10 + 64 - WATCHED
    assert not aside & {each.known.pid for each in (*hanging, *victims)}


def test_who_was_watched_stays_watched_though_older_ones_are_there() -> None:
    helpers = [entry(pid) for pid in range(1, 1000)]
    before = set(range(940, 1000))
    assert not pick_crowd(helpers, before) & before


def test_a_new_rank_comes_before_whoever_was_watched_or_hangs() -> None:
    workers = [entry(pid, role=Role.WORKER) for pid in range(1, WATCHED + 1)]
    stopped = [entry(pid, state="T") for pid in range(5000, 5000 + WATCHED)]
    ranks = {pid: entry(pid, role=Role.RANK) for pid in range(9000, 9008)}
    for others in (workers, stopped):
        aside = pick_crowd([*others, *ranks.values()], {each.known.pid for each in others})
        assert len(aside) == len(ranks) and not aside & ranks.keys()


@dataclass
class Files:
    """/proc of processes that all sleep, but for those in `states`; counts what is read."""

    states: dict[int, str] = field(default_factory=dict)
    read_pids: list[int] = field(default_factory=list)

    def read(self, path: str, where: int | None = None) -> bytes:
        pid = int(path.split("/")[2])
        self.read_pids.append(pid)
        state = self.states.get(pid, "S")
        uids = "\t".join([str(MALLORY)] * 4)
        return f"Name:\tsleep\nState:\t{state}\nPPid:\t1\nUid:\t{uids}\nThreads:\t1\n".encode()


FIRST = 10_000_000
"""Pids of `collector`: none of this machine's, among which this test's own is."""


def collector(count: int) -> tuple[ProcessReader, Files]:
    files = Files()
    made = ProcessReader(UserLooks(Children(()), ProcessTable(files.read)))
    made.table.entries = {pid: entry(pid) for pid in range(FIRST, FIRST + count)}
    made.table._may_be_new = lambda: False  # type: ignore[method-assign]
    made._assign(False, {})
    return made, files


def test_a_look_reads_few_of_a_crowd_and_every_one_within_a_turn() -> None:
    mine, files = collector(3000)
    crowd = {pid for pid, each in mine.table.entries.items() if each.crowd}
    assert len(crowd) == 3000 - HELPERS_OF_JOB
    for now in range(CROWD_TICKS):
        before = len(files.read_pids)
        mine.table.look(float(now), 20)
        assert len(files.read_pids) - before <= HELPERS_OF_JOB + len(crowd) / CROWD_TICKS + 1
    assert crowd <= set(files.read_pids)
    assert all(each.member is not None for each in mine.table.entries.values())
    mine.crowd = Counter({("7", MALLORY): len(crowd)})
    assert [(each.job_id, each.uid, each.count) for each in mine.left_out] == [("7", MALLORY, len(crowd))]


def test_one_of_a_crowd_that_hangs_is_watched_from_then_on() -> None:
    mine, files = collector(1000)
    last = max(mine.table.entries)
    files.states[last] = "D"
    for now in range(CROWD_TICKS):
        mine.table.look(float(now), 20)
    assert mine.table.changed
    mine._assign(False, {})
    assert mine.table.entries[last] in mine.mine
    assert sum(each.crowd for each in mine.table.entries.values()) == 1000 - HELPERS_OF_JOB - 1


def test_a_crowd_that_has_become_small_is_none_any_more_when_it_is_decided_anew() -> None:
    mine, _ = collector(1000)
    for pid in range(FIRST, FIRST + 950):
        mine.table.remove(pid, 0.0)
    mine._assign(True, {})
    assert RECONSIDER_EVERY > 0 and not any(each.crowd for each in mine.table.entries.values())
    assert len(mine.mine) == 50


def test_a_crowd_of_a_job_that_has_another_owner_now_is_decided_on_anew() -> None:
    mine, _ = collector(1000)
    for each in mine.table.entries.values():
        each.known = ProcessFacts(each.known.pid, each.known.pid, 1, "sleep", MALLORY, None, {"SLURM_JOB_ID": "7"})
        each.member = JobMember("7", None, Role.HELPER, by="claim")
    mine.owners = {"7": MALLORY}
    mine._assign(False, {})
    assert sum(each.member is not None for each in mine.table.entries.values()) == 1000
    mine.owners = {"7": VICTIM}
    assert all(mine._has_new_owner(each) for each in mine.table.entries.values() if each.crowd)
    mine._assign(False, {})
    assert not any(mine._has_new_owner(each) for each in mine.table.entries.values())
    assert sum(each.crowd for each in mine.table.entries.values()) == 1000 - HELPERS_OF_JOB


def test_where_ranks_write_why_they_end_is_known_after_they_are_gone_and_as_long_as_the_job_is_here() -> None:
    read = ProcessReader(UserLooks(Children(()), ProcessTable()))
    ranks = [entry(pid, role=Role.RANK) for pid in (11, 12)]
    for number, each in enumerate(ranks):
        path = (("TORCHELASTIC_ERROR_FILE", f"/tmp/e/{number}/error.json"),)
        each.known = replace(each.known, settings=path)
        each.member = JobMember("7", "0", Role.RANK, rank=number, by=BY_SLURM)
    read.owners, read.mine = {"7": MALLORY}, ranks
    read._note_error_files()
    read.mine = []
    read._note_error_files()
    assert read.error_files_of("7") == {"/tmp/e/0/error.json": 0, "/tmp/e/1/error.json": 1}
    read.owners = {}
    read._note_error_files()
    assert read.error_files_of("7") == {}
