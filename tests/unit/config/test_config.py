"""The configuration: defaults are the example, and a wrong file is refused whole, with every error and its line."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slurm_watchdog.config.loading import ConfigError, load_config, parse_config
from slurm_watchdog.config.schema import Config
from slurm_watchdog.config.types import format_duration, format_size, parse_duration, parse_size
from slurm_watchdog.controller.policy.rules import rule_for
from slurm_watchdog.detect.collective_hang import CollectiveHang
from slurm_watchdog.detect.filesystem_stall import FilesystemStall
from slurm_watchdog.detect.registry import KINDS
from slurm_watchdog.detect.slow_job import SlowJob
from tests.builders.missing_data import DEFAULTS
from tools.docs.options import example as example_config


def problems(text: str) -> list[tuple[int | None, str, str]]:
    """(line, key, message) of everything that is wrong in `text`."""
    with pytest.raises(ConfigError) as caught:
        parse_config(text)
    return [(each.line, each.path, each.message) for each in caught.value.problems]


# ---------------------------------------------------------------------------------------------- example


def test_the_example_is_up_to_date(checkout: Path) -> None:
    assert (checkout / "config.example.yaml").read_text() == example_config(), "run: make example"


def test_the_example_holds_the_defaults(checkout: Path) -> None:
    assert load_config(str(checkout / "config.example.yaml")) == Config()


@pytest.mark.parametrize("text", ["", "# nothing set\n", "{}"])
def test_an_empty_file_gives_the_defaults(text: str) -> None:
    assert parse_config(text) == Config()


def test_detectors_get_the_values_of_the_file_and_their_own_defaults() -> None:
    assert Config().detectors.settings() == DEFAULTS
    config = parse_config("detectors: {slow_job: {percent: 7}, filesystem_stall: {blocked_for: 2min}}")
    assert config.detectors.settings() == {
        **DEFAULTS,
        SlowJob: SlowJob(percent=7.0),
        FilesystemStall: FilesystemStall(blocked_for=120.0),
    }


def test_configuration_without_settings_observes() -> None:
    assert not [kind for kind in KINDS if rule_for(Config(), kind, None).acts]


def test_a_wrong_value_hides_no_wrong_value_of_another_section() -> None:
    found = problems("mode: acts\njobs:\n  kill_switch: /scratch/stop\ncontroller:\n  listen: '9765'\n")
    assert [(line, key) for line, key, _ in found] == [
        (1, "mode"),
        (3, "jobs.kill_switch"),
        (5, "controller.listen"),
    ]


@pytest.mark.parametrize(
    "key", ["controller:\n  tick", "agent:\n  interval", "detectors:\n  collective_hang:\n    floor"]
)
def test_a_duration_that_must_be_something_is_not_zero(key: str) -> None:
    (problem,) = problems(f"{key}: 0s\n")
    assert "greater than 0s" in problem[2]


def test_every_setting_is_explained() -> None:
    assert not [line for line in example_config().splitlines() if line and "# " not in line]


# ------------------------------------------------------------------------------------- keys for people


def test_three_lines_are_a_configuration() -> None:
    config = parse_config("cluster_name: alps\ncontroller: http://mgmt1:9765\nrestart: hangs\n")
    assert (config.cluster_name, config.controller_urls, config.warnings) == ("alps", ("http://mgmt1:9765",), ())


@pytest.mark.parametrize(
    ("restart", "hang", "slow"), [("never", False, False), ("hangs", True, False), ("all", True, True)]
)
def test_what_is_restarted_is_one_word(restart: str, hang: bool, slow: bool) -> None:
    config = parse_config(f"restart: {restart}")
    hanging = ("collective_hang", "rank_stopped", "lingering_job", "driver_stall")
    assert {rule_for(config, kind, None).acts for kind in hanging} == {hang}
    assert {
        rule_for(config, kind, None).acts for kind in ("slow_node", "gpu_fault", "filesystem_stall", "node_down")
    } == {slow}


def test_limits_of_silence_follow_the_patience_and_no_proof_does() -> None:
    def hang(text: str) -> CollectiveHang:
        return parse_config(text).detectors.of(CollectiveHang)

    shipped, patient, soon = CollectiveHang(), hang("patience: 2min"), hang("patience: 30s")
    for name in ("floor", "stepless_limit", "busy_limit"):
        assert (getattr(patient, name), getattr(soon, name)) == (2 * getattr(shipped, name), getattr(shipped, name) / 2)
    for name in ("startup_grace", "evaluation_floor", "checkpoint_floor"):
        assert (getattr(patient, name), getattr(soon, name)) == (2 * getattr(shipped, name), getattr(shipped, name))
    assert patient.proven_floor == soon.proven_floor == shipped.proven_floor
    own = hang("patience: 2min\ndetectors: {collective_hang: {floor: 90s}}")
    assert (own.floor, own.busy_limit) == (90.0, 2 * shipped.busy_limit), "what is said of one limit holds"
    some = parse_config("patience: 3min\nexcept: [{match: {user: a}, patience: 10min}]")
    theirs = some.exceptions[0].settings(some.detectors.settings())[CollectiveHang]
    assert (theirs.floor, theirs.busy_limit) == (600.0, 10 * shipped.busy_limit)
    assert parse_config("patience: 1min").detectors == Config().detectors
    assert problems("patience: 5s")[0][2] == "must be at least 30s, got '5s'"


# ----------------------------------------------------------------------------------------------- errors


def test_all_errors_come_at_once_each_with_its_line() -> None:
    text = """\
