"""The options of sbatch that a listing of a job tells."""

from __future__ import annotations

import pytest

from slurm_watchdog.slurm import options, parse
from slurm_watchdog.slurm.node_names import ParseError

MARKS = parse.Marks("q7f", "q8r")
PLAIN = {
    "jobid": "5", "jobarrayid": "5", "arraytaskid": "N/A", "state": "RUNNING", "numnodes": "2", "numtasks": "4294967294",
    "cpus-per-task": "1", "ntpernode": "0", "tres-per-node": "N/A", "tres-per-job": "N/A", "tres-per-task": "N/A",
    "tres-per-socket": "N/A", "licenses": "(null)", "oversubscribe": "OK", "contiguous": "0",
    "tres-alloc": "cpu=2,node=2,billing=2", "feature": "(null)", "workdir": "/w", "stdout": "/w/slurm-5.out",
    "stderr": "/w/slurm-5.out",
}  # fmt: skip


def told(job_id: str | None = None, **fields: str) -> tuple[str, ...]:
    row = {**PLAIN, **{name.replace("_", "-"): value for name, value in fields.items()}}
    text = "".join(
        MARKS.field.join(values) + MARKS.record + "\n"
        for values in (["JOBID"] * len(options.OPTION_FIELDS), [row[name] for name in options.OPTION_FIELDS])
    )
    return options.options_of(text, MARKS, row["jobarrayid"] if job_id is None else job_id)


def test_a_job_that_asked_for_nothing_gets_no_option() -> None:
    assert told() == ("--cpus-per-task=1",)


@pytest.mark.parametrize(
    ("fields", "option"),
    [
        ({"numtasks": "16"}, "--ntasks=16"),
        ({"cpus_per_task": "8"}, "--cpus-per-task=8"),
        ({"ntpernode": "8"}, "--ntasks-per-node=8"),
        ({"tres_per_node": "gres:gpu:8"}, "--gres=gpu:8"),
        ({"tres_per_node": "gres/gpu:a100:4,gres/shard:2"}, "--gres=gpu:a100:4,shard:2"),
        ({"tres_per_job": "gres:gpu:16"}, "--gpus=16"),
        ({"tres_per_job": "gres/gpu:h100:16"}, "--gpus=h100:16"),
        ({"tres_per_task": "gres/gpu=1"}, "--gpus-per-task=1"),
        ({"tres_per_socket": "gres:gpu:2"}, "--gpus-per-socket=2"),
        ({"licenses": "matlab:2"}, "--licenses=matlab:2"),
        ({"feature": "a100&ib; rm -rf"}, "--constraint=a100&ib; rm -rf"),
        ({"oversubscribe": "NO"}, "--exclusive"),
        ({"oversubscribe": "USER"}, "--exclusive=user"),
        ({"contiguous": "1"}, "--contiguous"),
        ({"tres_alloc": "cpu=2,mem=1000G,node=2,billing=2,gres/gpu=16"}, "--mem=512000M"),
        ({"tres_alloc": "cpu=2,mem=1.50T,node=2"}, "--mem=786432M"),
        ({"tres_alloc": "mem=101M"}, "--mem=51M"),
        ({"arraytaskid": "3", "jobarrayid": "4_3"}, "--array=3"),
        ({"stdout": "/w/log-%j.txt"}, "--output=/w/log-%j.txt"),
        ({"stderr": "/w/err"}, "--error=/w/err"),
    ],
)
def test_options_of_a_listed_job_are_given_to_sbatch_again(fields: dict[str, str], option: str) -> None:
    assert option in told(**fields)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        # What a job that has no nodes is listed with is no wish of its.
        ({"tres_alloc": "cpu=1,mem=1M,node=1", "state": "PENDING"}, "--mem"),
        ({"tres_alloc": "cpu=1,mem=1M,node=1", "state": "CANCELLED"}, "--mem"),
        ({"tres_alloc": "(null)"}, "--mem"),
        ({"stdout": "slurm-%j.out", "stderr": "(null)"}, "--output"),
        ({"stdout": "/w/slurm-%A_%a.out", "stderr": ""}, "--output"),
        ({"arraytaskid": "2-9%2", "jobarrayid": "5_[2-9%2]"}, "--array"),
        ({"tres_per_task": "cpu:1"}, "--gpus"),
    ],
)
def test_options_that_a_job_was_not_given_are_left_out(fields: dict[str, str], word: str) -> None:
    assert not [option for option in told(**fields) if option.startswith(word)]


def test_a_listing_of_another_job_is_noticed() -> None:
    with pytest.raises(ParseError, match="is about"):
        told("6")
