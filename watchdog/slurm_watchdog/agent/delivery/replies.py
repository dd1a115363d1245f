"""What a controller says, within bounds: its replies and orders, from the frames that the courier passes on."""

from __future__ import annotations

import logging

from msgspec.structs import replace

from slurm_watchdog.model.protocol import JobWatch, Reply
from slurm_watchdog.wire.codec import decode_reply

log = logging.getLogger(__name__)

MAX_JOBS = 512  # Watched on one node: there is no node with more CPUs to give away one by one.
MAX_LOGS = 64  # Named by the controller for one job; it names two.
MAX_PLACES = 16  # Directories and trackers of checkpoints of one job.
MAX_COMMANDS = 256  # In one reply, and waiting to be carried out.


def parse_reply(body: bytes) -> Reply:
    """The reply in a frame of a stream, of which nothing exceeds the bounds above. Raises WireError. Commands of a kind
    that this release does not know are left out: the rest of the reply is still good."""
    reply = decode_reply(body)
    watch = tuple(_bound_job(each) for each in reply.watch[:MAX_JOBS])
    commands = reply.commands[:MAX_COMMANDS]
    if len(watch) < len(reply.watch) or len(commands) < len(reply.commands):
        log.warning(
            "the controller named %d jobs and %d commands: the first %d and %d are taken",
            len(reply.watch), len(reply.commands), len(watch), len(commands),
        )  # fmt: skip
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
