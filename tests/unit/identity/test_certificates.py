"""When certificates end, which files may hold a secret, and where they are."""

from __future__ import annotations

import os
import ssl
import subprocess
import time
from pathlib import Path

import pytest

from slurm_watchdog.config.loading import parse_config
from slurm_watchdog.identity.secret_files import IdentityError, check_secret
from slurm_watchdog.identity.tls import read_end
from tests.builders.identity_files import DAY_S, issue, make_authority


@pytest.fixture(scope="module")
def ca(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority with a controller, and a node whose certificate ends beyond 2049."""
    place = make_authority(tmp_path_factory.mktemp("certificates") / "ca", time.time())
    issue(place, "node", "n1", time.time(), 40 * 365)
    return place


def test_the_end_of_a_certificate_is_the_one_that_openssl_reads(ca: Path) -> None:
    files = sorted(ca.rglob("*.crt"))
    for file in files:
        shown = subprocess.run(["openssl", "x509", "-noout", "-enddate", "-in", str(file)], capture_output=True,
                               text=True, check=True, timeout=60).stdout  # fmt: skip
        assert read_end(str(file)) == ssl.cert_time_to_seconds(shown.partition("=")[2].strip())
    assert max(map(read_end, map(str, files))) - time.time() > 39 * 365 * DAY_S


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nothing",
        "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----",
        "-----BEGIN CERTIFICATE-----\n%%\n",
    ],
)
def test_text_without_a_certificate_raises(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.crt").write_text(text)
    with pytest.raises(IdentityError, match="is not a certificate"):
        read_end(str(tmp_path / "x.crt"))
    with pytest.raises(IdentityError, match="is not a certificate"):
        read_end(str(tmp_path / "missing"))


def test_a_key_that_others_may_read_is_refused_with_what_to_do(tmp_path: Path) -> None:
    key = tmp_path / "agent.key"
    with pytest.raises(IdentityError, match="No such file"):
        check_secret(str(key))
    key.write_text("x")
    for mode in (0o604, 0o620, 0o660, 0o601):
        key.chmod(mode)
        with pytest.raises(IdentityError, match=f"chmod 600 {key}"):
            check_secret(str(key))
    for mode in (0o600, 0o400, 0o440, 0o640):
        key.chmod(mode)
        check_secret(str(key))
    with pytest.raises(IdentityError, match="is not a file"):
        check_secret(str(tmp_path))
    assert os.path.exists(key)


def test_a_path_may_begin_with_the_unit_s_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", "/run/credentials/x")
    text = "security: {tls_directory: '${CREDENTIALS_DIRECTORY}/tls', operators: ['a${CREDENTIALS_DIRECTORY}']}"
    security = parse_config(text).security
    assert (security.identity(), security.tls_directory) == ("tls", "/run/credentials/x/tls")
    assert security.operators == ("a${CREDENTIALS_DIRECTORY}",)
    monkeypatch.delenv("CREDENTIALS_DIRECTORY")
    assert parse_config(text).security.tls_directory == "/run/credentials/tls", "and it is said that it is not there"
