"""What Slurm hides from the user that asks, what its release does to heterogeneous jobs, and a token that ends."""

from __future__ import annotations

import asyncio
import base64
import json
import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from slurm_watchdog.controller.policy.guards import why_not
from slurm_watchdog.controller.policy.placement import objection_to_excluding
from slurm_watchdog.model.actions import Rung
from slurm_watchdog.model.slurm import SlurmJob, SlurmNode, SlurmView
from slurm_watchdog.slurm.client import SlurmUnavailable
from slurm_watchdog.slurm.command_line import (
    Access,
    CommandLineSlurm,
    hides_jobs,
    parse_config,
    token_ends_at,
    token_note,
    why_not_requeue_het,
)
from slurm_watchdog.slurm.commands import Commands
from slurm_watchdog.slurm.listings import Listings, merge_components
from tests.builders.views import slurm_job

CONFIG = """Configuration data as of 2026-11-22T07:43:31
AccountingStorageType   = accounting_storage/slurmdbd
PrivateData             = jobs,nodes
SlurmUser               = slurm(64030)
SLURM_VERSION           = 25.11.7
"""


def test_slurms_configuration_says_release_user_and_what_is_private() -> None:
    assert parse_config(CONFIG) == Access((25, 11), frozenset({"jobs", "nodes"}), 64030)
    assert parse_config("slurm_load_ctl_conf error: Unable to contact") == Access()


@pytest.mark.parametrize(
    ("uid", "level", "hidden"),
    [(0, "", False), (64030, "", False), (1000, "", True), (1000, "None", True), (1000, "Operator", False), (1000, "Administrator", False)],
)  # fmt: skip
def test_jobs_are_hidden_from_a_user_who_is_neither_slurms_user_nor_operator(
    uid: int, level: str, hidden: bool
) -> None:
    access = Access((25, 11), frozenset({"jobs"}), 64030, level)
    assert bool(hides_jobs(access, uid)) is hidden
    assert hides_jobs(Access((25, 11), frozenset({"nodes"}), 64030, level), uid) == ""


