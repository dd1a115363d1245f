"""What a batch script lacks to be protected. Pure; each rule is a function of JobFacts, silent where it cannot tell."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePath

from slurm_watchdog.doctor.finding import Advice, Level, Rule
from slurm_watchdog.doctor.job_facts import JobFacts
from slurm_watchdog.doctor.run_rules import RUN_RULES
from slurm_watchdog.doctor.script import (
    ON,
    has_one_task,
    is_on,
    is_one_task,
    is_training,
    programs,
    uses_launcher,
)
from slurm_watchdog.doctor.task_rules import TASK_RULES
from slurm_watchdog.doctor.torch_rules import TORCH_RULES
from slurm_watchdog.knowledge.checkpoint_options import directories_in

KILL_SWITCH = re.compile(r"SLURM_WATCHDOG_KILL_SWITCH|kill[-_]?switch", re.IGNORECASE)
OUR_CALLBACKS = re.compile(r"\bslurm_watchdog_hooks\b")
"""The trainer's side, which polls it."""
OUTPUT = re.compile("save|ckpt|checkpoint|output", re.IGNORECASE)


def _requeue(facts: JobFacts) -> Iterator[Advice]:
    line = next((n for name, _, n in facts.script.directives if name == "no-requeue"), None)
    asked = facts.script.directive("requeue") is not None
    if line is not None and not asked:
        evidence, why = f"line {line}: --no-requeue", "may not be restarted: it asks Slurm never to requeue it."
    elif facts.requeueable is False:
        evidence, why = "scontrol show job: Requeue=0", "may not be restarted: Slurm has it as not requeueable."
    elif asked or facts.slurm.requeue or facts.requeueable:
        return
    elif facts.slurm.requeue is False:
        evidence, why = "no --requeue in it, and JobRequeue=0 in slurm.conf", "can't be restarted."
    else:
        evidence, why = "no --requeue in it", "can't be restarted, unless slurm.conf has JobRequeue=1."
    yield Advice(
        rule="requeue", level=Level.WARNING, where=facts.script.path, evidence=evidence, sentence=f"The job {why}",
        add="#SBATCH --requeue",
    )  # fmt: skip


def _expedite(facts: JobFacts) -> Iterator[Advice]:
    script = facts.script
    if (
        not facts.slurm.expedites
        or script.directive("requeue") == "expedite"
        or script.directive("no-requeue") is not None
    ):
        return
    yield Advice(
        rule="requeue_expedite", level=Level.HINT, where=script.path,
        evidence="SlurmctldParameters=enable_expedited_requeue in slurm.conf, and no --requeue=expedite in it",
        sentence="After a requeue the job waits two minutes, and after a dead node for its turn, too; with this option "
        "it does not. A script that fails then stays in the queue, held, until `scontrol release`.",
        add="#SBATCH --requeue=expedite",
    )  # fmt: skip


def _open_mode(facts: JobFacts) -> Iterator[Advice]:
    script = facts.script
    mode = script.directive("open-mode")
    never = script.directive("no-requeue") is not None and script.directive("requeue") is None
    if never or (mode or "").startswith("a") or (mode is None and facts.slurm.append):
        return
    output = script.directive("output")
    if output == "/dev/null":
        return
    yield Advice(
        rule="open_mode", level=Level.WARNING if facts.options_known else Level.HINT, where=script.path,
        evidence=f"--open-mode={mode}" if mode else "no --open-mode in it",
        sentence="A restart overwrites the log of the run before, and with it why that one failed.",
        add="#SBATCH --open-mode=append",
    )  # fmt: skip


def _bad_exit(facts: JobFacts) -> Iterator[Advice]:
    """A task that fails has to end the step, or the others wait for it in a collective indefinitely."""
    script = facts.script
    if facts.slurm.kill_on_bad_exit or is_one_task(script) or is_on(script, "SLURM_KILL_BAD_EXIT"):
        return
    for srun in script.sruns:
        options = dict(srun.options)
        if srun.unknown or not is_training(srun) or has_one_task(options):
            continue
        kill = options.get("kill-on-bad-exit")
        if kill == "0" or (kill is None and dict(srun.environment).get("SLURM_KILL_BAD_EXIT", "0") not in ON):
            yield Advice(
                rule="kill_on_bad_exit", level=Level.WARNING, where=f"{script.path}:{srun.line}",
                evidence=f"srun … {' '.join(srun.words[:3])[:80]}",
                sentence="If one task fails, the others keep waiting and the job burns GPU hours: make srun "
                "stop the job.",
                add="srun --kill-on-bad-exit=1 --wait=60 …",
            )  # fmt: skip
        elif "wait" not in options and not is_on(script, "SLURM_WAIT", any_value=True):
            yield Advice(
                rule="wait", level=Level.HINT, where=f"{script.path}:{srun.line}",
                evidence=f"srun without --wait: {' '.join(srun.words[:3])[:80]}",
                sentence="When one task ends well before the others, Slurm waits for them without limit.",
                add="srun --wait=60 …",
            )  # fmt: skip


