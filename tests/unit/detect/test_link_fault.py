"""link_fault: by a link's own past and its peers; evidence in a hang and for slow nodes, and an event of its node."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from slurm_watchdog.agent.collectors.link import KEY
from slurm_watchdog.analysis.links import stopped
from slurm_watchdog.controller.node_history.suspicion import blamed
from slurm_watchdog.controller.state.nodes import KnownLink, look_at
from slurm_watchdog.detect.device_rules import LINK_FAULT
from slurm_watchdog.detect.slow_job import SlowJob, slow_node
from slurm_watchdog.diagnose.recorded_collectives import with_links
from slurm_watchdog.model.cluster_view import ClusterView
from slurm_watchdog.model.incidents import Finding, Severity, Truth
from slurm_watchdog.model.node_view import LinkView, NodeView, Rise
from slurm_watchdog.model.observations import HungProbe, Link
from tests.builders import slow_nodes as slow
from tests.builders.views import cluster, job, progress, slurm_job

NOW = 10_000.0
GBIT = 10**9


def link(rate: int = 400, **changes: Any) -> LinkView:
    outer = {name: changes.pop(name) for name in list(changes) if name in LinkView.__struct_fields__}
    given = {"name": "mlx5_0/1", "kind": "infiniband", "up": True, "rate_bits_s": rate * GBIT}
    return LinkView(link=Link(**{**given, **changes}), **{"best_rate_bits_s": rate * GBIT, "carried": True, **outer})


def view(*links: LinkView, **changes: Any) -> ClusterView:
    """The first node has the first of these links, and so on; all others are well."""
    names = tuple(f"n{number + 1}" for number in range(5))
    whole = (*links, *[link()] * (5 - len(links)))
    nodes = tuple(
        NodeView(
            name=name, reported_at=NOW - 2, links=(each,),
            rates=((each.link.name, each.link.kind, each.link.rate_bits_s or 0),),
        )
        for name, each in zip(names, whole, strict=True)
    )  # fmt: skip
    return cluster(job(job=slurm_job(nodes=names)), nodes=nodes, **changes)


RISING = Rise(counter="errors", first_at=NOW - 600, last_at=NOW - 20, times=12)
FLAPS = link(went_down=(NOW - 900, NOW - 60))
WRONG = view(FLAPS)


def bad(of: ClusterView) -> list[Finding]:
    return [each for each in LINK_FAULT.detect(of) if each.truth is Truth.BAD]


def test_link_that_flaps_is_named_with_its_times_and_held_against_its_node() -> None:
    (finding,) = bad(WRONG)
    assert finding.subject == "link:n1/mlx5_0/1" and finding.job_ids == ("7",)
    assert finding.summary == "Link mlx5_0/1 (infiniband) of n1 went down 2 times within an hour (900 s, 60 s ago)."
    assert blamed(finding) == (("n1", "link:mlx5_0"),)


@pytest.mark.parametrize(
    ("of", "words", "severity"),
    [
        (view(link(up=False, down_since=NOW - 90)), "has been down for 90 s", Severity.WARNING),
        (view(link(100, best_rate_bits_s=400 * GBIT)), "runs at 100 Gb/s, and has run at 400 Gb/s", Severity.WARNING),
        (view(link(200)), "runs at 200 Gb/s, that of 4 other nodes at 400 Gb/s and more", Severity.WARNING),
        (view(link(rising=RISING)), "has errors that rise for 600 s (12 times)", Severity.INFO),
    ],
)
def test_link_that_is_down_slow_or_has_errors_is_reported(of: ClusterView, words: str, severity: Severity) -> None:
    (finding,) = bad(of)
    assert words in finding.summary and finding.severity is severity
    assert finding.culprits[0].link == "mlx5_0/1" and finding.culprits[0].node == "n1"


@pytest.mark.parametrize(
    "of",
    [
        view(link()),
        view(link(up=False)),
        view(link(up=False, down_since=NOW - 20)),
        view(link(went_down=(NOW - 60,))),
        view(link(200), link(200)),
        view(link(rising=replace(RISING, times=5))),
        replace(view(link(200)), jobs=(job(job=slurm_job(nodes=("n1", "n2", "n3"))),)),
        replace(WRONG, silent_nodes=("n1",)),
        view(link(rate_bits_s=None)),
        view(link(went_down=(NOW - 900, NOW - 60), carried=False)),
        view(link(rising=RISING), link(rising=replace(RISING, times=6))),
        view(link(rising=replace(RISING, first_at=NOW - 1500))),
    ],
    ids=[
        "well",
        "never up",
        "just now",
        "once",
        "two kinds",
        "few errors",
        "few peers",
        "silent",
        "no rate",
        "never used",
        "rise on two nodes",
        "rise now and then",
    ],
)
def test_what_is_well_or_not_known_accuses_no_link(of: ClusterView) -> None:
    assert bad(of) == []


def test_adapter_whose_counters_cannot_be_read_is_named_by_its_node() -> None:
    def hung(seconds: float) -> ClusterView:
        whole = view()
        first = replace(whole.nodes[0], links=(), hung_probes=(HungProbe(probe=KEY, seconds=seconds),))
        return replace(whole, nodes=(first, *whole.nodes[1:]))

    (finding,) = bad(hung(70.0))
    assert finding.subject == "link:n1/adapters" and "has not let its counters be read for 70 s" in finding.summary
    assert bad(hung(30.0)) == []


def test_a_nodes_past_has_flaps_rates_and_rises() -> None:
    links, at = dict[str, KnownLink](), 0.0
    first = Link(name="a", kind="infiniband", up=True, rate_bits_s=400, downs=3, errors=5)

    def look(**changes: Any) -> LinkView:
        nonlocal at
        at += 30.0
        (found,) = look_at(links, (replace(first, **changes),), at)
        return found

    assert look(downs=1) == LinkView(link=replace(first, downs=1), best_rate_bits_s=400)
    assert look(downs=2).went_down == (), "before anything went through it its node was starting"
    assert look(sent_bytes_s=1.0, received_bytes_s=0.0).carried
    at = 30.0
    assert look(downs=5).went_down == (60.0,)
    down = look(downs=5, up=False, rate_bits_s=10)
    assert (down.down_since, down.went_down, down.best_rate_bits_s) == (90.0, (60.0, 90.0), 400)
    again = look(downs=6, rate_bits_s=100)
    assert (again.down_since, len(again.went_down), again.best_rate_bits_s) == (None, 3, 400)
    for errors in (6, 7, 8):
        risen = look(downs=6, errors=errors).rising
    assert risen is not None and (risen.times, risen.first_at) == (3, 150.0)
    at += 180.0
    late = look(downs=6, errors=9)
    assert late.rising is not None and late.rising.times == 1
    assert look(downs=0, rate_bits_s=100, errors=9).best_rate_bits_s == 100
    assert late.carried
    assert look_at(links, (), at) == ()
    at += 3700.0
    assert look(downs=0, errors=8).went_down == ()


def test_a_link_of_which_nobody_counts_bytes_is_judged_once_it_was_up_for_minutes() -> None:
    links, up = dict[str, KnownLink](), Link(name="a", kind="infiniband", up=True)
    for at in range(0, 600, 60):
        (found,) = look_at(links, (up,), float(at))
        assert found.carried is (at >= 300)
    (down,) = look_at(links, (replace(up, up=False),), 660.0)
    assert (down.carried, down.down_since) == (True, 660.0)
    spare, counted = dict[str, KnownLink](), replace(up, sent_bytes_s=0.0, received_bytes_s=0.0)
    assert not any(look_at(spare, (counted,), float(at))[0].carried for at in range(0, 3600, 60))


def moves(mbytes_s: float, usual: float = 1e9) -> LinkView:
    return link(sent_bytes_s=mbytes_s * 1e6, received_bytes_s=0.0, usual_bytes_s=usual)


def test_bytes_that_stop_on_one_node_are_a_fact_of_a_hang_and_of_all_nodes_none() -> None:
    one = view(moves(0.0), *[moves(800.0)] * 4)
    assert stopped(one.nodes) == ("mlx5_0/1 of n1",)
    assert stopped(view(*[moves(0.0)] * 5).nodes) == ()
    assert stopped(view(moves(0.0, usual=5.0), *[moves(800.0)] * 4).nodes) == ()
    hang = Finding(kind="collective_hang", subject="job:7", truth=Truth.BAD, summary="hangs")
    found = with_links(one.jobs[0], hang, one.nodes, 60.0)
    assert any("nothing goes through mlx5_0/1 of n1" in fact for fact in found.facts) and not found.culprits

    def summary(ago_s: float, usual: float) -> str:
        down = view(link(up=False, down_since=NOW - ago_s, usual_bytes_s=usual))
        return with_links(replace(down.jobs[0], progress=progress(100.0)), hang, down.nodes, 60.0).summary

    assert "mlx5_0/1 of n1 is down, as last seen" in summary(90.0, 1e9)
    for ago_s, usual in ((30.0, 1e9), (90.0, 5.0), (900.0, 1e9)):
        assert summary(ago_s, usual) == "hangs"


@pytest.mark.parametrize(("nodes", "rails"), [(3, 8), (9, 8), (3, 1)])
def test_one_node_of_many_rails_that_has_stopped_is_said_in_a_small_job(nodes: int, rails: int) -> None:
    def with_rails(name: str, mbytes_s: float) -> NodeView:
        links = tuple(replace(moves(mbytes_s), link=replace(moves(mbytes_s).link, name=f"r{n}")) for n in range(rails))
        return NodeView(name=name, reported_at=NOW, links=links)

    well = [with_rails(f"w{number}", 800.0) for number in range(nodes - 1)]
    assert stopped([with_rails("bad", 0.0), *well]) == (f"all {rails} links of bad" if rails > 1 else "r0 of bad",)
    assert stopped([with_rails("bad", 0.0), well[0]]) == (), "of two nothing tells which"


def test_errors_that_rise_on_one_node_tell_it_from_the_others_of_a_slow_job() -> None:
    base = slow.view({})
    odd = tuple(
        replace(node, links=(link(rising=replace(RISING, first_at=base.now - 300, last_at=base.now)),))
        if node.name == "n2"
        else node
        for node in base.nodes
    )
    (finding,) = slow_node(replace(base, nodes=odd), SlowJob())
    assert finding.truth is Truth.BAD and finding.exclude_nodes == ("n2",)
    assert "its link mlx5_0/1 has errors that rise" in finding.summary
