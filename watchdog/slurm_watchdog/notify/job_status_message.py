"""The periodic job status message in Slack. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.base.text import duration, fold, plural, safe
from slurm_watchdog.notify.slack_messages import BLOCK_LIMIT, LINE_LIMIT, Payload, message, section

PULSE_CHANNEL = "slack-pulse"
PULSE_ID = "pulse"
"""In the place of an incident's id."""
BLOCKS_PER_MESSAGE = 3


class JobPulse(Struct, frozen=True, kw_only=True):
    """How one job is."""

    job_id: str
    user: str = ""
    name: str = ""
    nodes: tuple[str, ...] = ()
    """Empty for one that does not run."""
    running_s: float | None = None
    """Since it was started; None for one that waits."""
    step: int | None = None
    total_steps: int | None = None
    step_s: float | None = None
    progress_age_s: float | None = None
    limit_s: float | None = None
    phase: str | None = None
    level: str = ""
    """How it is: `ok`, `warning`, `critical`, `unknown`."""
    reason: str = ""
    """Why it is not simply training."""
    waits_for: str = ""
    """Slurm's state and reason, for one that does not run."""


def pulse_message(pulses: Sequence[JobPulse], cluster: str) -> Payload:
    """One message with a line for each job: those that make no steps first, then those that run, then those
    that wait."""
    ranked = sorted(
        pulses,
        key=lambda pulse: (not (_late(pulse) or pulse.level not in ("", "ok")), pulse.running_s is None),
    )
    running = sum(1 for pulse in pulses if pulse.running_s is not None)
    text = safe(f"[{cluster}] {plural(running, 'job')} running, {len(pulses) - running} waiting", LINE_LIMIT)
    blocks: list[list[str]] = [[]]
    shown = 0
    for pulse in ranked:
        line = f"• {safe(describe(pulse), LINE_LIMIT)}"
        if sum(len(each) + 1 for each in blocks[-1]) + len(line) > BLOCK_LIMIT:
            if len(blocks) == BLOCKS_PER_MESSAGE:
                break
            blocks.append([])
        blocks[-1].append(line)
        shown += 1
    more = [section(f"and {plural(len(pulses) - shown, 'more job')}: slurm-watchdog status")]
    lines = [section("\n".join(block)) for block in blocks if block]
    return message(text, [section(text), *lines, *(more if shown < len(pulses) else [])])


def describe(pulse: JobPulse) -> str:
    """One job in one line."""
    whose = " ".join(part for part in (pulse.name, f"of {pulse.user}" if pulse.user else "") if part)
    head = f"job {pulse.job_id}{f' ({whose})' if whose else ''}"
    if pulse.running_s is None:
        return f"{head} waits: {pulse.waits_for or 'nobody says for what'}"
    parts = [f"{head} runs since {duration(pulse.running_s)} on {','.join(fold(pulse.nodes)) or 'no node'}"]
    if pulse.step is None:
        parts.append("no step yet" if pulse.reason else f"no step yet ({pulse.phase or 'starting'})")
    else:
        of = f" of {pulse.total_steps}" if pulse.total_steps else ""
        parts.append(f"step {pulse.step}{of}")
        if pulse.step_s:
            parts.append(f"{pulse.step_s:.3g} s a step")
            left = (pulse.total_steps or 0) - pulse.step
            if left > 0:
                parts.append(f"{duration(left * pulse.step_s)} to go")
    if _late(pulse):
        parts.append(f"NO STEP for {duration(pulse.progress_age_s or 0.0)}")
    if pulse.phase not in (None, "training", "starting") or pulse.reason:
        what = pulse.phase or ""
        parts.append(
            (what.upper() if pulse.level == "critical" else what) + (f": {pulse.reason}" if pulse.reason else "")
        )
    return ", ".join(parts)


def _late(pulse: JobPulse) -> bool:
    return pulse.progress_age_s is not None and pulse.limit_s is not None and pulse.progress_age_s > pulse.limit_s
