"""`slurm-watchdog ca`: a small certificate authority, for sites that have none."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from slurm_watchdog.base import clock
from slurm_watchdog.cli.options import EXIT_FINE, EXIT_FOUND, EXIT_USAGE, json_option, print_json
from slurm_watchdog.cli.terminal import clean, count, sentence

if TYPE_CHECKING:
    from slurm_watchdog.identity.certificate_authority import Issued

F = TypeVar("F", bound=Callable[..., Any])

DIRECTORY: Final = "/etc/slurm-watchdog/ca"
AUTHORITY_DAYS: Final = 3650
DEFAULT_DAYS: Final = 397
"""A year and a month: renewing once a year leaves the month that `doctor` warns in."""
MAX_DAYS: Final = 36500
MAX_NODES: Final = 20_000
"""A slip in a range should not fill the disk; a certificate takes 40 ms."""
MAX_TEXT: Final = 1 << 20
BRACKETED_NAMES: Final = re.compile(r"[^,\[\]]*(?:\[[^\]]*\]?[^,\[\]]*)+")
BRACKETS: Final = re.compile(r"\[[^\]]*")
NUMBER_RANGE: Final = re.compile(r"([0-9]{1,18})-([0-9]{1,18})")


def common_options(command: F) -> F:
    """`--directory` and `--json`."""
    guard = "Directory of the authority. Protect it: with ca.key anyone can pose as any node."
    return click.option("--directory", metavar="DIR", default=DIRECTORY, show_default=True, help=guard)(
        json_option(command)
    )


def days_option(days: int, whose: str) -> Callable[[F], F]:
    """`--days`."""
    return click.option(
        "--days",
        type=click.IntRange(1, MAX_DAYS),
        default=days,
        show_default=True,
        help=f"How long {whose} valid.",
    )


@click.group(short_help="Certificates for nodes and controller, for sites without an authority.")
def ca() -> None:
    """Certificates with which nodes and controller prove who they are (security.tls_directory). Needs the
    program openssl.

    Run it where the authority is kept, preferably on the management node. Each certificate comes as a folder of
    three files, ca.crt, a certificate and its key, to be copied to that machine's security.tls_directory; the
    key belongs to the service's user, mode 600.

    \b
    Examples:
      slurm-watchdog ca init
      slurm-watchdog ca issue --controller mgmt.cluster.example.org
      slurm-watchdog ca issue 'node[001-064]'
      slurm-watchdog ca list
      slurm-watchdog ca renew                 what expires within 30 days
    """


@ca.command()
@click.option("--name", default="slurm-watchdog", show_default=True, help="Name of the authority.")
@days_option(AUTHORITY_DAYS, "the authority is")
@common_options
def init(name: str, days: int, directory: str, as_json: bool) -> None:
    """Creates the authority: ca.crt, which is public, and ca.key, which has to stay secret.

    \b
    Examples:
      slurm-watchdog ca init
      slurm-watchdog ca init --directory /srv/watchdog-ca --name 'cluster two'
    """
    from slurm_watchdog.identity import certificate_authority

    with reported_errors(as_json):
        made = certificate_authority.create(Path(directory), name, days, clock.wall())
    if as_json:
        print_json({"directory": directory, "name": name, "not_after": iso(made.not_after)})
        return
    sentence(f"The authority {name} is in {directory} and valid until {certificate_authority.date_of(made.not_after)}.")
    sentence(
        f"Keep {directory}/ca.key secret, and a copy of it elsewhere. Next: slurm-watchdog ca issue --controller HOST"
    )


@ca.command()
@click.argument("nodes", nargs=-1, metavar="[NODES]...")
@click.option(
    "--controller", "controllers", multiple=True, metavar="HOST", help="The controller's host, as "
        "agent.controller_url names it; several: one machine by all its names and addresses."
)  # fmt: skip
@click.option(
    "--client",
    "clients",
    multiple=True,
    metavar="NAME",
    help="A client that only reads /metrics, such as prometheus.",
)
@days_option(DEFAULT_DAYS, "each is")
@common_options
def issue(
    nodes: tuple[str, ...],
    controllers: tuple[str, ...],
    clients: tuple[str, ...],
    days: int,
    directory: str,
    as_json: bool,
) -> None:
    """Issues certificates (in place of earlier ones) for NODES (node sets, as Slurm writes them), a
    controller, or clients.

    \b
    Examples:
      slurm-watchdog ca issue 'node[001-064]' login1
      slurm-watchdog ca issue --controller mgmt --controller mgmt.cluster.example.org --controller 10.0.0.1
      slurm-watchdog ca issue --client prometheus
    """
    from slurm_watchdog.identity import certificate_authority

    names = expand(nodes)
    if not (names or controllers or clients):
        raise click.UsageError("name nodes, --controller HOST or --client NAME")
    now, place = clock.wall(), Path(directory)
    with reported_errors(as_json):
        for name in (*names, *clients):
            certificate_authority.check_name(name)
        made = []
        if controllers:
            made.append(certificate_authority.issue(place, "controller", controllers[0], controllers[1:], days, now))
        made += [certificate_authority.issue(place, "node", name, (), days, now) for name in names]
        made += [certificate_authority.issue(place, "client", name, (), days, now) for name in clients]
    print_certificates(made, now, as_json, "made")
    if not as_json and len(made) == 1:
        sentence(f"Copy the three files of {made[0].directory} to its security.tls_directory.")
    elif not as_json:
        sentence("Copy the three files of each folder to that machine's security.tls_directory, such as: for n "
            f"in {directory}/nodes/*; do scp $n/* root@${{n##*/}}:/etc/slurm-watchdog/tls/; done")  # fmt: skip


@ca.command()
@click.argument("nodes", nargs=-1, metavar="[NAMES]...")
@click.option(
    "--within",
    "within",
    type=click.IntRange(0, MAX_DAYS),
    default=30,
    show_default=True,
    help="Those that expire within this many days.",
)
@days_option(DEFAULT_DAYS, "each is then")
@common_options
def renew(nodes: tuple[str, ...], within: int, days: int, directory: str, as_json: bool) -> None:
    """Renews the certificates that expire soon, with new keys; with NAMES only these, whenever they expire.

    Agents and controller read their files again when they change: no restart.

    \b
    Examples:
      slurm-watchdog ca renew
      slurm-watchdog ca renew --within 60
      slurm-watchdog ca renew 'node[017-018]'
    """
    from slurm_watchdog.identity import certificate_authority

    now, place, wanted = clock.wall(), Path(directory), set(expand(nodes))
    with reported_errors(as_json):
        if wanted:
            due = issued_to(directory, wanted, ": slurm-watchdog ca issue")
        else:
            known, left = certificate_authority.list_issued(place), certificate_authority.days_left
            due = [each for each in known if left(each.certificate.not_after, now) < within]
        made = [certificate_authority.renew(place, each, days, now) for each in due]
    print_certificates(made, now, as_json, "renewed")


@ca.command()
@click.argument("nodes", nargs=-1, required=True, metavar="NAMES...")
@common_options
def revoke(nodes: tuple[str, ...], directory: str, as_json: bool) -> None:
    """Revokes certificates, such as of a node whose key was stolen: adds them to the list ca.crl.

    Copy the list into the controller's security.tls_directory: it is read within seconds, and
    clients on it are disconnected. If the controller's own key was stolen, copy it to every node as well: agents
    read it within a minute.

    \b
    Examples:
      slurm-watchdog ca revoke node017
      slurm-watchdog ca revoke 'node[017-018]' && cp /etc/slurm-watchdog/ca/ca.crl /etc/slurm-watchdog/tls/
    """
    from slurm_watchdog.identity import certificate_authority

    now, place, wanted = clock.wall(), Path(directory), set(expand(nodes))
    with reported_errors(as_json):
        due = issued_to(directory, wanted)
        file = certificate_authority.revoke(place, due, now)
    print_certificates(due, now, as_json, "revoked")
    if not as_json:
        where = " and every node's" * any(each.role == "controller" for each in due)
        sentence(f"Copy {file} to the controller's{where} security.tls_directory.")


@ca.command("list")
@common_options
def list_(directory: str, as_json: bool) -> None:
    """Lists what the authority has signed, the earliest to expire first. Exit code 1 if anything expires within
    30 days.

    \b
    Examples:
      slurm-watchdog ca list
      slurm-watchdog ca list --json
    """
    from slurm_watchdog.identity import certificate_authority
    from slurm_watchdog.identity.certificates import WARN_S, read_certificate
    from slurm_watchdog.identity.secret_files import CA_FILE

    now, place = clock.wall(), Path(directory)
    with reported_errors(as_json):
        own = read_certificate(str(place / CA_FILE))
        issued = certificate_authority.list_issued(place)
    ends = [own.not_after, *(each.certificate.not_after for each in issued)]
    if as_json:
        rows = [row_of(each, now) for each in issued]
        print_json({"directory": directory, "not_after": iso(own.not_after),
                    "days_left": certificate_authority.days_left(own.not_after, now),
                    "certificates": rows})  # fmt: skip
    else:
        sentence(f"The authority in {directory} is valid until {certificate_authority.date_of(own.not_after)}.")
        print_certificates(issued, now, as_json=False, verb="listed")
    sys.exit(EXIT_FOUND if min(ends) - now < WARN_S else EXIT_FINE)


def issued_to(directory: str, wanted: set[str], todo: str = "") -> list[Issued]:
    """The certificates of these names. Raises IdentityError if one of them has none."""
    from slurm_watchdog.identity.certificate_authority import list_issued
    from slurm_watchdog.identity.secret_files import IdentityError

    found = [each for each in list_issued(Path(directory)) if each.name in wanted]
    missing = wanted - {each.name for each in found}
    if missing:
        raise IdentityError(f"{directory} has no certificate of {', '.join(sorted(missing)[:5])}{todo}")
    return found


def expand(nodes: tuple[str, ...]) -> list[str]:
    """The names of node sets, each once. Ends the process with code 2 if one is none."""
    from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException

    text = ",".join(nodes)
    # Counted before they are written out: that alone can take minutes.
    if len(text) > MAX_TEXT or sum(map(_size, BRACKETED_NAMES.findall(text))) > MAX_NODES:
        raise click.UsageError(f"too many nodes at once: {MAX_NODES} at most")
    try:
        return [str(name) for name in NodeSet(text, resolver=RESOLVER_NOGROUP)]
    except NodeSetException as error:
        raise click.UsageError(clean(f"{' '.join(nodes)} is no set of nodes: {error}")) from error


def _size(name: str) -> int:
    """How many nodes `rack[1-4]n[01-16]` are, or more."""
    size = 1
    for bracket in BRACKETS.findall(name):
        size *= (
            bracket.count(",") + 1 + sum(abs(int(last) - int(first)) for first, last in NUMBER_RANGE.findall(bracket))
        )
    return size


def iso(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def row_of(issued: Issued, now: float) -> dict[str, object]:
    """One certificate, for a program."""
    from slurm_watchdog.identity.certificate_authority import days_left

    certificate = issued.certificate
    return {
        "role": issued.role, "name": issued.name, "not_before": iso(certificate.not_before),
        "not_after": iso(certificate.not_after),
        "days_left": days_left(certificate.not_after, now), "names": [*certificate.names, *certificate.addresses],
        "directory": issued.directory,
    }  # fmt: skip


def print_certificates(issued: list[Issued], now: float, as_json: bool, verb: str) -> None:
    """What was made or found, a line each."""
    from slurm_watchdog.identity.certificate_authority import date_of, days_left

    if as_json:
        print_json({"certificates": [row_of(each, now) for each in issued]})
        return
    for each in issued:
        left = days_left(each.certificate.not_after, now)
        when = f"{count(left, 'day')} left" if left >= 0 else "ended"
        click.echo(
            clean(f"{each.role:10} {each.name:24} {date_of(each.certificate.not_after)}  {when:14} {each.directory}")
        )
    sentence(f"{count(len(issued), 'certificate')} {verb}.")


@contextmanager
def reported_errors(as_json: bool) -> Iterator[None]:
    """Turns an IdentityError, or what a disk or its rights refuse, into words and code 2."""
    from slurm_watchdog.base.os_errors import describe
    from slurm_watchdog.identity.secret_files import IdentityError

    try:
        yield
    except (IdentityError, OSError) as failure:
        error = str(failure)
        if isinstance(failure, OSError):
            error = f"the authority's files cannot be read or written: {describe(failure)}"
        if as_json:
            print_json({"error": error})
        click.echo(clean(error), err=True)
        sys.exit(EXIT_USAGE)
