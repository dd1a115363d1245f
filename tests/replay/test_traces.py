"""Recorded and hand-written traces, each with what has to be found in it, whom that names, and what may not
be found."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from random import Random

import pytest

from slurm_watchdog.config.schema import Config
from slurm_watchdog.model.actions import Verdict
from slurm_watchdog.model.incidents import IncidentState
from slurm_watchdog.replay.player import Outcome, numbered_ids, replay
from tests.replay.write_traces import TRACES

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Expected:
    """`kinds`: one of them has to fire, naming `who` ((node, rank), the first culprits) within `within_s`
    after the fault."""

    kinds: tuple[str, ...]
    who: tuple[tuple[str, int], ...] = ()
    within_s: float = 0.0
    also: tuple[str, ...] = ()
    """May fire, too: the same trouble under the name of its consequence."""
    action: str = "none"
    verdict: str = "allowed"
    exclude: tuple[str, ...] = ()


NOTHING = Expected(kinds=())
EXPECTED: dict[str, Expected] = {
    # Two nodes: the filesystem itself. Nobody is restarted and no node is excluded for it.
    "filesystem_outage": Expected(("filesystem_outage",), (("n0", 0), ("n1", 2)), 75),
    "nonsense": Expected(("filesystem_outage",), (("n0", 0), ("n1", 2)), 75),
    # One node: it lost the filesystem, the others have it.
    "filesystem_stall": Expected(
        ("filesystem_stall",), (("n0", 0),), 75, action="requeue", verdict="observed", exclude=("n0",)
    ),
    # Its last words say why it died: they explain its death, and that the job lingers explains both.
    "dead_rank_zombie": Expected(("log_error",), (("n1", 3),), 20, also=("lingering_job",)),
    # It is gone only when it was missed twice; until then nobody knows. Its error is not held back for as
    # long as the job is merely suspected to linger.
    "dead_rank_not_listed": Expected(
        ("lingering_job", "dead_rank"),
        (("n1", 3),),
        320,
        action="requeue",
        verdict="suppressed",
        also=("log_error",),
    ),
    # Without stacks no rank is identified, and it takes the limit for jobs whose stacks can't be had.
    "hang": Expected(("collective_hang", "stalled_progress"), (), 1900, action="requeue", verdict="suppressed"),
    "healthy": NOTHING,
    "irregular": NOTHING,
}


def play(name: str) -> Outcome:
    with (HERE / f"{name}.jsonl").open("rb") as file:
        return replay(file.read, Config(), numbered_ids())


def test_every_trace_of_this_folder_has_its_expected_outcome() -> None:
    assert {path.stem for path in HERE.glob("*.jsonl")} == set(EXPECTED)
    assert {trace.__name__ for trace in TRACES} | {"nonsense"} == set(EXPECTED)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_a_trace_gives_what_is_expected_of_it(name: str) -> None:
    expected, outcome = EXPECTED[name], play(name)
    fired = [i for i in outcome.incidents if i.fired_at is not None]
    told = {str(i.kind): i for i in fired}
    assert set(told) <= {*expected.kinds, *expected.also}, [i.summary for i in fired]
    if not expected.kinds:
        assert outcome.incidents == ()
        return
    found = next((told[kind] for kind in expected.kinds if kind in told), None)
    assert found is not None, [i.summary for i in outcome.incidents]
    assert tuple((c.node, c.rank) for c in found.culprits) == expected.who
    assert found.state is IncidentState.FIRING
    assert found.detected_after_s is not None
    assert 0 <= found.detected_after_s <= expected.within_s
    if found.inhibited_by is None:
        (decision, *_) = outcome.decisions[found.id]
        if decision.action != "none":
            assert (decision.action, decision.verdict) == (expected.action, expected.verdict)
        assert decision.exclude == expected.exclude
    assert all(d.verdict is not Verdict.ALLOWED or d.action == "none" for ds in outcome.decisions.values() for d in ds)


def test_nonsense_is_counted_by_reason_and_costs_nothing_else() -> None:
    clean, hurt = play("filesystem_outage"), play("nonsense")
    assert hurt.tally.used == clean.tally.used + 2  # two of the lines can be used in part
    assert hurt.tally.skipped_lines == 10
    assert {why: found[0] for why, found in hurt.tally.skipped.items()} == {
        "no whole JSON in it": 2,
        "JSON, but no object": 1,
        "a `kind` that trace v1 does not have": 1,
        "a time far from that of all other lines": 1,
        "the time goes back": 1,
        "report with a negative number as `t`": 1,
        "report with a string as `t`": 1,
        "report with no finite number as `t`": 1,
        "report without `t`": 1,
    }
    assert set(hurt.tally.ignored) == {
        "bytes that are not UTF-8",
        "gpu with a negative number as `util`",
        "gpu with a string as `power_w`",
    }
    strip = lambda outcome: [(i.kind, i.opened_at, i.fired_at, i.culprits) for i in outcome.incidents]  # noqa: E731
    assert strip(hurt) == strip(clean)


@pytest.mark.parametrize("name", sorted(set(EXPECTED) - {"nonsense", "healthy"}))
def test_in_what_order_nodes_and_their_processes_report_at_one_moment_changes_nothing(name: str) -> None:
    lines = [json.loads(line) for line in (HERE / f"{name}.jsonl").read_text().splitlines()]
    shuffled = []
    for _, moment in groupby(lines, key=lambda line: line["t"]):
        said = list(moment)
        in_order = [line for line in said if line["kind"] in ("job", "node", "fault", "log")]
        others = [line for line in said if line not in in_order]
        Random(3).shuffle(others)
        shuffled += [*in_order, *others]

    def told(outcome: Outcome) -> list[object]:
        return [(i.kind, i.subject, i.fired_at, set(i.culprits), i.state) for i in outcome.incidents]

    data = "\n".join(json.dumps(line) for line in shuffled).encode()
    assert told(replay(io.BytesIO(data).read, Config(), numbered_ids())) == told(play(name))
