"""Cases of detectors as data: `tests/cases/KIND.yaml`, a list of pictures with what is to be said of each.

A picture is a job `7` of four ranks on n1 and n2 (tests/builders/views.py) with what differs: `job` of it, `view` of the
cluster around it, by the names of JobView and ClusterView. Shorthands: `losses` are numbers, `ranks` are processes by
number and `cards` their GPUs in order, with what differs of each, `nodes` of `view` are by name; `lost` is a cluster of tests/builders/lost_nodes.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml
from msgspec import inspect

from slurm_watchdog.base.structs import Struct, named
from slurm_watchdog.detect.registry import findings_of, spec_of
from slurm_watchdog.model.cluster_view import ClusterView, JobView, RankGpu
from slurm_watchdog.model.incidents import Finding, Severity, Truth
from tests.builders import lost_nodes
from tests.builders.gpu_faults import card
from tests.builders.missing_data import DEFAULTS
from tests.builders.report_json import as_sent
from tests.builders.views import cluster, job, seen

T = TypeVar("T")
CASES = Path(__file__).resolve().parents[1] / "cases"


class Case(Struct, forbid_unknown_fields=True):
    """One picture, and what is to be said of it."""

    kind: str
    job: Mapping[str, Any] = {}
    view: Mapping[str, Any] = {}
    lost: Mapping[str, Any] = {}
    settings: Mapping[str, float] = {}
    subject: str = ""  # Of the finding that is meant, where there are several.
    truth: Truth | None = Truth.BAD  # None: there is no finding.
    says: str = ""  # Words of the sentence.
    facts: tuple[str, ...] = ()  # Words, each of some fact.
    culprits: tuple[dict[str, Any], ...] | None = None  # Some fields of each.
    severity: Severity | None = None
    acts: bool | None = None
    lasts_s: float | None = None

    @property
    def cluster(self) -> ClusterView:
        """The picture."""
        given = dict(self.view)
        nodes = [{"name": name, "reported_at": 9998.0, **of} for name, of in given.pop("nodes", {}).items()]
        base = lost_nodes.cluster(**self.lost) if self.lost else cluster(_job(self.job))
        seen_of = _plain(base)
        return _made(ClusterView, _over(seen_of, given | ({"nodes": nodes} if nodes else {})))

    def findings(self) -> list[Finding]:
        """What its detector says of it, or of the one subject that is meant."""
        spec = spec_of(self.kind)
        own = {spec.settings: replace(DEFAULTS[spec.settings], **self.settings)} if spec.settings else {}
        found = findings_of(spec, self.cluster, {**DEFAULTS, **own})
        return [each for each in found if self.subject in ("", each.subject)]


def cases(kind: str) -> list[Case]:
    """Those of one kind, in the order of its file."""
    rows = yaml.safe_load((CASES / f"{kind}.yaml").read_text())
    return [msgspec.convert({"kind": kind, **row}, Case) for row in rows]


def kinds() -> list[str]:
    """The kinds that have cases."""
    return sorted(path.stem for path in CASES.glob("*.yaml"))


def _job(given: Mapping[str, Any]) -> JobView:
    given = dict(given)
    base = _plain(job())
    if "losses" in given:
        given["losses"] = [{"step": n, "loss": loss, "at": float(n)} for n, loss in enumerate(given["losses"])]
    cards = (card(**{"index": number, **of}) for number, of in enumerate(given.pop("cards", ())))
    seats = [RankGpu(rank=number, pid=100 + number, view=each) for number, each in enumerate(cards)]
    given |= {"gpus": _plain(seats)} if seats else {}
    ranks = {number: _plain(seen(number)) for number in range(4)}
    for number, of in given.pop("ranks", {}).items():
        ranks[number] = _over(ranks[number], of)
    return _made(JobView, _over({**base, "processes": list(ranks.values())}, given))


def _plain(value: Any) -> Any:
    return msgspec.to_builtins(named(value))


def _made(kind: type[T], plain: Any) -> T:
    return msgspec.convert(as_sent(inspect.type_info(kind), plain), kind)


def _over(base: Any, given: Any) -> Any:
    """`base` with what is given in its place, field by field."""
    if not isinstance(base, dict) or not isinstance(given, dict):
        return given
    return {**base, **{name: _over(base.get(name), value) for name, value in given.items()}}
