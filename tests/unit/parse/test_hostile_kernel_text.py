"""Words that a user makes the kernel print are believed by nothing: no exclusion, no fault of the node, live or in a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import yaml

from slurm_watchdog.agent.collectors.kernel_log import KernelLogReader
from slurm_watchdog.agent.proc.kmsg import KmsgFile
from slurm_watchdog.diagnose.kernel_log.verdict import KernelScan, judge_file
from slurm_watchdog.knowledge.kernel_signatures import USER_TEXT, UserText
from slurm_watchdog.model.observations import NodeEvent
from tests.builders.forged_kernel_lines import CAPTURES, SAMPLES, forged

PROGRAMS = frozenset(name for form in USER_TEXT for name in form.rows)
"""What a line with a user's words may give: that a program crashed or was killed."""
DANGEROUS = [row["line"] for row in yaml.safe_load((CAPTURES / "vendors.yaml").read_text()) if row["exclude"]]


class Lines:
    """A kernel's ring that holds these records."""

    def __init__(self, records: list[tuple[str, str]]) -> None:
        self._records: Iterator[bytes] = iter(
            f"3,{number},81000000000,-;{text}\n{fields}".encode() for number, (text, fields) in enumerate(records)
        )

    def read(self) -> bytes:
        try:
            return next(self._records)
        except StopIteration:
            raise BlockingIOError from None

    def close(self) -> None: ...


def events_of(*records: tuple[str, str]) -> tuple[NodeEvent, ...]:
    def opened(path: str) -> KmsgFile:
        return Lines(list(records))

    reader = KernelLogReader("/dev/kmsg", open_device=opened)
    return reader.collect(81000.0)[0]


def of_pci(address: str) -> str:
    return f" SUBSYSTEM=pci\n DEVICE=+pci:{address}\n"


@pytest.mark.parametrize("form", USER_TEXT, ids=lambda form: form.name)
def test_a_users_words_in_any_form_make_no_event_of_a_device(form: UserText) -> None:
    texts = [line for words in DANGEROUS for sample in SAMPLES[form.name] for line in forged(sample, words)]
    events = events_of(*((text, "") for text in dict.fromkeys(texts)))
    assert {event.name for event in events} <= PROGRAMS
    assert not any(event.may_exclude_node for event in events)


@pytest.mark.parametrize("line", DANGEROUS)
def test_a_second_line_in_a_mount_option_is_no_line_of_a_driver(line: str) -> None:
    option = f'overlayfs: unrecognized mount option "x\\x0a{line}\\x0a" or missing value'
    assert not events_of((option, ""))
    for stamp in ("[81000.500000] ", "Nov 29 00:12:01 n1 kernel: "):
        shown = f'{stamp}overlayfs: unrecognized mount option "x\n               {line}\n               " or missing value\n'
        assert not any(each.may_exclude_node for each in judge_file(KernelScan().messages(shown.encode(), 1)).lines)


@pytest.mark.parametrize(
    "line", [line for line in DANGEROUS if " 0000:" in line and not line.startswith(("NVRM", "pcieport"))]
)
def test_a_line_with_an_address_counts_only_in_a_record_of_that_device(line: str) -> None:
    address = line.split()[1].rstrip(":")
    (event,) = events_of((line, of_pci(address)))
    assert event.pci_bus_id == address and event.may_exclude_node
    assert not events_of((line, ""))
    assert not events_of((line, of_pci("0000:ff:1f.7")))


def test_a_program_that_writes_to_the_kernels_log_is_not_the_kernel() -> None:
    for line in DANGEROUS:
        assert not judge_file(KernelScan().messages(f"12,7,81000000000,-;{line}\n".encode(), 1)).lines


@pytest.mark.parametrize(
    "line",
    [
        "mlx5_0: now running without any active interface!", "eth0: (slave ib0): link status definitely down, disabling slave",
        "mlx5_core 0000:17:00.0 ib0: Link down", "ib0: transmit timeout: latency 2032 msecs", "infiniband mlx5_0: Port: 1 Link DOWN",
    ],
)  # fmt: skip
def test_no_line_about_a_link_is_reported_while_jobs_run(line: str) -> None:
    assert not events_of((line, of_pci("0000:17:00.0")))


def test_a_record_of_the_journal_names_its_device_too() -> None:
    line = "mlx5_core 0000:5e:00.0: poll_health:738:(pid 0): device's health compromised - reached miss count"
    record = '{"_TRANSPORT": "kernel", "MESSAGE": "%s", "_KERNEL_DEVICE": "+pci:%s"}\n'
    for address, believed in (("0000:5e:00.0", True), ("0000:5e:00.1", False)):
        lines = judge_file(KernelScan().messages((record % (line, address)).encode(), 1)).lines
        assert any(each.may_exclude_node for each in lines) is believed
