"""Earlier tests of a node: kept, read back, and compared only with what is alike."""

from __future__ import annotations

from pathlib import Path

from slurm_watchdog.nodetest.past import FILE, PastTest, append_tests, read_tests, usual


def kept(node: str, rate: float, **more: object) -> PastTest:
    fields = {
        "node": node,
        "at": 1.0,
        "model": "X",
        "seconds": 2.0,
        "cluster": "c",
        "figures": {"cpu_all": rate},
        **more,
    }
    return PastTest(**fields)  # type: ignore[arg-type]


def test_tests_are_read_back_in_order_and_a_torn_line_is_left_out(tmp_path: Path) -> None:
    place = tmp_path / "state"
    append_tests(place, [kept("n1", 1.0), kept("n2", 2.0)])
    with (place / FILE).open("a") as file:
        file.write('{"node": "n3", "at"\n')
    append_tests(place, [kept("n1", 3.0)])
    assert [each.node for each in read_tests(place)] == ["n1", "n2", "n1"]
    assert read_tests(tmp_path / "nowhere") == []


def test_tests_of_another_model_length_or_cluster_and_bad_ones_are_not_usual() -> None:
    others = [
        kept("n1", 9.0, model="Y"), kept("n1", 9.0, seconds=0.5), kept("n1", 9.0, cluster="d"), kept("n1", 9.0, truth="bad"),
    ]  # fmt: skip
    found = usual([*others, kept("n1", 1.0), kept("n1", 2.0)], {"n1": "X"}, 2.0, "c")
    assert [each["cpu_all"] for each in found["n1"]] == [2.0, 1.0]
