"""What a node and a cluster lack, rule by rule; and nothing where all is well."""

from __future__ import annotations

import base64
import json
import os
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from slurm_watchdog.cli.main import main
from slurm_watchdog.config.loading import parse_config
from slurm_watchdog.config.schema import Config
from slurm_watchdog.doctor import cluster, finding, node, script
from slurm_watchdog.doctor.finding import Advice, Level, Names, examine, exit_code, rules
from slurm_watchdog.model.documents import Status
from slurm_watchdog.slurm.command_line import Access, hides_jobs, token_note
from tests.builders.cli import job, status
from tests.builders.identity_door import listening

NODE: dict[str, object] = {
    **dict.fromkeys(
        ["unit_state", "controller_problem", "standby_problem", "certificate_problem", "certificate_days", "open_secret", "offset_s", "nvml_problem", "gpus_missing", "state_problem", "kernel_log_problem"]
    ),
    "where": "n1", "service": "agent", "agent": True, "root": True, "unit_state": "active", "first_start": False,
    "py_spy": True, "ptrace_scope": "1", "hidepid": False, "gpu_devices": 8, "nvml_gpus": 8, "has_munge": True,
    "munge_works": True, "munge_needed": False, "munge_refuses": False, "state_directory": "/var/lib/slurm-watchdog",
    "state_filesystem": "ext4", "state_free_mib": 10240, "slurm_commands": True, "node_known": True, "side": "behind",
    "controller_url": "https://mgmt1:9765", "identity": "tls", "certificate": "agent.crt", "days_ago": 1,
}  # fmt: skip
SLURM = {
    "JobRequeue": "1", "KillOnBadExit": "0", "JobFileAppend": "0", "TaskProlog": "/etc/slurm/slurm-watchdog-task-prolog.sh",
    "MinJobAge": "300 sec", "ProctrackType": "proctrack/cgroup", "SLURM_VERSION": "24.11.5",
}  # fmt: skip
CLAIMS = base64.urlsafe_b64encode(b'{"exp": 1700000300}').decode().rstrip("=")
TOKEN = f"e30.{CLAIMS}.x"
HIDDEN = hides_jobs(Access(private=frozenset({"jobs"})), 1000)


def of_node(**changes: object) -> list[Advice]:
    return list(examine("node", {**NODE, **changes}))


def answer(**changes: Any) -> Status:
    """Of a controller where all is well."""
    nodes = {"reporting": ["n1", "n2"], "silent": []}
    return msgspec.convert(status(**{"mode": "act", "nodes": nodes, "jobs": [], "deliveries": [], **changes}), Status)


def of_cluster(
    seen: Status | str | None = None,
    slurm: dict[str, str] | None = SLURM,
    nodes: tuple[str, ...] = ("n1", "n2"),
    operator: bool | None = True,
) -> list[Advice]:
    seen = answer() if seen is None else seen
    return list(cluster.examine_answers(slurm or {}, "timed out", nodes, seen, operator))


def test_a_node_and_a_cluster_that_are_well_lack_nothing() -> None:
    assert of_node() == []
    bare = {"gpu_devices": 0, "nvml_gpus": None, "ptrace_scope": None, "has_munge": False, "munge_works": None}
    assert of_node(**bare, unit_state=None) == []
    assert of_node(identity="tls", certificate="agent.crt", certificate_days=31, offset_s=2.5) == []
    unseen = dict.fromkeys(["node_known", "state_filesystem", "state_free_mib"])
    assert of_node(**unseen) == []
    assert of_node(ptrace_scope="2", hidepid=True) == []  # root sees and traces all the same
    assert of_cluster() == []
    assert of_cluster(nodes=(), operator=None) == []


