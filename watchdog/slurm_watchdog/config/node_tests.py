"""The section `node_tests` of the configuration: the program that measures a node, and the worst that is accepted."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from slurm_watchdog.config.types import Section


class NodeTests(Section):
    """What `slurm-watchdog test-nodes` runs on nodes."""

    program: str = Field(
        "", description="A site's own node test, in place of the one that is shipped (deploy/node-test/node_test.py)."
    )
    options: list[str] = Field(
        [],
        description="Words that it gets, such as [--shared=/scratch, --torch=/opt/python/bin/python3]; those of the "
        "command line come after them.",
    )
    floors: dict[str, float] = Field(
        {},
        description="Worst values that are accepted, by the name of a figure: {cpu_all: 40000, pair_out: 80, "
        "'mount_write /scratch': 500}. docs/test-nodes.md has names and units.",
    )

    def problems(self) -> Iterator[str]:
        if self.program and not self.program.startswith("/"):
            yield f"node_tests.program: must be an absolute path, got {self.program!r}"
