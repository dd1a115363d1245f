"""The section `security`: how nodes prove who they are, and what can't be."""

from __future__ import annotations

from typing import get_args

import pytest

from slurm_watchdog.config.agent import Identity, Security
from slurm_watchdog.config.converting import options_of
from slurm_watchdog.config.loading import ConfigError, parse_config
from slurm_watchdog.identity.transport import Transport

AWAY = "controller: {listen: '0.0.0.0:9765'}\n"


@pytest.mark.parametrize(
    ("text", "identity"),
    [
        ("", "munge"),
        (AWAY, "munge"),
        ("security: {tls_directory: /t}", "tls"),
        ("security: {mode: munge}", "munge"),
        (AWAY + "security: {mode: munge}", "munge"),
        (AWAY + "security: {tls_directory: /t}", "tls"),
    ],
)
def test_auto_is_certificates_where_their_directory_is_set_and_else_munge(text: str, identity: str) -> None:
    assert parse_config(text).security.identity() == identity


@pytest.mark.parametrize(
    ("text", "path", "words"),
    [
        ("security: {mode: none}", "security.mode", "must be auto, tls or munge, got"),
        ("security: {token_file: /t}", "security.token_file", "unknown key"),
        ("security: {mode: unix}", "security.mode", "must be auto, tls or munge, got"),
        ("security: {mode: tls}", "security.tls_directory", "docs/authentication.md"),
        ("security: {tls_directory: tls}", "security.tls_directory", "absolute path"),
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
        ("agent: {controller_url: 'https://m:9765'}", "agent.controller_url", "http://"),
        (
            "security: {check_node_address: false}",
            "security.check_node_address",
            "the address proves the node",
        ),
        ("security: {mode: kerberos}", "security.mode", ""),
        ("security: {mode: munge, agent_user: ''}", "security.agent_user", ""),
    ],
)
def test_security_settings_that_contradict_are_refused_with_key_and_remedy(text: str, path: str, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_config(text)
    assert [each.path for each in raised.value.problems] == [path]
    assert words in raised.value.problems[0].message


def test_a_controller_alone_with_certificates_needs_no_address_of_itself() -> None:
    assert parse_config(AWAY + "security: {mode: tls, tls_directory: /t}").controller_urls == ()


def test_the_transports_are_the_modes_of_services_and_the_socket_of_one_user() -> None:
    assert set(get_args(Transport)) == {*get_args(Identity), "unix"}
    assert {*get_args(Identity), "auto"} == set(get_args(options_of(Security)["mode"].type))
