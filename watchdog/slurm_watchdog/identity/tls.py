"""TLS on both ends: contexts from files, read again when they change, and what a failed handshake means in words."""

from __future__ import annotations

import base64
import logging
import os
import re
import ssl
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from slurm_watchdog.identity.secret_files import IdentityError, Stamp, TlsFiles, check_secret, read_stamp, read_text

# When a certificate ends, read from its DER (X.690, RFC 5280 section 4.1.2.5): the standard library has no public way
# to ask, and the package cryptography would cost each agent 11 MiB. Only our own files are read: whether a certificate
# is to be trusted is decided by OpenSSL.

PEM = re.compile("-----BEGIN CERTIFICATE-----(.+?)-----END CERTIFICATE-----", re.DOTALL)
VALIDITY = re.compile(
    rb"\x30[\x1e\x20\x22](?:\x17\x0d\d{12}Z|\x18\x0f\d{14}Z)(?:\x17\x0d(?P<utc>\d{12})|\x18\x0f(?P<general>\d{14}))Z"
)  # A sequence of two times: UTCTime (YYMMDDHHMMSSZ, 1950 to 2049) or GeneralizedTime (YYYYMMDDHHMMSSZ).


def parse_end(text: str) -> float:
    """When the first certificate of a PEM file ends, in seconds since the epoch. Raises ValueError."""
    if (found := PEM.search(text)) is None:
        raise ValueError("it has no certificate")
    der = base64.b64decode("".join(found[1].split()), validate=True)
    extra = max(0, (der + b"\0\0")[1] - 0x80)  # Bytes of the length of the whole, where one does not hold it.
    size = int.from_bytes(der[2 : 2 + extra] if extra else der[1:2], "big")
    times = VALIDITY.search(der)
    if times is None or len(der) != 2 + extra + size:
        raise ValueError("its certificate is damaged")
    at = str(times["general"] or (b"19" if times["utc"] >= b"50" else b"20") + times["utc"], "ascii")
    return datetime.fromisoformat(f"{at[:4]}-{at[4:6]}-{at[6:8]}T{at[8:10]}:{at[10:12]}:{at[12:]}+00:00").timestamp()


def read_end(path: str) -> float:
    """When the first certificate of a file ends, in seconds since the epoch. Raises IdentityError."""
    try:
        return parse_end(read_text(path))
    except ValueError as error:
        raise IdentityError(f"{path} is not a certificate: {error}") from error


log = logging.getLogger(__name__)


def reason_of(error: ssl.SSLError) -> str:
    """Why a client's handshake failed: a key of HANDSHAKE_REASONS."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return VERIFY_REASONS.get(error.verify_code, "bad_certificate")
    return OPENSSL_REASONS.get(error.reason or "", "handshake")


def explain(error: ssl.SSLError) -> str:
    """Why the controller could not be spoken to, for the log of an agent."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the controller's certificate is not good: {error.verify_message}"
    reason = error.reason or ""
    meaning = next((text for end, text in ALERTS.items() if reason.endswith(end)), "")
    return meaning or f"TLS failed: {reason or error}"


