"""A small certificate authority in a directory, for sites that have none: made, used and renewed by the
program openssl.

DIRECTORY/ca.crt and ca.key are the authority. DIRECTORY/nodes/NAME holds agent.crt and agent.key,
DIRECTORY/controllers/NAME controller.crt and controller.key, DIRECTORY/clients/NAME client.crt and
client.key, each with a copy of ca.crt: the three files that machine gets. Keys are made with mode 0600, in a
directory that only its owner may enter, and are never in an argument or a variable.
"""

from __future__ import annotations

import ipaddress
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from slurm_watchdog.identity.certificates import Certificate, read_certificate
from slurm_watchdog.identity.secret_files import CA_FILE, REVOKED_FILE, IdentityError

DEADLINE_S: Final = 60.0
BACKDATED_S: Final = 3600.0
"""A certificate is good from an hour ago: a node's clock may be slow, before it is synchronised at least."""
DAY_S: Final = 86400.0
NAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,252}[A-Za-z0-9])?")
"""What a node or a host may be called. It becomes a file's name and a line of openssl's configuration."""

TITLE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9 .,()_-]{0,63}")

Role = Literal["node", "controller", "client"]
FOLDERS: Final[dict[Role, tuple[str, str]]] = {
    "node": ("nodes", "agent"),
    "controller": ("controllers", "controller"),
    "client": ("clients", "client"),
}
"""Role -> the folder, and what its files are called."""
USES: Final[dict[Role, str]] = {"node": "clientAuth", "controller": "serverAuth", "client": "clientAuth"}
"""A node's certificate must not be accepted as a controller's: its holder could command all agents."""


@dataclass(frozen=True)
class Issued:
    """One certificate of the authority."""

    role: Role
    name: str
    directory: str
    certificate: Certificate


def create(directory: Path, name: str, days: int, now: float) -> Certificate:
    """A new authority called `name`. Raises IdentityError, also if there is one already."""
    if (directory / CA_FILE).exists() or (directory / "ca.key").exists():
        raise IdentityError(f"{directory} holds an authority already: slurm-watchdog ca list --directory {directory}")
    if not TITLE.fullmatch(name):
        raise IdentityError(
            f"{name[:60]!r} can be no name of an authority: letters, digits, blanks and '.,()_-', 64 at most"
        )
    _private(directory)
    # No path length but 0: it signs nodes and controllers, and no other authorities.
    extensions = (
        "basicConstraints=critical,CA:TRUE,pathlen:0\nkeyUsage=critical,keyCertSign,cRLSign\n"
        "subjectKeyIdentifier=hash\n"
    )
    _make(directory, directory / "ca", name, extensions, (now - BACKDATED_S, now + days * DAY_S), own=True)
    made = read_certificate(str(directory / CA_FILE))
    _write_list(directory, made, now)
    return made


def issue(directory: Path, role: Role, name: str, names: Sequence[str], days: int, now: float) -> Issued:
    """A key and a certificate for `name`, in place of the ones before. `names` are the host names and
    addresses of a controller.

    Raises IdentityError.
    """
    check_name(name)
    authority = read_certificate(str(directory / CA_FILE))
    if authority.not_after <= now:
        raise IdentityError(f"the authority in {directory} has ended: make a new one in another directory")
    folder, stem = FOLDERS[role]
    place = directory / folder / name
    _private(place)
    until = min(now + days * DAY_S, authority.not_after)
    extensions = _extensions(role, name, names)
    _make(directory, place / stem, name, extensions, (now - BACKDATED_S, until), own=False)
    _copy(directory / CA_FILE, place / CA_FILE)
    return Issued(role, name, str(place), read_certificate(str(place / f"{stem}.crt")))


def _extensions(role: Role, name: str, names: Sequence[str]) -> str:
    lines = [
        "basicConstraints=critical,CA:FALSE",
        "keyUsage=critical,digitalSignature",
        f"extendedKeyUsage={USES[role]}",
        "subjectKeyIdentifier=hash",
        "authorityKeyIdentifier=keyid",
    ]
    if role == "node":
        lines.append(f"subjectAltName=DNS:{name}")
    elif role == "controller":
        lines.append("subjectAltName=" + ",".join(_alternative(each) for each in (name, *names)))
    else:  # it reads /metrics, and speaks for no node
        lines.append(f"subjectAltName=URI:slurm-watchdog:client:{name}")
    return "\n".join(lines) + "\n"


def _alternative(name: str) -> str:
    try:
        return f"IP:{ipaddress.ip_address(name)}"
    except ValueError:
        check_name(name)
        return f"DNS:{name}"


def check_name(name: str) -> None:
    """Raises IdentityError for what can be no name of a machine."""
    if not NAME.fullmatch(name):
        raise IdentityError(f"{name[:60]!r} can be no name of a machine: letters, digits, '.', '-' and '_'")


def list_issued(directory: Path) -> list[Issued]:
    """All certificates of the authority, those that end first at the beginning. Raises IdentityError."""
    found = []
    for role, (folder, stem) in FOLDERS.items():
        for file in sorted(directory.glob(f"{folder}/*/{stem}.crt")):
            found.append(Issued(role, file.parent.name, str(file.parent), read_certificate(str(file))))
    return sorted(found, key=lambda each: (each.certificate.not_after, each.role, each.name))


def renew(directory: Path, issued: Issued, days: int, now: float) -> Issued:
    """The same with a new key and a new end. Raises IdentityError."""
    extra = [name for name in (*issued.certificate.names, *issued.certificate.addresses) if name != issued.name]
    return issue(directory, issued.role, issued.name, extra, days, now)


