"""The outbound heartbeat: a request to an address outside that rings when none comes. It goes out only after a whole
tick of a controller that sees, so that it proves more than that a process is there."""

from __future__ import annotations

import logging
from collections.abc import Callable

from slurm_watchdog.notify import SendFailed
from slurm_watchdog.notify.http import post_json
from slurm_watchdog.notify.slack import read_url

log = logging.getLogger(__name__)


class Heartbeat:
    """Sends one when asked to; says once that it cannot."""

    def __init__(self, url_file: str, deadline_s: float, cluster: str, healthy: Callable[[], tuple[bool, str]]) -> None:
        self._url_file, self._deadline_s, self._cluster, self._healthy = url_file, deadline_s, cluster, healthy
        self._error = ""

    async def beat(self) -> bool:
        """Whether one was sent."""
        good, sentence = self._healthy()
        if not good:
            return False
        try:
            url = read_url(self._url_file, "notify.heartbeat.url_file")
            document = {"cluster": self._cluster, "detail": sentence}
            await post_json(url, document, self._deadline_s, receiver="the heartbeat's receiver")
        except SendFailed as error:
            if error.reason != self._error:
                log.warning("the heartbeat is not delivered: %s", error.reason)
            self._error = error.reason
            return False
        self._error = ""
        return True
