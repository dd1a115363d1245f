"""What the search for the node that makes a job slow has found, in sentences. Pure."""

from __future__ import annotations

from math import exp

from slurm_watchdog.analysis.slow_node_search import CONFIRMED_BY, SLOW, SlowNode, judge, percent_of, restarts_needed
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.base.text import plural
from slurm_watchdog.model.cluster_view import JobView
from slurm_watchdog.model.incidents import Truth
from slurm_watchdog.model.slow_search import JobSearch, SearchRun

MAX_NAMES = 16


class SpeedNow(Struct, frozen=True):
    """The present run, compared with the job as it was."""

    is_slow: bool
    words: str


def is_first_run(search: JobSearch, job: JobView) -> bool:
    """Whether the job's present run is the one that became slow."""
    return (search.restarts, search.step_id) == (job.job.restarts, job.step_id)


def run_of(search: JobSearch, job: JobView) -> SearchRun | None:
    """The job's present run, if its speed is known and it is not the one that became slow."""
    run = search.search.runs[-1] if search.search.runs else None
    here = job.job.restarts, job.step_id, job.ranks_on
    return run if run is not None and (run.restarts, run.step_id, run.nodes) == here else None


def speed_now(search: JobSearch, job: JobView) -> SpeedNow | None:
    """None: it is the run that became slow, or its speed cannot be told from the other ones."""
    run = run_of(search, job)
    if run is None or (verdict := judge(search.search)).unclear_now:
        return None
    height = run.level - search.search.fast
    words = f"{_seconds(search.search.fast)} s a step then, {_seconds(run.level)} s now"
    words += f", {percent_of(height):.1f} % more" if height > SLOW else ""
    return SpeedNow(verdict.height > 0, words)


def search_facts(search: JobSearch) -> tuple[str, ...]:
    """A sentence for each thing that is known; the last one says what comes next."""
    verdict, runs = judge(search.search), 1 + len(search.search.runs)
    seen = f"{plural(runs, 'run')} compared" + (f", {verdict.unclear - 1} unclear" if verdict.unclear > 1 else "")
    found = [f"{slow_node_words(search, each)}: restarts leave it out" for each in verdict.named]
    if verdict.acquitted:
        found.append(
            f"the search for a slow node has acquitted all of them ({seen}): runs are slow that used only nodes which "
            f"a fast run has used, too. Look at what they share: storage, network, the job's own data"
        )
    elif not verdict.over:
        group = verdict.suspects[0] if verdict.suspects else verdict.uncleared
        needed = plural(restarts_needed(len(group), (len(group) + 1) // 2), "restart")
        found.append(
            f"a slow node is searched for among {_some(group)} ({seen}): each restart by the watchdog leaves out half "
            f"of them, as far as others are free; {needed} where half can be left out. Sooner: "
            f"`slurm-watchdog test-nodes` on those that are idle"
        )
        well = tuple(each.node for each in search.tests if each.truth is Truth.OK and each.node in group)
        if well:
            found.append(
                f"tests while the job ran without them found nothing wrong with {_some(well)}: they stay suspects, "
                f"for a test does not measure everything"
            )
    return tuple(found)


def slow_node_words(search: JobSearch, node: SlowNode) -> str:
    """`n17 makes a step 7.1 % longer: …`, with the figures of the runs with and without it."""
    first = SearchRun(nodes=search.search.suspects, level=search.search.slow, error=search.search.error, at=0.0)
    runs = (first, *search.search.runs)
    used = [run.level for run in runs if node.node in run.nodes]
    without = [run.level for run in runs if node.node not in run.nodes]
    tested = next((f"; its test: {each.what}" for each in reversed(search.tests)
                   if each.node == node.node and each.truth is Truth.BAD), "")  # fmt: skip
    unsure = (
        ""
        if node.confirmed
        else f"; not confirmed yet, which takes {CONFIRMED_BY} slow runs with it and a fast one without, or a failed "
        f"test of it"
    )
    return (
        f"{node.node} makes a step of job {search.job_id} {node.percent:.1f} % longer: {_range(used)} s in "
        f"{plural(len(used), 'run')} with it, {_range(without)} s in {len(without)} without, "
        f"{_seconds(search.search.fast)} s before step {search.step} (confidence {node.confidence:.2f}){tested}{unsure}"
    )


def _range(levels: list[float]) -> str:
    low, high = (_seconds(each(levels)) for each in (min, max)) if levels else ("?", "?")
    return low if low == high else f"{low} to {high}"


def _some(nodes: tuple[str, ...]) -> str:
    names = " ".join(nodes[:MAX_NAMES])
    return f"{plural(len(nodes), 'node')}, {names}{' …' if len(nodes) > MAX_NAMES else ''}"


def _seconds(level: float) -> str:
    return f"{exp(level):.4g}"