@pytest.mark.parametrize(
    ("rule", "level", "changes"),
    [
        ("service", Level.CRITICAL, {"unit_state": "failed"}),
        ("service", Level.CRITICAL, {"unit_state": "not installed"}),
        ("controller", Level.CRITICAL, {"controller_problem": "Connection refused"}),
        ("nvml", Level.CRITICAL, {"nvml_problem": "Driver/library version mismatch"}),
        ("nvml", Level.CRITICAL, {"nvml_gpus": 7, "gpus_missing": 1}),
        ("controller", Level.CRITICAL, {"controller_url": ""}),
        ("standby", Level.WARNING, {"standby_problem": "https://mgmt2:9765: Connection refused"}),
        ("state_directory", Level.WARNING, {"state_problem": "not writable for you"}),
        ("service", Level.HINT, {"first_start": True, "unit_state": "inactive"}),
        ("state_local", Level.WARNING, {"state_filesystem": "lustre"}),
        ("state_local", Level.CRITICAL, {"state_filesystem": "nfs4", "agent": False}),
        ("state_space", Level.WARNING, {"state_free_mib": 1}),
        ("slurm_commands", Level.CRITICAL, {"slurm_commands": False, "agent": False}),
        ("slurm_commands", Level.HINT, {"slurm_commands": False}),
        ("node_name", Level.CRITICAL, {"node_known": False}),
        ("munge", Level.CRITICAL, {"munge_works": False, "munge_needed": True}),
        ("py_spy", Level.WARNING, {"py_spy": False}),
        ("ptrace_scope", Level.WARNING, {"ptrace_scope": "3"}),
        ("ptrace_scope", Level.WARNING, {"ptrace_scope": "2", "root": False}),
        ("hidepid", Level.WARNING, {"hidepid": True, "root": False}),
        ("kernel_log", Level.WARNING, {"kernel_log_problem": "/dev/kmsg: Operation not permitted"}),
        ("certificate", Level.CRITICAL, {"certificate_problem": "agent.key cannot be read"}),
        ("certificate_end", Level.WARNING, {"certificate_days": 12}),
        ("certificate_end", Level.CRITICAL, {"certificate_days": -1}),
        ("open_secret", Level.WARNING, {"open_secret": "/etc/slurm-watchdog/slack (mode 0644)"}),
        ("clock_offset", Level.WARNING, {"offset_s": 42.0}),
        ("clock_offset", Level.WARNING, {"offset_s": 4000.0}),
        ("clock_offset", Level.CRITICAL, {"offset_s": 400.0, "munge_refuses": True}),
        ("munge", Level.CRITICAL, {"identity": "munge", "has_munge": False, "munge_works": None}),
    ],
)  # fmt: skip
def test_what_a_node_lacks_is_said_alone_and_with_what_mends_it(
    rule: str, level: Level, changes: dict[str, Any]
) -> None:
    (found,) = of_node(**changes)
    assert (found.rule, found.level, found.where) == (rule, level, "n1")
    assert found.sentence.endswith(".")
    assert found.evidence
    assert found.add


@pytest.mark.parametrize(
    ("rule", "level", "changes"),
    [
        ("controller", Level.UNKNOWN, {"seen": "does not exist"}),
        ("blind", Level.CRITICAL, {"seen": answer(controller={"journal_error": "disk full"})}),
        ("paused", Level.WARNING, {"seen": answer(paused={"reason": ""})}),
        ("mode", Level.HINT, {"seen": answer(mode="observe")}),
        ("silent_agents", Level.WARNING, {"seen": answer(nodes={"reporting": ["n1"], "silent": ["n2"]})}),
        ("nodes_without_agent", Level.WARNING, {"nodes": ("n1", "n2", "n3", "n4")}),
        ("no_agents", Level.CRITICAL, {"seen": answer(nodes={})}),
        ("slurm", Level.UNKNOWN, {"slurm": None}),
        ("job_requeue", Level.HINT, {"slurm": {**SLURM, "JobRequeue": "0"}}),
        ("task_prolog", Level.HINT, {"slurm": {**SLURM, "TaskProlog": "(null)"}}),
        ("min_job_age", Level.WARNING, {"slurm": {**SLURM, "MinJobAge": "2 sec"}}),
        ("kill_wait", Level.HINT, {"slurm": {**SLURM, "KillWait": "5 sec"}}),
        ("unkillable_step", Level.HINT, {"slurm": {**SLURM, "UnkillableStepTimeout": "60 sec"}}),
        ("proctrack", Level.HINT, {"slurm": {**SLURM, "ProctrackType": "proctrack/linuxproc"}}),
        ("slurm_version", Level.WARNING, {"slurm": {**SLURM, "SLURM_VERSION": "20.11.9"}}),
        ("operator", Level.CRITICAL, {"operator": False}),
        ("operator", Level.WARNING, {"operator": False, "seen": answer(mode="observe")}),
        ("slurm_access", Level.WARNING, {"seen": answer(slurm={"notes": [HIDDEN]})}),
        ("slurm_access", Level.WARNING, {"seen": answer(slurm={"notes": ["Slurm is asked by its commands: 24.05"]})}),
        ("slurm_access", Level.WARNING, {"seen": answer(slurm={"notes": token_note(TOKEN, 1700000000.0)})}),
        ("slurm_access", Level.WARNING, {"seen": "x", "slurm": {**SLURM, "PrivateData": "accounts,jobs"}}),
    ],
)  # fmt: skip
def test_what_a_cluster_lacks_is_said_with_what_mends_it(rule: str, level: Level, changes: dict[str, Any]) -> None:
    (found,) = [each for each in of_cluster(**changes) if each.rule == rule]
    assert found.level is level
    assert found.sentence.endswith(".")
    assert found.evidence
    assert found.add


