"""Whether a series of step times has risen to a level that lasts. Pure.

A change is looked for where the means of the values around it differ most (on logarithms, clipped: one evaluation
of an hour counts no more than one slow step). It is believed by the method of batch means (C. Alexopoulos and A. F.
Seila, "Output data analysis for simulations", 2001): the series is cut into batches, each with its interquartile
mean, and the scatter of these over the same job says how far two stretches differ by chance, whatever the
distribution of a single step is. What neighbours have in common makes fewer values of many: the variance of a mean
grows by (1 + r) / (1 - r) (M. S. Bartlett, 1935), for single steps as for batches; the larger estimate counts.

Then it has to be more than what jobs do all day: what the hour of the day explains, or one digit of a rounded
figure, and every part of the time since has to be slower. A burst has an end.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import exp, inf, log, log1p, pi, sin, sqrt
from typing import TYPE_CHECKING

from slurm_watchdog.base.averages import fmean, median, midmean
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.model.past_runs import SearchRun

if TYPE_CHECKING:
    from slurm_watchdog.model.cluster_view import StepTime

MAD_TO_SIGMA = 1.4826  # Of a normal distribution: 1 / its 0.75 quantile.
NEARLY = 0.65  # A change is estimated from few values: so much of the wanted size will do where it scatters that much.
PERHAPS = 2.5  # Standard errors by which the estimate may fall short of the wanted size, down to NEARLY of it.
LEAST_SIGMA = 0.002  # Of the level: logs round, and without scatter the last digit would be a change.

CLIP = 4.0  # Standard deviations that one value counts at most while a change is looked for.
SURE = 5.5  # Standard errors: a job is looked at thousands of times, at many places, and chance has as many tries.
SURE_OF_MEMORY = 7.0  # The same where the variance doubles by what neighbours have in common, which is estimated.
FEW = 8.0
"""`SURE` grows by this share of the degrees of freedom where the scatter itself is known from few batches: about
the quantiles of Student's t at 1e-7 (10 degrees of freedom: 10; 20: 7.7)."""
TRIMMED = 0.25
"""Share of the values to both sides that an interquartile mean leaves out. Its variance is that of the values
winsorised there, over (1 - 2 TRIMMED)^2 of their number (J. W. Tukey and D. H. McLaughlin, 1963)."""
CUT = 0.03  # The same of values whose memory is estimated: one pause of an hour has none.
MOST_MEMORY = 0.95  # Correlation of neighbours up to which it is reckoned with.
LEFT = 0.5  # Of the wanted size: so much has to be left when what the hour of the day explains is taken off.
DAY_SWING = 0.03  # Step times may swing by so much within a day: shared filesystems and fabrics are busier by day.
LOCAL_S = 7200.0  # A level is taken over two hours to both sides at most where enough values are in them.
TRIES = 6  # Places of change that are looked at closely, the most promising first.
CREEP_S = 3600.0  # The newest stretch is as long at least where a rise over hours is looked for: no burst is.
CREPT = 2.0
"""Times `SURE`, where stretches of a run are compared that do not follow each other: their scatter is taken from
neighbours, which may have a lot in common (up to a correlation of 0.6)."""
PARTS = 6  # Of the time since the change; each has to be slower.
MANY = 8  # Batches to both sides from which on they are made twice as long: pauses that come together are one.
LEAST_BEFORE, LEAST_AFTER = 3, 3  # Batches to both sides of a change.


class Rise(Struct, kw_only=False):
    """A rise that lasts: where it is, and the level before and now in seconds a step."""

    begin: int  # Place of its first value.
    last: int  # Place of the newest value that certainly belongs to it: what follows makes no batch yet.
    compared: int  # Place of the first value of the level before.
    before_s: float
    after_s: float

    @property
    def share(self) -> float:
        """By how much of the level before a step takes longer."""
        return self.after_s / self.before_s - 1


def find_rise(
    values: Sequence[float], times: Sequence[float], shift: float, batch: int, window: int, quantum_s: float
) -> Rise | None:
    """The rise by about `shift` (0.05: five per cent) or more that the series ends with: `values`, in seconds a
    step and oldest first, and when each was seen. None: there is none, or chance may have made it.

    `batch` values make a batch (1: they are batches already); at most `window` values to both sides are compared;
    `quantum_s` is the last digit of the figures, 0 where they are finer than they scatter.
    """
    if len(values) < batch * (LEAST_BEFORE + LEAST_AFTER):
        return None
    logs = [log(each) for each in values]
    for place in _places(logs, shift, batch, window):
        rise = _rise_at(place, times, logs, shift, batch, window, quantum_s)
        if rise is not None:
            return rise
    return None


