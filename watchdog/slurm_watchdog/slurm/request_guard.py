"""What every client does with a request: checks what it is about, keeps the deadline, counts how it ended."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from slurm_watchdog.base import clock
from slurm_watchdog.base.deadline import timeout
from slurm_watchdog.model import slurm_states
from slurm_watchdog.model.slurm import ELEMENTS, SlurmJob, SlurmNode
from slurm_watchdog.slurm import parse
from slurm_watchdog.slurm.client import Refusal, SlurmRefused, SlurmUnavailable
from slurm_watchdog.slurm.node_names import ParseError

T = TypeVar("T")

Observe = Callable[[str, str], None]  # Given the name of each request and how it ended: ok, refused or unavailable.
SIGNAL_NAME = re.compile(r"[A-Z][A-Z0-9]{1,9}", re.ASCII)
OPTION = re.compile(r"--[a-z][^\0]*")
RESERVATION_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,349}", re.ASCII)
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0
"""Between two listings that fail: one that answers again is noticed within a minute."""
REASON_LIMIT = 400  # Characters of a drain's reason: one line in `sinfo -R`, and no message of Slurm grows with it.


@dataclass
class Backoff:
    """Nothing after the first failure, then `first_s`, doubled with each further one up to `most_s`."""

    first_s: float
    most_s: float
    failures: int = 0
    _failed_at: float = 0.0

    def failed(self, now: float) -> None:
        """One more failure in a row."""
        self.failures += 1
        self._failed_at = now

    def succeeded(self) -> None:
        """The pauses start from the beginning."""
        self.failures = 0

    def wait_s(self, now: float) -> float:
        """Seconds until the next try, 0 if it may be made now."""
        if self.failures < 2:
            return 0.0
        delay_s = min(self.most_s, self.first_s * 2.0 ** min(self.failures - 2, 30))
        return max(0.0, self._failed_at + delay_s - now)


class Requests:
    """Carries out requests one by one within `deadline_s`."""

    def __init__(self, deadline_s: float, observe: Observe) -> None:
        self.deadline_s = deadline_s
        self._observe = observe
        self._backoff = Backoff(first_s=FIRST_PAUSE_S, most_s=LONGEST_PAUSE_S)
        self._last_error, self._answered = "", False

    async def carry_out(self, call: str, body: Callable[[], Awaitable[T]]) -> T:
        """The result of `body`. Raises SlurmRefused, SlurmUnavailable and nothing else."""
        try:
            result = await self._within_deadline(call, body)
        except SlurmRefused:
            self._observe(call, "refused")
            self._backoff.succeeded()
            raise
        except SlurmUnavailable as error:
            self._observe(call, "unavailable")
            self._last_error, self._answered = error.reason, error.answered
            raise
        self._observe(call, "ok")
        self._backoff.succeeded()
        return result

    async def carry_out_repeated(self, call: str, body: Callable[[], Awaitable[T]]) -> T:
        """As `carry_out`, for what is requested periodically: the pauses grow while Slurm does not answer.

        Anything that Slurm does answer ends the pauses.
        """
        wait_s = self._backoff.wait_s(clock.monotonic())
        if wait_s > 0:
            what = "Slurm's answer was of no use" if self._answered else "Slurm did not answer"
            raise SlurmUnavailable(
                f"{what} {self._backoff.failures} times in a row ({self._last_error}); "
                f"it is asked again in {wait_s:.0f} s",
                answered=self._answered,
            )
        try:
            return await self.carry_out(call, body)
        except SlurmUnavailable:
            self._backoff.failed(clock.monotonic())
            raise

    async def _within_deadline(self, call: str, body: Callable[[], Awaitable[T]]) -> T:
        try:
            async with timeout(self.deadline_s):
                return await body()
        except TimeoutError as error:
            raise SlurmUnavailable(f"no answer within {self.deadline_s:g} s ({call})") from error
        except ParseError as error:
            raise SlurmUnavailable(f"the answer cannot be read ({call}): {error}", answered=True) from error


def not_asked(problem: str) -> SlurmRefused:
    """The refusal of a request that is not even sent."""
    return SlurmRefused(f"not asked: {problem}", Refusal.NOT_ASKED)


def _checked(text: str, pattern: re.Pattern[str], problem: str) -> str:
    if not pattern.fullmatch(text):
        raise not_asked(f"{text[:80]!r} {problem}")
    return text


def checked_job_id(job_id: str) -> str:
    """`job_id` if it names one job; raises SlurmRefused, as all of these do."""
    return _checked(job_id, parse.JOB_ID, "does not name one job (like 123 or 123_4)")


def checked_elements(job_id: str) -> str:
    """`job_id` if it names one job, or those elements of one array that wait."""
    return job_id if ELEMENTS.fullmatch(job_id) else checked_job_id(job_id)


def checked_node(node: str) -> str:
    return _checked(node, parse.NODE_NAME, "is not a node's name")


def checked_reservation(name: str) -> str:
    return _checked(name, RESERVATION_NAME, "is not a reservation's name")


def checked_signal(signal: str) -> str:
    """`USR1` for `SIGUSR1` or `USR1`."""
    return _checked(signal.removeprefix("SIG"), SIGNAL_NAME, "is not a signal's name (like USR1)")


def checked_option(option: str) -> str:
    return _checked(option, OPTION, "is not a long option of sbatch (like --exclude=n1)")


def one_line(reason: str) -> str:
    """A drain's reason on one line and bounded. Raises SlurmRefused if nothing is left of it: Slurm wants one.

    scontrol takes a quote at either end for its own, and drops it: such a reason would not come back as it was sent.
    """
    text = " ".join("".join(c if c.isprintable() else " " for c in reason).split())[:REASON_LIMIT].strip(' "')
    if not text:
        raise not_asked("a node is drained for a reason, and none was given")
    return text


def require_running(job: SlurmJob | None, job_id: str) -> SlurmJob:
    """`job` if it has processes that a signal can reach; raises SlurmRefused."""
    if job is None:
        raise SlurmRefused(f"Slurm knows no job {job_id}", Refusal.NO_SUCH_JOB)
    if job.state in slurm_states.OVER or job.state == "COMPLETING":
        raise SlurmRefused(f"the job has ended or is ending ({job.state})", Refusal.FINISHED)
    if job.state not in slurm_states.RUNNING:
        raise SlurmRefused(f"the job is not running ({job.state})", Refusal.NOT_RUNNING)
    return job


def require_unchanged(now: SlurmNode | None, node: str, reason: str, reason_at: float | None) -> None:
    """Raises SlurmRefused unless the node is drained with this reason since this time."""
    if now is None:
        raise SlurmRefused(f"Slurm knows no node {node}", Refusal.NO_SUCH_NODE)
    if not slurm_states.is_drained(now.state):
        raise SlurmRefused(f"{node} is not drained any more ({now.state})", Refusal.CHANGED)
    if (now.reason, now.reason_at) != (reason, reason_at):
        raise SlurmRefused(f"{node} has got another reason since: {now.reason!r} by {now.reason_user}", Refusal.CHANGED)


def raise_unless_requeued(job: SlurmJob | None) -> None:
    """What `requeuehold Incomplete` did, from the job as read afterwards: returns if it is requeued and held; raises
    SlurmRefused if not, SlurmUnavailable if that can't be said.

    Requeueing, as observed: `scontrol requeuehold J` on a running job gives at once COMPLETING, reason `job
    requeued in held state`, priority 0, restarts + 1; when the processes are gone PENDING with the same reason.
    Exclusions may be set and the job released in both. Then PENDING with reason BeginTime until the credential's
    lifetime is over. `requeuehold Incomplete J` touches only CONFIGURING, RUNNING, STOPPED and SUSPENDED jobs,
    decided by slurmctld under its lock: a job that has ended, is completing or is pending stays as it is, *and
    the command says nothing and exits with 0*.
    """
    if job is None:
        raise SlurmRefused("Slurm no longer knows the job", Refusal.NO_SUCH_JOB)
    if job.held and job.state in slurm_states.REQUEUED:
        return
    if job.state in slurm_states.OVER:
        raise SlurmRefused(f"the job has already finished ({job.state})", Refusal.FINISHED)
    if job.state == "COMPLETING":
        raise SlurmRefused("the job is already ending (COMPLETING)", Refusal.FINISHED)
    if job.state in slurm_states.REQUEUED:
        raise SlurmRefused(f"the job is not running ({job.state}, {job.reason})", Refusal.NOT_RUNNING)
    raise SlurmUnavailable(f"Slurm accepted the requeue, yet the job is still {job.state}")
