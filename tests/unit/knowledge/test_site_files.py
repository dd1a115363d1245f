"""Rows of a site: what is refused, each with its place and reason, and what they change where they are in force."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from slurm_watchdog.base.regex_cost import SEEN_CHARS
from slurm_watchdog.diagnose.stacks.places import place_of
from slurm_watchdog.knowledge import site_rows
from slurm_watchdog.knowledge.entries import shipped_parts
from slurm_watchdog.knowledge.log_signatures import log_table
from slurm_watchdog.knowledge.site_files import MAX_ROWS, SiteText, read_site
from slurm_watchdog.knowledge.site_rows import SiteRows
from slurm_watchdog.knowledge.stack_frames import Place
from slurm_watchdog.knowledge.xids import describe_xid
from slurm_watchdog.model.observations import EventKind
from slurm_watchdog.parse.kernel_log.line import is_interesting, parse_message
from slurm_watchdog.parse.training_log.line import parse_line
from slurm_watchdog.parse.training_log.line_scan import scan

GOOD = r"""
[log acme_license]
means: the ACME licence server refused
group: node_can_cause
needle: acme:
pattern: ACME: no licence for \w+
pattern: ACME: licence lost
source: ACME solver 3.2, manual
example: ACME: no licence for fluids
not: ACME: licence taken for fluids

[log cuda_oom]
replaces: yes
means: the GPU is full
needle: no room on the gpu
pattern: no room on the GPU
source: ACME solver 3.2
example: no room on the GPU
not: room on the GPU

[progress acme]
needle: sweep
pattern: ^sweep (?P<step>\d+) of (?P<total>\d+)
source: ACME solver 3.2
example: sweep 12 of 40
not: sweep of the disk

[sign acme_saved]
complete: yes
needle: acme: stored
pattern: ACME: stored sweep (?P<step>\d+)
source: ACME solver 3.2
example: ACME: stored sweep 12
not: ACME: stored nothing

[kernel acme_card_lost]
severity: critical
excludes_node: yes
begins: acm
needle: card lost
pattern: acme {PCI}: card lost
source: acme.ko 1.4
example: acme 0000:c1:00.0: card lost
not: acme: no card lost

[kernel acme_anywhere]
severity: warning
needle: acme link retrained
pattern: .{1,64}: acme link retrained
source: acme.ko 1.4
example: eth7: acme link retrained
not: acme link retrained

[xid 901]
name: acme_xid
means: A number that this site's driver uses
blame: driver
severity: warning
source: ACME

