"""Addresses for messages: where an incident is on the page, and what a site has written about its kind. Pure."""

from __future__ import annotations

from typing import Final
from urllib.parse import quote

from slurm_watchdog.base.structs import Struct


class SiteLinks(Struct, frozen=True, kw_only=True):
    """Of one site; an empty address gives no links."""

    external_url: str = ""
    """The page, as people reach it."""
    runbook_url: str = ""
    """With {kind} in it."""

    def incident_url(self, incident_id: str) -> str:
        """The page of an incident."""
        return f"{self.external_url.rstrip('/')}/#/incident/{quote(incident_id, safe='')}" if self.external_url else ""

    def runbook(self, kind: str) -> str:
        """What to do about a kind of incident."""
        return self.runbook_url.replace("{kind}", quote(kind, safe=""))


NO_LINKS: Final = SiteLinks()
