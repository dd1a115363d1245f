"""What is remembered of each network link of a node: when it went down, how fast it was, whether its errors rise."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec.structs import replace

from slurm_watchdog.base.structs import picked
from slurm_watchdog.model.node_view import LinkView, Rise
from slurm_watchdog.model.observations import Link

FLAP_S = 3600.0  # A link that went down is held to have flapped for so long.
MAX_TIMES = 32
RISE_BREAK_S = 150.0  # Between two and three looks of an agent.
UNCOUNTED_S = 300.0  # One of which no one counts bytes carries some after so long: its node has started.
USUAL_S, USUAL_LOOKS = 3600.0, 10  # Time constant of what usually goes through, and looks before it is known.


@dataclass(slots=True)
class KnownLink:
    link: Link
    seen_at: float
    up_from: float | None = None
    down_since: float | None = None
    went_down: list[float] = field(default_factory=list)
    best: int | None = None
    usual: float | None = None
    looks: int = 0
    rising: Rise | None = None
    carried: bool = False


def look_at(known: dict[str, KnownLink], links: tuple[Link, ...], now: float) -> tuple[LinkView, ...]:
    """What the links of a node are at `now`; `known` is since its start. One that is not named any more is forgotten:
    its adapter is gone."""
    if not links:
        return ()  # nothing was seen: what is known stays
    for gone in known.keys() - {link.name for link in links}:
        del known[gone]
    for link in links:
        past = known.setdefault(link.name, KnownLink(link=link, seen_at=now))
        if past.link != link:
            _look(past, link, now)
        past.carried = past.carried or bool(link.moved_bytes_s)
        if link.up and past.up_from is None:
            past.up_from = now
        if link.up and link.moved_bytes_s is None and not past.looks and past.up_from is not None:
            past.carried = past.carried or now - past.up_from >= UNCOUNTED_S
        if link.up is not None:
            past.down_since = (past.down_since or now) if past.up_from is not None and not link.up else None
        if link.rate_bits_s is not None and link.up is not False:
            past.best = max(past.best or 0, link.rate_bits_s)
        past.link = link
    return tuple(_view(known[link.name], now) for link in links)


def _look(past: KnownLink, link: Link, now: float) -> None:
    before = past.link
    if before.kind != link.kind or (before.downs is not None and link.downs is not None and link.downs < before.downs):
        past.best = None  # its driver was loaded again: it may be another adapter
    fell = before.downs is not None and link.downs is not None and link.downs > before.downs
    if past.carried and (fell or (before.up is True and link.up is False)):  # before, it is its node that starts
        past.went_down = [*past.went_down, now][-MAX_TIMES:]
    if before.errors is not None and link.errors is not None and link.errors > before.errors:
        past.rising = risen(past.rising, "errors", now, RISE_BREAK_S)
    moved = link.moved_bytes_s
    if moved is not None:
        weight = min(1.0, max(0.0, now - past.seen_at) / USUAL_S)
        past.usual = (
            moved if past.usual is None else past.usual + max(weight, 1 / (past.looks + 1)) * (moved - past.usual)
        )
        past.looks += 1
        past.seen_at = now


def _view(past: KnownLink, now: float) -> LinkView:
    past.went_down = [at for at in past.went_down if now - at <= FLAP_S]
    rising = past.rising if past.rising is not None and now - past.rising.last_at <= RISE_BREAK_S else None
    usual, went_down = past.usual if past.looks >= USUAL_LOOKS else None, tuple(past.went_down)
    more = {"went_down": went_down, "best_rate_bits_s": past.best, "usual_bytes_s": usual, "rising": rising}
    return picked(LinkView, past, "link", "down_since", "carried", **more)


def risen(rise: Rise | None, counter: str, now: float, break_s: float) -> Rise:
    """A counter has risen once more; after a break longer than `break_s` it is a new rise."""
    if rise is None or now - rise.last_at > break_s:
        return Rise(counter=counter, first_at=now, last_at=now, times=1)
    return replace(rise, last_at=now, times=rise.times + 1)
