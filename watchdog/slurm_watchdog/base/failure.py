"""What a command's work ends with: a sentence, and what to do next. Pure."""

from __future__ import annotations


class Failure(Exception):
    """`what` failed, and what `todo` next, each a sentence. A command tells it; see slurm_watchdog.cli.client.told."""

    def __init__(self, what: str, todo: str = "", *, is_usage: bool = False, untaken: bool = False):
        super().__init__(what)
        self.what, self.todo = what, todo
        self.is_usage = is_usage  # What was asked for cannot be.
        self.untaken = untaken  # No controller has taken the request, so that another one can be asked the same.
