"""Lines that a node prints, as values, and what they make of a node and of a pair. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.knowledge.node_figures import KINDS, split_key

MARK: Final = "slurm-watchdog-test "
"""As probes/phases.py has it."""
MAX_LINE: Final = 1 << 20
Text = Annotated[str, Meta(max_length=4096)]
Fact = str | int | float | bool | dict[str, str | int | float | bool | None] | None
Raw = tuple[float, float, int, bool]


class Line(Struct, frozen=True, kw_only=True):
    """One line of a node's: a phase has begun, or ended."""

    node: Text
    phase: Text
    state: Literal["begun", "ok", "late", "failed"]
    at: float
    """That node's clock."""
    job: Text = ""
    subject: Text = ""
    """Directory, or pair: what the phase is about."""
    said: Text = ""
    """Why it is not ok."""
    took_s: float = 0.0
    figures: Mapping[Text, Raw] = {}
    """Name to median, spread as a share of it, repetitions, and whether other processes disturbed them."""
    facts: Mapping[Text, Fact] = {}


class Problem(Struct, frozen=True, kw_only=True):
    """A phase that did not end well."""

    phase: str
    subject: str
    state: str
    """late or failed."""
    said: str


class Fault(Struct, frozen=True, kw_only=True):
    """One thing that is wrong with a node."""

    place: str
    """Its part, in words that are the same in every test: `cpu`, `disk:/tmp`, `mount:/scratch`, `link:eth0`, a UUID."""
    what: str
    """A part of a sentence, with the figures."""


class Finding(Struct, frozen=True, kw_only=True):
    """A fault, and whether it is certain enough to call a node bad: otherwise it is a reason not to call it well."""

    fault: Fault
    is_certain: bool


class Measured(Struct, frozen=True, kw_only=True):
    """What is known of one node, or of one pair (`name` is then `a b`)."""

    name: str
    model: str = ""
    figures: Mapping[str, float] = {}
    """Key (figures.split_key) to median; disturbed ones are not here."""
    spreads: Mapping[str, float] = {}
    disturbed: tuple[str, ...] = ()
    """Keys that other processes on the node disturbed."""
    problems: tuple[Problem, ...] = ()
    facts: Mapping[str, Mapping[str, Fact]] = {}
    """Phase (with its subject) to its facts."""
    missing: str = ""
    """Why there is nothing, or not all, a part of a sentence."""


def parse_line(text: str) -> Line | None:
    """What a line of a job's output says; None: it is none of ours."""
    if not text.startswith(MARK) or len(text) > MAX_LINE:
        return None
    try:
        return msgspec.json.decode(text[len(MARK) :], type=Line)
    except (msgspec.MsgspecError, RecursionError):
        return None


def measured(name: str, lines: Iterable[Line], missing: str = "") -> Measured:
    """All ends of phases of one node or pair put together. A phase that has begun and never ended is `late` when the
    job is over: its node did not even answer any more."""
    figures: dict[str, float] = {}
    spreads: dict[str, float] = {}
    disturbed: list[str] = []
    facts: dict[str, Mapping[str, Fact]] = {}
    problems: list[Problem] = []
    begun: dict[tuple[str, str, str], Line] = {}
    for line in lines:
        where = (line.node, line.phase, line.subject)
        if line.state == "begun":
            begun[where] = line
            continue
        begun.pop(where, None)
        if line.state != "ok":
            problems.append(Problem(phase=line.phase, subject=line.subject, state=line.state, said=line.said))
        for figure, (value, spread, _, was_disturbed) in line.figures.items():
            key = f"{figure} {line.subject}" if line.phase in ("disk", "mount", "fio") else figure
            if split_key(key)[0] not in KINDS:
                continue
            if was_disturbed:
                disturbed.append(key)
            else:
                figures[key], spreads[key] = value, spread
        if line.facts:
            where_of = " ".join(filter(None, (line.phase, line.subject)))
            facts[where_of] = {**facts.get(where_of, {}), **_facts(line)}
    for line in begun.values():
        said = "it had begun when the job ended"
        problems.append(Problem(phase=line.phase, subject=line.subject, state="late", said=said))
    return by_nvml(Measured(
        name=name, model=_model(facts), figures=figures, spreads=spreads, disturbed=tuple(disturbed),
        problems=tuple(problems), facts=facts, missing=missing,
    ))  # fmt: skip


