"""The parsers of Slurm's answers, on what Slurm really printed."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from watchdog.model import SlurmJob
from watchdog.slurm import parse

RELEASES = sorted((Path(__file__).parent / "slurm_captures").iterdir())
MARKS = parse.Marks("q7f", "q8r")
GUESSED = parse.Marks("xF1f", "xR2r")


@pytest.fixture(params=RELEASES, ids=lambda path: path.name)
def release(request: pytest.FixtureRequest) -> Path:
    return request.param


def jobs_of(release: Path) -> dict[str, SlurmJob]:
    return {job.job_id: job for job in parse.parse_jobs((release / "jobs.txt").read_text(), MARKS)}


def test_hostile_names_stay_names(release: Path) -> None:
    jobs = jobs_of(release)
    assert jobs["25"].name == "line\nbreak JobId=999 JobState=FAILED"
    assert jobs["25"].comment == "cmt line\nbreak JobId=999 JobState=FAILED"
    assert jobs["25"].state == "RUNNING"
    assert jobs["27"].name == "—unicode 你好"
    assert jobs["24"].name == "two  words | JobState=COMPLETED"


def test_a_running_job_is_read_whole(release: Path) -> None:
    job = jobs_of(release)["23"]
    assert job == SlurmJob(
        job_id="23", state="RUNNING", reason="None", name="plain", user="root", uid=0, partition="main", nodes=("n1",),
        batch_host="n1", restarts=0, start_at=1795241199.0, requeueable=True, stdout="/tmp/jc/23-plain.out",
        stderr="/tmp/jc/23-plain.out", workdir="/tmp", comment="cmt plain", raw_id="23",
    )  # fmt: skip


def test_a_requeued_job_is_held_and_has_one_more_restart(release: Path) -> None:
    for job_id in ("24", "34"):
        job = jobs_of(release)[job_id]
        assert (job.state, job.held, job.restarts) == ("COMPLETING", True, 1)


def test_a_job_held_by_its_user_is_held_and_a_pending_one_has_no_start(release: Path) -> None:
    jobs = jobs_of(release)
    assert (jobs["33"].held, jobs["33"].start_at, jobs["33"].nodes, jobs["33"].batch_host) == (
        True,
        None,
        (),
        None,
    )
    assert (jobs["32"].held, jobs["32"].requeueable) == (False, False)


def test_ids_are_as_commands_want_them(release: Path) -> None:
    jobs = jobs_of(release)
    assert {"29_0", "29_1", "29_[2-3%2]", "30", "30+1"} <= set(jobs)
    assert jobs["29_1"].stdout == "/tmp/jc/29_1.out"
    # What the processes have as SLURM_JOB_ID; the last element to start has the id of the whole array.
    assert (jobs["29_1"].process_id, jobs["30+1"].process_id, jobs["23"].process_id) == ("36", "31", "23")


def test_an_empty_queue_is_an_answer_and_no_output_is_none(release: Path) -> None:
    assert parse.parse_jobs((release / "jobs_none.txt").read_text(), MARKS) == ()
    with pytest.raises(parse.ParseError, match="empty"):
        parse.parse_jobs("", MARKS)


def test_a_field_that_squeue_does_not_know_is_noticed(release: Path) -> None:
    # squeue prints an empty column, complains on stderr and exits with 0.
    fields = (*parse.JOB_FIELDS[:3], "nosuch", *parse.JOB_FIELDS[3:])
    with pytest.raises(parse.ParseError, match="21 fields were asked for"):
        parse.parse_table((release / "jobs_unknown_field.txt").read_text(), fields, MARKS)


def test_a_guessed_mark_spoils_the_answer_and_forges_nothing(release: Path) -> None:
    with pytest.raises(parse.ParseError):
        parse.parse_jobs((release / "jobs_guessed_mark.txt").read_text(), GUESSED)


def test_an_answer_cut_anywhere_is_refused_or_ends_at_a_record(release: Path) -> None:
    text = (release / "jobs.txt").read_text()
    whole = parse.parse_jobs(text, MARKS)
    for end in range(0, len(text) - 1, 7):
        try:
            jobs = parse.parse_jobs(text[:end], MARKS)
        except parse.ParseError:
            continue
        assert text[:end].endswith("q8r\n")
        assert jobs == whole[: len(jobs)]


def test_excluded_nodes_are_those_of_the_job(release: Path) -> None:
    text = (release / "excluded.txt").read_text()
    assert parse.parse_excluded(text, MARKS, "23") == ("n2",)
    assert parse.parse_excluded(text, MARKS, "29_0") == ()
    with pytest.raises(parse.ParseError, match="99"):
        parse.parse_excluded(text, MARKS, "99")


def test_nodes_have_their_address_and_flags(release: Path) -> None:
    nodes = {node.name: node for node in parse.parse_nodes((release / "nodes.txt").read_text(), MARKS)}
    assert nodes["n1"].address == "10.77.2.11"
    assert nodes["n1"].reason == ""
    assert "DRAIN" in nodes["n3"].state
    assert nodes["n3"].reason == "bad | disk"


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


@pytest.mark.parametrize("text", ["n[1-", "n[a-b]"])
def test_a_broken_node_list_is_an_error(text: str) -> None:
    with pytest.raises(parse.ParseError):
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


def test_a_pattern_in_a_name_is_not_filled_in_again() -> None:
    names = parse.Names(raw_id="1", job_id="1", user="ann", name="%u%%j", batch_host="n1")
    assert parse.expand_path("/d/%x", "/", names) == "/d/%u%%j"


@given(st.text(), st.text())
def test_no_path_raises(pattern: str, name: str) -> None:
    parse.expand_path(pattern, "/w", parse.Names("1", "1", "u", name, "n1"))


@given(st.text(), st.text(), st.text())
def test_what_a_user_writes_can_not_change_another_field(name: str, comment: str, workdir: str) -> None:
    row = [
        "5", "5", "RUNNING", "2", "1", "1", "100", "1795241199", "1000", "ann", "n1", "n1", "main", "None", "acc", workdir,
        "/o", "/e", comment, name,
    ]  # fmt: skip
    marks = parse.Marks("x3b1c55e0d2a94f77f", "x3b1c55e0d2a94f77r")
    text = (
        marks.field.join(["JOBID"] * len(row))
        + marks.record
        + "\n"
        + marks.field.join(row)
        + marks.record
        + "\n"
    )
    (job,) = parse.parse_jobs(text, marks)
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
    assert parse.parse_refusal(stderr) == stderr.splitlines()[0]


@pytest.mark.parametrize(
    "stderr",
    [
        "",
        "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
        "Socket timed out on send/recv operation for job 4",
        "Job can not be altered now, try again later for job 4",
        "slurm_update error: Slurm backup controller in standby mode",
        "Zero Bytes were transmitted or received",
        "something nobody has seen",
    ],
)
def test_everything_else_leaves_the_outcome_open(stderr: str) -> None:
    assert parse.parse_refusal(stderr) is None


@pytest.mark.parametrize(
    ("state", "reason", "held", "done"),
    [
        ("COMPLETING", parse.REQUEUED_HELD, True, True),
        ("PENDING", parse.REQUEUED_HELD, True, True),
        ("PENDING", "JobHeldUser", True, True),
        ("REQUEUE_HOLD", "None", True, True),
        ("COMPLETING", "None", False, False),
        ("PENDING", "Resources", False, False),
        ("COMPLETED", "None", False, False),
        ("FAILED", "NonZeroExitCode", False, False),
        ("RUNNING", "None", False, None),
    ],
)
def test_what_a_silent_requeue_did_is_read_from_the_job(
    state: str, reason: str, held: bool, done: bool | None
) -> None:
    job = SlurmJob(job_id="1", state=state, reason=reason, held=held)
    assert parse.judge_requeue(job)[0] is done


def test_a_job_that_slurm_forgot_was_not_requeued() -> None:
    assert parse.judge_requeue(None)[0] is False
