"""Prints a diagnosis: one sentence, groups of ranks by stack, what differs, which ranks could not be dumped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from slurm_watchdog.cli.terminal import fold_nodes, sentence, table
from slurm_watchdog.model.diagnosis_documents import Diagnosis, Hint, Suspect

if TYPE_CHECKING:
    from slurm_watchdog.knowledge.remediation_hints import Hint as KnownHint

MAX_FRAMES: Final = 4
MAX_GROUPS: Final = 20
MAX_ROWS: Final = 40


def print_diagnosis(found: Diagnosis) -> None:
    """Prints all of a diagnosis, the sentence first."""
    sentence(found.summary or "Nothing can be said.", "bold red" if found.is_hang else "")
    if found.culprits:
        heading("Who")
        table(
            ("WHO", "WHERE", "WHY"),
            [
                (suspect_text(each), each.path or each.mount or "-", each.reason or "-")
                for each in found.culprits[:MAX_ROWS]
            ],
        )
    if found.groups:
        from slurm_watchdog.diagnose.stacks.wording import fold

        heading("Groups")
        rows = [
            (
                str(len(g.ranks)),
                fold(g.ranks),
                fold_nodes(g.hosts),
                g.place or "-",
                " < ".join(g.frames[:MAX_FRAMES]),
            )
            for g in found.groups[:MAX_GROUPS]
        ]
        table(("RANKS", "WHICH", "NODES", "WHERE", "FRAMES, INNERMOST FIRST"), rows)
        if len(found.groups) > MAX_GROUPS:
            sentence(f"… and {len(found.groups) - MAX_GROUPS} smaller groups: --json has them")
    print_list("What differs", [each.line for each in found.differences])
    print_list("Filesystems", [each.summary for each in found.filesystems])
    print_list(
        "Could not be dumped",
        [f"{suspect_text(each)}: {each.reason or 'no reason given'}" for each in found.undumped],
    )
    print_list("Hints: what it usually is", [advice(each) for each in found.hints])


def advice(hint: Hint | KnownHint) -> str:
    """What it usually is, and what to try."""
    return f"{hint.usually} Try: {hint.try_next}" + (f" ({hint.documented})" if hint.documented else "")


def heading(text: str) -> None:
    """An empty line, and a title."""
    sentence("")
    sentence(text, "bold")


def print_list(title: str, lines: Sequence[str]) -> None:
    """A heading and a line each; nothing if there are none."""
    if not lines:
        return
    heading(title)
    for line in lines[:MAX_ROWS]:
        sentence(f"- {line}")
    if len(lines) > MAX_ROWS:
        sentence(f"… and {len(lines) - MAX_ROWS} more: --json has them")


def suspect_text(suspect: Suspect) -> str:
    """`rank 2 (pid 4711 on n3)`, or what of it is known."""
    name = f"rank {suspect.rank}" if suspect.rank is not None else "a process"
    pid = f"pid {suspect.pid} " if suspect.pid is not None else ""
    return f"{name} ({pid}on {suspect.host})" if suspect.host else name
