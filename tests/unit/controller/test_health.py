"""One judgement for every surface: what is wrong comes first, what nobody sees is never green, and all show
the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from slurm_watchdog.analysis.progress_limit import RHYTHM
from slurm_watchdog.analysis.rank_motion import TRAINED_LOOKS
from slurm_watchdog.cli.status import exit_code, screen
from slurm_watchdog.controller.health.cluster import BusyShare, Health, health, pulses
from slurm_watchdog.controller.health.job import HealthInputs, NotJudged
from slurm_watchdog.controller.health.metrics import ControllerMetrics
from slurm_watchdog.controller.health.views import status_of
from slurm_watchdog.detect.registry import SPECS, spec_of
from slurm_watchdog.knowledge.frameworks import FRAMEWORKS
from slurm_watchdog.model.cluster_view import JobView, LogView, SlurmNodeView
from slurm_watchdog.model.documents import Delivery, Level, Status
from slurm_watchdog.model.incidents import Incident, IncidentKind, IncidentState, Severity
from slurm_watchdog.model.past_runs import Motion
from tests.builders import views

LIMIT_S = 60.0


def seen(*jobs: JobView, **changes: Any) -> HealthInputs:
    """A cluster that is well, with one job that trains, unless told otherwise."""
    given: dict[str, Any] = {
        "view": views.cluster(*(jobs or (views.job(),)), **changes.pop("cluster", {})), "limits_s": {"7": LIMIT_S}, "incidents": (),
        "mode": "act", "tick_age_s": 0.5,
    }  # fmt: skip
    return HealthInputs(**{**given, **changes})


def fires(kind: IncidentKind, **changes: Any) -> Incident:
    given: dict[str, Any] = {
        "id": "abc123", "kind": kind, "subject": "job:7", "state": IncidentState.FIRING, "severity": Severity.CRITICAL, "job_ids": ("7",),
        "jobs_now": ("7",), "opened_at": 1.0, "pending_mono": 1.0, "summary": "SECRET words of a user",
    }  # fmt: skip
    return Incident(**{**given, **changes})


def stepless(**changes: Any) -> JobView:
    given = {"progress": None, "run_age_s": 5000.0, "log": LogView(grew_age_s=1.0, whole=True)}
    return views.job(**{**given, **changes})


BLIND: dict[str, HealthInputs] = {
    "no tick": seen(tick_age_s=None),
    "late tick": seen(tick_age_s=300.0),
    "a full core": seen(busy_share=0.99),
    "journal": seen(journal_error="disk full"),
    "Slurm never answered": seen(cluster={"slurm_age_s": None}),
    "Slurm never answered, no job": replace(seen(), view=views.cluster(slurm_age_s=None)),
    "Slurm is silent": seen(cluster={"slurm_age_s": 600.0}),
    "Slurm is excused by a stall": seen(cluster={"slurm_excused": True}),
    "Slurm's answer is an error": seen(slurm_error="exit 1"),
    "Slurm shows not all": seen(slurm_notes=("PrivateData hides jobs",)),
    "warm-up": seen(warming_up=True),
    "no agent anywhere": seen(cluster={"reporting_nodes": ()}),
    "no agent of the job": seen(cluster={"reporting_nodes": ("n9",)}),
    "its agents are silent": seen(views.job(silent_nodes=("n1", "n2")), cluster={"silent_nodes": ("n1", "n2"), "reporting_nodes": ("n9",)}),
    "its agents are excused": seen(cluster={"excused_nodes": ("n1", "n2")}),
    "the node that reads its log is silent": seen(
        views.job(job=views.slurm_job(batch_host="n1"), silent_nodes=("n1",)),
        cluster={"silent_nodes": ("n1",), "reporting_nodes": ("n2",)},
    ),
    "a node of another job is silent": seen(cluster={"silent_nodes": ("n8",)}),
    "root's job": seen(stepless(job=views.slurm_job(uid=0), processes=(), run_age_s=5.0)),
    "a system account's job": seen(stepless(job=views.slurm_job(uid=999), processes=(), run_age_s=5.0)),
    "no process of it": seen(stepless(processes=())),
    "its log is unread": seen(stepless(log=None)),
    "no step was read": seen(stepless()),
    "beyond its limit": seen(views.job(progress=views.progress(LIMIT_S + 1))),
    "something is pending": seen(incidents=(fires(IncidentKind.COLLECTIVE_HANG, state=IncidentState.PENDING),)),
    "an action is under way": seen(acting={"7": "its requeue is under way"}),
    "paused": seen(paused=("looking", "root")),
    "messages are not delivered": seen(deliveries=(Delivery(channel="slack", failing_s=600.0, error="404", waiting=3),)),
}  # fmt: skip


def status(given: HealthInputs, found: Health) -> Status:
    return status_of(given.view, given.limits_s, given.incidents, 0, lambda _: False, found)


def said_by_status(given: HealthInputs, found: Health) -> str:
    return str(exit_code(status(given, found)) or "green")


def said_by_metrics(given: HealthInputs, found: Health) -> str:
    metrics = ControllerMetrics()
    metrics.show_health(found, given.incidents)
    return "green" if 'slurm_watchdog_health{level="ok"} 1.0' in metrics.text().decode() else "other"


SURFACES: dict[str, Callable[[HealthInputs, Health], str]] = {
    "status": said_by_status, "metrics": said_by_metrics,
}  # fmt: skip


@pytest.mark.parametrize("surface", SURFACES)
def test_every_surface_is_green_of_a_cluster_that_is_seen_and_well(surface: str) -> None:
    assert SURFACES[surface](seen(), health(seen())) == "green"
    assert health(seen()).headline == "1 job watched (1 training), 3 nodes reporting, mode act."


@pytest.mark.parametrize("what", BLIND)
@pytest.mark.parametrize("surface", SURFACES)
def test_no_surface_is_green_where_something_is_not_seen(surface: str, what: str) -> None:
    assert SURFACES[surface](BLIND[what], health(BLIND[what])) != "green"


JUDGED = {"no tick", "late tick", "a full core", "journal", "Slurm's answer is an error", "Slurm shows not all", "warm-up", "paused",
          "a node of another job is silent", "messages are not delivered", "something is pending", "Slurm never answered, no job"}  # fmt: skip


def test_a_core_is_full_only_once_it_was_for_a_whole_minute() -> None:
    busy = BusyShare()
    for second in range(61):
        assert busy.share() is None
        busy.note(100.0 + second, 5.0 + 0.98 * second)
    assert busy.share() == pytest.approx(0.98)
    assert "98% of a core" in health(seen(busy_share=busy.share())).headline
    for second in range(61, 121):
        busy.note(100.0 + second, 5.0 + 0.98 * 60 + 0.3 * (second - 60))
    assert busy.share() == pytest.approx(0.3)
    assert health(seen(busy_share=0.3)).reasons == ()


@pytest.mark.parametrize("what", sorted(BLIND.keys() - JUDGED))
def test_a_job_that_cannot_be_judged_is_nowhere_said_to_train(what: str) -> None:
    given = BLIND[what]
    found = health(given)
    shown = "\n".join(screen(status(given, found), None))
    pulse = str(pulses(given.view, given.limits_s, 1000.0, found))
    assert "training" not in shown + pulse + found.headline
    assert found.jobs[0].reason in pulse and found.jobs[0].reason


@pytest.mark.parametrize("why", NotJudged)
def test_every_reason_for_not_judging_is_reached_says_what_to_do_and_has_its_series(why: NotJudged) -> None:
    found = next(
        health(given) for given in BLIND.values() if any(each.not_judged is why for each in health(given).jobs)
    )
    assert found.jobs[0].todo
    metrics = ControllerMetrics()
    metrics.show_health(found, ())
    assert f'slurm_watchdog_job_not_judged{{job_id="7",reason="{why}"}} 1.0' in metrics.text().decode()
    metrics.show_health(health(seen()), ())
    assert "job_not_judged{" not in metrics.text().decode()


@pytest.mark.parametrize("row", FRAMEWORKS, ids=lambda row: row.name)
def test_a_job_without_steps_is_given_the_advice_for_its_framework(row: Any) -> None:
    (job,) = health(seen(stepless(log=LogView(grew_age_s=1.0, whole=True, framework=row.name)))).jobs
    assert (job.not_judged, job.todo) == (NotJudged.NO_STEP, row.advice)
    assert row.title in job.reason


@pytest.mark.parametrize("changes", [{"run_age_s": 5.0}, {"run_age_s": 5.0, "log": None}, {"run_age_s": 59.0}])
def test_a_job_that_has_just_begun_is_starting(changes: dict[str, Any]) -> None:
    (job,) = health(seen(stepless(**changes))).jobs
    assert (job.state, job.level) == ("starting", Level.OK)


@pytest.mark.parametrize(
    "signs",
    [
        {"motion": Motion(last_at=1.0, trained=TRAINED_LOOKS)},
        {"saved_age_s": 5.0, "save_intervals_s": (60.0,) * RHYTHM},
    ],
)
@pytest.mark.parametrize("log", [None, LogView(grew_age_s=1.0, whole=True)])
def test_a_job_whose_steps_are_unread_and_that_is_judged_by_other_signs_is_judged(
    signs: dict[str, Any], log: LogView | None
) -> None:
    (job,) = health(seen(stepless(log=log, **signs))).jobs
    assert (job.state, job.not_judged, job.level) == ("training, steps unread", None, Level.OK)


@pytest.mark.parametrize("kind", [spec.kind for spec in SPECS if spec.delays_steps])
@pytest.mark.parametrize("what", [None, "Slurm is silent", "its agents are silent"])
def test_a_job_with_such_an_incident_has_its_word_also_where_nothing_is_seen(
    kind: IncidentKind, what: str | None
) -> None:
    given = replace(BLIND[what] if what else seen(), incidents=(fires(kind),), acting={"7": "its requeue is under way"})
    found = health(given)
    assert (found.level, found.jobs[0].state, found.jobs[0].level) == (
        Level.CRITICAL,
        spec_of(kind).job_state,
        Level.CRITICAL,
    )
    assert "its requeue is under way" in found.jobs[0].reason
    assert "SECRET" not in str(found)


def test_an_incident_that_another_explains_and_a_persons_own_restart_are_counted_nowhere() -> None:
    others = (
        fires(IncidentKind.COLLECTIVE_HANG, id="b", inhibited_by="abc123"),
        fires(IncidentKind.OPERATOR_RESTART, id="c", severity=Severity.INFO),
    )
    given = seen(incidents=(fires(IncidentKind.FILESYSTEM_OUTAGE, subject="mount:/shared"), *others))
    found = health(given)
    assert found.headline.startswith("1 incident firing (")
    assert status(given, found).incidents.firing == 1
    metrics = ControllerMetrics()
    metrics.show_health(found, given.incidents)
    series = [line for line in metrics.text().decode().splitlines() if line.startswith("slurm_watchdog_job_incident{")]
    assert series == ['slurm_watchdog_job_incident{job_id="7",kind="filesystem_outage",severity="critical"} 1.0']


def test_an_incident_outranks_blindness_and_blindness_a_warning() -> None:
    given = seen(incidents=(fires(IncidentKind.LOSS_NAN),), paused=("x", "ann"), cluster={"slurm_age_s": None})
    assert [each.level for each in health(given).reasons] == [Level.CRITICAL, Level.UNKNOWN, Level.WARNING]


def test_some_jobs_that_are_not_judged_warn_and_when_none_is_judged_the_level_is_unknown() -> None:
    assert health(BLIND["no step was read"]).level is Level.UNKNOWN
    other = replace(stepless(), job=views.slurm_job(job_id="8"))
    given = seen(views.job(), other, limits_s={"7": LIMIT_S, "8": LIMIT_S})
    assert health(given).level is Level.WARNING
    assert "job 8: not judged, no step could be read" in health(given).headline


def test_thousands_of_jobs_that_are_not_judged_leave_a_headline_of_one_line() -> None:
    many = [
        replace(stepless(run_age_s=5000.0 + 100 * number), job=views.slurm_job(job_id=str(number)))
        for number in range(5000)
    ]
    found = health(seen(*many, limits_s={str(number): LIMIT_S for number in range(5000)}))
    assert len(found.headline) < 1000


def test_a_job_that_shows_no_sign_of_a_training_is_no_reason_to_warn() -> None:
    shell = views.seen(0, comm="lmp_mpi")
    cpu = stepless(processes=(shell, views.seen(1, comm="lmp_mpi")), gpus=())
    found = health(seen(cpu))
    assert (found.level, found.jobs[0].state, found.jobs[0].not_judged) == (
        Level.OK,
        "no training seen",
        None,
    )
    assert health(seen(cpu, personal=True)).jobs[0].not_judged is NotJudged.NO_STEP
    python = stepless(processes=(views.seen(0, comm="python3.11"), views.seen(1, comm="python3.11")), gpus=())
    assert health(seen(python)).jobs[0].not_judged is NotJudged.NO_STEP
    unread = replace(cpu, log=None)
    assert health(seen(unread)).level is Level.OK
    assert health(seen(cpu, incidents=(fires(IncidentKind.LOG_ERROR),))).level is Level.CRITICAL


def test_a_personal_run_judges_the_processes_of_its_own_user_root_or_not() -> None:
    begins = stepless(processes=(), run_age_s=2.0, job=views.slurm_job(uid=0))
    assert health(seen(begins)).jobs[0].not_judged is NotJudged.SYSTEM_ACCOUNT
    (job,) = health(seen(begins, personal=True)).jobs
    assert (job.state, job.level) == ("starting", Level.OK)


@pytest.mark.parametrize(
    ("patience_s", "until"),
    [((600.0, 1800.0), "after 10 min if nothing moves, after 30 min otherwise"), (None, "what it waits for")],
)
def test_a_job_beyond_its_limit_says_when_it_is_reported_and_what_shows_its_stacks_now(
    patience_s: tuple[float, float] | None, until: str
) -> None:
    late = views.job(progress=replace(views.job().progress, age_s=200.0))
    found = health(seen(late, patience_s=patience_s)).jobs[0]
    assert (found.state, found.level) == ("beyond its limit", Level.WARNING)
    assert "slurm-watchdog diagnose 7" in found.todo and until in found.todo


@pytest.mark.parametrize(("state", "alive"), [("ALLOCATED", 4), ("DOWN*", 2)])
def test_ranks_on_a_node_that_slurm_has_lost_do_not_count_as_alive(state: str, alive: int) -> None:
    view = views.cluster(views.job(), slurm_nodes=(SlurmNodeView(name="n2", state=state),))
    (listed,) = status_of(view, {}, (), 0, lambda incident: True, health(seen())).jobs
    assert (listed.ranks, listed.ranks_alive) == (4, alive)
