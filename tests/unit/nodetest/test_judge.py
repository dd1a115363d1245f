"""Who is slow or broken, by literals, and in a test as a whole over scripted jobs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from slurm_watchdog.model.incidents import Truth
from slurm_watchdog.model.slurm import SlurmNode
from slurm_watchdog.nodetest.conduct import NodeJob, Report, Terms, conduct, job_options, run_all
from slurm_watchdog.nodetest.judge import (
    Fault,
    Figure,
    Line,
    Measured,
    NodeVerdict,
    confirmed,
    judge_nodes,
    measured,
    parse_line,
    ring,
    slow_pairs,
    with_links,
)

WELL = {"cpu_all": 60000.0, "memory_all": 300.0, "disk_write /tmp": 900.0}
LEAST = {"cpu_all": 0.1, "memory_all": 0.15, "disk_write": 0.75, "pair_out": 0.35, "mount_read": 0.75}
NODES = [f"n{at}" for at in range(1, 7)]


def figure(key: str, value: float, **more: Any) -> Figure:
    name, _, about = key.partition(" ")
    place = f"{name.partition('_')[0]}:{about}" if about else name.partition("_")[0]
    return Figure(
        **{
            "name": name,
            "about": about,
            "value": value,
            "unit": "u",
            "least": LEAST.get(name, 0.1),
            "place": place,
            **more,
        }
    )


def node(name: str, figures: dict[str, float] | None = None, **more: Any) -> Measured:
    values = WELL | (figures or {})
    return Measured(
        name=name, **{"like": "X", "figures": {key: figure(key, each) for key, each in values.items()}, **more}
    )


def nodes(*odd: Measured, count: int = 6) -> list[Measured]:
    given = {each.name: each for each in odd}
    return [given.get(name) or node(name) for name in NODES[:count]]


def bad(
    *odd: Measured, floors: dict[str, float] | None = None, past: Any = None, count: int = 6
) -> dict[str, list[str]]:
    """Who is named, and for which parts."""
    found = judge_nodes(nodes(*odd, count=count), floors or {}, past or {})
    return {each.node: [place for place, _ in each.faults] for each in found if each.truth is Truth.BAD}


def test_a_slow_node_is_named_by_the_figure_and_no_healthy_one() -> None:
    assert bad() == {}
    assert bad(node("n3", {"cpu_all": 30000.0, "disk_write /tmp": 100.0})) == {"n3": ["cpu", "disk:/tmp"]}
    (verdict,) = (v for v in judge_nodes(nodes(node("n3", {"cpu_all": 30000.0})), {}, {}) if v.node == "n3")
    assert verdict.reasons == ("cpu_all is 30,000 u, 50% less than the 60,000 u on 5 peers",)


def test_what_is_too_little_to_count_names_no_one() -> None:
    assert bad(node("n3", {"cpu_all": 55000.0})) == {}
    spread = [node(name, {"cpu_all": 60000.0 * (1 - 0.05 * at)}) for at, name in enumerate(NODES)]
    assert bad(*spread) == {}, "they differ by as much among themselves"
    assert bad(node("n3", figures={"cpu_all": 30000.0}), count=4) == {}, "three peers are too few"
    restless = node("n3", {"cpu_all": 50000.0})
    restless = replace(restless, figures=restless.figures | {"cpu_all": figure("cpu_all", 50000.0, spread=0.2)})
    assert bad(restless) == {}


def test_a_node_without_peers_is_judged_by_floors_and_by_its_past() -> None:
    alone = node("n1", {"cpu_all": 30000.0}, like="Y")
    assert bad(alone) == {}
    assert bad(alone, floors={"cpu_all": 40000.0}) == {"n1": ["cpu"]}
    assert bad(alone, past={"n1": [{"cpu_all": 60000.0}] * 3}) == {"n1": ["cpu"]}
    assert bad(alone, past={"n1": [{"cpu_all": 60000.0}] * 2}) == {}
    assert bad(past={"n1": [{"cpu_all": 90000.0}] * 3}) == {}, "as good as its peers now"


def test_what_is_not_to_be_compared_is_not() -> None:
    guest = {"memory_all": figure("memory_all", 100.0, against=())}
    assert bad(replace(node("n1"), figures=node("n1").figures | guest)) == {}
    few = [node(name, {"gpu_count": 8.0 if at > 1 else 4.0}) for at, name in enumerate(NODES)]
    sole = [
        replace(e, figures=e.figures | {"gpu_count": replace(e.figures["gpu_count"], sole=True, least=0.01)})
        for e in few
    ]
    assert bad(*sole) == {}, "another one is built so"
    assert bad(sole[0], *sole[2:5], replace(sole[5], name="n2")) == {"n1": ["gpu"]}
    other = {"cpu_all": figure("cpu_all", 10.0, like="H200")}
    assert bad(replace(node("n1"), figures=node("n1").figures | other)) == {}


def test_a_card_is_compared_with_its_neighbours_too() -> None:
    cards = {f"GPU {at}": 700.0 if at else 500.0 for at in range(8)}
    figures = {
        f"gpu_matmul {name}": figure(f"gpu_matmul {name}", value, siblings=True) for name, value in cards.items()
    }
    (found,) = judge_nodes([Measured(name="n1", like="X", figures=figures)], {}, {})
    assert [what.split(",")[0] for _, what in found.faults] == ["gpu_matmul of GPU 0 is 500 u"]


def line(part: str, state: str, about: str = "/s") -> Line:
    return Line(node="n1", part=part, about=about, state=state, said="no end within 30 s")


def test_a_part_that_fails_is_the_node_s_only_where_it_does_not_fail_for_the_others() -> None:
    hangs = node("n2", problems=(line("mount", "late"),))
    assert bad(hangs) == {"n2": ["mount:/s"]}
    assert bad(*(node(name, problems=(line("mount", "late"),)) for name in NODES)) == {}
    half = [node(name, problems=(line("cpu", "failed", ""),)) for name in NODES[:4]]
    assert bad(*half) == {}


def test_a_doubt_keeps_a_node_from_being_called_well_unless_others_have_the_same() -> None:
    doubt = Fault(what="nccl-tests got 3 values wrong", place="gpu", sure=False)
    found = judge_nodes(nodes(node("n1", faults=(doubt,))), {}, {})
    assert [each.truth for each in found[:2]] == [Truth.UNKNOWN, Truth.OK]
    everywhere = judge_nodes([node(name, faults=(doubt,)) for name in NODES], {}, {})
    assert {each.truth for each in everywhere} == {Truth.OK}
    assert bad(node("n1", faults=(replace(doubt, sure=True),))) == {"n1": ["gpu"]}


def test_a_line_that_is_none_is_left_out_and_a_part_that_never_ended_is_late() -> None:
    assert parse_line("salloc: Granted job allocation 7") is None and parse_line('{"node": 1}') is None
    begun = parse_line('{"node": "n1", "part": "cpu", "state": "begun"}')
    assert begun is not None and measured("n1", [begun]).hangs


def test_of_two_looks_what_both_found_remains_and_what_a_part_was_sure_of() -> None:
    def seen(*faults: tuple[str, str]) -> NodeVerdict:
        return NodeVerdict(node="n1", truth=Truth.BAD if faults else Truth.OK, faults=faults)

    slow, broken = ("cpu", "it is slow"), ("GPU-a", "a row of its memory could not be remapped")
    looked = node("n1", faults=(Fault(what=broken[1], place=broken[0]),))
    assert confirmed(seen(slow), seen(), looked).truth is Truth.OK
    assert confirmed(seen(slow, broken), seen(slow), node("n1")).faults == (slow,)
    assert confirmed(seen(slow, broken), seen(), looked).faults == (broken,)
    assert confirmed(seen(), seen(slow), node("n1")).truth is Truth.UNKNOWN, "found once"
    assert confirmed(seen(), seen(slow), node("n1", disturbed=("cpu",))).faults == (slow,), "the first did not count"


def link(pair: tuple[str, str], rate: float = 90.0) -> Measured:
    return Measured(name=" ".join(pair), figures={"pair_out": figure("pair_out", rate, place="link:eth0")})


def linked(*slow: tuple[str, str]) -> dict[str, tuple[Truth, list[str]]]:
    around = ring(NODES)
    links = [link(pair, 0.2 if pair in slow else 90.0) for pair in around]
    found = with_links(judge_nodes(nodes(), {}, {}), links, slow_pairs(links, {}))
    return {e.node: (e.truth, [place for place, _ in e.faults]) for e in found if e.truth is not Truth.OK}


def test_a_slow_link_names_a_node_only_if_another_link_tells_which() -> None:
    assert linked() == {}
    assert linked(("n2", "n3"), ("n3", "n4")) == {"n3": (Truth.BAD, ["link:eth0", "link:eth0"])}
    assert linked(("n2", "n3")) == {"n2": (Truth.UNKNOWN, []), "n3": (Truth.UNKNOWN, [])}


# ------------------------------------------------------------------------------- a test as a whole

Rates = Callable[[str, str, int], float | None]


class Jobs:
    """Answers each job with `rate(node, key, look)`; None: its node is not free."""

    def __init__(self, rate: Rates) -> None:
        self._rate, self.asked, self.cancelled = rate, list[NodeJob](), 0

    async def run(self, job: NodeJob) -> Measured:
        look = 1 + sum(each.names == job.names for each in self.asked)
        self.asked.append(job)
        if len(job.nodes) == 2:
            lines = [Line(node=job.names[1], part="network", state="ok", figures=(figure("pair_out", 90.0),))]
            return measured(" ".join(job.names), lines)
        values = {key: self._rate(job.names[0], key, look) for key in (*WELL, "mount_read /s")}
        if None in values.values():
            return measured(" ".join(job.names), (), "its nodes were not free")
        figures = tuple(figure(key, value) for key, value in values.items() if value is not None)
        return measured(" ".join(job.names), [Line(node=job.names[0], part="x", state="ok", like="X", figures=figures)])


def conducted(jobs: Jobs, **more: Any) -> Report:
    known = [SlurmNode(name=name, address=name, state="IDLE") for name in NODES]
    return asyncio.run(conduct(known, Terms(**more), jobs.run, lambda text: None))


def named(report: Report) -> list[str]:
    return [each.node for each in report.verdicts if each.truth is Truth.BAD]


def test_of_20_throttled_nodes_each_is_named_and_of_20_healthy_ones_none() -> None:
    """As `make bench ARGS=bad-nodes` does on a real Slurm: here with rates that vary as there."""
    chance = random.Random(4)
    noise = {"cpu_all": 0.02, "memory_all": 0.03, "disk_write /tmp": 0.2, "mount_read /s": 0.2}

    def rates(slow: str, key: str) -> Rates:
        values = WELL | {"mount_read /s": 1500.0}

        def rate(of: str, which: str, look: int) -> float:
            part = 0.5 if which in ("cpu_all", "memory_all") else 0.05
            return (
                values[which] * chance.lognormvariate(0, noise[which]) * (part if (of, which) == (slow, key) else 1.0)
            )

        return rate

    for number in range(20):
        slow, key = NODES[number % 6], list(noise)[number % 3]
        assert named(conducted(Jobs(rates(slow, key)))) == [slow], (slow, key)
        assert named(conducted(Jobs(rates("", "")))) == []


def test_what_looks_bad_once_is_not_reported_and_shared_directories_are_measured_beside_peers() -> None:
    jobs = Jobs(lambda name, key, look: 10.0 if name == "n3" and key.startswith("mount") and look == 1 else 900.0)
    report = conducted(jobs)
    assert named(report) == []
    again = jobs.asked[len(NODES) + len(ring(NODES)) :]
    assert [each.names[0] for each in again].count("n3") == 1 and len(again) == 5
    assert all(each.words[-2:] == ("--only", "mount") for each in again if each.names != ("n3",))


def test_a_shared_directory_that_is_slower_for_all_by_now_names_no_one() -> None:
    jobs = Jobs(lambda name, key, look: 10.0 if key.startswith("mount") and (look == 2 or name == "n3") else 900.0)
    assert named(conducted(jobs)) == []


def test_earlier_figures_are_kept_and_compared(tmp_path: Path) -> None:
    for _ in range(3):
        conducted(Jobs(lambda name, key, look: 900.0), place=tmp_path)
    alone = [SlurmNode(name="n1", address="n1", state="IDLE")]
    slow = Jobs(lambda name, key, look: 90.0)
    report = asyncio.run(conduct(alone, Terms(place=tmp_path), slow.run, lambda text: None))
    assert named(report) == ["n1"] and "in its earlier tests" in report.verdicts[0].reasons[0]
    other = asyncio.run(conduct(alone, Terms(place=tmp_path, words=("--seconds=9",)), slow.run, lambda text: None))
    assert named(other) == [], "a test of another length is another test"


def test_a_node_that_is_not_free_is_not_judged() -> None:
    report = conducted(Jobs(lambda name, key, look: None if name == "n2" else 900.0))
    assert [(each.node, each.reasons) for each in report.verdicts if each.truth is Truth.UNKNOWN] == [
        ("n2", ("its nodes were not free",))
    ]


def job_on(*names: str) -> NodeJob:
    return NodeJob(tuple(SlurmNode(name=n, address=n, state="IDLE", partitions=("gpu", n)) for n in names), ())


@pytest.mark.parametrize(("at_once", "most"), [(1, 1), (3, 3), (100, 3)])
def test_no_two_jobs_share_a_node_and_none_is_left_when_cancelled(at_once: int, most: int) -> None:
    running: list[NodeJob] = []
    seen = [0]

    async def slow(job: NodeJob) -> Measured:
        assert not {n for other in running for n in other.names} & set(job.names)
        running.append(job)
        seen[0] = max(seen[0], len(running))
        try:
            await asyncio.sleep(0.01)
        finally:
            running.remove(job)
        return measured(" ".join(job.names), ())

    async def all_of_them() -> dict[str, Measured]:
        return await run_all("", [job_on(*pair) for pair in ring(NODES)], slow, at_once, lambda text: None)

    assert len(asyncio.run(all_of_them())) == 6 and seen[0] == most and running == []


def test_a_job_is_exclusive_bounded_late_in_the_queue_and_says_whose_it_is() -> None:
    options = job_options(job_on("n1", "n2"), Terms(comment="of ann", reservation="r"))
    assert {
        "--exclusive", "--mem=0", "--time=5", "--nice=10000", "--nodelist=n1,n2", "--nodes=2", "--partition=gpu",
        "--comment=of ann", "--reservation=r", "--job-name=slurm-watchdog-test",
    } <= set(options)  # fmt: skip