def find_creep(
    values: Sequence[float], times: Sequence[float], shift: float, window: int, quantum_s: float
) -> Rise | None:
    """The same for a rise that has no place, over hours: between the fastest stretch of `window` values, which are
    batches, and the newest; by more than the hour of the day can explain."""
    n = len(values)
    window = max(window, sum(1 for at in times if at > times[-1] - CREEP_S)) if n else window
    if n < 2 * window:
        return None
    logs = [log(each) for each in values]
    sums = [0.0, *accumulate(logs)]
    levels = [(sums[at + window] - sums[at]) / window for at in range(n - window + 1)]
    fastest = min(range(n - 2 * window + 1), key=levels.__getitem__)
    before, after = levels[fastest], levels[-1]
    scatter = sqrt(fmean((b - a) ** 2 for a, b in pairwise(logs)) / 2)
    error = max(scatter, LEAST_SIGMA) * sqrt(2 / window)
    explained = 2 * DAY_SWING + quantum_s / exp(before)
    if after - before < max(CREPT * SURE * error, NEARLY * log1p(shift) + explained):
        return None
    half = (before + after) / 2
    begin = window // 2 + max(at for at in range(fastest, n - window + 1) if levels[at] < half)
    return Rise(begin, n - 1, fastest, exp(before), exp(after))


BATCH = 10  # As `slow_job` takes them.


def quantum(values: Sequence[float]) -> float:
    """The last digit of figures as a log prints them: 1, 0.1 or 0.01 s; 0 where they are finer."""
    for step in (1.0, 0.1, 0.01):
        if all(abs(value / step - round(value / step)) < 1e-6 for value in values):
            return step
    return 0.0


def _places(logs: list[float], shift: float, batch: int, window: int) -> list[int]:
    """Where the level rises most, best first: the contrast of the means to both sides, in its own standard error."""
    middle = median(logs)
    scatter = MAD_TO_SIGMA * median(abs(v - middle) for v in logs)
    fence = CLIP * max(scatter, log1p(shift)) if batch > 1 else inf
    sums = [0.0, *accumulate(max(-fence, min(fence, v - middle)) for v in logs)]
    n, found = len(logs), []
    for place in range(LEAST_BEFORE * batch, n - batch + 1):  # a change that is too new is found, and waits
        begin, end = max(0, place - window), min(n, place + window)
        before, after = place - begin, end - place
        rise = (sums[end] - sums[place]) / after - (sums[place] - sums[begin]) / before
        found.append((rise * sqrt(before * after / (before + after)), place))
    places: list[int] = []
    for gain, place in sorted(found, reverse=True):
        if gain <= 0 or len(places) == TRIES:
            break
        if all(abs(place - each) >= LEAST_AFTER * batch for each in places):
            places.append(place)
    return places


