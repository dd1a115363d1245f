"""A judge whose every answer is compared with what it would say if it judged each job at that tick."""

from __future__ import annotations

from msgspec.structs import replace

from slurm_watchdog.controller.incidents.judge import NUMBERS_S, Judge
from slurm_watchdog.model.cluster_view import JobView
from slurm_watchdog.model.incidents import Finding, Truth


class JudgedTwice(Judge):
    """`kept`: so many answers about a job were those of an earlier tick."""

    kept = 0

    def detect(self, now: float) -> list[Finding]:
        found = super().detect(now)
        for job_id, judged in self._judged.items():
            run = self.state.runs.get(job_id)
            assert run is not None
            self.kept += judged.at < now
            if run.has_numbers:  # they wait for NUMBERS_S, at most, and only where nothing was wrong
                assert judged.at > now - NUMBERS_S and not any(each.truth is Truth.BAD for each in judged.findings)
                continue
            job = self.state.view_of(run, now)
            whole, limit_s = self.findings_of(job, self.view, now)
            said, again = ([_said(each, self.view.asked) for each in found] for found in (judged.findings, whole))
            assert said == again, (job_id, now, judged.at)
            assert judged.limit_s == limit_s
            shown = next(each for each in self.view.jobs if each.job.job_id == job_id)
            assert _rounded(shown) == _rounded(job), (job_id, now)
        return found


def _said(finding: Finding, asked: frozenset[str]) -> Finding:
    """How long something has been well, or is not known and asked about by no one, is of no concern."""
    counts = (
        finding.truth is Truth.BAD or finding.wanted or (finding.truth is not Truth.OK and finding.subject in asked)
    )
    return finding if counts else replace(finding, duration_s=0.0)


def _rounded(job: JobView) -> tuple[object, ...]:
    """Its ages, which are sums of floats."""
    progress = job.progress
    ages = (job.run_age_s, job.saved_age_s, job.growing_age_s, job.saving_age_s, job.touched_age_s)
    if progress is not None:
        ages += (progress.age_s, progress.last_increase_age_s, progress.ungranted_age_s, progress.phase_age_s)
    ages += tuple(each.age_s for each in (*job.errors, *job.snapshots))
    return tuple(None if age is None else round(age, 5) for age in ages)
