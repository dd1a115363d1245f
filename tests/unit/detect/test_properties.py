"""What must hold for every detector on every view: nothing fires on missing data, and order does not matter."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from slurm_watchdog.detect.registry import SPECS, findings_of
from slurm_watchdog.model.cluster_view import ClusterView, FilesystemView, JobView, MountAnswer
from slurm_watchdog.model.incidents import Finding, IncidentKind, Truth
from tests.builders.missing_data import DEFAULTS
from tests.builders.views import (
    BACKWARD,
    BARRIER,
    COMPUTE,
    LOADER,
    RECV,
    SAVE,
    blocked,
    cluster,
    job,
    progress,
    seen,
    snapshot,
    stack,
)

PLACES = st.sampled_from([RECV, BARRIER, BACKWARD, LOADER, COMPUTE, SAVE, ()])
AGES = st.sampled_from([0.0, 5.0, 40.0, 70.0, 400.0, 5000.0])


def run(view: ClusterView) -> list[Finding]:
    return [finding for spec in SPECS for finding in findings_of(spec, view, DEFAULTS)]


@st.composite
def jobs(draw) -> JobView:
    where = draw(st.lists(PLACES, min_size=4, max_size=4))
    gone = draw(st.lists(st.sampled_from([None, None, None, 10.0, 400.0]), min_size=4, max_size=4))
    ages = draw(st.sampled_from([(), (10.0,), (30.0, 10.0), (30.0, 20.0, 10.0)]))
    age = draw(st.one_of(st.none(), AGES))
    return job(
        processes=tuple(seen(r, gone_s=gone[r]) for r in range(4)),
        progress=None if age is None else progress(age, phase=draw(st.sampled_from([None, "evaluating"]))),
        run_age_s=draw(AGES),
        snapshots=tuple(snapshot(a, [stack(r, where[r]) for r in range(4) if gone[r] is None]) for a in ages),
    )


@st.composite
def filesystems(draw) -> FilesystemView:
    held = draw(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([3.0, 40.0, 90.0, 4000.0])), max_size=4))
    answers = draw(st.dictionaries(st.sampled_from(["n1", "n2", "n3"]), st.tuples(st.booleans(), AGES)))
    return FilesystemView(
        key="k",
        mount="/shared",
        blocked=tuple(seen(rank, blocked=blocked(seconds)) for rank, seconds in held),
        known_nodes=tuple(sorted({"n1" if rank < 2 else "n2" for rank, _ in held})),
        answers=tuple((n, MountAnswer(responding=ok, age_s=age, seconds=1.0)) for n, (ok, age) in answers.items()),
    )


def test_nothing_is_wrong_with_an_empty_cluster() -> None:
    assert {finding.kind for finding in run(ClusterView(now=0.0)) if finding.truth is not Truth.OK} == {
        IncidentKind.SLURM_UNREACHABLE  # it has not answered yet: unknown
    }


@given(jobs(), st.sampled_from(["n1", "n2"]))
@settings(max_examples=60)
def test_nothing_is_bad_about_a_job_with_a_silent_node(view: JobView, silent: str) -> None:
    findings = run(cluster(replace(view, silent_nodes=(silent,))))
    assert all(finding.truth is not Truth.BAD for finding in findings)


@given(jobs())
@settings(max_examples=60)
def test_nothing_is_bad_about_a_job_whose_ranks_are_not_known(view: JobView) -> None:
    assert all(f.truth is not Truth.BAD for f in run(cluster(replace(view, processes=()))))


@given(jobs())
@settings(max_examples=60)
def test_nothing_is_acted_on_without_two_dumps_of_every_rank(view: JobView) -> None:
    one = replace(view, snapshots=view.snapshots[-1:])
    partly = replace(view, snapshots=tuple(replace(s, stacks=s.stacks[1:]) for s in view.snapshots))
    alive_first = [p for p in view.processes if p.alive and p.process.rank == 0]
    assert not any(f.actionable for f in run(cluster(one)))
    if (
        alive_first
        and len(view.snapshots) > 0
        and len(view.snapshots[0].stacks) == sum(p.alive for p in view.processes)
    ):
        assert not any(f.actionable for f in run(cluster(partly)))


@given(filesystems())
@settings(max_examples=100)
def test_nothing_is_bad_about_a_filesystem_while_its_nodes_are_silent(filesystem: FilesystemView) -> None:
    assert all(f.truth is not Truth.BAD for f in run(cluster(filesystems=(filesystem,), reporting_nodes=("n3",))))


@given(filesystems())
@settings(max_examples=100)
def test_a_filesystem_is_in_at_most_one_kind_of_trouble_and_an_outage_excludes_nobody(
    fs: FilesystemView,
) -> None:
    bad = [f for f in run(cluster(filesystems=(fs,))) if f.truth is Truth.BAD]
    assert len(bad) <= 1
    assert all(len(f.exclude_nodes) <= 1 for f in bad)


@given(jobs(), st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_the_order_of_processes_and_of_dumps_within_a_snapshot_does_not_matter(view: JobView, random) -> None:
    def shuffled(values):
        values = list(values)
        random.shuffle(values)
        return tuple(values)

    other = replace(
        view,
        processes=shuffled(view.processes),
        snapshots=tuple(replace(s, stacks=shuffled(s.stacks)) for s in view.snapshots),
    )
    first = [(f.kind, f.truth, f.actionable, set(f.culprits)) for f in run(cluster(view))]
    assert first == [(f.kind, f.truth, f.actionable, set(f.culprits)) for f in run(cluster(other))]


@given(jobs())
@settings(max_examples=100)
def test_whoever_is_named_is_a_rank_of_the_job_and_a_minority(view: JobView) -> None:
    for finding in run(cluster(view)):
        if finding.kind == "collective_hang" and finding.culprits:
            assert {c.rank for c in finding.culprits} <= {0, 1, 2, 3}
            assert finding.truth is Truth.BAD