def _rise_at(
    place: int, times: Sequence[float], logs: list[float], shift: float, batch: int, window: int, quantum_s: float
) -> Rise | None:
    begin, end = _window(place, times, batch, window)
    if batch > 1 and min(place - begin, end - place) >= MANY * batch:
        batch *= 2
    old = _batches(logs[place - (place - begin) // batch * batch : place], batch)
    new = _batches(logs[place:end], batch)
    if len(new) < LEAST_AFTER:
        return None
    before, after = fmean(old), fmean(new)
    size = after - before
    wanted = log1p(shift)
    if size < NEARLY * wanted or not _lasts(_batches(logs[place:], batch), before + size / 2):
        return None
    hours_apart = (times[place] + times[end - 1] - times[begin] - times[place - 1]) / 7200
    explained = 2 * DAY_SWING * sin(pi / 24 * min(12.0, max(0.0, hours_apart))) + quantum_s / exp(before)
    if size - explained < LEFT * wanted:
        return None
    rest = [*(v - before for v in old), *(v - after for v in new)]
    freedom = len(rest) - 2
    variance = sum(v * v for v in rest) / freedom * _inflation(rest, 1 / len(rest))
    sure = SURE * (1 + FEW / freedom)
    if batch > 1:
        parts = [v - before for v in logs[begin:place]], [v - after for v in logs[place:end]]
        singles = [*_cut_off(parts[0], TRIMMED), *_cut_off(parts[1], TRIMMED)]
        memory = _inflation([*_cut_off(parts[0], CUT), *_cut_off(parts[1], CUT)], 1 / sqrt(len(singles)))
        of_one = fmean(v * v for v in singles) / (1 - 2 * TRIMMED) ** 2
        variance, sure = max(variance, memory * of_one / batch), SURE if memory < 2 else SURE_OF_MEMORY
    error = sqrt(max(variance, LEAST_SIGMA**2 / batch) * (1 / len(old) + 1 / len(new)))
    if size < max(sure * error, min(wanted, max(NEARLY * wanted, wanted - PERHAPS * error))):
        return None
    newest = _batches(logs[place:], batch)[-max(LEAST_AFTER, window // batch) :]
    last = place + (len(times) - place) // batch * batch - 1
    return Rise(place, last, begin, exp(median(old)), exp(median(newest)))


def _window(place: int, times: Sequence[float], batch: int, window: int) -> tuple[int, int]:
    """(begin, end) of the values that are compared around a place: of two hours to both sides, or the fewest that
    will do."""
    begin, end = max(0, place - window), min(len(times), place + window)
    at = times[place]
    while place - begin > 2 * LEAST_BEFORE * batch and at - times[begin] > LOCAL_S:
        begin += 1
    while end - place > 2 * LEAST_AFTER * batch and times[end - 1] - at > LOCAL_S:
        end -= 1
    return begin, end


def _batches(logs: Sequence[float], batch: int) -> list[float]:
    """Their interquartile means; what is left over at the end makes no batch."""
    if batch == 1:
        return list(logs)
    return [midmean(logs[at : at + batch]) for at in range(0, len(logs) - batch + 1, batch)]


def _cut_off(values: list[float], share: float) -> list[float]:
    """The values, of which this share at both ends is moved to where it begins."""
    ordered, cut = sorted(values), int(len(values) * share)
    low, high = ordered[cut], ordered[-1 - cut]
    return [max(low, min(high, v)) for v in values]


def _lasts(batches: list[float], half: float) -> bool:
    """Whether every part of the time since the change is above the middle of both levels, the newest one too."""
    n = len(batches)
    parts = min(PARTS, n)
    cuts = [round(n * part / parts) for part in range(parts + 1)]
    return batches[-1] > half and all(fmean(batches[a:b]) > half for a, b in pairwise(cuts))


def _inflation(rest: Sequence[float], chance: float) -> float:
    """By how much the variance of a mean grows for what neighbours have in common; `chance` is what hides of that
    in a series of this length."""
    whole = sum(v * v for v in rest)
    if whole <= 0:
        return 1.0
    r = min(MOST_MEMORY, max(0.0, sum(a * b for a, b in pairwise(rest)) / whole + chance))
    return (1 + r) / (1 - r)


# ------------------------------------------------------------------------------------------ of one run

LEAST_UNLOGGED_S = 30.0  # Times that the log does not say are as exact as reports: shorter steps are not compared.
SKIPPED = 3  # First steps of a run, which compile, warm caches and fill pipelines.
LEAST_BATCHES = 6  # Of a run whose speed is measured.


def comparable(times: tuple[StepTime, ...]) -> tuple[StepTime, ...]:
    """The steps of which one may be compared with another: training, of the present batch size, exact enough."""
    usable = [
        t for t in times[SKIPPED:] if t.phase is None and t.seconds > 0 and (t.logged or t.seconds >= LEAST_UNLOGGED_S)
    ]
    if not usable:
        return ()
    last = usable[-1]
    return tuple(t for t in usable if t.batch == last.batch and t.logged == last.logged)


def run_speed(times: Sequence[StepTime], history: Sequence[StepTime], least_s: float) -> SearchRun | None:
    """The speed over at least `least_s`, for what jobs share is slow for some minutes now and then: of single steps
    (comparable ones) where they reach that far, else of the blocks of the run's history. None: it is not known yet."""
    logs = [log(each.seconds) for each in times[SKIPPED:] if each.seconds > 0]
    batches = [midmean(logs[at : at + BATCH]) for at in range(0, len(logs) - BATCH + 1, BATCH)]
    blocks = [log(each.seconds) for each in history]
    for means, of in ((batches, times), (blocks, history)):
        if len(means) >= LEAST_BATCHES and of[-1].at - of[0].at >= least_s:
            return SearchRun(level=fmean(means), error=_error_of_mean(means), batches=len(means), at=of[-1].at)
    return None


def _error_of_mean(means: Sequence[float]) -> float:
    """The standard error of their mean, by how much neighbours are alike."""
    rest = [mean - fmean(means) for mean in means]
    whole = sum(v * v for v in rest)
    together = sum(a * b for a, b in pairwise(rest)) / whole if whole else 0.0
    r = min(0.9, together) if together > 2 / sqrt(len(rest)) else 0.0  # less is what chance gives
    return sqrt(whole / (len(rest) - 1) / len(rest) * (1 + r) / (1 - r))
