"""What a batch script says of PyTorch's and NCCL's error handling and records of collectives. Pure; rules as in
`script_rules`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from slurm_watchdog.doctor.finding import Advice, Level, Rule
from slurm_watchdog.doctor.job_facts import JobFacts
from slurm_watchdog.doctor.script import ON, Script, is_one_task, is_training, programs, uses_launcher

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
    return bool(asked) and not (is_one_task(script) and all(ONE_GPU.fullmatch(each) for each in asked))


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


TORCH_RULES: tuple[Rule[JobFacts], ...] = (_error_handling, _collective_debugging)
