"""Links of a node: a tree like /sys/class, and what went through them between two looks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from slurm_watchdog.agent.children.answers import LinkCounters
from slurm_watchdog.agent.children.children import Children
from slurm_watchdog.agent.collectors.collector import CollectorContext, Sections
from slurm_watchdog.agent.collectors.link import (
    MAX_LINKS,
    OLD_S,
    LinkCollector,
    links_in,
    parse_rate,
    parse_speed,
    with_rates,
)
from slurm_watchdog.model.observations import Link
from slurm_watchdog.model.report import LinkSection, ProcessSection
from tests.builders.links import INTERFACE, PORT, ROCE, tree
from tests.builders.requests import tasks
from tests.builders.views import process


def test_ports_and_interfaces_with_a_device_are_read(tmp_path: Path) -> None:
    roce = PORT | {"link_layer": "Ethernet", "state": "1: DOWN", "rate": "10 Gb/sec (1X QDR)"}
    root = tree(
        tmp_path,
        {
            "infiniband/mlx5_0/ports/1": PORT, "infiniband/mlx5_1/ports/1": roce, "net/ens1": INTERFACE,
            "net/docker0": {"operstate": "up"}, "net/ib0": {"operstate": "down", "speed": "-1", "device/x": ""},
        },
    )  # fmt: skip
    found = {each.link.name: each for each in links_in(root)}
    assert found.keys() == {"mlx5_0/1", "mlx5_1/1", "ens1", "ib0"}
    port = found["mlx5_0/1"]
    assert port.link == Link(
        name="mlx5_0/1", kind="infiniband", up=True, rate_bits_s=400_000_000_000, downs=3, errors=10
    )
    assert [port.counts[name] for name in ("sent_bytes", "received_bytes", "waits")] == [4000, 2000, 9]
    assert (found["mlx5_1/1"].link.kind, found["mlx5_1/1"].link.up) == ("roce", False)
    assert found["ens1"].link == Link(name="ens1", kind="ethernet", up=True, rate_bits_s=10**11, downs=2, errors=5)
    assert found["ib0"].link == Link(name="ib0", kind="ethernet", up=False)


def test_interfaces_that_are_switched_off_or_on_usb_are_left_out_and_roce_has_no_packets_sent_again(
    tmp_path: Path,
) -> None:
    places = {"net/off": INTERFACE | {"flags": "0x1002"}, "net/on": INTERFACE | {"flags": "0x1003"}}
    places |= {"net/bmc": INTERFACE, "infiniband/m/ports/1": PORT | {"link_layer": "Ethernet"}, "bus/usb": {"x": ""}}
    root = tree(tmp_path, places)
    (tmp_path / "net/bmc/device/subsystem").symlink_to(tmp_path / "bus/usb")
    found = {each.link.name: each.link.errors for each in links_in(root)}
    assert found == {"m/1": 8, "on": 5}


def test_congestion_of_roce_and_packets_that_were_lost_are_counted_and_of_infiniband_no_marks(tmp_path: Path) -> None:
    places = {"infiniband/a/ports/1": ROCE, "infiniband/b/ports/1": PORT | {"hw_counters/rp_cnp_handled": "9"}}
    roce, infiniband = links_in(tree(tmp_path, places))
    assert [roce.counts[name] for name in ("marked", "slowed", "resent")] == [70, 30, 6]
    assert infiniband.counts.keys() & {"marked", "slowed", "resent"} == {"resent"}
    later = replace(roce, at=roce.at + 10.0, counts={"marked": 170, "slowed": 30, "resent": 5})
    now = with_rates(later, roce)
    assert (now.marked_s, now.slowed_s, now.resent_s) == (10.0, 0.0, None), "one that was reset says nothing"


def test_node_without_adapters_has_no_links_and_one_with_many_a_bounded_number(tmp_path: Path) -> None:
    assert links_in(str(tmp_path)) == []
    root = tree(tmp_path, {f"net/e{number}": INTERFACE for number in range(MAX_LINKS + 5)})
    assert len(links_in(root)) == MAX_LINKS


def test_bytes_a_second_are_those_between_two_looks_and_a_counter_that_fell_says_nothing() -> None:
    link = Link(name="mlx5_0/1", kind="infiniband", up=True)
    before = LinkCounters(link, 10.0, {"sent_bytes": 1000, "received_bytes": 5000, "waits": 100})
    after = LinkCounters(link, 40.0, {"sent_bytes": 4000, "received_bytes": 4000, "waits": 400})
    assert with_rates(after, before) == replace(link, sent_bytes_s=100.0, received_bytes_s=None, waits_s=10.0)
    for end in (2**32 - 1, 4 * (2**32 - 1)):
        stopped = LinkCounters(link, 10.0, {"sent_bytes": end, "received_bytes": end, "waits": 2**32 - 1})
        assert with_rates(replace(stopped, at=40.0), stopped) == link, "a counter that is full tells of no silence"
    assert with_rates(before, None) == link
    assert with_rates(before, before) == link


@given(st.binary(max_size=40) | st.from_regex(rb"-?\d{0,12}(\.\d)? ?Gb/sec", fullmatch=True))
def test_no_text_of_a_driver_is_an_impossible_rate(text: bytes) -> None:
    for parse in (parse_rate, parse_speed):
        rate = parse(text)
        assert rate is None or 0 < rate < 10**18


@given(st.dictionaries(st.sampled_from([*PORT]), st.text("0123456789-. GbADCTIVE:/sec\x00é", max_size=24)))
def test_tree_with_anything_in_its_files_is_read(tmp_path_factory: object, files: dict[str, str]) -> None:
    root = tmp_path_factory.mktemp("sysfs")  # type: ignore[attr-defined]
    (found,) = links_in(tree(root, {"infiniband/x/ports/1": {"link_layer": "InfiniBand"} | files}))
    assert found.link.errors is None or found.link.errors >= 0


def test_links_come_from_a_child_are_said_again_and_dropped_when_the_adapters_are_silent() -> None:
    sections = Sections()
    sections.put(ProcessSection(processes=(process(),)))
    probes = Children(tasks("read_links"))
    context = SimpleNamespace(children=probes, sections=sections, settings=SimpleNamespace(probe_deadline=10.0))
    collector = LinkCollector(cast(CollectorContext, context))
    try:
        began = probes.read_clock()
        assert collector.collect(began) == LinkSection()
        probes.settle(10.0, [1])
        assert list(collector.problems(began)) == []
        now = probes.read_clock()
        seen = collector.collect(now)
        assert {each.name for each in seen.links} == {each.link.name for each in links_in("/sys/class")}
        assert collector.collect(now + 5.0) == seen
        assert collector.collect(now + OLD_S + 5.0) == LinkSection()
        sections.put(ProcessSection())
        assert collector.collect(now) == LinkSection()
    finally:
        probes.close()
