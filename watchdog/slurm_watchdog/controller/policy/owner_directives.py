"""What a job's owner wants of the watchdog: words in `--comment`, or variables of the job. Pure.

    #SBATCH --comment="watchdog: off"
    #SBATCH --comment="watchdog:
    kill_switch=/scratch/run7/stop,checkpoint_dir=/scratch/run7/ckpt,ladder=kill_switch+requeue"
    #SBATCH --comment="watchdog: stall_after=20m"
    export SLURM_WATCHDOG="off"        or the same words as after `watchdog:`

A wish that cannot be understood leaves the job alone: someone meant something by it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from msgspec.structs import asdict, replace

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.model.actions import Rung
from slurm_watchdog.model.slurm import RUN_LIMITS, SlurmJob, limit_of, words_in

OFF = frozenset({"off", "no", "none", "never", "false", "0", "observe", "disable", "disabled"})
ON = frozenset({"on", "yes", "true", "1"})
VARIABLES: dict[str, str] = {
    "SLURM_WATCHDOG_KILL_SWITCH": "kill_switch",
    "SLURM_WATCHDOG_CHECKPOINT_DIR": "checkpoint_dir",
    "SLURM_WATCHDOG_LADDER": "ladder",
    "SLURM_WATCHDOG_STALL_AFTER": "stall_after",
}  # Variables of the job's processes that say one thing each; SLURM_WATCHDOG itself holds words as the comment does.
PLACEHOLDERS = frozenset({"job_id", "restarts", "user", "workdir"})
MAX_PATH = 1024
MAX_PATIENCE_S = 7 * 86400
_UNITS_S = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_PATIENCE = re.compile(r"(\d{1,6})\s*(s|m|min|h|d)")


class OwnerDirectives(Struct):
    """What the owner of one job wants; everything empty: nothing."""

    source: str = ""  # Where it stands, for people.
    leave_alone: bool = False
    kill_switch: str | None = None  # Template of a path; see `problem_of_path`.
    checkpoint_dir: str | None = None
    ladder: tuple[Rung, ...] | None = None
    stall_after_s: float | None = None  # The job is not said to stand before it has made no step for so long.
    problem: str = ""  # Why it cannot be understood.


def directives_of(comment: str, variables: Mapping[str, str] = {}) -> OwnerDirectives:
    """The wish of a job; where its comment and its environment differ, the comment holds, and `off` of either."""
    said = parse_comment(comment)
    meant = parse_variables(variables)
    if said == OwnerDirectives() or meant == OwnerDirectives():
        return meant if said == OwnerDirectives() else said
    own = {name: word for name, word in asdict(said).items() if word != getattr(OwnerDirectives(), name)}
    return replace(meant, **(own | {"source": f"{said.source}; {meant.source}"}))


def parse_comment(comment: str) -> OwnerDirectives:
    """The words after `watchdog:` or `watchdog=`, up to a semicolon, a bar or the end of the line."""
    words = words_in(comment)
    return OwnerDirectives() if words is None else parse_words(words, "--comment")


def parse_variables(variables: Mapping[str, str]) -> OwnerDirectives:
    """The same from variables of the job's processes."""
    words = variables.get("SLURM_WATCHDOG", "").strip()
    wish = parse_words(words, "SLURM_WATCHDOG") if words else OwnerDirectives()
    for name, key in VARIABLES.items():
        value = variables.get(name, "").strip()
        if value:
            source = f"{wish.source}, {name}" if wish.source else name
            wish = replace(_apply_pair(wish, key, value), source=source)
    return wish


def parse_words(words: str, source: str) -> OwnerDirectives:
    """`off`, or `key=value` pairs with commas between them."""
    wish = OwnerDirectives(source=source)
    for word in filter(None, (each.strip().strip("\"'") for each in words.split(","))):
        key, equals, value = word.partition("=")
        key = key.strip().lower().replace("-", "_")
        if not equals:
            first = key.split()[0]
            if first in OFF:
                wish = replace(wish, leave_alone=True)
            elif first not in ON:
                wish = replace(wish, problem=f"{word[:80]!r} is neither off nor key=value")
        else:
            wish = _apply_pair(wish, key, value.strip())
    return wish


def _apply_pair(wish: OwnerDirectives, key: str, value: str) -> OwnerDirectives:
    if key in ("kill_switch", "checkpoint_dir"):
        problem = problem_of_path(value)
        return replace(wish, problem=f"{key}: {problem}") if problem else replace(wish, **{key: value})
    if key == "ladder":
        names = [each for each in re.split(r"[+>\s]+", value.lower()) if each]
        unknown = [name for name in names if name not in {*Rung, "none"}]
        if unknown:
            return replace(wish, problem=f"ladder: {unknown[0][:40]!r} is not a step; known: {', '.join(Rung)}")
        return replace(wish, ladder=tuple(Rung(name) for name in names if name != "none"))
    if key == "stall_after":
        found = _PATIENCE.fullmatch(value.lower())
        seconds = int(found[1]) * _UNITS_S[found[2]] if found is not None else 0
        if not 0 < seconds <= MAX_PATIENCE_S:
            return replace(wish, problem=f"stall_after: {value[:40]!r} is not a time such as 20m or 2h, at most 7d")
        return replace(wish, stall_after_s=float(seconds))
    if key in RUN_LIMITS:
        try:
            limit_of(key, value)  # they are for `run`
        except ValueError as error:
            return replace(wish, problem=str(error))
        return wish
    if key == "mode" and value.lower() in OFF | ON | {"act"}:
        return replace(wish, leave_alone=value.lower() in OFF)
    return replace(
        wish, problem=f"{key[:40]!r} is not known; known: off, {', '.join((*VARIABLES.values(), *RUN_LIMITS))}"
    )


def problem_of_path(template: str) -> str | None:
    """What is wrong with a path that a user gave, a sentence; None if nothing is."""
    if not template.startswith(("/", "{workdir}/")):
        return f"{template[:80]!r} has to be an absolute path, or begin with {{workdir}}/"
    if len(template) > MAX_PATH or any(ord(each) < 32 for each in template):
        return "the path is too long, or has control characters in it"
    if ".." in template.split("/"):
        return "a path with .. in it is not followed"
    unknown = [name for name in re.findall(r"\{([^}]*)\}", template) if name not in PLACEHOLDERS]
    return f"{{{unknown[0][:40]}}} is not known; known: {', '.join(sorted(PLACEHOLDERS))}" if unknown else None


def fill(template: str, job: SlurmJob) -> str:
    """A path of one run of a job, from a template with {job_id} {restarts} {user} {workdir}."""
    return (
        template.replace("{job_id}", job.process_id)
        .replace("{restarts}", str(job.restarts))
        .replace("{user}", job.user)
        .replace("{workdir}", job.workdir or "")
    )
