"""Why a handshake failed: OpenSSL's words, our labels, and what they mean to a person."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

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
}
"""X509_V_ERR_* of OpenSSL (x509_vfy.h) -> label of a refusal."""
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
}
"""Reasons of OpenSSL's own errors (sslerr.h)."""
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
}
"""Label -> what it means. These are all the labels there are."""

ALERTS: Final[Mapping[str, str]] = {
    "CERTIFICATE_REQUIRED": "it wants a certificate of us, and we have none",
    "CERTIFICATE_EXPIRED": "our certificate has expired: copy a new one here (docs/authentication.md)",
    "UNKNOWN_CA": "it does not know the authority that made our certificate",
    "BAD_CERTIFICATE": "our certificate is not good (not valid yet? is the clock right?)",
    "UNSUPPORTED_CERTIFICATE": "our certificate is not for clients",
    "CERTIFICATE_REVOKED": "our certificate was revoked",
    "HTTP_REQUEST": "it does not use TLS",
    "WRONG_VERSION_NUMBER": "it does not use TLS: is `controller` right, and expert.security the same on both ends?",
}
"""What the end of OpenSSL's reason means to an agent."""
