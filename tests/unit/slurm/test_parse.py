"""The parsers of Slurm's answers, on what Slurm really printed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_watchdog.model import slurm_states
from slurm_watchdog.model.slurm import SlurmJob, can_be_named
from slurm_watchdog.slurm import parse
from slurm_watchdog.slurm.client import MAY_CHANGE, REFUSALS, Refusal, SlurmRefused, SlurmUnavailable, parse_refusal
from slurm_watchdog.slurm.node_names import ParseError
from slurm_watchdog.slurm.request_guard import raise_unless_requeued
from tests.builders.slurm_listings import parse_jobs, parse_nodes

CAPTURES = Path(__file__).parents[2] / "captures/slurm"
RELEASES = sorted(path for path in CAPTURES.iterdir() if (path / "story.json").exists())
MARKS = parse.Marks("q7f", "q8r")
GUESSED = parse.Marks("xF1f", "xR2r")


@dataclass(frozen=True)
class Release:
    """What one release of Slurm printed; see tests/captures/slurm/README."""

    directory: Path
    story: dict[str, Any]

    def text(self, name: str) -> str:
        return (self.directory / f"{name}.txt").read_text()

    @property
    def jobs(self) -> dict[str, SlurmJob]:
        return {job.job_id: job for job in parse_jobs(self.text("jobs"), MARKS)}

    def id_of(self, what: str) -> str:
        return self.story["jobs"][what]

    def job(self, what: str) -> SlurmJob:
        return self.jobs[self.id_of(what)]


@pytest.fixture(params=RELEASES, ids=lambda path: path.name)
def release(request: pytest.FixtureRequest) -> Release:
    return Release(request.param, json.loads((request.param / "story.json").read_text()))


def test_the_captures_are_of_the_releases_that_we_promise() -> None:
    assert [path.name for path in RELEASES] == ["22.05", "24.11", "25.11", "26.05"]


def test_a_capture_is_of_the_release_that_its_folder_names(release: Release) -> None:
    assert f" {release.directory.name}." in release.story["version"]


def test_hostile_names_stay_names(release: Release) -> None:
    for what, name in (
        ("pipes", "two  words | JobState=COMPLETED"),
        ("lines", "line\nbreak JobId=999 JobState=FAILED"),
        ("shell", "%j,:;$(touch pwned)`x`\t'\"\\"),
        ("option", "--all"),
        ("unicode", "—unicode 你好"),
    ):
        job = release.job(what)
        assert (job.name, job.comment, job.state) == (name, f"cmt {name}", "PENDING")
    assert "999" not in release.jobs


def test_a_running_job_is_read_whole(release: Release) -> None:
    job = release.job("plain")
    job_id = job.job_id
    assert job == SlurmJob(
        job_id=job_id, state="RUNNING", reason="None", name="plain", user="root", uid=0, partition="main",
        nodes=job.nodes, batch_host=job.nodes[0], restarts=0, start_at=job.start_at, requeueable=True,
        stdout=f"/tmp/{job_id}-plain.out", stderr=f"/tmp/{job_id}-plain.out", workdir=job.workdir, comment="cmt plain",
        raw_id=job_id, node_count=1, required_nodes=("n1",), time_limit_s=3600.0, submit_at=job.submit_at, eligible_at=job.eligible_at,
    )  # fmt: skip
    assert len(job.nodes) == 1
    assert job.start_at is not None
    assert job.submit_at is not None
    assert job.start_at >= job.submit_at > 1.7e9
    assert job.workdir is not None
    assert job.workdir.endswith("/shared")


@pytest.mark.parametrize(
    ("what", "state"),
    [
        ("fails", "FAILED"),
        ("completes", "COMPLETED"),
        ("cancelled", "CANCELLED"),
        ("times out", "TIMEOUT"),
        ("on n5", "NODE_FAIL"),
        ("suspended", "SUSPENDED"),
        ("stopped", "STOPPED"),
        ("stubborn", "COMPLETING"),
        ("begins", "PENDING"),
    ],
)
def test_states_are_slurms_own_words(release: Release, what: str, state: str) -> None:
    job = release.job(what)
    assert (job.state, job.held) == (state, False)
    assert (job.state in slurm_states.OVER) == (state not in {"SUSPENDED", "STOPPED", "COMPLETING", "PENDING"})


def test_errors_go_where_they_are_sent_or_where_the_output_goes(release: Release) -> None:
    job = release.job("suspended")
    assert (job.stdout, job.stderr) == ("/dev/null", f"/tmp/{job.job_id}.err")
    assert release.job("begins").stderr == release.job("begins").stdout


def test_a_requeued_job_is_held_and_has_one_more_restart(release: Release) -> None:
    requeued, special = release.job("requeued"), release.job("special")
    assert (requeued.state, requeued.held, requeued.restarts, requeued.user) == ("PENDING", True, 1, "games")
    assert (special.held, special.restarts) == (True, 1)
    assert special.state in {"SPECIAL_EXIT", "PENDING"}
    for job in (requeued, special):
        raise_unless_requeued(job)


def test_a_pending_job_has_no_start_and_no_nodes_and_says_what_it_wants(release: Release) -> None:
    held = release.job("held")
    assert (held.held, held.start_at, held.nodes, held.batch_host) == (True, None, (), None)
    assert (held.required_nodes, held.node_count, held.time_limit_s) == (("n1", "n2", "n3"), 3, 93840.0)
    fixed = release.job("fixed")
    assert (fixed.held, fixed.requeueable, fixed.time_limit_s) == (False, False, None)
    assert release.job("too large").node_count == 5
    assert release.job("begins").node_count in {2, 4}  # -N2-4
    assert release.job("begins").eligible_at is not None


def test_listed_job_has_its_dependency(release: Release) -> None:
    assert release.job("depends").dependency.startswith(f"afterok:{release.id_of('plain')}")
    assert release.job("plain").dependency == ""


def test_the_elements_of_an_array_and_the_rest_of_it_are_told_apart(release: Release) -> None:
    array = release.id_of("array")
    elements = {job.array_tasks: job for job in release.jobs.values() if job.array_job_id == array}
    running = [job for job in elements.values() if job.state == "RUNNING"]
    assert len(running) == 2
    for job in running:
        assert job.job_id == f"{array}_{job.array_tasks}"
        assert job.stdout is not None
        assert job.stdout.endswith(f"/shared/{job.job_id}.out")
        # What the processes have as SLURM_JOB_ID; the last element to start has the id of the whole array.
        assert job.process_id.isdigit()
    (rest,) = [job for job in elements.values() if "[" in job.job_id]
    assert rest.job_id == f"{array}_[{rest.array_tasks}]"
    assert (rest.array_tasks, rest.stdout) == ("2-9", None)
    assert release.job("plain").array_job_id == ""


def test_elements_with_records_of_their_own_are_listed_one_by_one_and_many_gaps_spoil_nothing(
    release: Release,
) -> None:
    array = release.id_of("gaps")
    jobs = release.jobs
    for element in ("4", "9"):
        job = jobs[f"{array}_{element}"]
        assert (job.comment, job.array_tasks, job.array_job_id) == ("split off", element, array)
    (rest,) = [job for job in jobs.values() if job.array_job_id == array and "[" in job.job_id]
    assert rest.job_id.startswith(f"{array}_[0-1,16,25,")
    assert rest.job_id.endswith("441,484,529,576,625,676,729,784,841]")


def listing(*rows: dict[str, str]) -> str:
    empty = {
        "jobid": "6", "jobarrayid": "6_0", "state": "PENDING", "restartcnt": "0", "batchflag": "1", "requeue": "1",
        "prioritylong": "1", "starttime": "N/A", "userid": "0", "username": "ann", "batchhost": "n/a", "arrayjobid": "6",
        "arraytaskid": "0", "hetjobid": "N/A", "hetjoboffset": "N/A", "submittime": "1", "eligibletime": "1",
    }  # fmt: skip
    header = {"jobid": "JOBID"}
    return "".join(
        MARKS.field.join([row.get(name, "X" if row is header else "") for name in parse.JOB_FIELDS])
        + MARKS.record
        + "\n"
        for row in (header, *({**empty, **row} for row in rows))
    )


def element(index: int, **more: str) -> dict[str, str]:
    return {"jobarrayid": f"6_{index}", "arraytaskid": str(index), **more}


def test_unstarted_elements_are_one_job_and_those_that_have_run_are_jobs_of_their_own() -> None:
    text = listing(
        element(0, jobid="7", state="RUNNING", nodelist="n1", batchhost="n1"),
        element(1, jobid="8", restartcnt="1"),
        *(element(index) for index in range(2, 10)),
        element(11),
    )
    jobs = {job.job_id: job for job in parse_jobs(text, MARKS)}
    assert list(jobs) == ["6_0", "6_1", "6_[2-9,11]"]
    assert (jobs["6_1"].restarts, jobs["6_1"].raw_id) == (1, "8")
    assert (jobs["6_[2-9,11]"].array_tasks, jobs["6_[2-9,11]"].raw_id) == ("2-9,11", "6")


def test_without_a_reason_nobody_gave_it() -> None:
    row = ["n1", "10.77.1.11", "idle", "main", "Unknown", "root", "none"]  # as 25.11.7 has it
    text = "".join(MARKS.field.join(cells) + MARKS.record + "\n" for cells in (map(str.upper, parse.NODE_FIELDS), row))
    (node,) = parse_nodes(text, MARKS)
    assert (node.reason, node.reason_at, node.reason_user) == ("", None, "")


def test_the_last_element_has_the_number_of_the_array_and_is_a_job_all_the_same() -> None:
    assert [job.job_id for job in parse_jobs(listing(element(9)), MARKS)] == ["6_9"]
    requeued = listing(element(8, jobid="7", state="RUNNING"), element(9, restartcnt="2"))
    assert {job.job_id: job.restarts for job in parse_jobs(requeued, MARKS)} == {"6_8": 0, "6_9": 2}


@pytest.mark.parametrize(
    ("indexes", "job_id"),
    [
        (range(0, 18, 3), "6_[0,3,6,9,12,15,...]"),
        (range(0, 12, 3), "6_[0,3,6,9]"),
        (range(1, 9), "6_[1-8]"),
        ((0, 3, 6, 9, 13), "6_[0,3,6,9,13]"),
    ],
)
def test_of_elements_equally_far_apart_squeue_leaves_out_the_last_so_they_are_not_all(
    indexes: Sequence[int], job_id: str
) -> None:
    (job,) = parse_jobs(listing(*map(element, indexes)), MARKS)
    assert (job.job_id, can_be_named(job.job_id)) == (job_id, "..." not in job_id)


def test_ten_thousand_unstarted_elements_are_one_short_job() -> None:
    text = listing(*(element(index) for index in range(0, 30_000, 3)))
    (job,) = parse_jobs(text, MARKS)
    assert job.job_id.startswith("6_[0,3,6,")
    assert job.job_id.endswith(",...]")
    assert len(job.job_id) < 220


def test_the_components_of_a_heterogeneous_job_are_told_apart(release: Release) -> None:
    first = release.id_of("het")
    jobs = release.jobs
    assert (jobs[first].het_job_id, jobs[first].het_offset) == (first, 0)
    assert (jobs[f"{first}+1"].het_job_id, jobs[f"{first}+1"].het_offset) == (first, 1)
    assert jobs[f"{first}+1"].process_id != first
    assert (release.job("plain").het_job_id, release.job("plain").het_offset) == ("", None)


def test_an_empty_queue_is_an_answer_and_no_output_is_none(release: Release) -> None:
    assert parse_jobs(release.text("jobs_none"), MARKS) == ()
    with pytest.raises(ParseError, match="empty"):
        parse_jobs("", MARKS)


def test_a_field_that_squeue_does_not_know_is_noticed(release: Release) -> None:
    # squeue prints an empty column or nothing, complains on stderr and exits with 0.
    fields = (*parse.JOB_FIELDS[:3], "nosuch", *parse.JOB_FIELDS[3:])
    with pytest.raises(ParseError, match=r"fields were asked for|empty"):
        parse.split_table(release.text("jobs_unknown_field"), fields, MARKS)


def test_a_guessed_mark_spoils_the_answer_and_forges_nothing(release: Release) -> None:
    with pytest.raises(ParseError):
        parse_jobs(release.text("jobs_guessed_mark"), GUESSED)


def test_an_answer_cut_anywhere_is_refused_or_ends_at_a_record(release: Release) -> None:
    text = release.text("jobs")
    whole = release.jobs
    rests = {job.raw_id for job in whole.values() if "[" in job.job_id}  # fewer elements, another id
    for end in range(0, len(text) - 1, 61):
        try:
            jobs = parse_jobs(text[:end], MARKS)
        except ParseError:
            continue
        assert text[:end].endswith("q8r\n")
        assert all(job == whole[job.job_id] for job in jobs if job.raw_id not in rests)


def test_excluded_nodes_are_those_of_the_job(release: Release) -> None:
    text = release.text("excluded")
    assert parse.parse_excluded(text, MARKS, release.id_of("plain")) == ("n2",)
    assert parse.parse_excluded(text, MARKS, release.id_of("begins")) == ()
    with pytest.raises(ParseError, match="99"):
        parse.parse_excluded(text, MARKS, "99")


def test_nodes_have_their_address_flags_partitions_and_reason(release: Release) -> None:
    nodes = {node.name: node for node in parse_nodes(release.text("nodes"), MARKS)}
    assert list(nodes) == ["n1", "n2", "n3", "n4", "n5"]
    assert nodes["n1"].address.startswith("10.77.")
    assert (nodes["n1"].reason, nodes["n1"].reason_at, nodes["n1"].reason_user) == ("", None, "")
    assert nodes["n1"].partitions == ("debug", "main")
    assert "DRAIN" in nodes["n3"].state
    assert (nodes["n3"].reason, nodes["n3"].reason_user) == ('bad | "disk"  JobState=x', "root")
    assert nodes["n3"].reason_at is not None
    assert nodes["n3"].reason_at > 1.7e9
    assert nodes["n4"].state.startswith("DOWN")
    assert nodes["n4"].reason == "Not responding"


REFUSED = {
    "requeuehold, unknown": Refusal.NO_SUCH_JOB,
    "requeuehold, pending": Refusal.NOT_RUNNING,
    "requeuehold, another's": Refusal.NO_PERMISSION,
    "requeue, unknown": Refusal.NO_SUCH_JOB,
    "release, unknown": Refusal.NO_SUCH_JOB,
    "release, another's": Refusal.NO_PERMISSION,
    "hold, unknown": Refusal.NO_SUCH_JOB,
    "exclude, running": Refusal.NOT_PENDING,
    "exclude, finished": Refusal.FINISHED,
    "exclude, no such node": Refusal.NO_SUCH_NODE,
    "exclude, another's": Refusal.NO_PERMISSION,
    "cancel, another's": Refusal.NO_PERMISSION,
    "signal, another's": Refusal.NO_PERMISSION,
    "signal, finished": Refusal.NO_SUCH_JOB,
    "script, unknown": Refusal.NO_SUCH_JOB,
    "script, another's": Refusal.NO_PERMISSION,
    "submit, no such partition": Refusal.UNSATISFIABLE,
    "submit, no such node": Refusal.NO_SUCH_NODE,
    "submit, no such option": Refusal.OTHER,
    "read, unknown": Refusal.NO_SUCH_JOB,
    "drain, not allowed": Refusal.NO_PERMISSION,
    "drain, unknown": Refusal.NO_SUCH_NODE,
}


@pytest.mark.parametrize("what", REFUSED)
def test_refusals_of_each_release_have_their_kind(release: Release, what: str) -> None:
    answer = release.story["answers"][what]
    assert answer["code"] or not answer["stdout"]
    refusal = parse_refusal(answer["stderr"])
    assert refusal is not None, answer
    assert refusal[1] is REFUSED[what]


@pytest.mark.parametrize("what", ["controller away", "controller away, requeue"])
def test_a_controller_that_is_away_leaves_the_outcome_open(release: Release, what: str) -> None:
    answer = release.story["answers"][what]
    assert answer["code"]
    assert parse_refusal(answer["stderr"]) is None


def test_a_requeue_of_a_finished_job_is_silent(release: Release) -> None:
    answer = release.story["answers"]["requeuehold, finished"]
    assert (answer["code"], answer["stdout"], answer["stderr"]) == (0, "", "")


def test_the_script_is_printed_as_it_was_given(release: Release) -> None:
    assert release.story["answers"]["script"]["stdout"] == "#!/bin/bash\nexec sleep 900\n"


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("", ()),
        ("(null)", ()),
        ("n1", ("n1",)),
        ("n[08-10],gpu-a", ("gpu-a", "n08", "n09", "n10")),
        ("r[1-2]n[1-2]", ("r1n1", "r1n2", "r2n1", "r2n2")),
    ],
)
def test_node_lists_are_expanded(text: str, nodes: tuple[str, ...]) -> None:
    assert sorted(parse.expand_nodes(text)) == sorted(nodes)


def test_ten_thousand_nodes_are_as_many_names_and_are_kept_once() -> None:
    nodes = parse.expand_nodes("gpu[00001-10000]")
    assert (len(nodes), nodes[0], nodes[-1]) == (10000, "gpu00001", "gpu10000")
    odd = parse.expand_nodes("gpu[00001,00003,09999]")
    assert odd == ("gpu00001", "gpu00003", "gpu09999")
    assert odd[2] is nodes[9998]


def test_ten_thousand_nodes_are_listed_once_each_whatever_their_partitions() -> None:
    rows = [
        (f"gpu{number:05d}", "10.0.0.1", "idle", partition, "Unknown", "Unknown", "none")
        for number in range(1, 10001)
        for partition in ("all", "main")
    ]
    header = ("NODELIST", *(["X"] * (len(parse.NODE_FIELDS) - 1)))
    text = "".join(MARKS.field.join(row) + MARKS.record + "\n" for row in (header, *rows))
    nodes = parse_nodes(text, MARKS)
    assert len(nodes) == 10000
    assert {node.partitions for node in nodes} == {("all", "main")}


@pytest.mark.parametrize("text", ["n[1-", "n[a-b]"])
def test_a_broken_node_list_is_an_error(text: str) -> None:
    with pytest.raises(ParseError):
        parse.expand_nodes(text)


SINGLE = parse.Names(raw_id="19", job_id="19", user="ann", name="nm", batch_host="n2.example")
ELEMENT = parse.Names(raw_id="20", job_id="18_13", user="ann", name="nm", batch_host="n1")


@pytest.mark.parametrize(
    ("names", "pattern", "path"),
    [
        # As 22.05.8 named these files.
        (SINGLE, "/d/p-%A-%a-%j-%4j-%x-%u-%N-%n-%t-%b-%s-%J-%%-%q",
         "/d/p-19-4294967294-19-0019-nm-ann-n2-0-0-%b-batch-19-%-%q"),
        (ELEMENT, "/d/p-%A-%a-%j-%4j", "/d/p-18-13-20-0020"),
        (SINGLE, "/d/w-%0j-%12j-%3a-%3x", "/d/w-19-0000000019-4294967294-nm"),
        (SINGLE, "/d/back\\\\p-%A-%j", "/d/back\\p-%A-%j"),
        # Ours.
        (SINGLE, "slurm-%j.out", "/home/ann/slurm-19.out"),
        (SINGLE, "/dev/null", "/dev/null"),
        (SINGLE, "(null)", None),
        (SINGLE, "", None),
    ],
)  # fmt: skip
def test_output_paths_are_filled_in_as_slurm_does(names: parse.Names, pattern: str, path: str | None) -> None:
    assert parse.expand_path(pattern, "/home/ann", names) == path


@pytest.mark.parametrize(
    ("path", "in_array", "pattern"),
    [
        ("/w/slurm-19.out", True, "/w/slurm-%A_%a.out"),
        ("/w/slurm-19.out", False, "/w/slurm-19.out"),
        ("/w/slurm-%A_%a.out", True, "/w/slurm-%A_%a.out"),
        ("/w/slurm-2.out", True, "/w/slurm-2.out"),
        ("/elsewhere/slurm-19.out", True, "/elsewhere/slurm-19.out"),
        ("slurm-%j.out", True, "slurm-%j.out"),
    ],
)
def test_the_default_output_of_an_arrays_element_is_where_slurm_writes_it(
    path: str, in_array: bool, pattern: str
) -> None:
    assert parse.output_of(path, {"workdir": "/w", "jobid": "19"}, in_array) == pattern


@pytest.mark.parametrize(
    ("printed", "job_id"),
    [
        ("16+0", "16"),
        ("16+1", "16+1"),
        ("6_7", "6_7"),
        ("6_[2-9%2]", "6_[2-9%2]"),
        ("6_[1-399:2]", "6_[1-399:2]"),
        ("6_[1,3,5,...]", "6_[1,3,5,...]"),
        # As 22.05 prints the elements 0, 1, 4, 9, 16, ... of an array.
        ("62_[0-1,4,9,16,25,36,49,64,81,1", "62_[0-1,4,9,16,25,36,49,64,81,...]"),
        ("62_[0-1,4,", "62_[0-1,4,...]"),
        ("62_[12", "62_[...]"),
        ("62_[", "62_[...]"),
    ],
)
def test_the_id_of_an_array_with_many_gaps_may_be_cut_off_and_spoils_no_listing(printed: str, job_id: str) -> None:
    assert parse.checked_id(printed) == job_id


@pytest.mark.parametrize("printed", ["", "x", "6_", "6_[2-9]x", "6 7", "6_[a]", "٣"])
def test_sbatch_output_without_a_job_id_is_a_parse_error(printed: str) -> None:
    with pytest.raises(ParseError):
        parse.checked_id(printed)


def test_a_pattern_in_a_name_is_not_filled_in_again() -> None:
    names = parse.Names(raw_id="1", job_id="1", user="ann", name="%u%%j", batch_host="n1")
    assert parse.expand_path("/d/%x", "/", names) == "/d/%u%%j"


@given(st.text(), st.text())
def test_no_path_raises(pattern: str, name: str) -> None:
    parse.expand_path(pattern, "/w", parse.Names("1", "1", "u", name, "n1"))


@given(st.text(), st.text(), st.text())
def test_user_text_in_a_listing_cannot_change_another_field(name: str, comment: str, workdir: str) -> None:
    row = [
        "5", "5", "RUNNING", "2", "1", "1", "100", "1795241199", "1000", "ann", "n1", "n1", "main", "5", "N/A", "N/A", "N/A",
        "1", "1:00:00", "1795241190", "1795241190", "(null)", "(null)", "", "(null)", "None", "acc", workdir, "/s", "/o",
        "/e", comment, name,
    ]  # fmt: skip
    marks = parse.Marks("x3b1c55e0d2a94f77f", "x3b1c55e0d2a94f77r")
    text = marks.field.join(["JOBID"] * len(row)) + marks.record + "\n" + marks.field.join(row) + marks.record + "\n"
    (job,) = parse_jobs(text, marks)
    assert (job.state, job.restarts, job.uid, job.nodes, job.name) == ("RUNNING", 2, 1000, ("n1",), name)


@pytest.mark.parametrize(
    "stderr",
    [
        "Invalid job id specified for job 99999\nslurm_suspend error: Invalid job id specified",
        "6_9: Invalid job id specified",
        "Job is pending execution for job 15",
        "Invalid node name specified for job 1",
        "Job is no longer pending execution for job 2",
        "Job has already finished for job 10",
        "Requested operation is presently disabled for job 11",
        "Access/permission denied for job 4",
        "Invalid user id for job 1",
        "scancel: error: Kill job error on job id 4: Access/permission denied",
        "Only batch jobs are accepted or processed for job 7",
        "Job/step already completing or completed for job 7",
    ],
)
def test_a_positive_no_is_a_refusal(stderr: str) -> None:
    refusal = parse_refusal(stderr)
    assert refusal is not None
    assert refusal[0].startswith(stderr.splitlines()[0])


@pytest.mark.parametrize(
    "stderr",
    [
        "",
        "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
        "Socket timed out on send/recv operation for job 4",
        "slurm_update error: Slurm backup controller in standby mode",
        "Zero Bytes were transmitted or received",
        "something nobody has seen",
    ],
)
def test_everything_else_leaves_the_outcome_open(stderr: str) -> None:
    assert parse_refusal(stderr) is None


@pytest.mark.parametrize(
    ("state", "reason", "held", "said"),
    [
        ("COMPLETING", parse.REQUEUED_HELD, True, None),
        ("PENDING", parse.REQUEUED_HELD, True, None),
        ("PENDING", "JobHeldUser", True, None),
        ("REQUEUE_HOLD", "None", True, None),
        ("COMPLETING", "None", False, SlurmRefused),
        ("PENDING", "Resources", False, SlurmRefused),
        ("COMPLETED", "None", False, SlurmRefused),
        ("FAILED", "NonZeroExitCode", False, SlurmRefused),
        ("RUNNING", "None", False, SlurmUnavailable),
    ],
)
def test_whether_a_requeue_was_done_is_read_from_the_job_afterwards(
    state: str, reason: str, held: bool, said: type[Exception] | None
) -> None:
    job = SlurmJob(job_id="1", state=state, reason=reason, held=held)
    with nullcontext() if said is None else pytest.raises(said):
        raise_unless_requeued(job)


def test_a_job_that_slurm_forgot_was_not_requeued() -> None:
    with pytest.raises(SlurmRefused):
        raise_unless_requeued(None)


@pytest.mark.parametrize(("phrase", "kind"), REFUSALS)
def test_each_phrase_of_the_table_is_found(phrase: str, kind: Refusal) -> None:
    refusal = parse_refusal(f"scontrol: noise\nslurm_update error: {phrase} for job 5\n")
    assert refusal is not None
    assert refusal[1] is kind
    assert SlurmRefused(*refusal).terminal is (kind not in MAY_CHANGE)


def test_refusal_for_lack_of_permission_says_what_to_do() -> None:
    refusal = parse_refusal("Access/permission denied for job 4")
    assert refusal is not None
    assert "Slurm operator" in refusal[0]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("365-00:00:00", 31536000.0),
        ("1-02:03:04", 93784.0),
        ("12:00:00", 43200.0),
        ("30:00", 1800.0),
        ("0:00", 0.0),
        ("UNLIMITED", None),
        ("Partition_Limit", None),
        ("INVALID", None),
        ("N/A", None),
        ("", None),
    ],
)
def test_time_limits(text: str, seconds: float | None) -> None:
    assert parse.parse_time_limit(text) == seconds


@pytest.mark.parametrize(
    ("text", "count"),
    [("4", 4), ("2-8", 2), ("1K", 1024), ("1.5K", 1536), ("2K-4K", 2048), ("", None), ("N/A", None)],
)
def test_numbers_of_nodes(text: str, count: int | None) -> None:
    assert parse.parse_count(text) == count


@pytest.mark.parametrize(("text", "job_id"), [("12\n", "12"), ("12;east\n", "12"), ("sbatch: note\n7\n", "7")])
def test_the_id_of_a_submitted_job_is_the_last_line(text: str, job_id: str) -> None:
    assert parse.parse_submitted(text) == job_id


@pytest.mark.parametrize("text", ["", "Submitted batch job 7\n", "seven\n", "7 8\n"])
def test_a_submission_that_names_no_job_is_unknown(text: str) -> None:
    with pytest.raises(ParseError):
        parse.parse_submitted(text)