[frame collective]
function: acme_wait_all
file: .*acme/comm\.py
source: ACME solver 3.2
example: acme_wait_all (/opt/acme/comm.py)
not: acme_wait_all (/project/train.py)
"""


def rows_of(text: str) -> SiteRows:
    rows, problems = read_site([SiteText(file="a.conf", text=text)], shipped_parts())
    assert problems == []
    return rows


@pytest.fixture
def in_force() -> Iterator[None]:
    site_rows.use(rows_of(GOOD))
    yield
    site_rows.use(site_rows.NONE)


@pytest.mark.usefixtures("in_force")
def test_rows_of_a_site_are_tried_by_line_and_by_block() -> None:
    lines = ("ACME: no licence for fluids", "sweep 12 of 40", "ACME: stored sweep 12")
    facts = [parse_line(line) for line in lines]
    assert [(fact.kind, fact.pattern) for fact in facts if fact] == [
        (EventKind.ERROR, "acme_license"),
        (EventKind.PROGRESS, "acme"),
        (EventKind.CHECKPOINT, "acme_saved"),
    ]
    assert [replace(fact, line=0) for fact in scan("\n".join(lines).encode()).facts] == facts
    assert log_table().means["acme_license"] == "the ACME licence server refused"
    assert "acme_license" in log_table().node_can_cause


@pytest.mark.usefixtures("in_force")
def test_a_row_that_replaces_takes_the_shipped_rows_of_its_name_out() -> None:
    out_of_memory = "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    fact = parse_line(out_of_memory)
    assert fact is None or fact.pattern != "cuda_oom"
    full = parse_line("no room on the GPU")
    assert full is not None and full.pattern == "cuda_oom"
    assert log_table().means["cuda_oom"] == "the GPU is full"
    site_rows.use(site_rows.NONE)
    fact = parse_line(out_of_memory)
    assert fact is not None and fact.pattern == "cuda_oom"


@pytest.mark.usefixtures("in_force")
def test_rows_of_a_site_are_known_of_the_kernel_of_xids_and_of_stacks() -> None:
    line = "acme 0000:c1:00.0: card lost"
    fact = parse_message(line)
    assert is_interesting(line.encode())
    assert fact is not None
    assert (fact.name, fact.pci_bus_id, fact.may_exclude_node) == ("acme_card_lost", "0000:c1:00.0", True)
    assert is_interesting(b"eth7: acme link retrained")
    assert describe_xid(901).name == "acme_xid"
    assert describe_xid(79).name == "gpu_off_the_bus"
    assert place_of("acme_wait_all", "/opt/acme/comm.py") is Place.COLLECTIVE
    site_rows.use(site_rows.NONE)
    assert parse_message(line) is None
    assert describe_xid(901).name == "unknown"
    assert place_of("acme_wait_all", "/opt/acme/comm.py") is Place.OTHER


@pytest.mark.usefixtures("in_force")
def test_an_expression_of_a_site_sees_the_beginning_of_a_line_only() -> None:
    assert parse_line("x" * (SEEN_CHARS - 40) + " ACME: licence lost") is not None
    assert parse_line("x" * SEEN_CHARS + " ACME: licence lost") is None
    assert place_of("acme_wait_all", "/opt/" + "x" * SEEN_CHARS + "/acme/comm.py") is Place.OTHER


LOG = """[log acme_license]
means: the ACME licence server refused
needle: acme
pattern: {}
source: ACME
example: acme: refused 12
not: acme: granted
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (LOG.format("acme: (refused|refused)+x"), "may take very long on some lines: a group is repeated"),
        (LOG.format(".*acme: refused"), "begins with a repeat of nearly any character"),
        (LOG.format("acme: " + "x" * 300), "longer than 300 characters"),
        (LOG.format("acme: lost"), "does not match its example 'acme: refused 12'"),
        (LOG.format("acme: "), "matches 'acme: granted', which it should not"),
        (LOG.format("acme: refused").replace("needle: acme", "needle: a1"), "has fewer than 3 letters"),
        (LOG.format("acme: refused").replace("means: ", "source: "), "needs a line `means: …`"),
        (LOG.format("acme: refused").replace("not: acme: granted\n", ""), "needs a line `not: …`"),
        (LOG.format("acme: refused") + "replaces: yes\n", "the package has no log row of this name"),
        (
            GOOD.replace(r"(?P<step>\d+) of (?P<total>\d+)", r"(?P<step>\S+) of (?P<total>\d+)"),
            r"group step has to be (?P<step>\d+)",
        ),
        (GOOD.replace(r"(?P<step>\d+) of", r"(?P<stop>\d+) of"), "unknown group 'stop'"),
        (GOOD.replace("begins: acm", "begins: acme"), "has to be three characters in lower case"),
        (GOOD.replace("severity: critical", "severity: error"), "`excludes_node` is for what is critical"),
        (GOOD.replace("{PCI}", "{NOPE}"), "{NOPE} in `pattern` is not a part"),
        ("[part A]\npattern: a\n" * (MAX_ROWS + 1), f"a site may have {MAX_ROWS}"),
    ],
)
def test_site_file_errors_name_their_place(text: str, said: str) -> None:
    _, problems = read_site([SiteText(file="/etc/a.conf", text=text)], shipped_parts())
    assert any(said in problem for problem in problems), problems
    assert all(problem.startswith("/etc/a.conf:") for problem in problems)
