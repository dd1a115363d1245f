"""Notifications to Slack, webhook and Alertmanager: pure formatting, an outbox in the journal, one sender."""


class SendFailed(Exception):
    """A message was not delivered. `permanent`: the same message will never be."""

    def __init__(self, reason: str, *, retry_after_s: float | None = None, permanent: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retry_after_s = retry_after_s
        self.permanent = permanent