def test_findings_of_status_become_findings_of_the_doctor_grouped_by_their_reason() -> None:
    health = {
        "state": "not judged",
        "level": "unknown",
        "reason": "no agent",
        "todo": "start it",
        "not_judged": "no_agent",
    }
    failing = [
        {"channel": "slack", "failing_s": 600.0, "error": "404", "waiting": 3, "oldest_s": 1.0},
        {"channel": "webhook", "failing_s": None},
    ]
    jobs = [job(job_id=each, health=health) for each in ("7", "8")] + [job()]
    found = of_cluster(answer(jobs=jobs, deliveries=failing))
    assert [each.sentence for each in found] == [
        "No notification has reached slack for 10 min.",
        "2 jobs cannot be judged: no agent.",
    ]
    assert [each.evidence for each in found] == ["404; 3 notifications waiting", "job 7-8"]


PARTITIONED = """
except:
- {match: {partition: [debugg, 'test-*']}, restart: never}
- {match: {user: ann}, restart: never}
- {match: {partition: 'gpu*'}, stall_after_floor: 1min}
- {match: {partition: cpu}, mention: here}
"""


def test_what_the_configuration_has_for_a_partition_that_is_not_there_is_said_for_it_never_holds() -> None:
    meant = parse_config(PARTITIONED)
    found = list(cluster.examine_partitions(meant, ("gpu", "debug", "vision")))
    assert [(each.rule, each.sentence.partition(" is for")[0], each.evidence.partition(";")[0]) for each in found] == [
        ("no_partition", "except (partition: debugg or test-*)", "debugg, test-*"),
        ("no_partition", "except (partition: cpu)", "cpu"),
    ]
    assert not list(cluster.examine_partitions(meant, ())), "Slurm did not say which there are"


def test_the_code_is_that_of_a_monitoring_plugin() -> None:
    levels = {Level.HINT: 0, Level.WARNING: 1, Level.CRITICAL: 2, Level.UNKNOWN: 3}
    some = {level: Advice(rule="x", level=level, sentence="x.") for level in levels}
    assert {level: exit_code([some[level]]) for level in levels} == levels
    assert exit_code([]) == 0
    assert exit_code([some[Level.WARNING], some[Level.UNKNOWN], some[Level.HINT]]) == 3
    assert exit_code([some[Level.UNKNOWN], some[Level.CRITICAL]]) == 2
    other = Advice(rule="x", level=Level.HINT, sentence="y.")
    assert finding.ranked([some[Level.HINT], other, some[Level.WARNING]]) == (some[Level.WARNING], some[Level.HINT])


def test_the_configuration_of_slurm_is_read_as_scontrol_prints_it() -> None:
    text = "Configuration data as of 2026-11-21T15:00:00\nJobRequeue              = 1\nKillOnBadExit           = 0\nTaskProlog = (null)\n"
    config = cluster.parse_slurm_config(text)
    assert config["TaskProlog"] == "(null)"
    keys = ("JobRequeue", "KillOnBadExit", "JobFileAppend")
    assert [script.flag(config, key) for key in keys] == [True, False, None]
    assert script.flag(None, "JobRequeue") is None


