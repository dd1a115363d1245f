"""Options of srun that take no argument, so that it can be told where srun's own options end, and its --gpus.

From Slurm's src/common/slurm_opt.c (`has_arg`), releases 22.05 to 26.05, and pyxis (`srun --help`, NVIDIA/pyxis 0.20).
An option that is not here takes one. Standard library only: the `srun` of ours is started at every call.
"""

from __future__ import annotations

FLAGS = frozenset(
    """
    allocate async consolidate-segments contiguous debugger-test disable-status exact help hold interactive join label
    multi-prog no-allocate overcommit oversubscribe parsable preserve-env quiet quit-on-interrupt reboot share
    spread-job spread-segments stepmgr test-only unbuffered usage use-min-nodes verbose version wait-for-children whole
    """.split()  # noqa: SIM905  a table of words
)
OPTIONAL = frozenset(
    """
    bcast compress exclusive external-launcher immediate kill-on-bad-exit nice no-kill oom-kill-step overlap propagate
    pty resv-ports send-libs x11
    """.split()  # noqa: SIM905  a table of words
)
"""With an argument only behind `=`, or right behind the letter."""
OF_PYXIS = frozenset(
    """
    container-mount-home no-container-mount-home container-remap-root no-container-remap-root container-entrypoint
    no-container-entrypoint container-entrypoint-log container-writable container-readonly
    """.split()  # noqa: SIM905  a table of words
)
BEGIN_A_FLAG = frozenset({"container", "wait"})
"""Options with an argument that the name of one without begins with: they are not that name cut short."""
LETTERS = {
    pair[0]: pair[2:]
    for pair in """
    A:account b:begin B:extra-node-info c:cpus-per-task C:constraint d:dependency
    D:chdir e:error E:preserve-env F:nodefile G:gpus h:help H:hold
    i:input I:immediate J:job-name k:no-kill K:kill-on-bad-exit l:label
    L:licenses m:distribution M:clusters n:ntasks N:nodes o:output
    O:overcommit p:partition q:qos Q:quiet r:relative s:oversubscribe
    S:core-spec t:time T:threads u:unbuffered v:verbose V:version
    w:nodelist W:wait x:exclude X:disable-status Z:no-allocate
    """.split()  # noqa: SIM905  a table of words
}
"""Of srun, and their long names."""
PLACING = frozenset(
    "nodes ntasks exclude nodelist no-kill overlap exclusive distribution nodefile relative gpus jobid het-group".split()  # noqa: SIM905
)
"""What is looked at. Any name may be cut short, as getopt_long(3) allows."""
NO_LAUNCH = frozenset({"help", "usage", "version", "test-only"})
OTHER_PLACING = frozenset({"relative", "het-group", "pack-group", "no-allocate"})
"""Options that place a step in another way: what stands beside them is left as it is."""


def gpu_number(text: str) -> int:
    """How many GPUs `8`, `a100:8` or `a100:8,h100:4` are, as Slurm writes its --gpus; 0 where it is none of these."""
    numbers = [part.rpartition(":")[2] for part in text.split(",")]
    return sum(int(number) for number in numbers) if all(number.isdecimal() for number in numbers) else 0


def scaled_gpus(text: str, total: int, have: int) -> str:
    """Such a number for `have` of `total` nodes, with its types; empty where not every node has the same."""
    parts = [part.rpartition(":") for part in text.split(",")] if gpu_number(text) else []
    if any(int(number) * have % total for _, _, number in parts):
        return ""
    return ",".join(f"{kind}{colon}{int(number) * have // total}" for kind, colon, number in parts)
