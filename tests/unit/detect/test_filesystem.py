"""filesystem_stall and filesystem_outage: one file, one node, or the filesystem itself."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from slurm_watchdog.base.redact import MASK
from slurm_watchdog.detect import filesystem_stall
from slurm_watchdog.detect.filesystem_stall import FilesystemStall
from slurm_watchdog.diagnose.filesystem import probes_wanted
from slurm_watchdog.model.cluster_view import FilesystemView, JobView, MountAnswer
from slurm_watchdog.model.incidents import Finding, IncidentKind, StackRequest, Truth
from slurm_watchdog.model.observations import Role
from tests.builders.views import blocked, cluster, job, progress, seen

SETTINGS = FilesystemStall(blocked_for=60.0)
YES = MountAnswer(responding=True, age_s=5.0, seconds=0.1)
NO = MountAnswer(responding=False, age_s=5.0, seconds=12.0)
STUCK = job(progress=progress(200.0))
LATE: dict[str, Any] = {"paces_s": (1.0,) * 100, "longest_pace_s": 2.0, "read_age_s": 2.0}
"""Of a job that makes a step a second, and whose log is still read."""


def stuck(rank: int, seconds: float = 70.0, **changes):
    return seen(rank, blocked=blocked(seconds), **changes)


def judge(*processes, answers=(), jobs=(STUCK,), known=None, **changes) -> dict[IncidentKind, Finding]:
    nodes = known if known is not None else tuple(sorted({p.node for p in processes}))
    filesystem = FilesystemView(key="k", mount="/shared", blocked=processes, known_nodes=nodes, answers=tuple(answers))
    view = cluster(*jobs, filesystems=(filesystem,), **changes)
    found = [
        *filesystem_stall.detect(view, SETTINGS),
        *filesystem_stall.OUTAGE.detect(view, SETTINGS),
    ]
    return {f.kind: f for f in found}


def truths(found: dict[IncidentKind, Finding]) -> tuple[Truth, Truth]:
    return found[IncidentKind.FILESYSTEM_STALL].truth, found[IncidentKind.FILESYSTEM_OUTAGE].truth


def test_a_node_that_alone_gets_no_answer_is_left_out_of_the_restart() -> None:
    found = judge(stuck(0), answers=[("n1", NO), ("n2", YES)])
    stall = found[IncidentKind.FILESYSTEM_STALL]
    assert truths(found) == (Truth.BAD, Truth.OK)
    assert (stall.actionable, stall.exclude_nodes, stall.mounts) == (True, ("n1",), ("/shared",))
    assert [(c.node, c.rank, c.pid, c.path) for c in stall.culprits] == [("n1", 0, 100, "/shared/log.txt")]
    assert any(fact.startswith("job 7: no step since step 500") for fact in stall.facts)


@pytest.mark.parametrize(
    ("processes", "answers"),
    [
        ((stuck(0), stuck(2)), ()),
        ((stuck(0),), (("n2", NO), ("n3", NO))),
        ((stuck(0),), (("n1", NO), ("n2", NO))),
        ((stuck(0),), (("n1", NO), ("n2", NO), ("n3", NO), ("n4", YES))),
    ],
)
def test_two_nodes_without_an_answer_are_an_outage_and_no_node_is_to_blame(processes, answers) -> None:
    found = judge(*processes, answers=answers)
    outage = found[IncidentKind.FILESYSTEM_OUTAGE]
    assert truths(found) == (Truth.OK, Truth.BAD)
    assert (outage.actionable, outage.exclude_nodes) == (False, ())


def by(uid: int, answer: MountAnswer) -> MountAnswer:
    return msgspec.structs.replace(answer, uid=uid)


def of(uid: int, rank: int, node: str = "n1"):
    process = msgspec.structs.replace(stuck(rank), node=node)
    return msgspec.structs.replace(process, process=msgspec.structs.replace(process.process, uid=uid))


@pytest.mark.parametrize(
    ("processes", "answers", "actionable"),
    [
        pytest.param([stuck(0)], [("n2", NO)], False, id="one word"),
        pytest.param([stuck(0)], [("n1", NO), ("n2", NO), ("n3", YES)], False, id="one against one"),
        pytest.param([stuck(0)], [("n1", NO), ("n2", NO), ("n3", YES), ("n4", YES)], True, id="one against two"),
        pytest.param(
            [of(1000, 0)], [("n3", YES), ("n2", by(1500, NO)), ("n3", by(1500, NO))], True, id="a stranger's children"
        ),
        pytest.param(
            [of(1000, 0), of(1500, 2, "n2"), of(1500, 4, "n3")], [("n1", by(1000, NO)), ("n2", by(1000, YES)), ("n3", by(1000, YES))],
            True, id="a stranger's processes",
        ),
    ],
)  # fmt: skip
def test_one_nodes_word_and_another_users_never_make_an_outage_of_a_stall(processes, answers, actionable) -> None:
    found = judge(*processes, answers=answers)
    assert truths(judge(*processes, answers=answers))[1] is not Truth.BAD
    late = judge(*(again(each) for each in processes), answers=answers)
    assert truths(late) == (Truth.BAD, Truth.OK)
    assert (
        late[IncidentKind.FILESYSTEM_STALL].actionable,
        found[IncidentKind.FILESYSTEM_OUTAGE].exclude_nodes,
    ) == (
        actionable,
        (),
    )


def again(seen_before):
    """The same process, 30 s later: the answers of other nodes were waited for."""
    call = seen_before.process.blocked
    later = msgspec.structs.replace(call, seconds=call.seconds + 30.0)
    process = msgspec.structs.replace(seen_before.process, blocked=later)
    return msgspec.structs.replace(seen_before, process=process)


def test_each_user_concerned_is_asked_for_in_his_own_directory() -> None:
    asked = judge(of(1000, 0), of(1500, 2))[IncidentKind.FILESYSTEM_STALL].wanted
    assert sorted(each.uid for each in asked) == [1000, 1500]


def test_a_filesystem_that_answers_on_the_node_itself_is_told_and_not_acted_on() -> None:
    stall = judge(stuck(0), answers=[("n1", YES), ("n2", YES)])[IncidentKind.FILESYSTEM_STALL]
    assert (stall.truth, stall.actionable, stall.exclude_nodes) == (Truth.BAD, False, ())


def test_a_process_in_d_for_a_moment_is_ok_and_from_half_the_limit_on_others_are_asked() -> None:
    assert truths(judge(stuck(0, 5.0))) == (Truth.OK, Truth.OK)
    asked = judge(stuck(0, 31.0))[IncidentKind.FILESYSTEM_STALL]
    assert (asked.truth, asked.wanted[0].nodes, asked.wanted[0].directory) == (
        Truth.UNKNOWN,
        ("n1", "n2", "n3"),
        "/shared",
    )


def urgent(**changes: Any) -> dict[IncidentKind, Finding]:
    """After 22 s, of a job with a supervisor that makes a step a second; its node fails, and two others answer."""
    given = {
        "answers": [("n1", NO), ("n2", YES), ("n3", YES)],
        "known": ("n1",),
        "jobs": (job(supervised=True, progress=progress(22.0, **LATE)),),
        "processes": (stuck(0, 22.0),),
    }
    given |= changes
    return judge(*given.pop("processes"), **given)


def test_a_job_with_a_supervisor_whose_step_is_late_does_not_wait_for_a_node_that_alone_fails() -> None:
    stall = urgent()[IncidentKind.FILESYSTEM_STALL]
    assert (stall.truth, stall.actionable, stall.exclude_nodes) == (Truth.BAD, True, ("n1",))
    assert "other nodes (n2, n3) get an answer" in stall.summary
    other = msgspec.structs.replace(YES, same_filesystem=False)
    own_disk = urgent(answers=[("n1", NO), ("n2", other), ("n3", other)])[IncidentKind.FILESYSTEM_STALL]
    assert (own_disk.truth, own_disk.exclude_nodes) == (Truth.BAD, ("n1",))
    early = urgent(processes=(stuck(0, 6.0),), answers=())[IncidentKind.FILESYSTEM_STALL]
    assert (early.truth, bool(early.wanted)) == (Truth.OK, True), "they are asked before"


def test_its_stacks_are_there_when_the_time_is_over() -> None:
    def stacks_wanted(**changes: Any) -> bool:
        return any(isinstance(each, StackRequest) for each in urgent(**changes)[IncidentKind.FILESYSTEM_STALL].wanted)

    assert stacks_wanted(processes=(stuck(0, 11.0),))
    assert not stacks_wanted(processes=(stuck(0, 9.0),))
    assert not stacks_wanted(processes=(stuck(0, 22.0),)), "it is proven"
    assert not stacks_wanted(processes=(stuck(0, 11.0),), answers=[("n1", YES), ("n2", YES), ("n3", YES)])


@pytest.mark.parametrize(
    "changes",
    [
        {"processes": (stuck(0, 18.0),)},
        {"processes": (seen(0, blocked=blocked(22.0, syscall="fsync")),)},
        {"processes": (stuck(0, 22.0, role=Role.WORKER),)},
        {"answers": [("n1", NO), ("n2", YES)]},
        {"answers": [("n2", YES), ("n3", YES)]},
        {"answers": [("n1", YES), ("n2", YES), ("n3", YES)]},
        {"processes": (stuck(0, 22.0), seen(1, node="n2", blocked=blocked(22.0)))},
        {"jobs": (job(progress=progress(22.0, **LATE)),)},
        {"jobs": (job(supervised=True, progress=progress(22.0)),)},
        *(
            {"jobs": (job(supervised=True, progress=progress(22.0, **LATE | paces), **changes),)}
            for paces, changes in (
                ({"longest_pace_s": 20.0}, {}),
                ({}, {"saving_age_s": 20.0}),
                ({}, {"growing_age_s": 20.0}),
                ({"read_age_s": 20.0}, {}),
            )
        ),
    ],
)
def test_without_all_of_that_it_has_the_time_that_all_have(changes: dict[str, Any]) -> None:
    assert Truth.BAD not in truths(urgent(**changes))


def test_while_nobody_has_answered_nothing_is_said_and_then_nothing_is_done() -> None:
    assert truths(judge(stuck(0, 70.0))) == (Truth.UNKNOWN, Truth.UNKNOWN)
    late = judge(stuck(0, 76.0))
    assert truths(late) == (Truth.BAD, Truth.OK)
    assert not late[IncidentKind.FILESYSTEM_STALL].actionable


@pytest.mark.parametrize("answers", [(), [("n1", YES), ("n2", YES)]])
@pytest.mark.parametrize(
    "saving",
    [
        job(progress=progress(200.0), saving_age_s=20.0),
        job(progress=progress(200.0), saved_age_s=5.0),
        job(progress=progress(200.0, phase="checkpointing")),
    ],
)
def test_a_shard_that_is_written_while_the_job_saves_has_five_minutes(answers: Any, saving: JobView) -> None:
    def writing(seconds: float, call: str = "pwrite64"):
        process = seen(0, blocked=blocked(seconds, syscall=call))
        return judge(process, answers=answers, jobs=(saving,))

    assert Truth.BAD not in truths(writing(200.0))
    assert truths(writing(301.0)) == (Truth.BAD, Truth.OK)
    assert truths(writing(200.0, "read")) == (Truth.BAD, Truth.OK)


def test_a_node_that_fails_when_it_is_asked_is_reported_while_its_job_saves() -> None:
    saving = job(progress=progress(200.0), saving_age_s=20.0)
    found = judge(stuck(0), answers=[("n1", NO), ("n2", YES)], jobs=(saving,))
    assert truths(found) == (Truth.BAD, Truth.OK)


def test_what_other_nodes_said_is_told_where_it_decides_nothing() -> None:
    late = judge(stuck(0, 100.0), answers=[("n1", NO), ("n2", NO), ("n3", YES)])[IncidentKind.FILESYSTEM_STALL]
    assert "/shared answers on 1 of 2 other nodes: its fault or that of n1" in late.summary


def test_filesystem_last_report_of_a_silent_node_is_no_evidence() -> None:
    found = judge(stuck(0), answers=[("n2", YES)], reporting_nodes=("n2", "n3"))
    assert truths(found) == (Truth.UNKNOWN, Truth.UNKNOWN)


def test_an_outage_whose_other_node_fell_silent_does_not_become_the_fault_of_the_one_that_reports() -> None:
    found = judge(stuck(0), stuck(2), answers=[("n3", YES)], reporting_nodes=("n1", "n3"))
    assert truths(found) == (Truth.UNKNOWN, Truth.UNKNOWN)


def test_an_old_answer_clears_nobody() -> None:
    old = MountAnswer(responding=True, age_s=300.0, seconds=0.1)
    assert not judge(stuck(0, 400.0), answers=[("n1", NO), ("n2", old)])[IncidentKind.FILESYSTEM_STALL].actionable


def test_a_node_that_never_answers_again_does_not_keep_the_incident_for_ever() -> None:
    old = MountAnswer(responding=False, age_s=700.0, seconds=12.0)
    assert truths(judge(answers=[("n2", NO)])) == (Truth.UNKNOWN, Truth.UNKNOWN)
    assert truths(judge(answers=[("n2", old)])) == (Truth.OK, Truth.OK)


@pytest.mark.parametrize("role", [Role.RANK, Role.WORKER, Role.HELPER])
def test_a_job_that_goes_on_is_not_requeued_for_a_process_that_is_blocked(role: Role) -> None:
    found = judge(stuck(0, 300.0, role=role), answers=[("n1", NO), ("n2", YES)], jobs=(job(progress=progress(8.0)),))
    stall = found[IncidentKind.FILESYSTEM_STALL]
    assert (stall.truth, stall.actionable) == (Truth.BAD, False)


def test_the_job_that_stands_still_comes_before_one_that_was_blocked_for_a_moment() -> None:
    moment = stuck(0, 2.0, job_id="1", pid=900)
    found = judge(moment, stuck(0, 300.0), jobs=(job(progress=progress(400.0)),))
    assert found[IncidentKind.FILESYSTEM_STALL].job_ids == ("7", "1")


def test_the_order_of_processes_and_answers_does_not_matter() -> None:
    processes, answers = [stuck(0), stuck(1), stuck(2)], [("n1", NO), ("n2", YES), ("n3", YES)]
    assert judge(*processes, answers=answers) == judge(*processes[::-1], answers=answers)


def test_a_masked_part_of_a_path_is_no_place_to_be_probed() -> None:
    held = seen(0, blocked=blocked(70.0, path=f"/shared/runs/{MASK}/log.txt"))
    filesystem = FilesystemView(key="k", mount="/shared", blocked=(held,), known_nodes=("n1",))
    (wanted,) = probes_wanted(cluster(STUCK, filesystems=(filesystem,)), filesystem)
    assert wanted.directory == "/shared/runs"
