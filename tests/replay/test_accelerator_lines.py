"""Lines of a kernel about accelerators in, incidents out; and none for words that a user makes the kernel print."""

from __future__ import annotations

import pytest
import yaml

from slurm_watchdog.knowledge.kernel_signatures import USER_TEXT, UserText
from slurm_watchdog.model.incidents import Incident, Severity
from slurm_watchdog.replay.player import Outcome
from tests.builders.forged_kernel_lines import CAPTURES, SAMPLES, forged
from tests.replay.stories import Story

EXCLUDES = [row["line"] for row in yaml.safe_load((CAPTURES / "vendors.yaml").read_text()) if row["exclude"]]
OF_HARDWARE = frozenset({"gpu_fault", "host_fault", "link_fault", "driver_stall", "suspect_node"})


def after(*lines: str) -> Outcome:
    """What is reported of two nodes with a healthy job, when the kernel of n0 writes these lines."""
    story = Story(per_node=1, every_s=10.0)
    story.train(12)
    begin = story.t + 1.0
    story.train(12)
    story.lines += [{"t": begin + 0.01 * n, "kind": "kmsg", "node": "n0", "line": text} for n, text in enumerate(lines)]
    return story.play()


def of_hardware(found: Outcome) -> list[Incident]:
    return [each for each in found.incidents if each.kind in OF_HARDWARE]


@pytest.mark.parametrize(
    "line",
    [
        "NVRM: nvAssertOkFailedNoLog: Assertion failed: GPU lost from the bus [NV_ERR_GPU_IS_LOST] (0x0000000F) returned from rmStatus @ kernel_ce_gv100.c:106",
        "NVRM: Xid (PCI:0000:66:00): 144, SAW_MVB Fatal XC1 i0 Link 03 (0x00000021 0x00000010 0x00000000 0x00000000 0x00000000 0x00000000)",
        "amdgpu 0000:c1:00.0: amdgpu: GPU mode1 reset failed",
        "xe 0000:03:00.0: [drm] *ERROR* CRITICAL: Xe has declared device 0000:03:00.0 as wedged.",
        "habanalabs hl2: Failed to reset! Device is NOT usable",
        "neuron:nr_reset_thread: nd3: reset request 4711 was initiated, but failed to complete",
        "amdgpu 0000:0b:00.0: [drm] device wedged, needs recovery",
    ],
    ids=lambda line: line[:50],
)
def test_an_accelerator_that_is_gone_is_an_incident_that_excludes_its_node(line: str) -> None:
    (incident,) = of_hardware(after(line))
    assert (incident.kind, incident.severity, incident.exclude_nodes) == ("gpu_fault", Severity.CRITICAL, ("n0",))
    assert "n0" in incident.summary


@pytest.mark.parametrize(
    "lines",
    [
        ("NVRM: Xid (PCI:0000:66:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x002505c6 0x00000000 0x00000000 0x00000000 0x00000000 0x00000000)",),
        ("amdgpu 0000:c1:00.0: amdgpu: GPU mode1 reset failed", "amdgpu 0000:c1:00.0: amdgpu: GPU reset(2) succeeded!"),
        ("BERT: Error records from previous boot:", "[Hardware Error]: event severity: fatal"),
        ("NVRM: Xid (PCI:0000:3b:00): 31, pid=9, name=python, Ch 00000008", "NVRM: Xid (PCI:0000:3b:00): 43, pid=9, name=python, Ch 00000008"),
    ],
    ids=lambda lines: lines[0][:50],
)  # fmt: skip
def test_a_peers_fault_a_reset_that_succeeded_and_a_program_s_fault_exclude_nothing(lines: tuple[str, ...]) -> None:
    assert not [each for each in after(*lines).incidents if each.exclude_nodes]


@pytest.mark.parametrize("form", USER_TEXT, ids=lambda form: form.name)
def test_words_of_a_user_with_every_dangerous_line_are_no_incident_of_the_node(form: UserText) -> None:
    texts = [line for words in EXCLUDES for sample in SAMPLES[form.name][:6] for line in forged(sample, words)]
    found = after(*dict.fromkeys(texts))
    assert [each.summary for each in of_hardware(found)] == []
    assert not any(each.exclude_nodes for each in found.incidents)
