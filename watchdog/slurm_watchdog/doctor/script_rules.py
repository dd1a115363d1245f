"""What a batch script lacks to be protected. Pure; each rule is a function of JobFacts, silent where it cannot tell."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import PurePath

from slurm_watchdog.doctor.finding import Advice, Level, Rule
from slurm_watchdog.doctor.job_facts import JobFacts
from slurm_watchdog.doctor.run_rules import RUN_RULES
from slurm_watchdog.doctor.script import Script, is_training, programs, uses_launcher
from slurm_watchdog.knowledge.checkpoint_options import directories_in

KILL_SWITCH = re.compile(r"SLURM_WATCHDOG_KILL_SWITCH|kill[-_]?switch", re.IGNORECASE)
OUR_CALLBACKS = re.compile(r"\bslurm_watchdog_hooks\b")
"""The trainer's side, which polls it."""
OUTPUT = re.compile("save|ckpt|checkpoint|output", re.IGNORECASE)
ON = frozenset({"1", "yes", "true", "y", "on"})
OLD, NEW = "NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ASYNC_ERROR_HANDLING"
RENAMED = (2, 2)
"""PyTorch 2.2 put TORCH_ before it, and warns of the old name: pytorch/pytorch#114077."""
ON_BY_ITSELF = (2, 0)
"""It came with 1.7 and was off (pytorch/pytorch#44163); by 2.1 it had been on for a while (#110723). torchrun
has always switched it on."""
TORCH = re.compile(r"(?:py)?torch[/=:@_-]{1,2}v?(\d{1,2})\.(\d{1,2})", re.IGNORECASE)
NGC_YEARS = range(20, 40)
NGC_SINCE = (((24, 1), (2, 2)), ((23, 3), (2, 0)), ((20, 0), (1, 13)))
"""NVIDIA's images are numbered by year and month: since when they have at least which PyTorch; the oldest
ones have 1.13 or less."""


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
    if facts.slurm.kill_on_bad_exit or _one_task(script) or _on(script, "SLURM_KILL_BAD_EXIT"):
        return
    for srun in script.sruns:
        options = dict(srun.options)
        if srun.unknown or not is_training(srun) or _one_task_of(options):
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
        elif "wait" not in options and not _on(script, "SLURM_WAIT", any_value=True):
            yield Advice(
                rule="wait", level=Level.HINT, where=f"{script.path}:{srun.line}",
                evidence=f"srun without --wait: {' '.join(srun.words[:3])[:80]}",
                sentence="When one task ends well before the others, Slurm waits for them without limit.",
                add="srun --wait=60 …",
            )  # fmt: skip


def _one_task(script: Script) -> bool:
    return script.components == 1 and _one_task_of({name: value for name, value, _ in script.directives})


def _one_task_of(options: Mapping[str, str]) -> bool:
    return options.get("ntasks") == "1" or (
        options.get("nodes") in ("1", "1-1") and options.get("ntasks-per-node", options.get("ntasks")) == "1"
    )


def _on(script: Script, name: str, *, any_value: bool = False) -> bool:
    value = script.variables.get(name)
    return value is not None and (any_value or value.lower() in ON)


def _error_handling(facts: JobFacts) -> Iterator[Advice]:
    """NCCL's errors and time-outs have to end the rank; the variable has another name since PyTorch 2.2."""
    script, torch = facts.script, facts.torch or torch_version(facts.script.text)
    right = NEW if torch is None or torch >= RENAMED else OLD
    for name in (OLD, NEW):
        value = _value_of(script, name)
        if value is None or "$" in value:
            continue
        if value == "0":
            yield Advice(
                rule="nccl_error_handling", level=Level.WARNING, where=script.path, evidence=f"{name}=0",
                sentence="Errors and time-outs of collectives are switched off: a rank that waits will wait "
                "indefinitely.",
                add=f"export {right}=1",
            )  # fmt: skip
        elif torch is not None and name != right and _value_of(script, right) is None:
            old = torch >= RENAMED
            yield Advice(
                rule="nccl_error_handling", level=Level.HINT if old else Level.WARNING, where=script.path,
                evidence=f"{name}={value} with PyTorch {torch[0]}.{torch[1]}",
                sentence="PyTorch has another name for this variable since 2.2." if old
                else "PyTorch before 2.2 does not know this variable.",
                add=f"export {right}={value}",
            )  # fmt: skip
    unset = _value_of(script, OLD) is None and _value_of(script, NEW) is None
    if unset and torch is not None and torch < ON_BY_ITSELF and not uses_launcher(script) and not script.sources:
        yield Advice(
            rule="nccl_error_handling", level=Level.WARNING, where=script.path,
            evidence=f"PyTorch before 2.0, and {OLD} is not set",
            sentence="A collective that fails or times out does not end its rank: the job hangs in the place "
            "of failing.",
            add=f"export {OLD}=1",
        )  # fmt: skip


PIPE, BUFFER = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "TORCH_NCCL_TRACE_BUFFER_SIZE"
"""There is no pipe unless the buffer is set by this name (ProcessGroupNCCL.hpp, DumpPipe)."""
RECORDS = (2, 13)
"""Since this PyTorch the last 2,000 collectives are recorded without a variable (FlightRecorder.hpp)."""
ONE_GPU = re.compile(r"(?:gpu:)?(?:[a-z][\w.-]*:)?[01]|gpu|", re.ASCII | re.IGNORECASE)


