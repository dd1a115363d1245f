"""What a batch script lacks to be protected: the few things that each save a night. Pure; each rule is a function of
JobFacts, silent where it cannot tell."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import PurePath

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.base.text import plural
from slurm_watchdog.doctor.cluster_rules import flag
from slurm_watchdog.doctor.finding import Advice, Level, Rule
from slurm_watchdog.doctor.script import ON, Command, Script
from slurm_watchdog.knowledge.checkpoint_options import directories_in
from slurm_watchdog.knowledge.launch_options import ADDRESSES, MPI
from slurm_watchdog.model.comment_words import run_limits

KILL_SWITCH = re.compile(r"SLURM_WATCHDOG_KILL_SWITCH|kill[-_]?switch|\bslurm_watchdog_hooks\b", re.IGNORECASE)
OUTPUT = re.compile("save|ckpt|checkpoint|output", re.IGNORECASE)
ERROR_HANDLING = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")
"""Since PyTorch 2.2 by the first name; on by itself since 2.0 (pytorch/pytorch#110723)."""
OF_A_TASK = re.compile(r"%\d*[tnN]")
"""In a name of srun's output: a file for each task, or for each node."""
OF_TORCHRUN = re.compile(r"--(?:tee|redirects|log[-_]dir)\b|-[tr]$")
"""Its options that keep the ranks' lines apart."""
OF_A_TASK = re.compile(r"%\d*[tnN]")
"""In a name of srun's output: a file for each task, or for each node."""
OF_TORCHRUN = re.compile(r"--(?:tee|redirects|log[-_]dir)\b|-[tr]$")
"""Its options that keep the ranks' lines apart."""
RUN_FLAGS = frozenset({"observe", "no-page", "quiet", "alone"})
"""Options of `run` without a value."""
ADDRESS = re.compile(rf"--(?:{'|'.join(sorted(each.replace('_', '[_-]') for each in ADDRESSES))})(?:=(.*))?", re.DOTALL)
HERE = re.compile(r"env://|file:|(?:[a-z]+://)?(?:localhost|127\.[\d.]+|::1|0\.0\.0\.0)")


class JobFacts(Struct, frozen=True, kw_only=True):
    """A job, or its script."""

    script: Script
    slurm: Mapping[str, str] | None = None
    """`scontrol show config`; None where it was not asked."""
    read: Mapping[str, str] = {}
    """Programs that the script starts and that could be read: path to text."""
    checkpoint_directories: Sequence[str] = ()
    """What the configuration names."""
    comment: str = ""
    requeueable: bool | None = None
    """Slurm's word about the job itself; None: it is a script."""


def _requeue(facts: JobFacts) -> Iterator[Advice]:
    script, default = facts.script, flag(facts.slurm, "JobRequeue")
    asked = script.directive("requeue") is not None
    if "no-requeue" in script.directives and not asked:
        evidence, why = f"line {script.directives['no-requeue'][1]}: --no-requeue", "may not be restarted"
    elif facts.requeueable is False:
        evidence, why = "scontrol show job: Requeue=0", "may not be restarted"
    elif asked or default or facts.requeueable:
        return
    else:
        evidence = f"no --requeue in it{', and JobRequeue=0 in slurm.conf' if default is False else ''}"
        why = f"can't be restarted{'' if default is False else ', unless slurm.conf has JobRequeue=1'}"
    yield Advice("requeue", Level.WARNING, f"The job {why}.", evidence, "#SBATCH --requeue", script.path)


def _bad_exit(facts: JobFacts) -> Iterator[Advice]:
    """A task that fails has to end the step, or the others wait for it in a collective indefinitely."""
    script = facts.script
    if flag(facts.slurm, "KillOnBadExit") or script.variables.get("SLURM_KILL_BAD_EXIT", "").lower() in ON:
        return
    for srun in script.sruns:
        unknown = any(name.startswith("$") for name in srun.options)  # options in a variable that is set elsewhere
        if unknown or not srun.is_training or script.has_one_task(srun):
            continue
        kill = srun.options.get("kill-on-bad-exit")
        shown = " ".join(srun.words[:3])[:80]
        if kill == "0" or (kill is None and srun.environment.get("SLURM_KILL_BAD_EXIT", "0") not in ON):
            yield Advice(
                "kill_on_bad_exit",
                Level.WARNING,
                "If one task fails, the others keep waiting and the job burns GPU hours: make srun stop the job.",
                f"srun … {shown}",
                "srun --kill-on-bad-exit=1 --wait=60 …",
                f"{script.path}:{srun.line}",
            )
        elif "wait" not in srun.options and "SLURM_WAIT" not in script.variables:
            yield Advice(
                "wait",
                Level.HINT,
                "When one task ends well before the others, Slurm waits for them without limit.",
                f"srun without --wait: {shown}",
                "srun --wait=60 …",
                f"{script.path}:{srun.line}",
            )


def _prefixes(facts: JobFacts) -> Iterator[Advice]:
    """An error that one of 512 ranks logs says no more than its text, unless its line says whose it is."""
    script = facts.script
    for srun in script.sruns:
        names = srun.options
        apart = names.keys() & {"label"} or any(OF_A_TASK.search(names.get(each, "")) for each in ("output", "error"))
        if apart or "SLURM_LABELIO" in script.variables or not srun.is_training or script.has_one_task(srun):
            continue
        told = (part for word in srun.words for part in word.split())
        if srun.launcher is not None and any(
            re.match(r"--(?:tee|redirects|log[-_]dir)\b|-[tr]$", each) for each in told
        ):
            continue
        yield Advice(
            "rank_prefixes",
            Level.HINT,
            "Lines of the log don't say whose they are: which rank failed first can't be read from it.",
            f"srun without --label: {' '.join(srun.words[:3])[:80]}",
            "srun --label …" if srun.launcher is None else "torchrun --tee 3 …  # and srun --label …",
            f"{script.path}:{srun.line}",
        )
        return


def _error_handling(facts: JobFacts) -> Iterator[Advice]:
    """NCCL's errors and time-outs have to end the rank."""
    for name in ERROR_HANDLING:
        if facts.script.value_of(name) == "0":
            yield Advice(
                "nccl_error_handling",
                Level.WARNING,
                "Errors and time-outs of collectives are switched off: a rank that waits will wait indefinitely.",
                f"{name}=0",
                f"export {name}=1",
                facts.script.path,
            )


def _kill_switch(facts: JobFacts) -> Iterator[Advice]:
    """A graceful restart needs a trainer that looks for the kill switch."""
    script = facts.script
    words = [word for command in script.commands for word in command.words]
    wrapped = any(KILL_SWITCH.search(word) or PurePath(word).name == "batch.sh" for word in words)
    if wrapped or not facts.read or any(KILL_SWITCH.search(text) for text in facts.read.values()):
        return
    first = next(iter(facts.read))
    exported = any(KILL_SWITCH.search(name) for name in script.variables)
    yield Advice(
        "kill_switch",
        Level.WARNING if exported else Level.HINT,
        "Nothing looks for the kill switch: the job can't save before a restart, and loses the steps since "
        "its last checkpoint.",
        f"{first} has no word of a kill switch",
        'if os.path.exists(os.environ.get("SLURM_WATCHDOG_KILL_SWITCH", "")): save and exit  # all ranks together: '
        "slurm_watchdog_hooks does it",
        first,
    )


def _checkpoints(facts: JobFacts) -> Iterator[Advice]:
    """A graceful restart waits for a complete checkpoint, and has to know where to look."""
    script = facts.script
    if facts.checkpoint_directories or not (script.programs or any(srun.is_training for srun in script.sruns)):
        return
    for command in script.commands:
        srun = command.words[0] == "srun"  # whose own --output is the log
        named = (each for each in command.words if not (srun and each.startswith("--output")))
        told = (each if "$" in each else each.partition("=")[0] for each in named if each[:1] == "-" or "$" in each)
        if directories_in(command.words, "/") or any(OUTPUT.search(each) for each in told):
            return
    yield Advice(
        "checkpoint_directory",
        Level.HINT,
        "Where the job keeps its checkpoints is not known: whether one is complete is then told by its log alone.",
        "no option of a known framework names it; a configuration file of the trainer may",
        "jobs: {checkpoint_directories: ['{workdir}/checkpoints']}",
        "the watchdog's configuration",
    )


def _runs(script: Script) -> Iterator[tuple[Command, dict[str, str]]]:
    """Each `slurm-watchdog run` with its options."""
    for command in script.commands:
        names = [PurePath(word).name for word in command.words]
        start = names.index("slurm-watchdog") + 1 if "slurm-watchdog" in names else len(names)
        if names[start : start + 1] != ["run"]:
            continue
        found: dict[str, str] = {}
        rest = list(command.words[start + 1 :])
        while rest and rest[0].startswith("--") and rest[0] != "--":
            name, equals, value = rest.pop(0)[2:].partition("=")
            found[name] = rest.pop(0) if not equals and name not in RUN_FLAGS and rest else value
        yield command, found


def _spares(facts: JobFacts) -> Iterator[Advice]:
    """A node that dies must not end the job, and a spare has to be there to take its place."""
    script, have = facts.script, facts.script.nodes
    for command, options in _runs(script):
        said = options.get("spares") or command.environment.get("SLURM_WATCHDOG_SPARES", "")
        said = said or script.variables.get("SLURM_WATCHDOG_SPARES", "")
        with suppress(ValueError):
            said = said or str(run_limits(facts.comment or script.directive("comment") or "").get("spares", ""))
        spares = int(said) if said.isascii() and said.isdecimal() else 0
        if "no-kill" not in script.directives and have != 1 and (have is not None or spares):
            yield Advice(
                "run_no_kill",
                Level.WARNING,
                "A node that dies ends the job: Slurm requeues it, and no spare takes its place.",
                f"line {command.line}: slurm-watchdog run, and no --no-kill",
                "#SBATCH --no-kill",
                script.path,
            )
        count = options.get("nodes", "1")
        if have is not None and count.isdecimal() and int(count) + spares > have:
            yield Advice(
                "run_spares",
                Level.WARNING,
                "The job has too few nodes for its spares: `run` refuses to start the command.",
                f"--nodes={have} of the job; run wants {count} and {plural(spares, 'spare')}",
                f"#SBATCH --nodes={int(count) + spares}",
                f"{script.path}:{command.line}",
            )


def _master_addr(facts: JobFacts) -> Iterator[Advice]:
    """A host that is written down stays rank 0's, also on a start without it."""
    script = facts.script
    if not any(_runs(script)):
        return
    for name, value in _addresses(script):
        if value and not re.search(r"[$`(]", value) and not HERE.match(value):
            yield Advice(
                "run_master_addr",
                Level.WARNING,
                "The host of rank 0 is written down: a restart without that node waits for it in vain.",
                f"{name}={value}"[:100],
                'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
                script.path,
            )
            return


def _addresses(script: Script) -> Iterator[tuple[str, str]]:
    yield "MASTER_ADDR", script.value_of("MASTER_ADDR") or ""
    for command in script.commands:
        for word, following in zip(command.words, (*command.words[1:], ""), strict=True):
            match = ADDRESS.fullmatch(word)
            if match is not None:
                yield word.partition("=")[0], match[1] if match[1] is not None else following


def _in_step(facts: JobFacts) -> Iterator[Advice]:
    """`srun slurm-watchdog run …`: the wrong way round."""
    for command, _ in _runs(facts.script):
        names = [PurePath(word).name for word in command.words]
        before = names[: names.index("slurm-watchdog")]
        launcher = next((name for name in before if name in MPI | {"srun"}), None)
        if launcher is not None:
            yield Advice(
                "run_in_step",
                Level.WARNING,
                "Each task has a watchdog of its own, which sees its own node alone and restarts its own "
                "command alone: the site's watchdog cannot restart the job in its allocation.",
                f"{launcher} … slurm-watchdog run",
                f"slurm-watchdog run -- {launcher} …",
                f"{facts.script.path}:{command.line}",
            )


SCRIPT_RULES: tuple[Rule[JobFacts], ...] = (
    _requeue, _bad_exit, _error_handling, _kill_switch, _checkpoints, _prefixes, _spares, _master_addr, _in_step,
)  # fmt: skip
"""With the cluster's rule about KillWait and UnkillableStepTimeout these are the ten."""
