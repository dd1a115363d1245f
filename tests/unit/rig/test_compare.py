"""What `make compare` and `make bench ARGS=recovery` read and write; the runs themselves need a Slurm and their time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab.bench.recovery import CASES
from lab.compare.changes import Change, apply, lines_changed
from lab.compare.peers import PEERS, Peer
from lab.live.again import Again, next_run
from lab.live.stage import TRAINER
from slurm_watchdog.detect.registry import KINDS
from tools.docs import recovery

BEFORE = "step 19/90 | loss 0.1 | step_time: 0.5 s\nsaved checkpoint at step 20 to /c.pt\nstep 26/90 | loss 0.1 | step_time: 0.5 s\n"
FAULT = len(BEFORE)


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_the_trainer_as_changed_for_a_peer_is_a_program(peer: Peer) -> None:
    compile(apply(TRAINER.read_text(), peer.changes), peer.name, "exec")


def test_a_change_of_a_line_that_is_not_there_once_is_refused() -> None:
    for source in ("a\nb\n", "x\nx\n"):
        with pytest.raises(ValueError, match="lines 'x'"):
            apply(source, (Change("x", ("y",)),))


def test_lines_that_are_new_or_another_are_counted_and_those_that_stay_are_not() -> None:
    changes = (Change("b", ("new",)), Change("c", ("c", "    more", "", "other"), replaces=True))
    assert apply("a\n  b\n  c\n", changes) == "a\n  b\n  new\n  c\n      more\n  \n  other\n"
    assert lines_changed(changes) == 3


def test_a_run_that_has_begun_and_made_no_step_is_not_the_next_one() -> None:
    assert next_run(BEFORE + "step 27/90 | loss 0.1\nresumed from /c.pt at step 20\n", FAULT) is None


def test_steps_lost_are_counted_from_the_checkpoint_to_the_last_step_of_the_run_before() -> None:
    text = BEFORE + "0: step 27/90 | loss 0.1\n0: resumed from /c.pt at step 20\n0: step 21/90 | loss 0.1\n"
    assert next_run(text, FAULT) == Again(resumed_at=20, first_step=21, steps_lost=7, starts=1)


def test_a_run_that_began_twice_is_seen_as_that() -> None:
    text = BEFORE + "resumed from /c.pt at step 20\n" * 2 + "step 21/90 | loss 0.1\n"
    assert next_run(text, FAULT) == Again(resumed_at=20, first_step=21, steps_lost=6, starts=2)


def test_every_case_of_recovery_has_a_name_of_its_own_and_kinds_that_exist() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert {kind for case in CASES for kind in case.kinds} <= set(KINDS)


def test_a_case_without_a_new_step_misses_its_goal_in_the_table(tmp_path: Path) -> None:
    row = {
        "case": "hang", "way": "in_place", "verdict_s": 21.0, "kind": "collective_hang", "right_rank": True,
        "first_step_s": None, "steps_lost": None, "left_out": [], "healthy_left_out": [], "date": "2026-11-23", "commit": "4711abcd",
    }  # fmt: skip
    kept = {"cases": {"hang": {"words": "hang", "goal_s": 40.0}}, "results": [row]}
    file = tmp_path / "recovery.json"
    file.write_text(json.dumps(kept))
    table = recovery.recovery(file).splitlines()
    assert table[-1] == "| hang | in place | 21 s, `collective_hang` | right | none: **missed** | 40 s | - | - |"
    assert "2026-11-23, 4711abcd" in table[0]


def test_a_peer_that_ends_a_healthy_job_is_told_of(tmp_path: Path) -> None:
    about = {"what": "x", "distribution": "", "release": "", "lines_changed": 2, "remark": ""}
    row = {"peer": "p", "scene": "evaluation", "verdict_s": 62.0, "right_rank": None, "first_step_s": None, "starts": 0,
           "job_state": "RUNNING", "watched_s": 140.0, "problem": ""}  # fmt: skip
    scenes = {name: name for name in ("hang", "killed", "power", "d_state", "evaluation")}
    kept = {"date": "2026-11-23", "commit": "4711abcd", "scenes": scenes, "peers": {"p": about}, "outcomes": [row]}
    file = tmp_path / "results.json"
    file.write_text(json.dumps(kept))
    text = recovery.compare(file, tmp_path / "none.json")
    assert "| x | - | - | - | - | 1 of 1 | 2 |" in text.splitlines()
