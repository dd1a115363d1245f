"""What is different about one rank, or one node, of a job whose ranks should be alike. Pure.

It only compares: a difference is a hint for the reader and accuses no one. Of words and numbers that should
be equal the majority counts; of measured values the median, and how far from it is far.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from slurm_watchdog.base.averages import median
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.knowledge.limits import most_odd
from slurm_watchdog.model.observations import Gpu

MIN_PEERS = 3  # Fewer values than this have no majority: of two that differ, either may be the odd one.
MAJORITY = 0.75  # So many of all have to agree before the others count as different.
MAX_TOLD = 40

ON_PURPOSE = frozenset(
    """
    RANK LOCAL_RANK GROUP_RANK NODE_RANK ROLE_RANK SLURM_PROCID SLURM_LOCALID SLURM_NODEID SLURMD_NODENAME
    SLURM_TASK_PID
    SLURM_GTIDS SLURM_LAUNCH_NODE_IPADDR SLURM_CPU_BIND SLURM_STEP_ID CUDA_VISIBLE_DEVICES NVIDIA_VISIBLE_DEVICES
    ROCR_VISIBLE_DEVICES HIP_VISIBLE_DEVICES OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_NODE_RANK
    PMI_RANK PMIX_RANK MV2_COMM_WORLD_RANK MV2_COMM_WORLD_LOCAL_RANK TORCHELASTIC_RESTART_COUNT TMPDIR
    OMPI_MCA_ess_base_vpid
    GLOO_SOCKET_HOSTNAME TORCHELASTIC_ERROR_FILE CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY TRITON_CACHE_DIR
    """.split()  # noqa: SIM905  a table of words
)
"""Variables that launchers give each rank, or each node, a value of its own."""
RUNNING_NUMBERS = frozenset({"shm_free_mib", "cpus_used"})  # Settings of a node that move all the time.


class Difference(Struct):
    """One thing that is not as with the others."""

    kind: str  # `gpu`, `environment` or `node`.
    what: str  # Name of the attribute, variable or setting.
    value: str
    usual: str  # What the others have.
    nodes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()  # Whose it is; empty where it is the node's.
    of: int = 0  # How many were compared.

    @property
    def line(self) -> str:
        """`rank 3 on n2: NCCL_SOCKET_IFNAME is eth1, that of the 7 others eth0`."""
        places = ", ".join(self.nodes[:4]) + (", …" if len(self.nodes) > 4 else "")
        if self.ranks:
            shown = ", ".join(map(str, self.ranks[:6])) + (", …" if len(self.ranks) > 6 else "")
            who = f"rank{'s' if len(self.ranks) > 1 else ''} {shown} on {places}"
        else:
            who = places
        what = f"GPU {self.what}" if self.kind == "gpu" else self.what
        others = self.of - len(self.ranks or self.nodes)
        rest = f"that of the {others} others" if others != 1 else "that of the other"
        return f"{who}: {what} is {_short(self.value)}, {rest} {_short(self.usual)}"


class RankFacts(Struct):
    """What is compared of one rank."""

    rank: int
    node: str
    gpu: Gpu | None = None
    environment: tuple[tuple[str, str], ...] = ()


class _Measure(Struct):
    """One attribute of a GPU: how to get it, how far from the median is far, and how to say it."""

    name: str
    get: Callable[[Gpu], float | None]
    share: float  # Of the median.
    least: float  # … and at least so much, in the attribute's own unit.
    say: Callable[[float], str]


MEASURES = (
    _Measure(name="SM clock", get=lambda g: g.sm_clock_hz, share=0.08, least=60e6, say=lambda v: f"{v / 1e6:.0f} MHz"),
    _Measure(name="memory clock", get=lambda g: g.memory_clock_hz, share=0.05, least=50e6,
    say=lambda v: f"{v / 1e6:.0f} MHz"),
    _Measure(name="power", get=lambda g: g.power_w, share=0.35, least=40.0, say=lambda v: f"{v:.0f} W"),
    _Measure(name="temperature", get=lambda g: g.temperature_c, share=0.3, least=15.0, say=lambda v: f"{v:.0f} C"),
    _Measure(name="utilisation", get=lambda g: g.utilization_ratio, share=0.3, least=0.3, say=lambda v: f"{v:.0%}"),
    _Measure(
        name="memory used", get=lambda g: g.memory_used_bytes, share=0.25, least=2 << 30,
        say=lambda v: f"{v / 2**30:.1f} GiB"
    ),
)  # fmt: skip
"""Far enough to be no jitter between healthy GPUs of one job; a GPU that waits idles at 1155 of 1410 MHz, 68 W, 28 C
where its peers spin at 100 % (case 1)."""
EQUALS: Final[tuple[tuple[str, Callable[[Gpu], str | None]], ...]] = (
    ("model", lambda g: g.name or None),
    ("memory", lambda g: None if g.memory_total_bytes is None else f"{g.memory_total_bytes / 2**30:.0f} GiB"),
    ("PCIe width", lambda g: _text(g.pcie_link_width)),
    ("throttle reasons", lambda g: None if g.throttle is None else ", ".join(g.throttle) or "none"),
    ("NVLinks that are down", lambda g: _text(g.nvlinks_down)),
    ("uncorrected memory errors", lambda g: _text(g.ecc_uncorrected)),
    ("rows remapped after uncorrected errors", lambda g: _text(g.remapped_rows_uncorrected)),
    ("a row waits to be remapped", lambda g: _text(g.remap_pending)),
    ("pages retired", lambda g: _text(g.retired_pages)),
    ("error of NVML", lambda g: g.error or "none"),
    ("MIG", lambda g: "off" if g.mig is None else f"{len(g.mig)} slices"),
)
"""Attributes that the GPUs of one job have in common."""


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def compare(
    ranks: Sequence[RankFacts], settings: Mapping[str, Mapping[str, str]], culprits: Iterable[int] = ()
) -> tuple[Difference, ...]:
    """Everything that is odd: GPUs and environments over ranks, settings (node -> name -> value) over nodes.

    Those of the `culprits` come first. At most MAX_TOLD.
    """
    found = [*_gpus(ranks), *_environments(ranks), *_settings(settings)]
    named = frozenset(culprits)
    places = {facts.node for facts in ranks if facts.rank in named}
    found.sort(
        key=lambda d: (
            not (named & set(d.ranks) or (not d.ranks and places & set(d.nodes))),
            len(d.ranks) + len(d.nodes),
        )
    )
    return tuple(found[:MAX_TOLD])


def _gpus(ranks: Sequence[RankFacts]) -> Iterable[Difference]:
    having = [(facts, facts.gpu) for facts in ranks if facts.gpu is not None]
    where = {facts.rank: facts.node for facts, _ in having}
    for measure in MEASURES:
        values = {facts.rank: value for facts, gpu in having if (value := measure.get(gpu)) is not None}
        yield from _far(measure, values, where)
    for name, get in EQUALS:
        words = {facts.rank: word for facts, gpu in having if (word := get(gpu)) is not None}
        yield from _odd("gpu", name, words, where)


def _far(measure: _Measure, values: Mapping[int, float], where: Mapping[int, str]) -> Iterable[Difference]:
    if len(values) < MIN_PEERS:
        return
    middle = median(values.values())
    far = {rank: v for rank, v in values.items() if abs(v - middle) > max(measure.least, measure.share * abs(middle))}
    if not far or len(far) > most_odd(len(values)):
        return
    for word, members in _by_value({rank: measure.say(value) for rank, value in far.items()}).items():
        yield _difference("gpu", measure.name, word, measure.say(middle), members, where, len(values))


def _environments(ranks: Sequence[RankFacts]) -> Iterable[Difference]:
    having = {facts.rank: dict(facts.environment) for facts in ranks if facts.environment}
    where = {facts.rank: facts.node for facts in ranks}
    names = sorted({name for environment in having.values() for name in environment} - ON_PURPOSE)
    for name in names:
        words = {rank: environment.get(name, "not set") for rank, environment in having.items()}
        if not _follows_rank(words):
            yield from _odd("environment", name, words, where)


def _follows_rank(words: Mapping[int, str]) -> bool:
    return len(set(words.values())) > 1 + most_odd(len(words))


def _settings(settings: Mapping[str, Mapping[str, str]]) -> Iterable[Difference]:
    names = sorted({name for each in settings.values() for name in each} - RUNNING_NUMBERS)
    nodes = sorted(settings)
    numbers = dict(enumerate(nodes))
    for name in names:
        words = {at: settings[node].get(name, "not there") for at, node in numbers.items()}
        if _follows_rank(words):
            continue
        for each in _odd("node", name, words, numbers):
            yield replace(each, ranks=())


def _odd(kind: str, what: str, words: Mapping[int, str], where: Mapping[int, str]) -> Iterable[Difference]:
    if len(words) < MIN_PEERS:
        return
    (usual, many), *_ = Counter(words.values()).most_common(1)
    # Of three, two that agree are a majority; of many it takes three quarters.
    if many < len(words) and (many >= MAJORITY * len(words) or (len(words) == MIN_PEERS and many == MIN_PEERS - 1)):
        others = {rank: word for rank, word in words.items() if word != usual}
        for word, members in _by_value(others).items():
            yield _difference(kind, what, word, usual, members, where, len(words))


def _by_value(words: Mapping[int, str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for rank, word in sorted(words.items()):
        found.setdefault(word, []).append(rank)
    return found


def _difference(
    kind: str, what: str, value: str, usual: str, members: Sequence[int], where: Mapping[int, str], of: int
) -> Difference:
    nodes = tuple(sorted({where[member] for member in members}))
    return Difference(kind=kind, what=what, value=value, usual=usual, nodes=nodes, ranks=tuple(members), of=of)


def _short(text: str) -> str:
    text = re.sub(r"\s+", " ", text)
    return text if len(text) <= 80 else f"{text[:79]}…"