def revoke(directory: Path, issued: Sequence[Issued], now: float) -> Path:
    """Revokes certificates: adds them to the list that controllers read, and removes their folders. Returns
    the list's file.

    Raises IdentityError.
    """
    authority = read_certificate(str(directory / CA_FILE))
    kept, rows = directory / "revoked", []
    for each in issued:
        end, number = each.certificate.not_after, each.certificate.serial.removeprefix("00")
        # As openssl's own index has it: years of two digits, until 2049 at least.
        rows.append(f"R\t{_date(end)[2:]}\t{_date(now)[2:]}\t{number}\tunknown\t/CN={each.name[:64]}\n")
    try:
        before = kept.read_text(encoding="ascii") if kept.exists() else ""
        kept.write_text(before + "".join(rows), encoding="ascii")
    except OSError as error:
        raise IdentityError(f"{kept} can't be written: {error.strerror}") from error
    _write_list(directory, authority, now)
    for each in issued:
        shutil.rmtree(each.directory)
    return directory / REVOKED_FILE


def _write_list(directory: Path, authority: Certificate, now: float) -> None:
    """The list of all that were revoked, also of none: where an old authority has one, the next one needs its
    own beside it."""
    with tempfile.TemporaryDirectory(dir=directory, prefix=".new-") as scratch:
        place, kept = Path(scratch), directory / "revoked"
        if kept.exists():
            shutil.copyfile(kept, place / "index")
        else:
            (place / "index").touch()
        (place / "config").write_text(_config(place, "none", "authorityKeyIdentifier=keyid\n"), encoding="ascii")
        days = max(1, int((authority.not_after - now) // DAY_S))
        # With the key's name in it: two authorities may be called the same.
        _openssl("ca", "-gencrl", "-batch", "-config", str(place / "config"), "-cert", str(directory / CA_FILE),
                 "-keyfile", str(directory / "ca.key"),
                 "-crldays", str(days), "-crlexts", "extensions", "-out", str(place / "list"))  # fmt: skip
        (place / "list").chmod(0o644)
        os.replace(place / "list", directory / REVOKED_FILE)


# -- openssl -----------------------------------------------------------------------------------------------------


def _make(directory: Path, stem: Path, name: str, extensions: str, good: tuple[float, float], *, own: bool) -> None:
    """`stem`.key and `stem`.crt, both or neither: signed by themselves if `own`, else by the authority of
    `directory`."""
    with tempfile.TemporaryDirectory(dir=directory, prefix=".new-") as scratch:
        place = Path(scratch)
        (place / "index").touch()
        (place / "config").write_text(_config(place, name, extensions), encoding="ascii")
        key, request, certificate = place / "key", place / "request", place / "crt"
        config = ("-config", str(place / "config"))
        _openssl("req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", *config,
                 "-keyout", str(key), "-out", str(request))  # fmt: skip
        key.chmod(0o600)
        signer = ["-selfsign", "-keyfile", str(key)] if own else [
            "-cert", str(directory / CA_FILE), "-keyfile", str(directory / "ca.key")]  # fmt: skip
        _openssl("ca", "-batch", "-notext", *config, "-in", str(request), "-out", str(certificate), *signer,
                 "-startdate", _date(good[0]), "-enddate", _date(good[1]), "-extensions", "extensions")  # fmt: skip
        certificate.chmod(0o644)
        os.replace(key, stem.with_name(stem.name + ".key"))
        os.replace(certificate, stem.with_name(stem.name + ".crt"))


def _config(place: Path, name: str, extensions: str) -> str:
    """openssl's configuration. A common name has 64 characters at most (RFC 5280, ub-common-name)."""
    return f"""[req]
prompt = no
distinguished_name = subject
[subject]
CN = {name[:64]}
[ca]
default_ca = this
[this]
database = {place}/index
new_certs_dir = {place}
rand_serial = yes
default_md = sha256
policy = any
unique_subject = no
[any]
commonName = supplied
[extensions]
{extensions}"""


def _date(moment: float) -> str:
    return time.strftime("%Y%m%d%H%M%SZ", time.gmtime(moment))


def _openssl(*arguments: str) -> None:
    """Raises IdentityError with what openssl said."""
    try:
        done = subprocess.run(
            ["openssl", *arguments], stdin=subprocess.DEVNULL, capture_output=True, timeout=DEADLINE_S,
            check=False, umask=0o077
        )  # fmt: skip
    except FileNotFoundError as error:
        raise IdentityError(
            "there is no program openssl here: apt-get install openssl, or dnf install openssl"
        ) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise IdentityError(f"openssl {arguments[0]} could not be run: {error}") from error
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
        said = [line for line in lines if "error" in line.lower()] or [" ".join(lines[-2:]) or "it says nothing"]
        raise IdentityError(f"openssl {arguments[0]} failed: {said[0]}")


def _private(directory: Path) -> None:
    """A directory that only its owner may enter. Raises IdentityError."""
    try:
        before = os.umask(0o077)
        try:
            directory.mkdir(parents=True, exist_ok=True)
        finally:
            os.umask(before)
        if directory.stat().st_mode & 0o077:
            directory.chmod(0o700)
    except OSError as error:
        raise IdentityError(f"{directory} can't be made: {error.strerror}") from error


def _copy(source: Path, target: Path) -> None:
    try:
        shutil.copyfile(source, target)
        target.chmod(0o644)
    except OSError as error:
        raise IdentityError(f"{target} can't be written: {error.strerror}") from error


def date_of(moment: float) -> str:
    """A day, for people: 2027-03-01."""
    return time.strftime("%Y-%m-%d", time.gmtime(moment))


def days_left(moment: float, now: float) -> int:
    """Whole days until `moment`; negative after it."""
    return int((moment - now) // DAY_S)