def by_nvml(found: Measured) -> Measured:
    """With the GPUs of gpu_rate numbered as NVML numbers them, by UUID or PCI address: torch sees those that it may
    use, in an order of its own. One that NVML does not know keeps torch's number, as `cuda:N`."""
    by_torch = _cards(found.facts.get("gpu_rate", {}))
    known = _cards(found.facts.get("gpu_health before", {}))
    if not by_torch or not known:
        return found
    only = next(iter(known)) if len(known) == len(by_torch) == 1 else None
    same = {
        f"gpu_{each}": f"gpu_{_nvml_number(card, known) or only or f'cuda:{each}'}" for each, card in by_torch.items()
    }

    def renamed(key: str) -> str:
        family, slash, index = key.partition("/")
        return f"{family}/{same[f'gpu_{index}'].removeprefix('gpu_')}" if slash and index in by_torch else key

    rates = {same.get(name, name): value for name, value in found.facts["gpu_rate"].items()}
    return replace(
        found, facts={**found.facts, "gpu_rate": rates},
        figures={renamed(key) if key.startswith("gpu_") else key: value for key, value in found.figures.items()},
        spreads={renamed(key) if key.startswith("gpu_") else key: value for key, value in found.spreads.items()},
    )  # fmt: skip


def _cards(facts: Mapping[str, Fact]) -> dict[str, Mapping[str, str | int | float | bool | None]]:
    """Number to what is known of that GPU."""
    return {
        name.removeprefix("gpu_"): value
        for name, value in facts.items()
        if name.startswith("gpu_") and isinstance(value, dict)
    }


def _nvml_number(
    card: Mapping[str, object], known: Mapping[str, Mapping[str, str | int | float | bool | None]]
) -> str | None:
    """The one with the same UUID, else with the same PCI address."""
    for name in ("uuid", "bus"):
        if wanted := str(card.get(name) or "").lower():
            same = [number for number, each in known.items() if str(each.get(name) or "").lower() == wanted]
            if len(same) == 1:
                return same[0]
    return None


def _facts(line: Line) -> Mapping[str, Fact]:
    """Of a pair both nodes have some, under the same names."""
    if line.phase != "pair":
        return line.facts
    return {
        f"{name} {line.node}" if name in ("counters", "interface") else name: each for name, each in line.facts.items()
    }


def _model(facts: Mapping[str, Mapping[str, Fact]]) -> str:
    """What peers have in common: CPU model and number, GPU model."""
    cards = [value.get("model") for value in facts.get("gpu_health before", {}).values() if isinstance(value, dict)]
    return " / ".join(str(each) for each in (facts.get("state", {}).get("model"), *cards[:1]) if each)


def place_of(name: str, subject: str, facts: Mapping[str, Mapping[str, Fact]]) -> str:
    """The part of a node that a figure or a phase is about; for a GPU by its UUID, where NVML gave it."""
    part = name.partition("_")[0]
    if part == "gpu" and subject.removeprefix("cuda:").isdecimal():
        for phase in ("gpu_health before", "gpu_rate"):
            card = facts.get(phase, {}).get(f"gpu_{subject}")
            if isinstance(card, dict) and card.get("uuid"):
                return str(card["uuid"])
        return f"gpu:{subject}"
    if part in ("disk", "mount"):
        return f"{part}:{subject}"
    return name if name == "site_check" else "link" if part == "nic" else part


def better(first: Measured, second: Measured) -> Measured:
    """Of two measurements the better figure each, and the problems that both had: what holds twice remains."""
    figures = {**first.figures, **second.figures}
    spreads = {**first.spreads, **second.spreads}
    for key in first.figures.keys() & second.figures.keys():
        best = max if KINDS[split_key(key)[0]].more_is_better else min
        figures[key] = best(first.figures[key], second.figures[key])
        spreads[key] = max(first.spreads.get(key, 0.0), second.spreads.get(key, 0.0))
    again = {(each.phase, each.subject) for each in second.problems}
    kept = tuple(each for each in first.problems if second.missing or (each.phase, each.subject) in again)
    return Measured(
        name=first.name, model=first.model or second.model, figures=figures,
        spreads=spreads,
        disturbed=tuple(key for key in first.disturbed if key not in figures),
        problems=kept, facts={**second.facts, **first.facts},
        missing=first.missing and second.missing,
    )  # fmt: skip
