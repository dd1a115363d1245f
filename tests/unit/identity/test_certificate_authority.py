"""The small authority: what it makes, for whom, with which rights, and how it is told when it ends."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from slurm_watchdog.cli.main import main
from slurm_watchdog.config.loading import parse_config
from slurm_watchdog.identity import certificate_authority
from slurm_watchdog.identity.certificates import parse_pem, read_certificate
from slurm_watchdog.identity.secret_files import IdentityError, TlsFiles, check_secret, real_path

DAY_S = 86400.0


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["ca", *arguments], catch_exceptions=False)


@pytest.fixture(scope="module")
def ca(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority with two nodes, a controller and a client."""
    place = tmp_path_factory.mktemp("authority") / "ca"
    assert run("init", "--directory", str(place)).exit_code == 0
    done = run(
        "issue",
        "n[1-2]",
        "--controller",
        "mgmt",
        "--controller",
        "10.0.0.1",
        "--client",
        "prometheus",
        "--directory",
        str(place),
    )
    assert done.exit_code == 0, done.output
    return place


def openssl(*arguments: str) -> str:
    return subprocess.run(["openssl", *arguments], capture_output=True, text=True, check=True, timeout=60).stdout


def test_keys_are_for_their_owner_alone_and_folders_cannot_be_entered(ca: Path) -> None:
    keys = sorted(ca.rglob("*.key"))
    assert len(keys) == 5
    assert {path.stat().st_mode & 0o777 for path in keys} == {0o600}
    assert {path.stat().st_mode & 0o777 for path in (ca, *ca.rglob("*")) if path.is_dir()} == {0o700}
    assert not list(ca.glob(".new-*")), "nothing of the making is left"


def test_an_authority_has_a_list_of_what_it_revoked_from_the_beginning_and_the_list_names_its_key(
    ca: Path,
) -> None:
    text = openssl("crl", "-in", str(ca / "ca.crl"), "-noout", "-text")
    assert "No Revoked Certificates" in text
    key = openssl("x509", "-in", str(ca / "ca.crt"), "-noout", "-ext", "subjectKeyIdentifier").splitlines()[-1].strip()
    assert key in text, "two authorities may have the same name"


def test_each_certificate_is_good_for_what_its_machine_does_and_for_nothing_else(ca: Path) -> None:
    for stem, purpose in (
        ("nodes/n1/agent", "sslclient"),
        ("clients/prometheus/client", "sslclient"),
        ("controllers/mgmt/controller", "sslserver"),
    ):
        other = {"sslclient": "sslserver", "sslserver": "sslclient"}[purpose]
        file = str(ca / f"{stem}.crt")
        assert "OK" in openssl("verify", "-x509_strict", "-CAfile", str(ca / "ca.crt"), "-purpose", purpose, file)
        with pytest.raises(subprocess.CalledProcessError):
            openssl("verify", "-CAfile", str(ca / "ca.crt"), "-purpose", other, file)


def test_a_node_s_certificate_cannot_sign_another(ca: Path) -> None:
    assert "CA:FALSE" in openssl("x509", "-noout", "-text", "-in", str(ca / "nodes/n1/agent.crt"))
    assert "pathlen:0" in openssl("x509", "-noout", "-text", "-in", str(ca / "ca.crt"))


def test_parsed_certificate_agrees_with_openssl(ca: Path) -> None:
    for file in ca.rglob("*.crt"):
        found = read_certificate(str(file))
        dates = dict(line.split("=", 1) for line in openssl("x509", "-noout", "-dates", "-in", str(file)).splitlines())
        assert found.not_before == ssl.cert_time_to_seconds(dates["notBefore"])
        assert found.not_after == ssl.cert_time_to_seconds(dates["notAfter"])
    assert read_certificate(str(ca / "nodes/n1/agent.crt")).names == ("n1",)
    controller = read_certificate(str(ca / "controllers/mgmt/controller.crt"))
    assert (controller.names, controller.addresses) == (("mgmt",), ("10.0.0.1",))


def test_dates_beyond_2049_are_read(tmp_path: Path) -> None:
    made = certificate_authority.create(tmp_path / "ca", "far", 36500, time.time())
    assert made.not_after - time.time() > 99 * 365 * DAY_S


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nothing",
        "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----",
        "-----BEGIN CERTIFICATE-----\n%%\n",
    ],
)
def test_text_without_a_certificate_raises(text: str) -> None:
    with pytest.raises(ValueError):
        parse_pem(text)


def test_a_certificate_that_is_cut_off_anywhere_is_refused_and_nothing_else_happens(ca: Path) -> None:
    import base64

    from slurm_watchdog.identity.certificates import parse_der

    text = (ca / "nodes/n1/agent.crt").read_text()
    der = base64.b64decode("".join(text.splitlines()[1:-1]))
    for size in range(len(der)):
        with pytest.raises((ValueError, IndexError)):
            parse_der(der[:size])


def test_an_authority_is_never_overwritten(ca: Path) -> None:
    before = (ca / "ca.key").read_bytes()
    done = run("init", "--directory", str(ca))
    assert done.exit_code == 2
    assert "holds an authority already" in done.output
    assert (ca / "ca.key").read_bytes() == before