# ------------------------------------------------------------------------------------------------ reading


def test_the_table_has_all_rows_and_asks_for_facts_that_are_read() -> None:
    text = (Path(finding.__file__).parent / "rules.conf").read_text()
    assert sum(map(len, rules().values())) == len(re.findall(r"^\w+ \S+ if ", text, re.MULTILINE)) > 60
    for service in ("agent", "controller"):
        facts = node.read_node(Config(), service, os.uname().nodename)
        assert facts["where"] == os.uname().nodename
        assert facts["root"] is (os.geteuid() == 0)
        assert set(facts) <= set(NODE)
        examine("node", facts)
    for _, _, _, *texts in rules()["node"]:  # no sentence has a hole
        shown = {**NODE, "offset_s": 42.0}
        assert all(text.format_map(shown) for text in texts)


@pytest.mark.parametrize(
    ("word", "value", "found"),
    [
        *[(word, None, False) for word in ("x", "!x", "x<3", "x>3", "x=a", "x!=a", "x~a", "x!~a")],
        ("x", "", False), ("!x", "", True), ("!x", False, True), ("x<3", "2 sec", True), ("x>3", 3, False),
        ("x<3", "often", False), ("x=a,b", "b", True), ("x!=a,b", "b", False), ("x~b|c", "abc", True), ("x!~d", "abc", True),
    ],
)  # fmt: skip
def test_a_word_of_a_rule_never_holds_of_what_is_not_known(word: str, value: object, found: bool) -> None:
    assert finding.holds(word, {"x": value}) is found


def test_names_are_counted_and_folded() -> None:
    names = Names(["n1", "n2", "n3"])
    assert f"{names}, {names:node}, {names:#}, {Names(['n1']):node}" == "n[1-3], 3 nodes, 3, 1 node"


def test_a_command_that_does_not_end_is_left_after_its_deadline() -> None:
    code, said = node.run(["sleep", "60"], 0.2)
    assert (code, said.partition(";")[0]) == (None, "sleep: no answer within 0.2 s")
    code, said = node.run(["/no/such/program"])
    assert (code, "No such file" in said) == (None, True)


def test_a_directory_is_known_with_its_filesystem_and_whether_it_can_be_written(tmp_path: Path) -> None:
    filesystem, problem, free = node.read_directory(str(tmp_path))
    assert filesystem
    assert problem is None
    assert (free or 0) > 0
    assert node.read_directory(str(tmp_path / "none"))[1] == "it is not there"
    assert node.read_directory("") == (None, None, None)


def test_a_controller_that_is_not_there_is_said_with_the_reason() -> None:
    assert node.read_controller("http://127.0.0.1:1", None) == ("Connection refused", None)


def test_the_controller_s_time_is_that_of_its_short_answer_also_when_it_is_not_well() -> None:
    with listening() as port:
        for said in ((True, "it said so"), (False, "it said so")):
            port.healthy = said
            problem, ahead_s = node.read_controller(f"http://127.0.0.1:{port.number}", None)
            assert problem is None
            assert ahead_s is not None and abs(ahead_s) < 600, "both are this machine's clock"


def test_munge_is_not_accused_where_a_command_of_slurm_was_answered() -> None:
    assert [each.rule for each in of_node(munge_works=False, munge_needed=True)] == ["munge"]
    assert of_node(munge_works=False, munge_needed=False) == []


