"""TLS on both ends: contexts from files, read again when they change, and what a failed handshake means in words."""

from __future__ import annotations

import _ssl
import logging
import os
import ssl
from collections.abc import Mapping
from typing import Any

from slurm_watchdog.identity.secret_files import IdentityError, TlsFiles, check_secret

log = logging.getLogger(__name__)

CERTIFICATE_EXPIRED = 10  # X509_V_ERR_CERT_HAS_EXPIRED (x509_vfy.h).
NO_TLS = ("HTTP_REQUEST", "HTTPS_PROXY_REQUEST", "WRONG_VERSION_NUMBER")  # sslerr.h.


def reason_of(error: Exception) -> tuple[str, str]:
    """Why a client's handshake failed: a label (wire.rate_limits.CONNECTION_REASONS), and OpenSSL's words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return "expired" if error.verify_code == CERTIFICATE_EXPIRED else "bad_certificate", error.verify_message
    reason = getattr(error, "reason", None) or ""
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "no_certificate", ""
    return "no_tls" if reason in NO_TLS else "handshake", reason.replace("_", " ").lower()


def explain(error: Exception) -> str:
    """Why the controller could not be spoken to, for the log of an agent."""
    if not isinstance(error, ssl.SSLError):
        return str(error)
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the controller's certificate is not good: {error.verify_message}"
    reason = error.reason or ""
    if reason in NO_TLS:
        return "it does not use TLS: is `controller` right, and expert.security the same on both ends?"
    return f"TLS failed: {reason.replace('_', ' ').lower() or error}"


def make_context(files: TlsFiles, *, server: bool) -> ssl.SSLContext:
    """A context for one end, TLS 1.3; the other shows a certificate of our authority. Raises IdentityError."""
    check_secret(files.key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    if server:
        # Connections are kept for days; a resumed session would not look at the certificate again.
        context.num_tickets = 0
    used = files.ca
    try:
        context.load_verify_locations(files.ca)
        if os.path.exists(used := files.revoked):
            context.load_verify_locations(files.revoked)
            context.verify_flags |= ssl.VerifyFlags.VERIFY_CRL_CHECK_LEAF
        used = f"{files.certificate} with {files.key}"
        context.load_cert_chain(files.certificate, files.key, password=_no_password)
    except (OSError, ssl.SSLError) as error:
        why = error.reason or "not PEM" if isinstance(error, ssl.SSLError) else error.strerror or str(error)
        raise IdentityError(f"{used} cannot be used: {why}") from error
    return context


def _no_password() -> str:
    """Otherwise OpenSSL asks for it on the terminal, and waits."""
    how = "openssl pkey -in KEY -out NEW"
    raise IdentityError(f"the key is protected by a password, which a service cannot ask for: {how}")


def read_end(path: str) -> float:
    """When the first certificate of a file ends, in seconds since the epoch. Raises IdentityError."""
    # The standard library has no public way to ask, and the package cryptography would cost each agent 11 MiB.
    try:
        found: Mapping[str, Any] = _ssl._test_decode_cert(path)  # type: ignore[attr-defined]
        return float(ssl.cert_time_to_seconds(found["notAfter"]))
    except (OSError, ValueError, KeyError) as error:
        raise IdentityError(f"{path} is not a certificate: {getattr(error, 'reason', None) or error}") from error


def read_expiry(files: TlsFiles) -> dict[str, float]:
    """When our certificate (`own`) and that of the authority (`authority`) end. Raises IdentityError."""
    return {"own": read_end(files.certificate), "authority": read_end(files.ca)}


def _stamps(files: TlsFiles) -> list[tuple[int, ...]]:
    """Differs from the one before when a file, or the link to it, was replaced or written to."""

    def stamp(path: str) -> tuple[int, ...]:
        try:
            seen = os.stat(path)
        except OSError:
            return ()
        return seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns

    return list(map(stamp, (files.ca, files.revoked, files.certificate, files.key)))


class Context:
    """The context of files that may be replaced while we run. What can't be loaded is logged and changes nothing."""

    def __init__(self, files: TlsFiles, *, server: bool, domain: str = ""):
        """`domain` is cut off the names of the other end. Raises IdentityError if they cannot be used now."""
        self.files, self.domain, self._server = files, domain, server
        self._stamps = _stamps(files)
        self.current, self.expires = make_context(files, server=server), read_expiry(files)
        self.problem = ""
        self.new_authority = False  # Whether the last change was one of the authority or of the revocation list.

    def refresh(self) -> bool:
        """Looks whether the files have changed; True if there is a new context."""
        stamps = _stamps(self.files)
        if not self.problem:
            self.new_authority = False
        if stamps == self._stamps:
            return False
        self.new_authority = self.new_authority or stamps[:2] != self._stamps[:2]
        self._stamps = stamps
        where = self.files.directory
        try:
            self.current, self.expires = make_context(self.files, server=self._server), read_expiry(self.files)
        except IdentityError as error:
            self.problem = str(error)
            log.error("the certificates in %s were changed and cannot be used, the old ones stay: %s", where, error)
            return False
        self.problem = ""
        log.warning("new certificates from %s are in use", where)
        return True


def names_of(certificate: Mapping[str, Any], domain: str = "") -> frozenset[str]:
    """The nodes that a certificate (ssl's getpeercert) may speak for: its DNS names without this domain, the common
    name only where there are no others. A wildcard names no node."""
    alternatives = certificate.get("subjectAltName", ())
    names = [value for kind, value in alternatives if kind == "DNS"]
    if not alternatives:
        names = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
    ending = "." + domain.strip(".") if domain else ""
    return frozenset(each.removesuffix(ending) for each in names if "*" not in each and each != ending)
