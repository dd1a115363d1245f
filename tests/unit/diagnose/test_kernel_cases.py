"""`scan-log --kernel` on kernel logs of the field and of every vendor: text in, verdict out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from slurm_watchdog.cli.scan_log import read_kernel_logs
from slurm_watchdog.diagnose.kernel_log.verdict import JudgedLine, KernelScan, judge_file

CAPTURES = Path(__file__).parents[2] / "captures/kernel"
SEVERITIES = ("nothing", "info", "warning", "error", "critical")
REPORTED = ("warning", "error", "critical")


def cases(*files: str) -> list[Any]:
    found = [case for file in files for case in yaml.safe_load((CAPTURES / file).read_text())]
    return [pytest.param(case, id=f"{case['id']}: {case['title']}") for case in found]


def judged(text: str) -> tuple[JudgedLine, ...]:
    return judge_file(KernelScan().messages(text.encode(), 1)).lines


def named(line: JudgedLine) -> str:
    fact = line.fact
    each = (line.gpu, fact.pci_bus_id, fact.device, fact.server, fact.mount, fact.process, line.waits_for)
    return " ".join(str(part) for part in each if part)


@pytest.mark.parametrize("case", cases("field.yaml"))
def test_a_kernel_log_of_the_field_is_judged_right(case: dict[str, Any], tmp_path: Path) -> None:
    lines = judged(case["text"])
    wrong = []
    worst = max((line.fact.severity.value for line in lines), key=SEVERITIES.index, default="nothing")
    if worst not in case["severity_fair"] and not (worst == "info" and "nothing" in case["severity_fair"]):
        wrong.append(f"worst severity is {worst}")
    excludes = any(line.may_exclude_node for line in lines)
    if case["exclude_node_alone"] in ("no", "never", False) and excludes:
        wrong.append(f"excludes: {[line.fact.message for line in lines if line.may_exclude_node]}")
    if case["exclude_node_alone"] in ("yes", True) and not excludes:
        wrong.append("does not exclude")
    reported = [line for line in lines if line.fact.severity.value in REPORTED]
    texts = [line.fact.message for line in reported]
    wrong += [f"{words!r} is not reported" for words in case["must_report"] if not any(words in text for text in texts)]
    wrong += [f"{words!r} is reported" for words in case["must_be_silent"] if any(words in text for text in texts)]
    names = " ".join(named(line) for line in reported)
    wrong += [f"{name!r} is not named" for name in case.get("must_name", ()) if name not in names]
    causes = [line.fact.message for line in reported if line.role == "cause"]
    if (first := case.get("first_cause")) and (not causes or first not in causes[0]):
        wrong.append(f"the first cause is {causes[:1]}")
    assert not wrong, wrong
    file = tmp_path / "dmesg"
    file.write_text(case["text"])
    assert read_kernel_logs([str(file)]).code == (1 if any(line.role != "news" for line in lines) else 0)


def rows(file: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load((CAPTURES / file).read_text())
    return found


@pytest.mark.parametrize("case", rows("vendors.yaml"), ids=lambda case: case["line"][:80])
def test_a_line_of_each_vendor_has_its_class_its_severity_and_its_weight(case: dict[str, Any]) -> None:
    (line,) = judged(f"[81000.5] {case['line']}\n")
    found = {"class": line.class_name, "severity": line.fact.severity.value, "exclude": line.may_exclude_node}
    assert found == {key: case[key] for key in found}


@pytest.mark.parametrize("case", rows("lookalikes.yaml"), ids=lambda case: case["lines"][0][:80])
def test_what_recovered_was_corrected_or_only_looks_alike_excludes_nothing(case: dict[str, Any]) -> None:
    lines = judged("".join(f"{each}\n" for each in case["lines"]))
    assert not any(line.may_exclude_node for line in lines)
    worst = max((SEVERITIES.index(line.fact.severity.value) for line in lines), default=0)
    assert worst <= SEVERITIES.index(case["worst"])
