"""What people read in a terminal, whole: a file for each scene in tests/captures/screens, piped, coloured on 80 columns
and with NO_COLOR on 120. `SCREENS=write pytest …` writes them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.builders.cli import HOSTILE, FakeController, action, explanation, incident, job, operation, run, status
from tests.builders.time_zone import time_zone

SCREENS = Path(__file__).parents[2] / "captures" / "screens"
AT = 1_700_000_000.0
LOOKS = {
    "piped": {},
    "80 columns": {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "80"},
    "120 columns, NO_COLOR": {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "120", "NO_COLOR": "1"},
}
LONG = "Job 4711 hangs after step 120: no step for 61 s (limit 60 s); rank 2 (pid 471 on n3) waits for its data loader."


def health(state: str, level: str, reason: str = "", todo: str = "") -> dict[str, Any]:
    return {"state": state, "level": level, "reason": reason, "todo": todo}


WARY = status(
    level="critical",
    headline="3 jobs watched (1 hangs), 3 nodes reporting, 1 silent, mode observe.",
    jobs=[
        job(),
        job(job_id="4712", name=HOSTILE, user="bob", health=health("hangs", "critical", "rank 2 is stuck", "restart it"),
            restarts=2, restarts_in_place=1, progress_age_s=400.0, ranks_alive=7, saved_age_s=65.0, checkpoint_step=None),
        job(job_id="4713_2", name="pretrain-with-a-long-name-of-the-run", nodes=[], step=None, total_steps=None, step_s=None,
            progress_age_s=None, limit_s=None, ranks=None, ranks_alive=None, checkpoint_step=None,
            health=health("not judged", "unknown", "no step could be read", "print the step")),
    ],
    open=[
        {"id": "7f3a", "kind": "collective_hang", "state": "firing", "summary": LONG, "opened_at": AT, "quiet": "silenced by ann"},
        {"id": "9c01", "kind": "gpu_fault", "state": "firing", "summary": "GPU 3 of n2 fell off the bus.", "summary_at": AT, "opened_at": AT},
        {"id": "aa02", "kind": "slow_job", "state": "pending", "summary": "Job 1 is slow.", "opened_at": AT},
    ],
    incidents={"firing": 2, "pending": 1, "resolved": 2},
    silences=[{"id": "s1", "nodes": ["n1"], "by": "ann", "reason": "a cable", "at": 1.0, "until": AT}],
    left_out=[{"count": 12, "whose": "processes", "uid": 1501, "job_id": "4712", "what": "processes", "age_s": 1.0}],
)  # fmt: skip
DIAGNOSIS = {
    "ranks": 8, "missing": [], "is_hang": True, "class": "collective_hang",
    "summary": "Job 4711 hangs: rank 3 waits for its data loader, 7 ranks wait for it in all_reduce.",
    "groups": [{"frames": ["all_reduce (d.py)", "train (t.py)"], "ranks": [0, 1, 2, 4, 5, 6, 7], "hosts": ["n1", "n2"], "place": "collective"},
               {"frames": ["wait (queue.py:171)"], "ranks": [3], "hosts": ["n2"], "place": ""}],
    "culprits": [{"rank": 3, "host": "n2", "pid": 99, "reason": "data loader, in wait (queue.py:171)", "path": "/data/shard-17.tar"}],
    "undumped": [{"rank": 5, "host": "n3", "pid": 7, "reason": "py-spy: Permission denied"}, {"host": "n4"}],
    "differences": [{"line": "rank 3 on n2: NCCL_SOCKET_IFNAME is eth1, that of the 7 others eth0"}],
    "filesystems": [{"mount": "/data", "summary": "/data answers slowly on n2 alone."}],
    "hints": [{"usually": "A slow file.", "try_next": "Look at /data.", "documented": "https://example.org/x"}], "nodes": [],
}  # fmt: skip
ENDED = {
    "ok": True,
    "ended_at": AT + 90,
    "detail": "trains again",
    "resumed_at_step": 101,
    "steps_lost": 20,
    "downtime_s": 95.0,
}
FAILED = {"ok": False, "ended_at": AT + 90, "detail": "no checkpoint within 1800 s."}
STAGES = [
    operation("write_kill_switch", "done", "on 3 nodes"),
    operation("wait_checkpoint", "failed", "no file", 2),
    operation("confirm", None),
]
FULL = explanation(
    incident=incident(
        summary=LONG, evidence=["7 ranks wait in all_reduce", LONG, {"rank": 2}, HOSTILE], details_for="ann and operators",
        culprits=[{"node": "n3", "rank": 2, "pid": 471, "reason": "waits for its data loader"}, {"mount": "/data", "path": "/data/shard-17.tar"}],
        decisions=[{"action": "none", "verdict": "observed", "by": "mode", "reason": "mode is observe"},
                   {"action": "requeue", "verdict": "allowed", "by": "policy", "reason": "no guard objects"}],
    ),
    timeline=[{"at": AT, "text": "pending: no step for 61 s"}, {"at": AT + 60, "text": f"firing: {LONG}"}, {"at": AT + 61, "text": HOSTILE}],
    evidence=[{"at": AT, "kind": "stacks", "document": {"n3": ["wait (queue.py:171)"]}, "taken": "1 s after it began"},
              {"at": AT, "kind": "log", "document": "\n".join(f"line {n}" for n in range(60))},
              {"at": AT, "kind": "processes", "document": {str(n): n for n in range(60)}},
              {"at": AT, "kind": "diagnosis", "number": 1, "document": DIAGNOSIS},
              {"at": AT, "kind": "diagnosis", "document": {"ranks": "many"}},
              {"at": AT, "kind": "node", "number": 4, "taken": "1 s after"}, {"at": AT, "kind": "node", "number": 5, "taken": "9 s after"}],
    actions=[{**action(STAGES, None), "ladder": ["evidence", "requeue"], "waiting": {"for": "waiting for a complete checkpoint", "until": AT}},
             {**action([], None), "verdict": "suppressed", "rule": "policy.kinds"}],
)  # fmt: skip
OVER = explanation(
    incident=incident(state="resolved", culprits=[], decisions=[], resolution="it trains again", inhibited_by="suspicion:gpu_fault"),
    timeline=[], evidence=[], actions=[action(STAGES[:2], ENDED), action([], FAILED)],
)  # fmt: skip
NODE = {
    "node": "n1",
    "score": 2.86,
    "suspect": True,
    "place": "GPU-1",
    "recent": 3,
    "events": 4,
    "last_at": AT,
    "reasons": "3 x gpu_fault (Xid 79)",
}
PAST = {
    "at": AT,
    "kind": "gpu_fault",
    "what": "Xid 79",
    "place": "GPU-1",
    "node": "n1",
    "counts_for": "n1",
    "job_id": "7",
    "incident_id": "i1",
    "weight": 0.97,
}
RUN = {
    "job_id": "7", "restarts": 0, "began_at": AT, "ended_at": AT + 36000, "seen_at": AT + 36000, "first_rise_at": AT + 900,
    "last_rise_at": AT + 9000, "step_s": 10.0, "first_step": 0, "last_step": 810, "uid": 1501, "user": "ann", "account": "vision",
    "partition": "gpu", "name": "gpt", "nodes": 10, "state": "RUNNING",
}  # fmt: skip
JOB = {
    "job_id": "7", "name": "gpt", "user": "ann", "account": "vision", "partition": "gpu", "nodes": 10, "runs": 2, "began_at": AT,
    "ended_at": AT + 46800, "allocated_h": 125.0, "measured_h": 125.0, "effective_h": 40.0, "share": 0.32, "queued_h": 0.5, "failures": 1,
    "lost_h": [["collective_hang", 75.0], ["recomputed steps", 5.0], ["start", 0.5]], "to_be_noticed_h": [["collective_hang", 15.0]],
}  # fmt: skip
REPORT = {
    "since": AT, "until": AT + 86400, "jobs": [JOB, {**JOB, "job_id": "8", "name": HOSTILE, "nodes": 1, "share": None, "lost_h": []}], "known_jobs": 17,
    "allocated_h": 1275.5, "measured_h": 1000.0, "effective_h": 331.0, "lost_h": JOB["lost_h"], "to_be_noticed_h": JOB["to_be_noticed_h"],
    "failures": 12, "node_hours_between_failures": 106.3, "incidents": [["collective_hang", 3], ["gpu_fault", 1]], "nodes": [["n1", 2], ["n7", 1]],
    "savings": {"compared": 2, "unknown": 1, "saved_h": 12.5, "usual_wait_s": 7200.0, "observed": 1, "would_save_h": 70.0, "recovered": 1},
    "share": 0.33, "runs": [RUN, {**RUN, "restarts": 1, "began_at": AT + 37800, "ended_at": None, "state": "", "first_step": None}],
}  # fmt: skip
JOBS = [
    {"job_id": "7", "user": "ann", "nodes": ["n1"], "step": 12},
    {"job_id": "8", "user": "bob", "nodes": ["n2"], "why_not": "it hangs: its loop cannot see a kill switch"},
]
ASKED = {
    ("GET", "/v1/requests/jobs"): JOBS,
    ("POST", "/v1/requests"): [{"job_id": "7", "verdict": "allowed", "incident_id": "i7"}],
    ("POST", "/v1/requests/progress"): {"i7": {"decision_id": "d7", "end": {"ok": True, "ended_at": 1.0, "detail": "the job has saved"}}},
}  # fmt: skip
ALLOWED = {
    "incident_id": "7f3a",
    "decision_id": "d1",
    "verdict": "allowed",
    "by": "operator_restart",
    "reason": "no guard objects",
}
SILENCES = {
    "id": "s1",
    "silences": [
        {"id": "s1", "nodes": ["n1"], "by": "ann", "reason": HOSTILE, "at": 1.0, "until": AT},
        {"id": "s2", "jobs": ["7"], "by": "bob", "at": 1.0, "until": AT},
    ],
}
STORY = {("GET", "/v1/report?job=7&from=0"): REPORT, ("GET", "/v1/incidents?job=7"): [incident()],
         ("GET", "/v1/incidents/7f3a"): FULL}  # fmt: skip
SCENES: dict[str, tuple[str, dict[tuple[str, str], Any]]] = {
    "status": ("status", {("GET", "/v1/status"): WARY}),
    "status well": ("status", {("GET", "/v1/status"): status()}),
    "incidents": ("incidents", {("GET", "/v1/incidents"): [incident(summary=LONG), incident(id="00aa", state="resolved", culprits=[], decisions=[]),
                                incident(id="9c01", kind="gpu_fault", inhibited_by="7f3a", summary=HOSTILE, job_id=None, opened_at=None)]}),
    "incidents none": ("incidents --job 7", {("GET", "/v1/incidents?job=7"): []}),
    "show": ("show 7f3a", {("GET", "/v1/incidents/7f3a"): FULL}),
    "show observed": ("show 7f3a", {("GET", "/v1/incidents/7f3a"): explanation(evidence=[], actions=[], incident=incident(summary=HOSTILE, culprits=[{"node": HOSTILE, "path": HOSTILE, "reason": HOSTILE}],
                      decisions=[{"action": "requeue", "verdict": "observed", "by": HOSTILE, "reason": HOSTILE}]))}),
    "show resolved": ("show 7f3a", {("GET", "/v1/incidents/7f3a"): OVER}),
    "show all": ("show 7f3a --all", {("GET", "/v1/incidents/7f3a"): FULL}),
    "show all resolved": ("show 7f3a --all", {("GET", "/v1/incidents/7f3a"): OVER}),
    "nodes": ("nodes", {("GET", "/v1/nodes"): {"suspect_from": 2.25, "suspects": 1, "known": 3, "nodes": [NODE, {**NODE, "node": "n2", "suspect": False, "score": 0.5, "last_at": None}]}}),
    "nodes none": ("nodes", {("GET", "/v1/nodes"): {}}),
    "show node": ("show n1", {("GET", "/v1/incidents/n1"): (404, {"error": "no incident n1"}), ("GET", "/v1/nodes/n1"): {**NODE, "suspect_from": 2.25, "history": [PAST, {**PAST, "node": "n2"}, {**PAST, "counts_for": "n3"}, {**PAST, "why_not": "incident o1 explains it"}]}}),
    "node none": ("nodes n1", {("GET", "/v1/nodes/n1"): {**NODE, "history": []}}),
    "report": ("report --from 2023-11-01 --to 2023-12-01", {("GET", "/v1/report?from=1698796800.0&to=1701388800.0"): REPORT}),
    "report few": ("report --from 2023-11-01 --to 2023-12-01", {("GET", "/v1/report?from=1698796800.0&to=1701388800.0"): REPORT | {
        "failures": 1, "incidents": [], "nodes": [], "to_be_noticed_h": [], "savings": {**REPORT["savings"], "compared": 0, "observed": 0}, "known_jobs": 2,
        "allocated_h": 0.1, "measured_h": 0.1, "effective_h": 0.07, "lost_h": [["collective_hang", 0.03]]}}),
    "report none": ("report --from 2023-11-01 --to 2023-12-01", {("GET", "/v1/report?from=1698796800.0&to=1701388800.0"): REPORT | {"jobs": []}}),
    "show job": ("show 7 --no-accounting", STORY),
    "show job all": ("show 7 --no-accounting --all", STORY),
    "show job unknown": ("show 7 --no-accounting", STORY | {("GET", "/v1/report?job=7&from=0"): {**REPORT, "jobs": [], "runs": []}, ("GET", "/v1/incidents?job=7"): [],
                         ("GET", "/v1/incidents/7"): (404, {"error": "no incident 7"})}),
    "diagnose": ("diagnose 4711", {("POST", "/v1/diagnose"): {"id": "d1"}, ("GET", "/v1/diagnose/d1"): {"id": "d1", "state": "done", "age_s": 3.0, "diagnosis": DIAGNOSIS}}),
    "silence": ("silence", {("GET", "/v1/silences"): SILENCES}),
    "silence none": ("silence", {("GET", "/v1/silences"): {}}),
    "pause": ("pause moving", {("POST", "/v1/pause"): {"paused": {"reason": "moving", "by": "ann", "at": 1.0}}}),
    "resume": ("resume", {("POST", "/v1/resume"): {"paused": None}}),
    "save-all dry run": ("restart --save-only --all --dry-run", ASKED),
    "save-all": ("restart --save-only --all", ASKED),
    "save-all none": ("restart --save-only --all", {("GET", "/v1/requests/jobs"): []}),
    "restart": ("restart 4711", {("POST", "/v1/restart"): ALLOWED, ("POST", "/v1/requests/progress"): {"7f3a": action(STAGES[:2], ENDED)}}),
    "restart refused": ("restart 4711", {("POST", "/v1/restart"): {**ALLOWED, "verdict": "suppressed", "by": "storage", "reason": "/s does not answer"}}),
    "restart observed": ("restart 4711", {("POST", "/v1/restart"): {**ALLOWED, "verdict": "observed", "by": "mode", "reason": "mode is off"}}),
    "restart cancel": ("restart 4711 --cancel", {("POST", "/v1/restart/cancel"): {"cancelled": True}}),
}  # fmt: skip


@pytest.mark.parametrize("scene", SCENES)
def test_a_screen_is_as_it_was(tmp_path: Path, scene: str) -> None:
    words, answers = SCENES[scene]
    fake = FakeController(tmp_path / "c.sock")
    fake.answers = answers
    with time_zone("UTC"):
        shown = [f"== {look}\n{screen(words, fake.path, more)}" for look, more in LOOKS.items()]
    fake.close()
    file = SCREENS / f"{scene.replace(' ', '-')}.txt"
    if os.environ.get("SCREENS") == "write":
        file.write_bytes("\n".join(shown).encode())
    if words.startswith("show") and "--all" not in words:
        assert max(each.count("\n") - 2 for each in shown) <= 20
    assert "\n".join(shown) == file.read_bytes().decode()


def screen(words: str, socket: Path, environment: dict[str, str]) -> str:
    """What it prints and its exit code, with escapes made visible, without the advice (a table of its own) and how long
    ago a fixed date was."""
    result = run(*words.split(), socket=socket, **environment)
    text = re.sub(r"\b\d{4}\.\d\b", "####.#", f"{result.output}exit code {result.exit_code}\n")
    text = re.sub(r"(Usually \(advice.*?\n).*?\n\n", r"\1…\n\n", text, flags=re.DOTALL)
    assert not re.search(r"[\x00-\x09\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f\u200b\u202e]", text), (
        "hostile text moves nothing"
    )
    return text.replace("\x1b", "␛")
