"""A site's own authority, for tests: DIRECTORY/ca.crt, ca.key and the list of revoked certificates ca.crl;
nodes/NAME/agent.crt, controllers/NAME/controller.crt and clients/NAME/client.crt, each with its key and ca.crt."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from ipaddress import ip_address
from pathlib import Path

from slurm_watchdog.identity.secret_files import TlsFiles

DAY_S = 86400.0
ROLES = {
    "node": ("nodes", "agent", "clientAuth"),
    "controller": ("controllers", "controller", "serverAuth"),
    "client": ("clients", "client", "clientAuth"),
}
"""Role -> folder, name of the files, what the certificate is for."""
OWN = "basicConstraints=critical,CA:TRUE\nkeyUsage=critical,keyCertSign,cRLSign\nsubjectKeyIdentifier=hash\n"
CONFIG = """[req]
prompt = no
distinguished_name = subject
[subject]
CN = {name}
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


def make_authority(place: Path, now: float) -> Path:
    """An authority in `place` that is good since 1000 days before `now`, and a controller of 127.0.0.1."""
    place.mkdir(parents=True)
    _make(place, place / "ca", "tests", OWN, (now - 1000 * DAY_S, now + 2650 * DAY_S), own=True)
    _write_list(place, "")
    issue(place, "controller", "localhost", now, 397, ("127.0.0.1",))
    return place


def issue(ca: Path, role: str, name: str, now: float, days: float = 30, more: tuple[str, ...] = ()) -> Path:
    """A new key and certificate of `name`, and of the names and addresses `more`, made at `now`; their folder."""
    folder, stem, use = ROLES[role]
    place = ca / folder / name
    place.mkdir(parents=True, exist_ok=True)
    names = f"URI:urn:client:{name}" if role == "client" else ",".join(map(_alternative, (name, *more)))
    extensions = (
        "basicConstraints=critical,CA:FALSE\nkeyUsage=critical,digitalSignature\nsubjectKeyIdentifier=hash\n"
        f"authorityKeyIdentifier=keyid\nextendedKeyUsage={use}\nsubjectAltName={names}\n"
    )
    _make(ca, place / stem, name, extensions, (now - 3600.0, now + days * DAY_S), own=False)
    shutil.copy(ca / "ca.crt", place / "ca.crt")
    return place


def revoke(ca: Path, *names: str) -> None:
    """Puts the certificates of these names on the list, which holds all that ever were on it."""
    rows = ""
    for name in names:
        (file,) = (file for file in ca.glob(f"*/{name}/*.crt") if file.name != "ca.crt")
        number = _openssl("x509", "-in", str(file), "-noout", "-serial").partition("=")[2].strip()
        rows += f"R\t491231235959Z\t{_date(time.time())[2:]}\t{number}\tunknown\t/CN={name}\n"
    _write_list(ca, rows)


def node_files(ca: Path, name: str, now: float, days: float = 30) -> TlsFiles:
    """The folder of a node whose certificate was made at `now`."""
    return TlsFiles(str(issue(ca, "node", name, now, days)), "agent")


def controller_files(ca: Path) -> TlsFiles:
    return TlsFiles(str(ca / "controllers" / "localhost"), "controller")


def replace_files(there: TlsFiles, by: TlsFiles) -> None:
    """As somebody does who copies renewed certificates to a machine."""
    for name in ("ca", "certificate", "key"):
        old, new = getattr(there, name), getattr(by, name)
        shutil.copy(new, old + ".new")
        os.replace(old + ".new", old)


def _alternative(name: str) -> str:
    try:
        return f"IP:{ip_address(name)}"
    except ValueError:
        return f"DNS:{name}"


def _make(ca: Path, stem: Path, name: str, extensions: str, good: tuple[float, float], *, own: bool) -> None:
    """`stem`.key and `stem`.crt, which replace those before."""
    with tempfile.TemporaryDirectory(dir=ca) as scratch:
        place = Path(scratch)
        (place / "index").touch()
        (place / "config").write_text(CONFIG.format(name=name, place=place, extensions=extensions))
        config, key = ("-config", str(place / "config")), place / "key"
        _openssl("req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", *config,
                 "-keyout", str(key), "-out", str(place / "request"))  # fmt: skip
        signer = ("-selfsign", "-keyfile", str(key)) if own else _signer(ca)
        _openssl("ca", "-batch", "-notext", *config, *signer, "-in", str(place / "request"), "-out", str(place / "crt"),
                 "-startdate", _date(good[0]), "-enddate", _date(good[1]), "-extensions", "extensions")  # fmt: skip
        os.replace(key, f"{stem}.key")
        os.replace(place / "crt", f"{stem}.crt")


def _write_list(ca: Path, rows: str) -> None:
    with (ca / "revoked").open("a+") as file:
        file.write(rows)
    with tempfile.TemporaryDirectory(dir=ca) as scratch:
        place = Path(scratch)
        shutil.copy(ca / "revoked", place / "index")
        # With the key's name in it: two authorities may be called the same.
        (place / "config").write_text(
            CONFIG.format(name="none", place=place, extensions="authorityKeyIdentifier=keyid\n")
        )
        _openssl("ca", "-gencrl", "-batch", "-config", str(place / "config"), *_signer(ca), "-crldays", "300",
                 "-crlexts", "extensions", "-out", str(ca / "ca.crl"))  # fmt: skip


def _signer(ca: Path) -> tuple[str, ...]:
    return "-cert", str(ca / "ca.crt"), "-keyfile", str(ca / "ca.key")


def _date(moment: float) -> str:
    return time.strftime("%Y%m%d%H%M%SZ", time.gmtime(moment))


def _openssl(*arguments: str) -> str:
    done = subprocess.run(["openssl", *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          timeout=60, check=False, umask=0o077)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout
