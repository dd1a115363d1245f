"""What a child, and a program that it starts, may use: CPU time, memory, output, rights, and what it may
leave behind."""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slurm_watchdog.agent.children.become_user import CAP_SETUID, CAP_SYS_PTRACE, capabilities
from slurm_watchdog.agent.children.child import CPU_S, cpu_budget
from slurm_watchdog.agent.children.children import Answer, Children
from slurm_watchdog.agent.children.requests import WorkerState
from slurm_watchdog.agent.evidence import last_lines, tool
from slurm_watchdog.agent.processes import identify
from slurm_watchdog.base import clock, redact
from slurm_watchdog.base.regex_cost import op as _constants
from slurm_watchdog.base.regex_cost import parser as _parser
from tests.builders.requests import plain, plain_request

MEANS = tool.Means(seconds=20.0, output_bytes=10_000, address_space=1 << 30, cpu_s=5, processes=4096)


def spin(args: Any, worker: WorkerState) -> None:
    with cpu_budget(0.2):
        while True:
            pass


def spin_and_forgive(args: Any, worker: WorkerState) -> None:
    with cpu_budget(0.2):
        while True:
            try:
                while True:
                    pass
            except Exception:
                continue


def eat(args: Any, worker: WorkerState) -> int:
    return len(b"x" * (4 << 30))


def say_limits(args: Any, worker: WorkerState) -> list[int]:
    return [resource.getrlimit(resource.RLIMIT_CORE)[1], resource.getrlimit(resource.RLIMIT_CPU)[0]]


@pytest.fixture
def probes() -> Iterator[Children]:
    probes = Children(tuple(map(plain, (spin, spin_and_forgive, eat, say_limits))), 4)
    yield probes
    probes.close()


def answer(probes: Children, function: str) -> Answer:
    answers: list[Answer] = []
    request = probes.ask("a", plain_request(function), 60.0, clock.monotonic(), answers.append)
    assert request is not None
    probes.settle(60.0, [request])
    return answers[0]


@pytest.mark.parametrize("function", ["spin", "spin_and_forgive"])
def test_a_child_that_spins_is_no_answer_with_its_reason_and_works_on(probes: Children, function: str) -> None:
    spent = answer(probes, function)
    assert (spent.timed_out, spent.error) == (False, "given up after 0.2 s of CPU time")
    assert answer(probes, "say_limits").error is None


def test_a_child_that_wants_too_much_memory_is_no_answer_with_its_reason(probes: Children) -> None:
    assert "more memory than a child may use" in str(answer(probes, "eat").error)


def test_a_child_leaves_no_core_file_and_the_kernel_ends_it_when_nothing_else_does(
    probes: Children,
) -> None:
    core, cpu_s = answer(probes, "say_limits").value
    assert core == 0
    assert CPU_S < cpu_s < CPU_S + 10


def test_a_variable_of_128_kib_is_cut_before_it_is_searched() -> None:
    data = b"NCCL_X=" + b"-eyJ" * 32_768 + b"\0NCCL_DEBUG=INFO\0NCCL_Y=" + b"ghp_" + b"aB3" * 40_000
    found = identify.parse_settings(data)
    assert found["NCCL_DEBUG"] == "INFO"
    assert found["NCCL_Y"] == redact.MASK
    assert len(found["NCCL_X"]) <= identify.MAX_VALUE


def run(code: str, means: tool.Means = MEANS) -> tool.Ran:
    return next(tool.run_tools([lambda: ([sys.executable, "-I", "-S", "-c", code], means)], []))[1]


def test_a_tool_what_it_prints_comes_whole_with_its_errors_and_its_code() -> None:
    ran = run("import sys; print('x' * 9000); sys.stderr.write('no'); sys.exit(3)")
    assert (ran.out, ran.errors, ran.code, ran.problem) == (b"x" * 9000 + b"\n", b"no", 3, None)


def test_a_tool_that_prints_without_end_is_ended_and_is_no_answer() -> None:
    ran = run("while True: print('x' * 1000)")
    assert ran.problem == "its output is longer than 10000 bytes"
    assert len(ran.out) <= 10_000 + tool.READ


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("while True: pass", "more CPU time"),
        ("import os; os.kill(os.getpid(), 9)", "ended by signal 9"),
        ("import time; time.sleep(60)", "did not return within 1 s"),
    ],
)
def test_a_tool_that_does_not_end_by_itself_says_why_there_is_no_answer(code: str, problem: str) -> None:
    cpu = tool.Means(seconds=20.0 if "pass" in code else 1.0, output_bytes=10, address_space=1 << 30, cpu_s=1, processes=4096)  # fmt: skip
    assert problem in str(run(code, cpu).problem)


