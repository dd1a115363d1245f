"""What the reason of a drained node says: a fault of the node, a user's problem, planned work, a test, or nothing known.

First the vocabularies of programs that write reasons (Slurm, NHC, soperator, HyperPod, cloud plugins): the first row
that matches decides. Then words that people use, by whole words: hardware that is called broken counts against the
node, unless the reason also tells of a change, of users, or that it is over. What is not known counts for nothing.

Sources: src/slurmctld and src/common of Slurm 20.11 to 25.05; NHC 1.4 (LBNL, also Azure's checks); soperator 1.14 to
4.1 (internal/consts); SageMaker HyperPod's guide (faulty instances); ParallelCluster (slurm_plugin); slurm-operator 1.2;
lists of `sinfo -R` that users and sites have published: tests/captures/slurm/drain_reasons.yaml.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from slurm_watchdog.base.late_regex import late_regex
from slurm_watchdog.base.python310 import StrEnum


class DrainMeaning(StrEnum):
    """What a drain says about its node."""

    NODE = "node"
    USER = "user"
    PLANNED = "planned"
    TEST = "test"
    UNKNOWN = "unknown"


NODE, USER, PLANNED, TEST, UNKNOWN = DrainMeaning
_NHC = r"^(?:(?:nhc|hc|lbnl[ -]?nhc|gcm|health_?check)\s*[:-]\s*(?:health check failed:\s*)?|(?=check_\w+:))"

VOCABULARIES: Final[tuple[tuple[DrainMeaning, re.Pattern[str]], ...]] = tuple(
    (meaning, late_regex(pattern, re.IGNORECASE))
    for meaning, pattern in (
        # our own: the incident behind it counts
        (UNKNOWN, r"^slurm-watchdog\b"),
        # soperator; before 1.21 its maintenance was a node problem by name
        (PLANNED, r"\[compute_maintenance\]|\[node_problem\] compute_maintenance|^soperator (?:auto-healing|rolling)\b"),
        (USER, r"\[user_problem\]"),
        (NODE, r"\[(?:node_problem|hardware_problem|hc)\]"),
        # HyperPod: an operator, or its agent, asks for a repair
        (NODE, r"^action: ?(?:reboot|replace)\b"),
        # NHC: a check that was itself killed says nothing; what users' programs use up is not the node
        (UNKNOWN, _NHC + r"(?:$|terminated by signal|script timed out)"),
        (PLANNED, _NHC + r"check_reboot"),
        (USER, _NHC + r"check_(?:ps_(?:loadavg|cpu|mem|physmem|time|unauth\w*|blacklist|userproc\w*|kswapd)"
                      r"|fs_(?:free|used|ifree|iused|inodes)|hw_(?:mem_free|physmem_free|swap_free))\b"),
        (NODE, _NHC + r"\S"),
        # Slurm itself
        (NODE, r"^(?:not responding|node unexpectedly rebooted|low (?:realmemory|cpus|tmpdisk|socket\*core\S*)"
               r"|gres/\S+ count (?:reported lower|too low)|kill task failed|(?:prolog|epilog|health ?check(?: program)?)"
               r" (?:error|failed|failure)|batch job complete failure|duplicate jobid|resumetimeout reached"
               r"|reboot timed out|node failure|node_fail)\b"),
        (NODE, r"^(?:(?:node|host) )?(?:not pinging|no ping|unreachable|broken|dead|faulty|defective|crashed)$"),
        (UNKNOWN, r"^gres/"),
        # clouds: no machine was to be had
        (UNKNOWN, r"^\(?code:|^failure when resuming|capacity ?exceeded|insufficient\w*capacity|quota exceeded"),
        (PLANNED, r"^(?:reboot (?:asap|requested|issued)|power(?:ing|ed)?[ _](?:sav\w+|down|up)|update$|new node$|admin shutdown\b"
                  r"|scheduler health check$|slurm-operator: (?:pod|node) (?:is )?(?:terminating|cordoned|deleted))"),
    )
)  # fmt: skip

_THING = (
    r"(?:gpus?\d*|dimms?\w*|memory|ram|cpus?\d*|nics?|hcas?|ib\d*|infiniband|cables?|transceivers?|optics?|disks?|drives?"
    r"|ssds?|nvme\w*|hdds?|psus?|power supply|fans?|(?:main|mother|base)?board|nodes?|hosts?|hardware|hw|bmc|nvlinks?"
    r"|nvswitch\w*|pcie|links?|ports?|efa|mlx\d\w*|ipmi|battery|smart|nvml|nvidia.smi|ethernet|eth\d*|cards?|machine|raid|filesystem|mounts?|lustre|gpfs|nfs|beegfs|weka|slurmd)"
)
_BROKEN = (
    r"(?:bad|broken|fault(?:y|s)?|dead|defect(?:ive)?|fail(?:ed|ing|s|ures?)?|damaged|missing|lost|hung|hangs?|stuck|flaky|flap\w*|inactive|evict\w*|fatal|errors?"
    r"|degraded|dying|loud|noisy|unstable|leaks?|leaking|crash(?:ed|es|ing)?|not (?:detected|found|mounted|visible)|unreachable|overheat\w*|unhealthy)"
)
_CHECK = r"(?:tests?|checks?|diag\w*|bench\w*|memtest\w*|nccl\w*|bandwidth|dcgm\w*|nvidia.smi|gpu-?burn|hpl|linpack|stress\w*)"
_BETWEEN = r"\W{1,3}(?:\w+\W{1,3}){0,2}"
_WORDS: Final[dict[str, re.Pattern[str]]] = {
    "broken": late_regex(
        rf"\b{_THING}\b{_BETWEEN}{_BROKEN}\b|\b{_BROKEN}{_BETWEEN}{_THING}\b|\b{_CHECK}{_BETWEEN}fail\w*"
        rf"|\bfail(?:ed|ing|s|ures?)?\b{_BETWEEN}{_CHECK}\b"
        r"|health ?check\W{0,3}(?:error|fail)|\bs?xids?\W*\d|\becc\b|\baer\b|\bdbe\b|\buncorrect\w+|\bdouble.?bit|\bmce\b|\bmachine check|\bf[ae]ll(?:en)? off|\boff the bus"
        r"|\brma\b|\b(?:(?:row|page).?)?remap\w*|\bpage.?retire\w*|\bkernel (?:panic|oops|bug|crash\w*|hang)|\b(?:soft|hard).?lock.?up"
        r"|\bhung task|\bunkillable|\boverheat\w*|\bover.?temp\w*|\btemperature (?:is )?(?:too )?(?:high|critical)"
        r"|\bthermal (?:shut ?down|trip|event)|\breset required|\brepair(?:s|ing)?\b|\bsilent data corruption"
        r"|\b(?:memory|disk|i/?o|pcie|aer|nvlink|nvswitch|hardware|hw|crc|link|gpu|thermal|symbol|bit|ib) errors?\b"
        r"|\b(?:hardware|hw|gpu|disk|memory|nic|psu|fan|thermal|cooling|nvlink|ib) (?:issues?|problems?)\b"
        r"|\b(?:won'?t|doesn'?t|does not|not) (?:boot|power|post|come (?:up|back))|\bstale (?:nfs )?file handle"
        r"|\bread.?only (?:file ?system|fs|root)|\broot ?fs\W+read.?only|\b(?:link|ports?|ib\d*|nic|eth\w*|interface|nvlink)\W+(?:\w+\W+)?down\b"
        r"|\b(?:replac|swap|reseat|exchang)\w*\W+(?:\w+\W+){0,2}(?:dimms?|gpus?\d*|psu|fan|mainboard|motherboard|cable|disk"
        r"|drive|battery|ssd|nvme\w*|nic|hca)\b"
    ),
    "over": late_regex(
        r"\b(?:no|without|zero) (?:\w+ )?(?:errors?|faults?|issues?|problems?|failures?|xids?)\b"
        r"|\bfalse (?:alarm|positive)|\b(?:fixed|repaired|cleared|resolved|solved|passed|recovered|healthy again|is fine)\b"
    ),
    "change": late_regex(
        r"\b(?:upgrad|updat|patch|install|re-?install|re-?imag|re-?provision|provision|deploy|migrat|flash|decommission"
        r"|relocat|recabl|cabling)\w*"
    ),
    "user": late_regex(
        r"\b(?:users?|user'?s|(?:a|by|of|the) jobs?|job's|job of|runaway|oom|out of memory|quota|orphan(?:ed)?|abuse|over-?load(?:ed)?"
        r"|high load|load (?:avg|average))\b|(?:\bdisk|\bfile ?system|\bfs|\bpartition|(?:^|\s)/\w+)\W+(?:is )?(?:full|filled)\b"
    ),
    "test": late_regex(
        r"\b(?:tests?|testing|tested|benchmark\w*|burn.?in|validat\w+|acceptance|qualification|debug\w*|trial|experiment\w*"
        r"|evaluat\w+|diagnos\w+)\b"
    ),
    "planned": late_regex(
        r"\b(?:maint|maintenance|planned|schedul\w+|firmware|fw|bios|kernel|driver|reserv\w+|reboot\w*|restart\w*|rolling|rack"
        r"|mov(?:e|ed|ing)|shut ?down|power.?(?:sav\w+|down|off|cycl\w+|cap\w*)|re-?config\w*|mig|downtime|decom\w*|retired?|instance retirement|autostop"
        r"|autoscal\w+|tardis|scal(?:e|ed|ing).?(?:down|in)|new (?:node|hardware)|set.?up|workshop|course|demo|hold|standby|spare"
        r"|rotat\w+|shrink|expansion|cleaning|drain(?:ed|ing)? for)\b"
    ),
}  # fmt: skip
_STAMP = late_regex(r"\s*\[[^\[\]\s]{1,64}@[0-9T:-]{10,25}\]\s*$")  # scontrol adds who gave the reason, and when.


@lru_cache(maxsize=1024)
def drain_meaning(reason: str) -> DrainMeaning:
    """What a reason says about its node, by the first row that knows it."""
    text = _STAMP.sub("", reason[:500]).strip()
    for meaning, pattern in VOCABULARIES:
        if pattern.search(text):
            return meaning
    words = re.sub(r"[\s_]+", " ", text.lower())
    said = {name for name, pattern in _WORDS.items() if pattern.search(words)}
    if "broken" in said:
        return UNKNOWN if said & {"over", "change", "user"} or _only_tested(said, words) else NODE
    if "test" in said:
        return TEST
    if said & {"change", "planned"}:
        return PLANNED
    return USER if "user" in said and "over" not in said else UNKNOWN


def _only_tested(said: set[str], words: str) -> bool:
    return "test" in said and re.search(rf"{_CHECK}\b.*\bfail|\bfail\w*\b.*{_CHECK}", words) is None
