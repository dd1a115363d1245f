"""`slurm-watchdog group-stacks`: groups the stacks in files and finds the rank that the others wait for."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from slurm_watchdog.cli.diagnosis_text import advice, print_list
from slurm_watchdog.cli.options import (
    EXIT_FINE,
    EXIT_FOUND,
    EXIT_USAGE,
    FiniteRange,
    Refusal,
    config_option,
    json_option,
    knowledge_option,
    load_or_exit,
    print_json,
)
from slurm_watchdog.cli.terminal import clean, count, fold_nodes, sentence, table

if TYPE_CHECKING:
    from slurm_watchdog.diagnose.stacks.case import StackLimits
    from slurm_watchdog.diagnose.stacks.verdict import StackVerdict
    from slurm_watchdog.diagnose.stacks.wording import StackGroup
    from slurm_watchdog.knowledge.remediation_hints import Hint
    from slurm_watchdog.model.incidents import Culprit

FRAMES_SHOWN: Final = 4
GROUPS_SHOWN: Final = 40


@click.command("group-stacks", short_help="Group the stacks of all ranks: which one differs.")
@click.argument("paths", metavar="PATH…", nargs=-1, required=True, type=click.Path(allow_dash=True))
@click.option(
    "--ranks",
    type=click.IntRange(1, 10_000_000),
    metavar="N",
    help="How many ranks the job has: names the missing ones.",
)
@click.option(
    "--since-last-step",
    type=FiniteRange(0),
    metavar="S",
    help="Seconds since the last step when the stacks were taken.",
)
@click.option("--typical-step", type=FiniteRange(0), metavar="S", help="Seconds that a step takes.")
@click.option(
    "--topology",
    metavar="SIZES",
    help="Sizes of tensor, pipeline and context parallelism in Megatron's order of ranks, tp=4,pp=8: "
    "compares ranks with those that normally look like them. [default: as the ranks' command lines say]",
)
@config_option("Configuration file: the limits of its detectors. [default: every setting's default]")
@knowledge_option
@json_option
def group_stacks(
    paths: tuple[str, ...],
    ranks: int | None,
    since_last_step: float | None,
    typical_step: float | None,
    topology: str | None,
    config_file: str | None,
    as_json: bool,
) -> None:
    """Reads stacks and says whether they show a hang, and which rank keeps the others waiting, if one does.

    A PATH is a file, a directory with a file for each rank or node, or `-` for standard input: what `py-spy
    dump` prints (text or --json, --native, --locals), faulthandler, gdb, pystack, /proc/PID/stack; plain or
    gzip; many dumps in one file; with the prefixes of srun --label
    or pdsh; pasted into a document. Nothing is asked and nothing is touched. Several dumps of the same ranks,
    taken some 20 s apart,
    tell stuck from busy; so does the time since the last step. Exit code 0 nothing wrong, 1 something found,
    2 nothing could be read.

    \b
    Examples:
      slurm-watchdog group-stacks trace-*.out
      slurm-watchdog group-stacks stacks/ --ranks 64 --since-last-step 1800 --typical-step 12
      slurm-watchdog group-stacks stacks/ --since-last-step 1800 --topology tp=4,pp=8
      srun --overlap --label … py-spy dump … | slurm-watchdog group-stacks -
    """
    from slurm_watchdog.cli.stack_files import read_stack_files
    from slurm_watchdog.diagnose.stacks.case import Options
    from slurm_watchdog.diagnose.stacks.verdict import diagnose_dumps

    files = read_stack_files(paths)
    dumps, unreadable = files.dumps, files.unreadable
    if files.recorded:
        what = f"{count(files.recorded, 'file is a dump', 'files are dumps')} of PyTorch's Flight Recorder"
        click.echo(f"{what}: slurm-watchdog diagnose DIRECTORY says who did not come to which collective.", err=True)
    if not dumps:
        names = ", ".join(clean(path) for path in paths[:3]) + (", …" if len(paths) > 3 else "")
        expected = "Expected is what `py-spy dump --pid PID` prints (or --json), faulthandler's or gdb's backtraces."
        raise Refusal([*unreadable, *files.spoilt, f"No stacks were found in {names}."], expected)
    given = Options(
        ranks=ranks,
        since_last_step_s=since_last_step,
        typical_step_s=typical_step,
        topology=topology,
        limits=_limits(config_file),
    )
    verdict = diagnose_dumps(dumps, given)
    _check_topology(topology, verdict.ranks)
    for line in (*unreadable, *files.spoilt):
        click.echo(line, err=True)
    if as_json:
        print_json(_document(verdict))
    else:
        _print(verdict)
    unknown = unreadable or not verdict.dumped
    sys.exit(EXIT_USAGE if unknown else EXIT_FOUND if verdict.is_hang else EXIT_FINE)


def _limits(config_file: str | None) -> StackLimits:
    """Those of `collective_hang` in a configuration, which puts its rows of knowledge in force as well; as shipped
    without one. Ends the process with code 2 if the file is wrong."""
    from slurm_watchdog.knowledge.shipped_limits import SHIPPED

    if config_file is None:
        return SHIPPED
    from slurm_watchdog.config.knowledge_files import put_in_force
    from slurm_watchdog.detect.collective_hang import CollectiveHang

    config = load_or_exit(config_file)
    put_in_force(config.site_texts)
    return config.detectors.of(CollectiveHang)


def _check_topology(text: str | None, world: int) -> None:
    from slurm_watchdog.diagnose.stacks.topology import parse_topology

    if text is not None and parse_topology(text, world) is None:
        click.echo(
            f"--topology {clean(text)} was not used: it is written tp=4,pp=8 (and cp=2), and has to divide "
            f"the {world} ranks.",
            err=True,
        )


# ------------------------------------------------------------------------------------------- output


def _document(verdict: StackVerdict) -> dict[str, Any]:
    return {
        "ranks": verdict.ranks,
        "dumped": verdict.dumped,
        "missing": list(verdict.missing),
        "groups": [
            {
                "frames": list(group.frames),
                "ranks": [m.rank for m in group.members if m.rank is not None],
                "hosts": sorted({m.node for m in group.members if m.node}),
                "count": len(group.members),
                "place": str(group.place),
                "class": _class(group),
                "members": [{"rank": m.rank, "host": m.node, "pid": m.pid} for m in group.members],
                "threads": dict(group.threads),
            }
            for group in verdict.groups
        ],
        "is_hang": verdict.is_hang,
        "class": verdict.cls,
        "culprits": [_culprit_json(each) for each in verdict.culprits],
        "summary": verdict.summary,
        "odd": [_culprit_json(each) for each in verdict.odd],
        "undumped": [_culprit_json(each) for each in verdict.undumped],
        "gone": [_culprit_json(each) for each in verdict.gone],
        "others": dict(verdict.others),
        "todo": list(verdict.todo),
        "hints": [hint.as_json() for hint in _hints(verdict)],
    }


def _class(group: StackGroup) -> str:
    from slurm_watchdog.knowledge.stack_frames import CLASSES

    return CLASSES[group.place]


def _culprit_json(each: Culprit) -> dict[str, Any]:
    return {"rank": each.rank, "host": each.node, "pid": each.pid, "reason": each.reason}


def _hints(verdict: StackVerdict) -> tuple[Hint, ...]:
    """What this usually is and what to try next, from the knowledge of the house. May be wrong for the case:
    it is said so."""
    from slurm_watchdog.knowledge.remediation_hints import hints_for

    if not verdict.is_hang:
        return ()
    text = "\n".join([verdict.summary, *(frame for group in verdict.groups[:GROUPS_SHOWN] for frame in group.frames)])
    return hints_for(verdict.cls, text)


def _print(verdict: StackVerdict) -> None:
    sentence(verdict.summary, "bold red" if verdict.is_hang else "green")
    if len(verdict.culprits) > 1:
        _print_culprits("Named", verdict.culprits)
    if verdict.odd:
        _print_culprits("Elsewhere than the others, which proves nothing by itself", verdict.odd)
    if verdict.gone:
        _print_culprits("Ended", verdict.gone)
    if verdict.undumped:
        _print_culprits("Could not be dumped", verdict.undumped)
    if verdict.missing:
        from slurm_watchdog.diagnose.stacks.wording import fold

        sentence(f"No dump at all: rank {fold(verdict.missing)}.")
    sentence("")
    rows = [_row(group) for group in verdict.groups[:GROUPS_SHOWN]]
    table(("COUNT", "RANKS", "NODES", "PLACE", "INNERMOST FRAMES"), rows)
    if len(verdict.groups) > GROUPS_SHOWN:
        sentence(f"… {len(verdict.groups) - GROUPS_SHOWN} more groups: --json has them")
    if verdict.others:
        sentence("Left out, for they hold no rank: " + ", ".join(f"{n} x {what}" for what, n in verdict.others) + ".")
    print_list("What to do next", verdict.todo)
    print_list("What it usually is (it may be something else here)", [advice(each) for each in _hints(verdict)])


def _print_culprits(heading: str, people: Sequence[Culprit]) -> None:
    from slurm_watchdog.diagnose.stacks.wording import culprit_words

    sentence(f"{heading}:")
    for each in people[:16]:
        sentence(f"  {culprit_words(each, False)}: {each.reason}")
    if len(people) > 16:
        sentence(f"  … {count(len(people) - 16, 'more', 'more')}: --json has them")


def _row(group: StackGroup) -> tuple[str, ...]:
    from slurm_watchdog.diagnose.stacks.wording import fold

    known = [m.rank for m in group.members if m.rank is not None]
    unknown = len(group.members) - len(known)
    pids = sorted({m.pid for m in group.members if m.rank is None and m.pid})
    ranks = fold(known)
    if unknown:
        shown = ",".join(str(pid) for pid in pids[:4]) + ("…" if len(pids) > 4 else "")
        ranks = ", ".join(part for part in (ranks, f"pid {shown}" if shown else f"{unknown} unknown") if part)
    hosts = fold_nodes(sorted({m.node for m in group.members if m.node})) if any(m.node for m in group.members) else "-"
    return str(len(group.members)), ranks, hosts, str(group.place), " < ".join(group.frames[:FRAMES_SHOWN])
