"""The section `node_tests` of the configuration: what `test-nodes` measures, and the worst that is accepted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from pydantic import Field

from slurm_watchdog.config.types import Section, Span
from slurm_watchdog.knowledge.node_figures import NAMES

PARTS: Final = ("cpu", "memory", "disk", "mount", "gpu", "site_check", "network")
"""As nodetest/plan.py has them."""


class NodeTests(Section):
    """What `slurm-watchdog test-nodes` measures; its options win over this."""

    parts: list[str] = Field([], description=f"Parts that are measured, as --only; empty = all: {', '.join(PARTS)}.")
    directory: str = Field(
        "",
        description="A directory that all nodes share and everybody may write to: tests are batch jobs, and their "
        "output lies there. Empty = each test is a salloc, whose output comes by itself.",
    )
    local_directories: list[str] = Field(["/tmp"], description="Local disks, measured on every node.")
    shared_directories: list[str] = Field([], description="Shared filesystems, measured from every node.")
    interface: str = Field(
        "", description="Network interface of the fabric; empty = the one that leads to the nodes' addresses."
    )
    gpu_python: str = Field(
        "",
        description="A Python with torch, at the same path on every node, which measures GPUs. Empty = not measured.",
    )
    tools: bool = Field(
        True,
        description="Whether iperf3, fio, dcgmi (diag -r 1) and nccl-tests (all_reduce_perf) do their part on nodes "
        "that have them on the PATH; one that is missing or fails says nothing about a node.",
    )
    check: str = Field("", description="A shell command of the site's for each node: exit code 0 = well.")
    check_limit: Span = Field(60.0, description="For that command.")
    floors: dict[str, float] = Field(
        {},
        description="Worst values that are accepted, by the name of a figure: {cpu_all: 40000, pair_out: 80, "
        "'mount_write /scratch': 500}. docs/test-nodes.md has names and units.",
    )

    def problems(self) -> Iterator[str]:
        for index, part in enumerate(self.parts):
            if part not in PARTS:
                yield f"node_tests.parts[{index}]: {part!r} is no part; known: {', '.join(PARTS)}"
        for name in ("local_directories", "shared_directories"):
            for index, path in enumerate(getattr(self, name)):
                if not path.startswith("/"):
                    yield f"node_tests.{name}[{index}]: must be an absolute path, got {path!r}"
        for key in self.floors:
            if key.partition(" ")[0] not in NAMES:
                yield f"node_tests.floors.{key}: no figure; known: {', '.join(NAMES)}"