def _kill_switch(facts: JobFacts) -> Iterator[Advice]:
    """A graceful restart needs a trainer that looks for the kill switch."""
    script = facts.script
    named = KILL_SWITCH.search(_without_comments(script.text))
    if any(KILL_SWITCH.search(text) or OUR_CALLBACKS.search(text) for text in facts.read.values()):
        return
    exported = any(KILL_SWITCH.search(name) for name in script.variables) and not any(
        KILL_SWITCH.search(word) for command in script.commands for word in command.words
    )
    wrapped = any(PurePath(word).name == "batch.sh" for command in script.commands for word in command.words)
    if wrapped or (named and not (exported and facts.read)):
        return
    if facts.read:
        first = next(iter(facts.read))
        yield Advice(
            rule="kill_switch", level=Level.WARNING if exported else Level.HINT, where=first,
            evidence=f"{first} has no word of a kill switch",
            sentence="Nobody looks for the kill switch: the job can't save before a restart, and loses the "
            "steps since its last checkpoint.",
            add='if os.path.exists(os.environ.get("SLURM_WATCHDOG_KILL_SWITCH", "")): save and exit  # all '
            'ranks together: slurm_watchdog_hooks does it',
        )  # fmt: skip
    else:
        yield Advice(
            rule="kill_switch", level=Level.HINT, where=script.path, evidence="no program of it could be read",
            sentence="Whether the trainer looks for the kill switch can't be seen from here.",
            add="see docs/trainers.md",
        )  # fmt: skip


def _without_comments(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))


def _names_output(word: str) -> bool:
    """Whether it is an option like `--save-dir` or `--trainer.output=…`."""
    name = word.partition("=")[0]
    return name.startswith("-") and any(part in name for part in ("save", "ckpt", "checkpoint", "output"))


def _checkpoints(facts: JobFacts) -> Iterator[Advice]:
    """A graceful restart waits for a complete checkpoint, and has to know where to look."""
    script = facts.script
    if facts.checkpoint_directories:
        return
    for command in script.commands:
        if directories_in(command.words, "/") or any("$" in each and OUTPUT.search(each) for each in command.words):
            return
        srun = command.words[0] == "srun"  # whose own --output is the log
        if any(_names_output(each) for each in command.words if not (srun and each.startswith("--output"))):
            return
    if not any(is_training(srun) for srun in script.sruns) and not programs(script):
        return
    yield Advice(
        rule="checkpoint_directory", level=Level.HINT, where="the watchdog's configuration",
        evidence="no option of a known framework names it; a configuration file of the trainer may",
        sentence="Where the job keeps its checkpoints is not known: whether one is complete is then told by "
        "its log alone.",
        add="jobs: {checkpoint_directories: ['{workdir}/checkpoints']}",
    )  # fmt: skip


def _ignored(facts: JobFacts) -> Iterator[Advice]:
    for text, line in facts.script.ignored[:5]:
        yield Advice(
            rule="ignored_directive", level=Level.WARNING, where=f"{facts.script.path}:{line}",
            evidence=text[:100], sentence="Slurm does not read this line: it stands after the first command.",
            add="move it above the first command",
        )  # fmt: skip


def _opted_out(facts: JobFacts) -> Iterator[Advice]:
    comment = facts.comment or facts.script.directive("comment") or ""
    if facts.opt_out and facts.opt_out in comment:
        yield Advice(
            rule="opted_out", level=Level.HINT, where=facts.script.path, evidence=f"--comment={comment[:80]}",
            sentence="The job is watched and never touched, as its comment asks.",
            add="",
        )  # fmt: skip


def _buffered(facts: JobFacts) -> Iterator[Advice]:
    """Python writes to a file in blocks of 8 KiB: the log is behind, and a crash loses its end."""
    script = facts.script
    if "PYTHONUNBUFFERED" in script.text or script.sources or uses_launcher(script):
        return
    for srun in script.sruns:
        names = [PurePath(word).name for word in srun.words]
        python = next((i for i, name in enumerate(names) if re.fullmatch(r"python[\d.]*", name)), None)
        if python is None or any(word in ("-u", "-um") for word in srun.words[python + 1 : python + 4]):
            continue
        if not any(name in ("u", "unbuffered") for name, _ in srun.options):
            yield Advice(
                rule="buffered_output", level=Level.HINT, where=f"{script.path}:{srun.line}",
                evidence=" ".join(srun.words[:3])[:80],
                sentence="Python buffers its output: steps appear late, and a crash loses the last lines.",
                add="export PYTHONUNBUFFERED=1",
            )  # fmt: skip
            return


def _watched(facts: JobFacts) -> Iterator[Advice]:
    """A job that runs: whether its ranks and its steps are seen."""
    watched = facts.watched
    if watched is None:
        return
    if not watched.known:
        yield Advice(
            rule="not_watched", level=Level.WARNING, sentence="The controller does not watch this job.",
            evidence="it is not in its list",
            add="jobs: {partitions: [...]} leaves out others; slurm-watchdog status",
        )  # fmt: skip
        return
    running_s = watched.running_s or 0.0
    if watched.ranks == 0 and running_s > RANKS_AFTER_S:
        yield Advice(
            rule="no_ranks", level=Level.WARNING,
            sentence="No rank of the job is seen: one that dies would not be missed.",
            evidence=f"it runs since {running_s:.0f} s",
            add="slurm-watchdog agent --once  # on one of its nodes; what sets RANK or SLURM_PROCID?",
        )  # fmt: skip
    if watched.step is None and running_s > STEPS_AFTER_S:
        yield Advice(
            rule="no_steps", level=Level.WARNING,
            sentence="No step is read from the job's log: a hang will not be noticed by it.",
            evidence=f"it runs since {running_s / 60:.0f} min",
            add="jobs: {progress_patterns: ['step (?P<step>[0-9]+)']}; slurm-watchdog scan-log LOG",
        )  # fmt: skip


RANKS_AFTER_S = 300.0
STEPS_AFTER_S = 3600.0
"""Start-up and compilation take up to an hour."""

SCRIPT_RULES: tuple[Rule[JobFacts], ...] = (
    _requeue,
    _expedite,
    _open_mode,
    _bad_exit,
    *TORCH_RULES,
    _kill_switch,
    _checkpoints,
    _ignored,
    _opted_out,
    _buffered,
    _watched,
    *RUN_RULES,
    *TASK_RULES,
)
