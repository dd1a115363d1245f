"""Mails by SMTP. What a server took for some recipients is not sent to those again; what it puts off is tried again."""

from __future__ import annotations

import asyncio
import logging
import smtplib
import ssl
from contextlib import suppress
from email.message import EmailMessage
from typing import TYPE_CHECKING, Final

from slurm_watchdog.base.text import safe
from slurm_watchdog.notify import SendFailed
from slurm_watchdog.notify.failure import why
from slurm_watchdog.notify.slack import read_secret

if TYPE_CHECKING:
    from slurm_watchdog.config.receivers import Receiver

LOG = logging.getLogger(__name__)
Refused = dict[str, tuple[int, bytes]]
"""Address -> code and words of the server's refusal."""
FOR_GOOD: Final = 500
"""From this code on a refusal is permanent, below it temporary (RFC 5321, 4.2.1): a greylist answers 451."""


class Mailer:
    """Sends the mails of one receiver, one at a time."""

    def __init__(self, settings: Receiver) -> None:
        self._settings, self._where = settings, f"notify.receivers.{settings.name}"
        self._under_way: asyncio.Future[Refused] | None = None
        """A delivery that was given up on and has not ended: its thread lives."""
        self._left: tuple[int | str, list[str]] = (0, [])
        """(message, recipients) that a server has put off while it took the message for others."""

    async def send(self, key: int | str, message: EmailMessage, to: list[str]) -> None:
        """Sends a message to all, or to those that are left of an earlier try. `key` is the same for each try of a
        message, and of no other. Raises SendFailed."""
        name, settings = self._settings.name, self._settings
        if self._under_way is not None and not self._under_way.done():
            raise SendFailed(f"{name} has not finished an earlier mail yet")
        to = self._left[1] if self._left[0] == key else to
        password = read_secret(settings.password_file, f"{self._where}.password_file") if settings.login else ""
        self._under_way = asyncio.ensure_future(asyncio.to_thread(_deliver, settings, password, message, to))
        # A server that sends a byte now and then holds up one thread, and no message of others.
        done, _ = await asyncio.wait({self._under_way}, timeout=3 * settings.deadline)
        if not done:
            self._under_way.add_done_callback(_ignore)
            raise SendFailed(f"{name} did not take the mail in time")
        refused = self._refused(self._under_way)
        later = [address for address, (code, _) in refused.items() if code < FOR_GOOD]
        if refused:
            said = "; ".join(f"{address}: {code} {_words(text)}" for address, (code, text) in refused.items())
            if later:
                self._left = (key, later)
                raise SendFailed(f"{name} puts recipients off: {said}")
            if len(refused) == len(to):
                raise SendFailed(f"{name} refuses every recipient: {said}", permanent=True)
            LOG.error("%s refuses recipients for good, and took the mail for the others: %s", name, said)
        self._left = (0, [])

    def _refused(self, delivery: asyncio.Future[Refused]) -> Refused:
        name = self._settings.name
        try:
            return delivery.result()
        except smtplib.SMTPRecipientsRefused as error:
            return dict(error.recipients)
        except smtplib.SMTPDataError as error:  # about this very mail, and so also for the next try
            said = f"{name} answered {error.smtp_code}: {_words(error.smtp_error)}"
            raise SendFailed(said, permanent=error.smtp_code >= FOR_GOOD) from None
        except smtplib.SMTPResponseException as error:
            raise SendFailed(f"{name} answered {error.smtp_code}: {_words(error.smtp_error)}") from None
        except ssl.SSLCertVerificationError as error:
            said = safe(error.verify_message, 100)
            raise SendFailed(
                f"{name}'s certificate is not trusted: {said}; a CA of the site's goes into ca_file"
            ) from None
        except smtplib.SMTPNotSupportedError as error:
            raise SendFailed(f"{name} cannot do what is configured: {safe(str(error), 100)}") from None
        except smtplib.SMTPServerDisconnected:
            raise SendFailed(f"{name} closed the connection, or did not answer in time") from None
        except (smtplib.SMTPException, OSError, ValueError) as error:
            raise SendFailed(f"{name} can't be reached ({why(error)})") from None


def _words(text: bytes | str) -> str:
    return safe(text.decode(errors="replace") if isinstance(text, bytes) else text, 200)


def _ignore(delivery: asyncio.Future[Refused]) -> None:
    """Takes what came of a delivery that nobody waits for."""
    if not delivery.cancelled():
        delivery.exception()


def _deliver(settings: Receiver, password: str, message: EmailMessage, to: list[str]) -> Refused:
    host, _, port = settings.server.rpartition(":")
    tls = ssl.create_default_context(cafile=settings.ca_file or None)
    server: smtplib.SMTP
    if settings.encryption == "tls":
        server = smtplib.SMTP_SSL(host.strip("[]"), int(port), timeout=settings.deadline, context=tls)
    else:
        server = smtplib.SMTP(host.strip("[]"), int(port), timeout=settings.deadline)
    try:
        if settings.encryption == "starttls":
            server.starttls(context=tls)
        if settings.login:
            server.login(settings.login, password)
        refused: Refused = server.send_message(message, to_addrs=to)
    except BaseException:
        server.close()
        raise
    with suppress(smtplib.SMTPException, OSError):  # the mail was taken: whatever the server says now
        server.quit()
    return refused
