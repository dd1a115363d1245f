"""Writes docs/detectors.md, three lines a detector, from the detectors themselves: `python -m tools.docs detectors`.

A detector's page is what its row says, or its module's docstring: lines that begin with `Fires:`, `Names:` or `Acts:`.
Where it says nothing of acts, its ladder does.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from pathlib import Path

from slurm_watchdog.detect.registry import SPECS
from slurm_watchdog.detect.spec import DetectorSpec

FILE = Path(__file__).parents[2] / "docs/detectors.md"
HEAD = """# Detectors

Generated from the detectors by `make docs`. [How it judges](how-it-judges.md) has limits, phases and missing data, [Acting](acting.md) the ladders,
`slurm-watchdog show INCIDENT` what to try next.

A detector reports one kind of incident. Its name is the key below `detectors:` ([options](options.md)) and the label `kind` of the metrics. An incident
resolves when its condition has been gone for two reports, or its job has ended. Detectors run from causes to consequences: an incident that an earlier
one about the same job explains is kept and not announced; `show` says which. `operator_restart` is not a detector: it is a restart that a person asked for.
*Acts: no* means that it is only reported, *Acts: with a ladder of yours* that it is only reported unless you configure a ladder.
"""
LABEL = re.compile(r"^(Fires|Names|Acts|Note): ", re.MULTILINE)


def write() -> str:
    """The whole page."""
    return "\n".join([HEAD, *map(section, SPECS)])


def section(spec: DetectorSpec) -> str:
    """One detector."""
    found = facts(spec)
    may = "with a ladder of yours" if spec.may_act else "no"
    usual = f"`[{', '.join(spec.ladder)}]`" if spec.ladder else may
    more = f"; {found['Acts']}" if "Acts" in found else "."
    acts = found["Acts"] if spec.ladder and "Acts" in found else f"{usual}{more}"
    return f"## {spec.kind}\n\n- Fires: {found['Fires']}\n- Names: {found['Names']}\n- Acts: {acts}\n"


def facts(spec: DetectorSpec) -> Mapping[str, str]:
    """`Fires`, `Names`, `Acts` of its row or docstring -> their text on one line."""
    found = LABEL.split(spec.doc or inspect.getdoc(inspect.getmodule(spec.detect)) or "")[1:]
    return {label: " ".join(text.split()) for label, text in zip(found[::2], found[1::2], strict=True)}
