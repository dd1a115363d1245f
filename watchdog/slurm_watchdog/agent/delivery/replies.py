"""A controller's reply as the agent takes it: bounded, and readable also when it comes from a newer release.

The controller is trusted with its commands, not with the agent's life: whatever it sends, by mistake or
because someone else has taken its place, a tick stays a tick.
"""

from __future__ import annotations

import logging

from msgspec.structs import replace

from slurm_watchdog.agent.delivery.channel import Proven
from slurm_watchdog.model.protocol import JobWatch, Reply
from slurm_watchdog.wire.codec import WireError, decode_reply

log = logging.getLogger(__name__)

MAX_REPLY_BYTES = 1024**2  # 512 jobs with 2 kB each.
MAX_JOBS = 512  # Watched on one node: there is no node with more CPUs to give away one by one.
MAX_LOGS = 64  # Named by the controller for one job; it names two.
MAX_PLACES = 16  # Directories and trackers of checkpoints of one job.
MAX_COMMANDS = 256  # In one reply, and waiting to be carried out.


def parse_reply(answer: Proven) -> Reply:
    """The reply in an answer of the controller, of which nothing exceeds the bounds above. Raises WireError.

    Commands of a kind that this release does not know are left out: the rest of the reply is still good.
    """
    data = answer.body
    if len(data) > MAX_REPLY_BYTES:
        raise WireError(f"reply of {len(data)} bytes: the limit is {MAX_REPLY_BYTES}")
    return bound(decode_reply(data))


def bound(reply: Reply) -> Reply:
    """`reply`, cut to what one agent can do. What is left out is said in the log: it is a mistake, or an attack."""
    watch = tuple(_bound_job(each) for each in reply.watch[:MAX_JOBS])
    commands = reply.commands[:MAX_COMMANDS]
    if len(watch) < len(reply.watch) or len(commands) < len(reply.commands):
        log.warning(
            "the controller named %d jobs and %d commands: the first %d and %d are taken",
            len(reply.watch), len(reply.commands), len(watch), len(commands),
        )  # fmt: skip
    if watch == reply.watch and commands == reply.commands:
        return reply
    return replace(reply, watch=watch, commands=commands)


def _bound_job(watch: JobWatch) -> JobWatch:
    return replace(
        watch,
        log_paths=watch.log_paths[:MAX_LOGS],
        log_offsets=watch.log_offsets[:MAX_LOGS],
        checkpoint_trackers=watch.checkpoint_trackers[:MAX_PLACES],
        checkpoint_directories=watch.checkpoint_directories[:MAX_PLACES],
        progress_files=watch.progress_files[:MAX_PLACES],
    )