def make_context(files: TlsFiles, *, server: bool) -> ssl.SSLContext:
    """A context for one end, TLS 1.3; the other shows a certificate of our authority. Raises IdentityError."""
    check_secret(files.key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    if server:
        # Connections are kept for days; a resumed session would not look at the certificate again.
        context.num_tickets = 0
    try:
        context.load_verify_locations(files.ca)
    except (OSError, ssl.SSLError) as error:
        raise IdentityError(f"{files.ca} cannot be read, or holds no certificate: {_text(error)}") from error
    if os.path.exists(files.revoked):
        try:
            context.load_verify_locations(files.revoked)
        except (OSError, ssl.SSLError) as error:
            raise IdentityError(f"{files.revoked} cannot be read, or holds no list: {_text(error)}") from error
        context.verify_flags |= ssl.VerifyFlags.VERIFY_CRL_CHECK_LEAF
    try:
        context.load_cert_chain(files.certificate, files.key, password=_no_password)
    except (OSError, ssl.SSLError) as error:
        raise IdentityError(
            f"{files.certificate} and {files.key} cannot be used, or don't belong together: {_text(error)}"
        ) from error
    return context


def _no_password() -> str:
    """Otherwise OpenSSL asks for it on the terminal, and waits."""
    raise IdentityError(
        "the key is protected by a password, which a service cannot ask for: openssl pkey -in KEY -out NEW"
    )


def _text(error: OSError) -> str:
    return error.strerror or str(error) if not isinstance(error, ssl.SSLError) else error.reason or "not PEM"


class Context:
    """The context of files that may be replaced while we run. What can't be loaded is logged and changes nothing."""

    def __init__(self, files: TlsFiles, *, server: bool, domain: str = ""):
        """`domain` is cut off the names of the other end. Raises IdentityError if they cannot be used now."""
        self.files = files
        self.domain = domain
        self._server = server
        self._stamp = read_stamp(files.watched())
        self.current = make_context(files, server=server)
        self.expires = read_expiry(files)
        """`own` and `authority` -> when that certificate ends, in seconds since the epoch."""
        self.problem = ""
        self.new_authority = False  # Whether the last change was one of the authority or of the revocation list.

    def refresh(self) -> bool:
        """Looks whether the files have changed; True if there is a new context."""
        stamp: Stamp = read_stamp(self.files.watched())
        if not self.problem:
            self.new_authority = False
        if stamp == self._stamp:
            return False
        self.new_authority = self.new_authority or stamp[:2] != self._stamp[:2]
        self._stamp = stamp
        try:
            self.current = make_context(self.files, server=self._server)
            self.expires = read_expiry(self.files)
        except IdentityError as error:
            self.problem = str(error)
            log.error(
                "the certificates in %s were changed and cannot be used, the old ones stay: %s",
                self.files.directory,
                error,
            )
            return False
        self.problem = ""
        log.warning("new certificates from %s are in use", self.files.directory)
        return True


def read_expiry(files: TlsFiles) -> dict[str, float]:
    """When our certificate and that of the authority end. Raises IdentityError."""
    return {
        "own": read_end(files.certificate),
        "authority": read_end(files.ca),
    }


def names_of(certificate: Mapping[str, Any], domain: str = "") -> frozenset[str]:
    """The nodes that a certificate (ssl's getpeercert) may speak for: its DNS names, the common name only
    where there are no others.

    `domain` is cut off their ends. A wildcard names no node.
    """
    alternatives = certificate.get("subjectAltName", ())
    names = [value for kind, value in alternatives if kind == "DNS"]
    if not alternatives:
        names = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
    ending = "." + domain.strip(".") if domain else ""
    return frozenset(
        name.removesuffix(ending) if ending else name
        for name in names
        if "*" not in name and (not ending or name != ending)
    )


VERIFY_REASONS: Final[Mapping[int, str]] = {
    9: "not_yet_valid",
    10: "expired",
    12: "revocation_list_expired",
    2: "unknown_ca",
    3: "no_revocation_list",
    8: "no_revocation_list",
    44: "no_revocation_list",
    18: "unknown_ca",
    19: "unknown_ca",
    20: "unknown_ca",
    21: "unknown_ca",
    23: "revoked",
    26: "wrong_purpose",
}  # X509_V_ERR_* of OpenSSL (x509_vfy.h) -> label of a refusal.
OPENSSL_REASONS: Final[Mapping[str, str]] = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "no_certificate",
    "HTTP_REQUEST": "no_tls",
    "HTTPS_PROXY_REQUEST": "no_tls",
    "WRONG_VERSION_NUMBER": "no_tls",
    "UNSUPPORTED_PROTOCOL": "old_tls",
    "TLSV1_ALERT_UNKNOWN_CA": "refused_us",
    "SSLV3_ALERT_BAD_CERTIFICATE": "refused_us",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "refused_us",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "refused_us",
}  # Reasons of OpenSSL's own errors (sslerr.h).
HANDSHAKE_REASONS: Final[Mapping[str, str]] = {
    "no_certificate": "it showed no certificate",
    "expired": "its certificate has expired",
    "not_yet_valid": "its certificate is not valid yet: is the clock right?",
    "unknown_ca": "its certificate is not from our authority (ca.crt)",
    "revoked": "its certificate was revoked",
    "revocation_list_expired": "the list of revoked certificates is too old",
    "no_revocation_list": "ca.crl is there and holds no list of the authority that made its "
    "certificate: add that one's, "
    "or remove the file",
    "wrong_purpose": "its certificate is not for clients",
    "bad_certificate": "its certificate is not good",
    "no_tls": "it does not use TLS: does `controller` begin with https:// ?",
    "old_tls": "it does not support TLS 1.3",
    "refused_us": "it does not trust our certificate",
    "handshake": "the TLS handshake failed",
    "slow_handshake": "its TLS handshake took too long",
}  # Label -> what it means. These are all the labels there are.

ALERTS: Final[Mapping[str, str]] = {
    "CERTIFICATE_REQUIRED": "it wants a certificate of us, and we have none",
    "CERTIFICATE_EXPIRED": "our certificate has expired: copy a new one here (docs/authentication.md)",
    "UNKNOWN_CA": "it does not know the authority that made our certificate",
    "BAD_CERTIFICATE": "our certificate is not good (not valid yet? is the clock right?)",
    "UNSUPPORTED_CERTIFICATE": "our certificate is not for clients",
    "CERTIFICATE_REVOKED": "our certificate was revoked",
    "HTTP_REQUEST": "it does not use TLS",
    "WRONG_VERSION_NUMBER": "it does not use TLS: is `controller` right, and expert.security the same on both ends?",
}  # What the end of OpenSSL's reason means to an agent.
