"""`slurm_unreachable`: Slurm does not answer, or gives no usable answer.

Fires: Slurm has not answered a listing for 60 s.
Names: nothing.
Acts: no action is taken until Slurm answers.
"""

from __future__ import annotations

from slurm_watchdog.detect.spec import DetectorSpec, Subject
from slurm_watchdog.model.cluster_view import ClusterView
from slurm_watchdog.model.incidents import Finding, Severity

SILENT_FOR_S = 60.0  # Without an answer to a listing: several of them, 10 s apart.


def detect(view: ClusterView) -> list[Finding]:
    """One finding. Before the first answer the time since the controller's start counts."""
    age_s = view.watched_s if view.slurm_age_s is None else view.slurm_age_s
    finding = SPEC.about("slurm")
    if age_s < SILENT_FOR_S:
        answered = view.slurm_age_s is not None and not view.slurm_excused
        return [finding.ok("Slurm answers") if answered else finding]
    what = f"Slurm has not answered for {age_s:.0f} s"
    if view.slurm_problem:
        what = f"Slurm answers, but for {age_s:.0f} s nothing that can be used ({view.slurm_problem})"
    facts = ("on this machine: scontrol ping; squeue", "journalctl -u slurm-watchdog-controller says what it answered")
    return [finding.bad(f"{what}: no job is judged and nothing is done until it does.", facts=facts, duration_s=age_s)]


SPEC = DetectorSpec(
    detect=detect,
    subject=Subject.CLUSTER,
    needs_slurm=False,
    severity=Severity.CRITICAL,
    sentence="Slurm does not answer",
    why_no_action="what runs is unknown while Slurm does not answer",
    alerts=("SlurmWatchdogBlind",),
)