def test_a_tool_all_that_it_has_started_ends_with_it(tmp_path: Path) -> None:
    code = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid, flush=True)"
    pid = int(run(code).out)
    end = clock.monotonic() + 10
    while is_running(pid) and clock.monotonic() < end:
        time.sleep(0.02)
    assert not is_running(pid)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_tool_may_not_write_a_file_fill_the_memory_or_leave_a_core(tmp_path: Path) -> None:
    grown = tmp_path / "grown"
    run(f"open({str(grown)!r}, 'wb').write(b'x')")
    assert grown.stat().st_size == 0
    assert b"MemoryError" in run("b'x' * (2 << 30)").errors
    assert run("import resource; print(resource.getrlimit(resource.RLIMIT_CORE))").out == b"(0, 0)\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs capabilities to give up")
def test_a_tool_has_the_capabilities_it_is_given_and_no_program_gives_it_more() -> None:
    two = {CAP_SYS_PTRACE, CAP_SETUID}
    means = tool.Means(20.0, 10_000, 1 << 30, 5, 4096, frozenset(two))
    lines = dict(
        line.split(":\t", 1) for line in run("print(open('/proc/self/status').read())", means).out.decode().splitlines() if ":\t" in line
    )  # fmt: skip
    expected = sum(1 << each for each in two)
    assert capabilities() & expected == expected
    assert [int(lines[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")] == [expected] * 5
    assert lines["NoNewPrivs"] == "1"


def test_several_tools_are_begun_in_their_order_and_one_that_hangs_holds_up_no_other() -> None:
    begun: list[int] = []

    def job(number: int, code: str) -> tuple[list[str], tool.Means]:
        begun.append(number)
        return [sys.executable, "-I", "-S", "-c", code], tool.Means(2.0, 100, 1 << 30, 5, 4096)

    codes = ["import time; time.sleep(60)", "print(1)", "print(2)", "print(3)"]
    jobs = [lambda n=n, code=code: job(n, code) for n, code in enumerate(codes)]  # type: ignore[misc]
    ended = list(tool.run_tools(jobs, []))
    assert [number for number, _ in ended] == [1, 2, 3, 0]
    assert [ran.out for _, ran in ended] == [b"1\n", b"2\n", b"3\n", b""]
    assert [ran.problem is None for _, ran in ended] == [True, True, True, False]
    assert begun == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("record", "shown"),
    [
        (b"3,77,1500000,-;NVRM: Xid (PCI:0000:c1:00): 79, GPU has fallen off the bus.", True),
        (b"4,78,1500000,-;audit: user alice ran /home/alice/secret-project", False),
        (b"11,79,1500000,-;NVRM: Xid (PCI:0000:c1:00): 79, GPU has fallen off the bus.", False),
    ],
)
def test_kernel_lines_where_the_log_is_restricted_only_the_kernels_own_faults_are_shown(
    record: bytes, shown: bool
) -> None:
    assert (last_lines.parse_record(record, restricted=True) is not None) is shown


def test_kernel_lines_where_nobody_knows_whether_they_are_restricted_they_are(tmp_path: Path) -> None:
    (tmp_path / "dmesg_restrict").write_text("0\n")
    assert last_lines.is_restricted(str(tmp_path / "dmesg_restrict")) is False
    assert last_lines.is_restricted(str(tmp_path / "missing")) is True


def unbounded_repeats(tree: Any) -> Iterator[str]:
    """Repetitions without an upper bound in a parsed expression: where there are two ways to read them, time
    grows with the square."""
    for operation, what in tree:
        if operation in (_constants.MAX_REPEAT, _constants.MIN_REPEAT):
            if what[1] == _constants.MAXREPEAT:
                yield str(what[2])
            yield from unbounded_repeats(what[2])
        elif operation is _constants.BRANCH:
            for each in what[1]:
                yield from unbounded_repeats(each)
        elif operation in (_constants.SUBPATTERN, _constants.ASSERT, _constants.ASSERT_NOT):
            yield from unbounded_repeats(what[-1])


@pytest.mark.parametrize("kind", redact.KINDS, ids=lambda kind: kind.name)
def test_a_kind_of_secret_every_repetition_is_bounded_so_that_masking_is_linear(kind: redact.SecretKind) -> None:
    assert list(unbounded_repeats(_parser.parse(kind.regex.pattern))) == []
    assert list(unbounded_repeats(_parser.parse(r"\beyJ[\w-]{8,}\."))) != []