mode: sometimes
agent:
  interval: 5
  intervall: 5s
policy:
  attempts: many
detectors:
  collective_hang:
    warmup_steps: -1
"""
    found = problems(text)
    assert [(line, path) for line, path, _ in found] == [
        (1, "mode"),
        (3, "agent.interval"),
        (4, "agent.intervall"),
        (6, "policy.attempts"),
        (9, "detectors.collective_hang.warmup_steps"),
    ]
    assert found[2][2] == "unknown key; did you mean 'interval'?"


def test_an_error_is_printed_as_file_line_key_and_sentence() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config("slurm:\n  deadline: 20\n", "/etc/x.yaml")
    (line,) = caught.value.lines()
    assert line.startswith("/etc/x.yaml:2: slurm.deadline: a duration needs a number and a unit")
    assert str(caught.value) == line


def test_broken_yaml_names_its_line() -> None:
    ((line, path, message),) = problems("mode: observe\nagent: [1, 2\npolicy: {}\n")
    assert line is not None
    assert line >= 2
    assert (path, message.startswith("is not valid YAML")) == ("", True)


@pytest.mark.parametrize("text", ["- a\n- b\n", "just words", "5"])
def test_a_file_that_is_no_mapping_is_refused(text: str) -> None:
    assert problems(text)[0][2] == "must be a mapping of keys and values"


def test_a_section_that_is_no_mapping_is_refused() -> None:
    assert problems("mode: observe\nagent: 5s\n") == [(2, "agent", "must be a mapping of keys and values")]


def test_python_objects_in_yaml_are_refused() -> None:
    assert problems("mode: !!python/object/apply:os.getcwd []\n")[0][2].startswith("is not valid YAML")


def test_an_unknown_key_gets_a_suggestion_or_the_list_of_known_ones() -> None:
    assert problems("controler: {}\n") == [(1, "controler", "unknown key; did you mean 'controller'?")]
    ((_, _, message),) = problems("slurm:\n  zzz: 1\n")
    keys = "client, pyslurm_python, bin_directory, token_file, slurmd_port, poll_interval, deadline"
    assert message == f"unknown key; known: {keys}"


def test_a_key_that_is_given_twice_is_refused() -> None:
    assert problems("mode: observe\nmode: act\n") == [(2, "mode", "is given twice; remove one")]
    text = "policy:\n  attempts: 1\n  budget: 1\n  attempts: 2\n"
    assert problems(text) == [(4, "policy.attempts", "is given twice; remove one")]


@pytest.mark.parametrize(
    "value", ["5", "5.5", "'5'", "5 minutes", "s", "-5s", "5s6", "''", "true", "[5s]", "1e3s", "null"]
)
def test_a_duration_without_a_known_unit_is_refused(value: str) -> None:
    ((line, path, message),) = problems(f"agent:\n  interval: {value}\n")
    assert (line, path) == (2, "agent.interval")
    assert "needs a number and a unit (ms, s, min, h, d)" in message


@pytest.mark.parametrize("value", ["8", "8MB", "8 mib", "MiB", "-1MiB", "true"])
def test_a_size_without_a_known_unit_is_refused(value: str) -> None:
    ((_, path, message),) = problems(f"controller:\n  evidence_per_day: {value}\n")
    assert (path, "needs a number and a unit (B, KiB, MiB, GiB)" in message) == ("controller.evidence_per_day", True)


@pytest.mark.parametrize("line", ["attempts: '3'", "attempts: 3.5", "attempts: -1", "budget_percent: 101"])
def test_values_are_not_coerced(line: str) -> None:
    assert problems(f"policy:\n  {line}\n")[0][1] == f"policy.{line.partition(':')[0]}"


def test_a_missing_file_is_one_problem(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file or directory"):
        load_config(str(tmp_path / "none.yaml"))
    (tmp_path / "latin1.yaml").write_bytes(b"cluster_name: M\xfcnchen\n")
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        load_config(str(tmp_path / "latin1.yaml"))


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("mode: observe\nagent: &a [*a]\n", None, "nested too deeply"),
        ("agent: " + "[" * 5000, None, "nested too deeply"),
        ("a: &a [x, x]\n" + "".join(f"k{i}: &{b} [*{a}, *{a}]\n" for i, (a, b) in enumerate(pairwise("abcdefghijklmnopqrstuvwxyz"))),
         None, "aliases"),
        ("mode: observe\ncluster_name: 2026-99-99\n", 2, "2026-99-99 is not a valid timestamp"),
        ("mode: observe\nagent:\n  interval: !!int five\n", 3, "five is not a valid int"),
        (f"policy:\n  budget: {'9' * 5000}\n", 2, "is not a valid int"),
        ("mode: observe\ncluster_name: 'a\x00b'\n", 2, "the character #x0000 is not allowed"),
    ],
)  # fmt: skip
def test_yaml_that_cannot_be_read_as_values_is_one_problem(text: str, line: int | None, words: str) -> None:
    ((found, path, message),) = problems(text)
    assert (found, path, words in message) == (line, "", True), message


def test_an_alias_that_is_used_twice_is_fine() -> None:
    first = "{match: {kind: slow_node}, restart: all, ladder: [kill_switch, requeue]}"
    config = parse_config(f"except:\n- &a {first}\n- *a\n")
    assert config.exceptions[0] == config.exceptions[1]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("agent: {interval: %sd}", "36500d at most"),
        ("controller: {evidence_per_day: %sGiB}", "a size is"),
        ("policy: {attempts: %s}", "at most 1000000000"),
    ],
)
def test_a_number_beyond_all_use_is_refused(line: str, words: str) -> None:
    for digits in (30, 400):
        assert words in problems(line % ("9" * digits))[0][2]


@pytest.mark.parametrize(
    ("text", "path", "words"),
    [
        ("controller: 'http://mgmt1:97650'", "controller", "such as http://mgmt1:9765"),
        ("controller: ['http://[::1:9765']", "controller", "such as http://mgmt1:9765"),
        ("notify: {external_url: 'http://[x'}", "notify.external_url", "an address"),
        ("controller: {journal_url: db1}", "controller.journal_url", "an SQLAlchemy URL"),
        ("except: [{mach: {}}]", "except[0].mach", "did you mean 'match'?"),
        ("policy: {overrides: [{mode: act}]}", "policy.overrides[0].match", "is missing"),
    ],
)
def test_what_would_be_noticed_only_later_is_refused_with_its_key(text: str, path: str, words: str) -> None:
    assert [message for _, key, message in problems(text) if key == path and words in message], problems(text)


def test_the_address_of_a_journal_may_have_a_password_and_is_in_no_message() -> None:
    assert "hunter2" not in str(problems("controller: {journal_url: 'postgresql:w:hunter2@db1'}"))


def test_what_yaml_reads_as_true_or_false_is_taken_where_it_is_off_and_else_explained() -> None:
    for text in ("cluster_name: no", "jobs: {partitions: [off]}"):
        assert "write them in quotes" in problems(text)[0][2]


@pytest.mark.parametrize("value", [".nan", ".inf"])
def test_nan_and_infinity_are_no_values(value: str) -> None:
    assert problems(f"policy: {{budget_percent: {value}}}")[0][1] == "policy.budget_percent"
    assert problems(f"detectors: {{slow_job: {{percent: {value}}}}}")[0][1] == "detectors.slow_job.percent"


def test_a_file_that_is_too_large_is_refused_without_being_read_whole() -> None:
    with pytest.raises(ConfigError, match="larger than 1 MiB"):
        load_config("/dev/zero")


# ------------------------------------------------------------------------------------------ cross checks


@pytest.mark.parametrize("address", ["127.0.0.1:1", "localhost:9765", "'[::1]:9765'", "0.0.0.0:9765"])
def test_a_controller_may_listen_anywhere(address: str) -> None:
    parse_config(f"controller:\n  listen: {address}\n")


@pytest.mark.parametrize("address", ["9765", "':9765'", "'host:'", "host:0", "host:70000", "host:x"])
def test_an_address_is_host_and_port(address: str) -> None:
    found = problems(f"controller:\n  listen: {address}\n")
    assert found[0][:2] == (2, "controller.listen")


def test_a_kill_switch_is_the_switch_of_one_job() -> None:
    ((line, path, message),) = problems("jobs:\n  kill_switch: /shared/kill\n")
    assert (line, path) == (2, "jobs.kill_switch")
    assert message.startswith("must contain {job_id}")


@pytest.mark.parametrize(
    ("text", "path", "words"),
    [
        (
            "jobs:\n  kill_switch: kill.{job_id}\n",
            "jobs.kill_switch",
            "absolute path or begin with {workdir}",
        ),
        ("jobs:\n  kill_switch: /x/{job_id}/{rank}\n", "jobs.kill_switch", "unknown placeholder {rank}"),
        (
            "jobs:\n  kill_switch: /home/{user}/.ssh/rc{job_id}\n  kill_switch_prefixes: [/home]\n",
            "jobs.kill_switch",
            "hidden",
        ),
        ("jobs:\n  kill_switch_prefixes: [/]\n", "jobs.kill_switch_prefixes[0]", "of a directory below /"),
        ("jobs:\n  checkpoint_trackers: ['/a', 'b']\n", "jobs.checkpoint_trackers[1]", "absolute path"),
        (
            "agent:\n  log_patterns: ['/l/{restarts}']\n",
            "agent.log_patterns[0]",
            "unknown placeholder {restarts}",
        ),
        ("controller: mgmt:9765\n", "controller", "http:// or https://"),
        (
            "expert: {agent: {interval: 30s}}\n",
            "expert.controller.agent_silent_after",
            "at least twice expert.agent.interval",
        ),
        ("agent:\n  metrics_directory: here\n", "agent.metrics_directory", "must be an absolute path"),
    ],
)
def test_fields_are_checked_against_each_other(text: str, path: str, words: str) -> None:
    assert [message for _, where, message in problems(text) if where == path and words in message]


def test_several_cross_checks_fail_at_once() -> None:
    found = problems("expert:\n  controller:\n    page_listen: 0.0.0.0:1\n    agent_silent_after: 1s\n")
    assert {path for _, path, _ in found} == {"expert.controller.agent_silent_after", "expert.security.page_token_file"}
    found = problems("jobs:\n  kill_switch: kill\n")
    assert [path for _, path, _ in found] == ["jobs.kill_switch", "jobs.kill_switch"]


@pytest.mark.parametrize("template", ["/r/{job_id}", "{workdir}/kill.{job_id}.{restarts}", "/s/{user}/{job_id}"])
def test_a_kill_switch_may_lie_where_the_trainer_looks(template: str) -> None:
    text = f"jobs:\n  kill_switch: '{template}'\n"
    assert parse_config(f"{text}  kill_switch_prefixes: [/r, /s]\n").jobs.kill_switch == template
    assert "jobs.kill_switch_prefixes" in problems(text)[0][2], "nowhere without root's word"


# ------------------------------------------------------------------------------------------------ units


@given(st.integers(0, 999_999) | st.integers(0, 999_999).map(lambda milliseconds: milliseconds / 1000))
@example(90.5)
def test_a_duration_comes_back_as_it_was_written(seconds: float) -> None:
    # Six digits are what format_duration keeps: 11 days to the second, 16 minutes to the millisecond.
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, rel=1e-9)


@given(st.integers(0, 2**50))
def test_a_size_comes_back_as_it_was_written(size: int) -> None:
    assert parse_size(format_size(size)) == size


@given(st.text(max_size=20) | st.integers() | st.floats() | st.none() | st.booleans())
def test_a_duration_is_read_or_refused_with_value_error(value: object) -> None:
    try:
        assert parse_duration(value) >= 0
    except ValueError:
        pass


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5s", 5),
        ("250ms", 0.25),
        ("1h30min", 5400),
        ("1h 30min", 5400),
        ("1.5h", 5400),
        ("2d", 172800),
        ("0s", 0),
    ],
)
def test_durations_are_seconds(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(("text", "size"), [("8MiB", 8388608), ("1 KiB", 1024), ("0B", 0), ("1.5GiB", 1610612736)])
def test_sizes_are_bytes(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_a_loaded_configuration_cannot_be_changed() -> None:
    with pytest.raises(AttributeError, match="immutable"):
        Config().mode = "act"  # type: ignore[misc]


def test_a_test_of_nodes_that_nothing_would_start_is_refused() -> None:
    assert [each[1] for each in problems("policy: {quarantine_test: true}")] == ["policy.quarantine_test"]


def test_options_of_node_tests_and_of_the_search_by_restarts_load_with_a_warning_for_one_release() -> None:
    text = "policy: {slow_search: active, kinds: {slow_job: {ladder: [requeue]}}}\nnode_tests: {directory: /s, tools: false}"
    config = parse_config(text)
    assert sum("was removed" in each for each in config.warnings) == 4