def test_the_munge_that_is_asked_is_the_one_of_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "munge"
    program.write_text('#!/bin/sh\n[ "$2" = --socket=/run/other ]\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert node.read_munge() is False
    assert node.read_munge("/run/other") is True


def test_a_look_that_is_not_finished_in_time_says_so_and_claims_nothing_else() -> None:
    late = run("--node", "--deadline", "1ms", "--json")
    (found,) = json.loads(late.stdout)["findings"]
    assert (late.exit_code, found["rule"], found["level"]) == (3, "deadline", "unknown")
    assert "it waits in" in found["evidence"]


def test_with_a_deadline_a_child_looks_and_prints_what_it_finds() -> None:
    within, plain = (
        run("--node", *more, "--only", "state_space,nvlm", "--json") for more in (("--deadline", "60s"), ())
    )
    assert json.loads(within.stdout) == json.loads(plain.stdout)
    assert (within.exit_code, plain.exit_code) == (3, 3)
    assert "only" in [each["rule"] for each in json.loads(within.stdout)["findings"]]


def test_a_misspelt_finding_is_unknown_and_not_health() -> None:
    (wrong,) = node.misspelt(["nvml", "nvlm"])
    assert (wrong.level, wrong.evidence, "nvml" in wrong.add) == (Level.UNKNOWN, "--only nvlm", True)
    assert exit_code([wrong]) == 3
    assert node.misspelt([name for name, *_ in rules()["node"]]) == ()


# ------------------------------------------------------------------------------------------------ the command


def run(*arguments: str, given: str | None = None) -> Any:
    return CliRunner(env={"SLURM_WATCHDOG_SOCKET": "/no/such/socket", "COLUMNS": "100"}).invoke(
        main, ["doctor", *arguments], input=given
    )


SCRIPT = "#!/bin/bash\n#SBATCH --nodes=2 --job-name=\x1b[31mred\nsrun python train.py --save x\n"


def test_a_script_is_examined_without_slurm_or_a_controller(tmp_path: Path) -> None:
    file = tmp_path / "train.sbatch"
    file.write_text(SCRIPT)
    result = run(str(file))
    assert result.exit_code == 1
    assert result.stdout.startswith(f"WARNING: script {file}: ")
    assert "  add:   #SBATCH --requeue\n" in result.stdout
    assert f"  where: {file}:3\n" in result.stdout
    assert "\x1b" not in result.stdout


def test_as_json_each_finding_has_its_fields() -> None:
    result = run("-", "--json", given=SCRIPT)
    document = json.loads(result.stdout)
    assert (document["what"], document["subject"], document["level"]) == ("script", "-", "warning")
    assert set(document["findings"][0]) == {"rule", "level", "sentence", "evidence", "add", "where"}
    assert "kill_on_bad_exit" in [each["rule"] for each in document["findings"]]
    assert result.exit_code == 1


def test_a_well_kept_script_is_ok_with_code_0(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text('os.environ["SLURM_WATCHDOG_KILL_SWITCH"]')
    file = tmp_path / "job.sh"
    file.write_text("#!/bin/bash\n#SBATCH --requeue\nsrun -l -K -W60 python train.py --save x\n")
    result = run(str(file))
    assert (result.exit_code, result.stdout) == (0, f"OK: script {file}: nothing is missing.\n")


def test_wrong_usage_has_code_2(tmp_path: Path) -> None:
    assert run("a", "--node").exit_code == 2
    assert run("--deadline", "20s").exit_code == 2
    assert run("--only", "nvml").exit_code == 2
    assert run("--node", "--deadline", "20").exit_code == 2
    result = run(str(tmp_path / "none"))
    assert (result.exit_code, "cannot be read" in result.stderr) == (2, True)


def test_a_refused_configuration_is_none_of_the_findings_that_a_node_is_drained_for(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("agent: {intervall: 5s}")
    assert run("--node", "--config", str(file)).exit_code == 2
    asked = run("--node", "--deadline", "9s", "--only", "nvml", "--config", str(file))
    assert (asked.exit_code, "unknown key" in asked.stderr) == (3, True)


def test_a_job_that_slurm_does_not_have_is_unknown() -> None:
    result = run("--job", "999999999")
    assert result.exit_code == 3
    assert "Slurm has no job 999999999" in result.stdout


def test_a_secret_of_the_notifications_that_others_may_read_is_found_and_one_of_the_group_is_not(
    tmp_path: Path,
) -> None:
    token, password = tmp_path / "slack", tmp_path / "smtp"
    for path, mode in ((token, 0o640), (password, 0o644)):
        path.write_text("secret\n")
        path.chmod(mode)
    assert node.read_open_secret([str(tmp_path / "missing"), str(token)]) is None
    assert node.read_open_secret([str(token), str(password)]) == f"{password} (mode 0644)"
    token.chmod(0o620)
    assert node.read_open_secret([str(token)]) == f"{token} (mode 0620)"
