"""What one job left on GPUs is one incident, on however many nodes; each of its processes is ended by itself, once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from slurm_watchdog.model.incidents import Incident
from tests.behaviour.cluster import Leftover
from tests.behaviour.story import QUICK, Story

Tell = Callable[..., Story]
ENDS = f"mode: act\npolicy: {{budget: 9, budget_percent: 100, kinds: {{orphan_gpu_process: {{ladder: [end_process]}}}}}}\n{QUICK}"


def begin(tell: Tell, *leftovers: Leftover, config: str = ENDS) -> tuple[Story, Incident]:
    story = tell(config)
    story.cluster.add_nodes("n5", "n6", "n7", "n8")  # one user may have half of the budget, a share of the nodes
    story.cluster.leftovers += leftovers
    story.passes(seconds=10)
    (incident,) = story.judges()
    return story, incident


def four() -> tuple[Leftover, ...]:
    return Leftover("n1", 41), Leftover("n1", 42, hears=("kill",)), Leftover("n2", 43), Leftover("n3", 44)


def test_given_leftovers_of_a_job_on_three_nodes_then_one_incident_is_open_until_the_last_of_them_has_ended(
    tell: Tell,
) -> None:
    left = four()
    story, incident = begin(tell, *left)
    assert incident.summary.startswith(
        "4 processes of eve's job 6, which is over, still hold GPU-41, GPU-42, GPU-43, GPU-44 on n1, n2, n3: 4.0 GiB in all"
    )
    story.passes(seconds=20)
    assert [each.signals for each in left] == [["term"]] * 4
    assert [each.id for each in story.judges()] == [incident.id]  # three have ended, and one has not
    story.passes(minutes=2)
    assert [each.signals for each in left] == [["term"], ["term", "kill"], ["term"], ["term"]]
    story.judges()
    story.passes(seconds=15)
    assert story.judges() == []
    assert [each.end.ok for each in story.journal.actions(incident.id) if each.end] == [True] * 4


def test_given_a_process_that_cannot_be_killed_then_the_incident_stays_open_for_it_alone(tell: Tell) -> None:
    story, incident = begin(tell, *four(), Leftover("n2", 45, hears=()))
    story.passes(minutes=4)
    (open_one,) = story.judges()
    assert open_one.id == incident.id
    assert [each.pid for each in open_one.processes] == [45]
    assert open_one.summary.startswith(
        "1 process of eve's job 6, which is over, still holds GPU-45 on n2: pid 45 (python)"
    )
    assert sorted(each.end.ok for each in story.journal.actions(incident.id) if each.end) == [
        False,
        *[True] * 4,
    ]


def test_given_a_new_leftover_of_the_same_job_then_it_joins_the_incident_and_is_ended_too(tell: Tell) -> None:
    story, incident = begin(tell, Leftover("n1", 42, hears=()))
    story.passes(minutes=4)
    late = Leftover("n4", 46)
    story.cluster.leftovers.append(late)
    story.passes(seconds=10)
    (joined,) = story.judges()
    assert (joined.id, [each.pid for each in joined.processes]) == (incident.id, [42, 46])
    story.passes(minutes=1)
    assert late.signals == ["term"]
    assert story.cluster.leftovers[0].signals == ["term", "kill"]  # and not again: the guards count attempts


@pytest.mark.parametrize("moment", ["before intent term_process", "after intent term_process", "after outcome term_process",
                                    "before decision", "after decision", "after intent kill_process"])  # fmt: skip
def test_given_a_controller_that_dies_in_the_middle_then_each_process_gets_sigterm_once_and_all_end(
    tell: Tell, moment: str
) -> None:
    left = four()
    story, incident = begin(tell, *left, config=ENDS.replace("policy: {", "policy: {cooldown: 1min, "))
    story.controller_dies(moment)
    story.passes(minutes=5)
    assert all(each.gone and each.signals.count("term") <= 1 for each in left), left
    assert all(each.end is not None for each in story.journal.actions(incident.id))


def test_given_a_watchdog_that_only_observes_then_what_would_have_been_done_is_said_of_each_process_once(
    tell: Tell,
) -> None:
    story, incident = begin(tell, *four(), config=ENDS.replace("mode: act", "mode: observe"))
    story.passes(minutes=1)
    assert sorted(each.process.pid for each in story.decisions(incident) if each.process) == [41, 42, 43, 44]
    assert {each.verdict for each in story.decisions(incident)} == {"observed"}
    assert not any(each.signals for each in story.cluster.leftovers)
