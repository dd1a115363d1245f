"""A judge whose every answer is compared with what it would say if it judged each job at that tick."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator

from msgspec.structs import replace

from slurm_watchdog.base.ticking import SHOWN_S
from slurm_watchdog.controller.incidents.judge import Judge
from slurm_watchdog.model.cluster_view import JobView
from slurm_watchdog.model.incidents import Finding, Truth


class JudgedTwice(Judge):
    """`kept`: so many answers about a job were those of an earlier tick."""

    kept = 0

    def detecting(self, clock: Callable[[], float]) -> Generator[None, None, list[Finding]]:
        found = yield from super().detecting(clock)
        now = self.view.now
        for job_id, judged in self._judged.items():
            run = self.state.runs.get(job_id)
            assert run is not None
            self.kept += judged.at < now
            if run.has_numbers:
                assert judged.at > now - run.numbers_wait_s
                continue
            if judged.at < now and self.is_coming(run, judged):
                continue
            job = self.state.view_of(run, now)
            whole, limit_s = self.findings_of(job, self.view, now)
            said = [_said(each, self.view.asked, now, judged.at) for each in judged.findings]
            again = [_said(each, self.view.asked, now, judged.at) for each in whole]
            assert said == again, (job_id, now, judged.at)
            assert judged.limit_s == limit_s
            shown = next(each for each in self.view.jobs if each.job.job_id == job_id)
            assert _rounded(shown) == _rounded(job), (job_id, now)
        return found


AGES = re.compile(r"\d[\d.]* (?:s|min|h|d)\b(?: \d\d min)?")


def _said(finding: Finding, asked: frozenset[str], now: float, judged_at: float) -> Finding:
    """The finding at `now`. How long something has been well, or is not known and asked about by no one, is of no
    concern; the ages in its texts may be SHOWN_S old."""
    counts = (
        finding.truth is Truth.BAD or finding.wanted or (finding.truth is not Truth.OK and finding.subject in asked)
    )
    finding = replace(finding, duration_s=round(finding.lasts_s(now), 1) if counts else 0.0, began_mono=None)
    if not now - SHOWN_S < judged_at < now:
        return finding
    named = tuple(replace(each, reason=AGES.sub("AGE", each.reason)) for each in finding.culprits)
    facts = tuple(AGES.sub("AGE", each) for each in finding.facts)
    return replace(finding, summary=AGES.sub("AGE", finding.summary), facts=facts, culprits=named)


def _rounded(job: JobView) -> tuple[object, ...]:
    """Its ages, which are sums of floats."""
    progress = job.progress
    ages = (job.run_age_s, job.saved_age_s, job.growing_age_s, job.saving_age_s, job.touched_age_s)
    if progress is not None:
        ages += (progress.age_s, progress.last_increase_age_s, progress.ungranted_age_s, progress.phase_age_s)
    ages += tuple(each.age_s for each in (*job.errors, *job.snapshots))
    return tuple(None if age is None else round(age, 5) for age in ages)