class Listed(Listings):
    """Listings of one job, whatever is asked."""

    def __init__(self, *jobs: SlurmJob) -> None:
        self.jobs = jobs

    async def view(self) -> SlurmView:
        return SlurmView(jobs=self.jobs, nodes=())

    async def job(self, job_id: str) -> SlurmJob | None:
        return next((job for job in self.jobs if job.job_id == job_id), None)

    async def node(self, name: str) -> SlurmNode | None:
        return None


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """scontrol that prints CONFIG, and a sacctmgr that knows no user."""
    (tmp_path / "config").write_text(CONFIG)
    for name, text in (("scontrol", f"cat {tmp_path}/config"), ("sacctmgr", "exit 1")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    return tmp_path


def test_a_listing_that_hides_jobs_is_not_taken_for_the_whole_and_absence_is_unknown(tools: Path) -> None:
    client = CommandLineSlurm(str(tools), listings=Listed(slurm_job(job_id="1")), uid=1000)
    assert "PrivateData=jobs" in asyncio.run(client.read_view()).partial
    job = asyncio.run(client.read_job("1"))
    assert job is not None and job.job_id == "1"
    with pytest.raises(SlurmUnavailable, match="PrivateData=jobs") as caught:
        asyncio.run(client.read_job("2"))
    assert caught.value.answered


def test_nothing_is_hidden_from_root(tools: Path) -> None:
    client = CommandLineSlurm(str(tools), listings=Listed(slurm_job(job_id="1")), uid=0)
    assert asyncio.run(client.read_view()).partial == ""
    assert asyncio.run(client.read_job("2")) is None


FIRST = slurm_job(job_id="1", raw_id="1", nodes=("n1",), node_count=1, het_job_id="1", het_offset=0)
SECOND = replace(FIRST, job_id="1+1", raw_id="2", nodes=("n2", "n3"), node_count=2, het_offset=1)


def test_the_components_of_a_heterogeneous_job_are_one_job() -> None:
    (job,) = merge_components((SECOND, FIRST))
    assert (job.job_id, job.nodes, job.node_count, job.component_ids) == ("1", ("n1", "n2", "n3"), 3, ("2",))
    assert merge_components((SECOND,)) == (SECOND,), "its first component is not listed"
    other = slurm_job(job_id="9")
    assert merge_components((other, FIRST, SECOND))[0] == other


@pytest.mark.parametrize(
    ("first", "second", "whole", "nodes"),
    [
        ("RUNNING", "RUNNING", "RUNNING", ("n1", "n2", "n3")),
        ("PENDING", "COMPLETING", "COMPLETING", ("n2", "n3")),
        ("COMPLETED", "COMPLETED", "COMPLETED", ("n1",)),
        ("RUNNING", "COMPLETED", "RUNNING", ("n1",)),
    ],
)
def test_a_heterogeneous_job_stands_as_its_first_component_and_ends_with_its_last(
    first: str, second: str, whole: str, nodes: tuple[str, ...]
) -> None:
    (job,) = merge_components((replace(FIRST, state=first), replace(SECOND, state=second)))
    assert (job.state, job.nodes) == (whole, nodes)


@pytest.mark.parametrize(
    ("version", "may"),
    [((22, 5), True), ((24, 11), True), ((25, 5), False), ((25, 11), False), ((26, 5), True), (None, False)],
)
def test_a_heterogeneous_job_is_requeued_only_where_slurm_does_not_cancel_it(
    version: tuple[int, int] | None, may: bool
) -> None:
    assert (why_not_requeue_het(version) == "") is may
    job = replace(FIRST, not_requeueable=why_not_requeue_het(version))
    assert (why_not(Rung.REQUEUE, job, None) is None) is may
    assert why_not(Rung.RESUBMIT, job, None) is not None


def test_the_client_says_of_each_heterogeneous_job_whether_its_release_cancels_it(tools: Path) -> None:
    client = CommandLineSlurm(str(tools), listings=Listed(FIRST), uid=0)
    assert "Slurm 25.11 may cancel" in asyncio.run(client.read_view()).jobs[0].not_requeueable
    job = asyncio.run(client.read_job("1"))
    assert job is not None and job.not_requeueable


def test_no_node_is_excluded_from_a_heterogeneous_job() -> None:
    known = [SlurmNode(name=f"n{number}", address="", state="IDLE") for number in range(9)]
    assert "heterogeneous" in (objection_to_excluding(FIRST, ("n1",), known) or "")


def token(**claims: float) -> str:
    parts = (json.dumps({"alg": "HS256"}), json.dumps(claims), "signature")
    return ".".join(base64.urlsafe_b64encode(part.encode()).decode().rstrip("=") for part in parts)


@pytest.mark.parametrize(("left_s", "said"), [(3600.0, ""), (300.0, "ends in 5 min"), (-120.0, "ended 2 min ago")])
def test_a_token_is_reported_before_it_ends(left_s: float, said: str) -> None:
    notes = " ".join(token_note(token(exp=1e9 + left_s), 1e9))
    assert said in notes
    assert bool(notes) is bool(said)


@pytest.mark.parametrize("text", ["", "x", "a.b.c", "a.!!!.c", token(), "é.é.é", ".".join(["A" * 5] * 3)])
def test_of_a_token_that_says_nothing_nothing_is_said(text: str) -> None:
    assert token_ends_at(text) is None
    assert tuple(token_note(text, 1e9)) == ()


def test_token_file_is_read_for_each_command(tmp_path: Path) -> None:
    file = tmp_path / "token"
    commands = Commands("", os.environ, str(file))
    for text in ("first", "SLURM_JWT=second\n"):
        file.write_text(text)
        answer = asyncio.run(commands.run("sh", "-c", "echo $SLURM_JWT"))
        assert answer.stdout.strip() == text.strip().removeprefix("SLURM_JWT=")
    file.unlink()
    with pytest.raises(SlurmUnavailable, match=r"slurm\.token_file"):
        asyncio.run(commands.run("true"))