@pytest.mark.parametrize("name", ["../etc", "a b", "-n", "a,DNS:evil", "n1\nDNS:evil", "$ENV::HOME", "*", ".."])
def test_what_can_be_no_name_of_a_machine_is_refused_before_anything_is_made(ca: Path, name: str) -> None:
    with pytest.raises(IdentityError):
        certificate_authority.issue(ca, "node", name, (), 10, time.time())
    with pytest.raises(IdentityError):
        certificate_authority.issue(ca, "controller", "mgmt2", (name,), 10, time.time())
    assert not (ca / "controllers" / "mgmt2" / "controller.key").exists()


def test_an_authority_s_title_cannot_become_configuration(tmp_path: Path) -> None:
    with pytest.raises(IdentityError):
        certificate_authority.create(tmp_path / "ca", "x\n[ca]", 10, time.time())


def test_list_says_what_ends_first_and_warns_a_month_before(tmp_path: Path) -> None:
    place = tmp_path / "ca"
    run("init", "--directory", str(place))
    run("issue", "n1", "--directory", str(place))
    assert run("list", "--directory", str(place)).exit_code == 0
    run("issue", "n2", "--days", "10", "--directory", str(place))
    done = run("list", "--directory", str(place), "--json")
    assert done.exit_code == 1
    rows = json.loads(done.stdout)["certificates"]
    assert [(row["name"], row["role"], row["days_left"] < 30) for row in rows] == [
        ("n2", "node", True),
        ("n1", "node", False),
    ]


def test_renew_takes_those_that_end_soon_with_new_keys_and_the_same_names(tmp_path: Path) -> None:
    place, now = tmp_path / "ca", time.time()
    certificate_authority.create(place, "tests", 3650, now)
    certificate_authority.issue(place, "controller", "mgmt", ("10.0.0.1", "mgmt.example"), 20, now)
    certificate_authority.issue(place, "node", "n1", (), 300, now)
    keys = {path: path.read_bytes() for path in place.rglob("*.key")}
    done = run("renew", "--directory", str(place), "--json")
    assert [row["name"] for row in json.loads(done.stdout)["certificates"]] == ["mgmt"]
    assert {path.name for path, before in keys.items() if path.read_bytes() != before} == {"controller.key"}
    renewed = read_certificate(str(place / "controllers/mgmt/controller.crt"))
    assert (renewed.names, renewed.addresses) == (("mgmt", "mgmt.example"), ("10.0.0.1",))
    done = run("renew", "n1", "--directory", str(place), "--json")
    assert [row["name"] for row in json.loads(done.stdout)["certificates"]] == ["n1"]
    assert run("renew", "n7", "--directory", str(place)).exit_code == 2


def test_nothing_is_signed_beyond_the_authority_s_own_end(tmp_path: Path) -> None:
    now = time.time()
    own = certificate_authority.create(tmp_path / "ca", "tests", 20, now)
    assert (
        certificate_authority.issue(tmp_path / "ca", "node", "n1", (), 300, now).certificate.not_after == own.not_after
    )
    with pytest.raises(IdentityError, match="has ended"):
        certificate_authority.issue(tmp_path / "ca", "node", "n1", (), 300, own.not_after + 1)


def test_without_an_authority_it_is_said_what_is_missing(tmp_path: Path) -> None:
    for arguments in (("issue", "n1"), ("list",)):
        done = run(*arguments, "--directory", str(tmp_path), "--json")
        assert done.exit_code == 2
        assert "ca.crt cannot be read" in json.loads(done.stdout)["error"]


def test_a_set_of_nodes_that_is_none_or_far_too_large_is_wrong_usage(ca: Path) -> None:
    for nodes in ("n[1-", "n[1-99999999]", "r[1-9000]n[1-9000]", "n[1-99999999999999999999999]"):
        assert run("issue", nodes, "--directory", str(ca)).exit_code == 2
    assert run("issue", "--directory", str(ca)).exit_code == 2


@pytest.mark.parametrize("command", ["init", "issue", "renew", "revoke", "list"])
def test_each_has_an_example(command: str) -> None:
    assert f"slurm-watchdog ca {command}" in run(command, "--help").output


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
    with pytest.raises(IdentityError, match="is no file"):
        check_secret(str(tmp_path))
    assert os.path.exists(key)


def test_a_path_may_begin_with_the_unit_s_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", "/run/credentials/x")
    assert real_path("${CREDENTIALS_DIRECTORY}/token") == "/run/credentials/x/token"
    assert TlsFiles("${CREDENTIALS_DIRECTORY}", "agent").key == "/run/credentials/x/agent.key"
    assert real_path("/a/${CREDENTIALS_DIRECTORY}") == "/a/${CREDENTIALS_DIRECTORY}"
    assert parse_config("security: {tls_directory: '${CREDENTIALS_DIRECTORY}'}").security.identity() == "tls"
    monkeypatch.delenv("CREDENTIALS_DIRECTORY")
    assert real_path("${CREDENTIALS_DIRECTORY}/token") == "${CREDENTIALS_DIRECTORY}/token", (
        "and it is said that it is not there"
    )