def _collective_debugging(facts: JobFacts) -> Iterator[Advice]:
    """Variables about hanging collectives that do nothing as they stand, or switch off what would end a hang.

    What each means: https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html
    """
    script = facts.script
    if _value_of(script, "TORCH_NCCL_ENABLE_MONITORING") == "0":
        yield Advice(
            rule="nccl_monitoring", level=Level.HINT, where=script.path,
            evidence="TORCH_NCCL_ENABLE_MONITORING=0",
            sentence="PyTorch's monitor is off: a rank whose own NCCL watchdog hangs, in a driver call for "
            "one, is ended by nobody.",
            add="export TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=1800  # a longer time in the place of none",
        )  # fmt: skip
    sizes = [_value_of(script, name) for name in (BUFFER, "TORCH_FR_BUFFER_SIZE")]
    if (
        _value_of(script, "TORCH_NCCL_DUMP_ON_TIMEOUT") in ON
        and all(size in (None, "0") for size in sizes)
        and not script.sources
    ):
        yield Advice(
            rule="nccl_flight_recorder", level=Level.HINT, where=script.path,
            evidence="TORCH_NCCL_DUMP_ON_TIMEOUT without a buffer",
            sentence="The dump at a time-out shows nothing unless collectives are recorded: its buffer is "
            "not set, and empty in many releases.",
            add=f"export {BUFFER}=2000",
        )  # fmt: skip
    asked_for = any(size not in (None, "0") for size in sizes)
    if (asked_for or _records_by_itself(facts, sizes)) and _value_of(script, PIPE) is None and not script.sources:
        yield Advice(
            rule="nccl_flight_recorder_pipe", level=Level.HINT, where=script.path,
            evidence=f"collectives are recorded{'' if asked_for else ' by PyTorch'}, and {PIPE} is not set",
            sentence="The record of a hang is written at its time-out at the earliest: with this pipe the watchdog "
            "asks for it as soon as the job is suspected, and says which rank did not enter which collective.",
            add=f"export {'' if sizes[0] else f'{BUFFER}=2000 '}{PIPE}=/tmp/ask_fr_${{SLURM_JOB_ID}}_",
        )  # fmt: skip
    if _value_of(script, "NCCL_RAS_ENABLE") == "0":
        yield Advice(
            rule="nccl_ras", level=Level.HINT, where=script.path, evidence="NCCL_RAS_ENABLE=0",
            sentence="NCCL's RAS is switched off: of a suspected job it tells how many collectives each rank called, "
            "without stacks and without a record; it costs a thread that sleeps.",
            add="unset NCCL_RAS_ENABLE  # it is on by itself since NCCL 2.24",
        )  # fmt: skip
    used = re.search(r"\$\{?NCCL_TIMEOUT\b", script.text) is not None
    if (
        _value_of(script, "NCCL_TIMEOUT") is not None
        and not used
        and not any("NCCL_TIMEOUT" in text for text in facts.read.values())
    ):
        yield Advice(
            rule="nccl_timeout", level=Level.HINT, where=script.path,
            evidence="NCCL_TIMEOUT is set, and nothing that could be read uses it",
            sentence="Neither NCCL nor PyTorch reads this variable: the time-out of collectives stays as it "
            "was.",
            add="init_process_group(timeout=…), or the framework's own option "
            "(--distributed-timeout-minutes, --ddp_timeout)",
        )  # fmt: skip


def _records_by_itself(facts: JobFacts, sizes: list[str | None]) -> bool:
    """Whether PyTorch is known to record what several GPUs of this job call, though nothing in it says so."""
    script, torch = facts.script, facts.torch or torch_version(facts.script.text)
    trains = any(is_training(srun) for srun in script.sruns) or bool(programs(script))
    return torch is not None and torch >= RECORDS and sizes == [None, None] and trains and _several_gpus(script)


def _several_gpus(script: Script) -> bool:
    """By its directives, of the job or of each node, task or socket."""
    asked = [value for name, value, _ in script.directives if name.startswith("gpus")]
    asked += [part for part in (script.directive("gres") or "").split(",") if part.startswith("gpu")]
    return bool(asked) and not (_one_task(script) and all(ONE_GPU.fullmatch(each) for each in asked))


def _value_of(script: Script, name: str) -> str | None:
    for command in script.commands:
        for key, value in command.environment:
            if key == name:
                return value
    return script.variables.get(name)


def torch_version(text: str) -> tuple[int, int] | None:
    """Of PyTorch, from the name of a module or of an image: `pytorch/2.1`, `pytorch:24.01-py3` (NVIDIA's);
    None if nothing names it."""
    for match in TORCH.finditer(text):
        major, minor = int(match[1]), int(match[2])
        if major in NGC_YEARS:
            return next(version for since, version in NGC_SINCE if (major, minor) >= since)
        if 1 <= major <= 9:
            return major, minor
    return None


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
    _error_handling,
    _collective_debugging,
    _kill_switch,
    _checkpoints,
    _ignored,
    _opted_out,
    _buffered,
    _watched,
    *RUN_RULES,
)
