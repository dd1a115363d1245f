"""`slurm-watchdog group-stacks`: groups the stacks in files and finds the rank that the others wait for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slurm_watchdog.base.text import plural
from slurm_watchdog.cli.options import EXIT_USAGE, JSON, KNOWLEDGE, Answer, Asked, Refusal, command, configured, warn
from slurm_watchdog.cli.terminal import show
from slurm_watchdog.config.schema import Config
from slurm_watchdog.diagnose.stacks.case import Options, parse_topology
from slurm_watchdog.diagnose.stacks.ranks import dumps_of
from slurm_watchdog.diagnose.stacks.sentences import culprit_words
from slurm_watchdog.diagnose.stacks.verdict import diagnose_dumps, document_of, hints_of
from slurm_watchdog.parse.given_files import read_texts
from slurm_watchdog.slurm.node_names import expand_nodes


@command(
    """
    paths PATH…
    --ranks N<1..10000000>  How many ranks the job has: names the missing ones.
    --since-last-step S<0..>  Seconds since the last step when the stacks were taken.
    --typical-step S<0..>  Seconds that a step takes.
    --topology SIZES  Sizes of tensor, pipeline and context parallelism in Megatron's order of ranks, tp=4,pp=8:
      compares ranks with those that normally look like them. [default: as the ranks' command lines say]
    --config F  Configuration file: the limits of its detectors. [default: every setting's default]
    """,
    KNOWLEDGE,
    JSON,
)
def group_stacks(
    asked: Asked, paths: tuple[str, ...], since_last_step: float | None, typical_step: float | None, **given: Any
) -> Answer:
    """Reads stacks and says whether they show a hang, and which rank keeps the others waiting, if one does.

    A PATH is a file, a directory with a file for each rank or node, or `-` for standard input: what `py-spy dump`
    prints (text or --json, --native, --locals), faulthandler, gdb, pystack, /proc/PID/stack; plain or gzip; many dumps
    in one file; with the prefixes of srun --label or pdsh; pasted into a document. Several dumps of the same ranks,
    taken some 20 s apart, tell stuck from busy; so does the time since the last step. Nothing is asked or touched.
    Exit code 0 nothing wrong, 1 something found, 2 nothing could be read.

    \b
    Examples:
      slurm-watchdog group-stacks stacks/ --ranks 64 --since-last-step 1800 --typical-step 12 --topology tp=4,pp=8
      srun --overlap --label … py-spy dump … | slurm-watchdog group-stacks -
    """
    given |= {"since_last_step_s": since_last_step, "typical_step_s": typical_step}
    return read_stacks(paths, configured(asked.config), given)


def read_stacks(paths: Sequence[str], config: Config | None, given: dict[str, Any]) -> Answer:
    """What the stacks in files say; `given` is what else is known: see Options. Raises Refusal if there are none."""
    texts, unreadable, recorded = read_texts(paths)
    dumps, spoilt = dumps_of(texts, expand_nodes)
    if recorded:
        what = f"{plural(recorded, 'file is a dump', 'files are dumps')} of PyTorch's Flight Recorder"
        warn(f"{what}: slurm-watchdog diagnose DIRECTORY says who did not come to which collective.")
    if not dumps:
        names = ", ".join(paths[:3]) + (", …" if len(paths) > 3 else "")
        expected = "Expected is what `py-spy dump --pid PID` prints (or --json), faulthandler's or gdb's backtraces."
        raise Refusal([*unreadable, *spoilt, f"No stacks were found in {names}."], expected)
    if config is not None:
        from slurm_watchdog.detect.collective_hang import CollectiveHang

        given = given | {"limits": config.detectors.of(CollectiveHang)}
    verdict = diagnose_dumps(dumps, Options(**given))
    topology = given.get("topology")
    if topology is not None and parse_topology(topology, verdict.ranks) is None:
        must = f"it is written tp=4,pp=8 (and cp=2), and has to divide the {verdict.ranks} ranks."
        warn(f"--topology {topology} was not used: {must}")
    for line in (*unreadable, *spoilt):
        warn(line)
    unknown = unreadable or not verdict.dumped

    def show_all() -> None:
        show("stacks", found=verdict, hints=hints_of(verdict), words=lambda each: culprit_words(each, False))

    return Answer(document_of(verdict), show_all, EXIT_USAGE if unknown else verdict.is_hang)
