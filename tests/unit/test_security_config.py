"""The section `security`: how nodes prove who they are, and what can't be."""

from __future__ import annotations

import pytest

from watchdog.config import ConfigError, parse_config

AWAY = "controller: {listen: '0.0.0.0:9765'}\n"


@pytest.mark.parametrize(
    ("text", "identity"),
    [
        ("", "none"),
        ("security: {token_file: /t}", "token"),
        ("security: {tls_directory: /t}", "tls"),
        ("security: {tls_directory: /t, token_file: /t}", "tls"),
        ("security: {mode: munge}", "munge"),
        (AWAY + "security: {mode: munge}", "munge"),
        (AWAY + "security: {tls_directory: /t}", "tls"),
        (AWAY + "security: {mode: none}", "none"),
    ],
)
def test_auto_takes_what_is_set_and_away_from_this_machine_it_has_to_be_something(
    text: str, identity: str
) -> None:
    assert parse_config(text).security.identity() == identity


@pytest.mark.parametrize(
    ("text", "path", "words"),
    [
        (AWAY, "security.token_file", "security.mode: munge, or security.tls_directory"),
        ("security: {mode: tls}", "security.tls_directory", "slurm-watchdog ca --help"),
        ("security: {tls_directory: tls}", "security.tls_directory", "absolute path"),
        ("security: {mode: token}", "security.token_file", "openssl rand -hex 32"),
        (
            "security: {tls_directory: /t}\nagent: {controller_url: 'http://m:9765'}",
            "agent.controller_url",
            "https://",
        ),
        (
            "security: {mode: munge}\nagent: {controller_url: 'https://m:9765'}",
            "agent.controller_url",
            "http://",
        ),
        (
            "security: {mode: munge, check_node_address: false}",
            "security.check_node_address",
            "the address proves the node",
        ),
        ("security: {mode: none, token_file: /t}", "security.token_file", "nobody asks for it"),
        ("security: {mode: munge, token_file: /t}", "security.token_file", "nobody asks for it"),
        ("security: {mode: kerberos}", "security.mode", ""),
        ("security: {mode: munge, agent_user: ''}", "security.agent_user", ""),
    ],
)
def test_what_cannot_be_is_refused_with_its_key_and_what_to_do(text: str, path: str, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_config(text)
    assert [each.path for each in raised.value.problems] == [path]
    assert words in raised.value.problems[0].message


def test_a_controller_alone_with_certificates_needs_no_address_of_itself() -> None:
    assert parse_config(AWAY + "security: {mode: tls, tls_directory: /t}").agent.controller_url.startswith(
        "http://"
    )
