"""Kernel lines that a user can forge."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import yaml

from slurm_watchdog.knowledge.kernel_signatures import USER_TEXT
from slurm_watchdog.parse.kernel_log.line import (
    parse_message,
)

CAPTURES = Path(__file__).parents[1] / "captures/kernel"
SAMPLES: dict[str, list[str]] = yaml.safe_load((CAPTURES / "user_text.yaml").read_text())
"""Lines of each form of USER_TEXT, by its name."""


@dataclass(frozen=True)
class Case:
    """One line of signatures.txt or pasted.txt."""

    name: str
    severity: str | None
    exclude: bool
    fields: dict[str, str]
    line: str


def captured(file: str) -> list[str]:
    lines = (CAPTURES / file).read_text().splitlines()
    return [line for line in lines if line and not line.startswith("# ")]


def fields_of(text: str) -> dict[str, str]:
    """`server=mon0 (1)10.0.0.1 pid=3` -> {server: "mon0 (1)10.0.0.1", pid: "3"}: a value may hold spaces."""
    parts = re.split(r"(?:^|\s)(\w+)=", text.strip())
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def signature_cases() -> list[Case]:
    cases = []
    for line in captured("signatures.txt"):
        name, severity, exclude, fields, message = line.split("|", 4)
        cases.append(Case(name.strip(), severity.strip(), exclude.strip() == "x", fields_of(fields), message[1:]))
    return cases


def forged(sample: str, words: str) -> list[str]:
    """The line `sample` of a program whose name and whose file's name together are `words`, cut in each way
    that the kernel's limits allow."""
    lines = []
    for cut in {0, 6, 15, words.find(": ") + 2} - {1}:
        if cut <= 15:
            filled = sample.replace("{comm}", words[:cut] or "x").replace("{file}", words[cut:][:255])
            lines.append(filled.replace("{ifname}", "".join(words[:15].split())).replace("{pid}", "4711"))
    return lines


def forgeries() -> list[tuple[str, str, str]]:
    """(row whose words are used, form, line) of every line that a user may have the kernel write and that a
    row reads as its own, or as another driver's."""
    found = []
    for case in signature_cases():
        for form in USER_TEXT:
            for line in (each for sample in SAMPLES[form.name] for each in forged(sample, case.line)):
                fact = parse_message(line, 6)
                if fact is not None and fact.name not in form.rows:
                    found.append((case.name, form.name, line))
    return found
