"""What is tried: frameworks, faults, and what would be true to say of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Framework:
    """One training: `script` in scripts/, started for `ranks` ranks."""

    name: str
    script: str
    distributions: tuple[str, ...]
    """Whose releases the table names."""
    log: str
    """What its log has at its defaults."""
    ranks: int = 2
    launcher: str = "torchrun"
    """`torchrun`; `spawn`, as by mpirun; `python` where the framework starts its processes itself, or there is one."""
    environ: Mapping[str, str] = field(default_factory=dict)
    fault_step: int = 85
    """The fault comes at this step: between two checkpoints (every 20), after the job has shown its speed.
    One whose steps cannot be read has to be seen moving several times first, half of `stepless_limit`
    apart."""

    @property
    def total(self) -> int:
        """Steps of the whole training."""
        return self.fault_step + 45


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong, or only looks so."""

    name: str
    words: str
    kinds: frozenset[str] = frozenset()
    """Incidents that are true of it; none: nothing is wrong."""
    cause: str = ""
    """Pattern of what has to be said of the reason."""
    signal: str = ""
    """Sent by the runner, for it can't come from the process itself."""


FAULTS: tuple[Fault, ...] = (
    Fault(
        "loader",
        "the process that makes the samples blocks in a read",
        frozenset({"collective_hang", "stalled_progress"}),
        r"data loader|DataLoader|samples|read of a pipe|environment",
    ),
    Fault(
        "stop",
        "SIGSTOP",
        frozenset({"rank_stopped", "collective_hang", "stalled_progress"}),
        r"stopped|SIGSTOP",
        "STOP",
    ),
    Fault(
        "kill",
        "SIGKILL",
        frozenset({"log_error", "dead_rank", "lingering_job", "stalled_progress"}),
        r"SIGKILL|signal 9|-9",
        "KILL",
    ),
    Fault(
        "lock",
        "a thread waits for a lock that is never released",
        frozenset({"collective_hang", "stalled_progress"}),
        r"\block\b|waits in forward",
    ),
    Fault(
        "exception",
        "an exception, and a thread that keeps the interpreter from exiting",
        frozenset({"collective_hang", "stalled_progress", "log_error", "wedged_teardown", "lingering_job"}),
        r"bad sample in shard 17",
    ),
    Fault("save", "a checkpoint that takes a minute"),
    Fault("evaluation", "an evaluation that takes a minute"),
    Fault("none", "no fault, to the end"),
)

UNREAD = 305

FRAMEWORKS: tuple[Framework, ...] = (
    Framework("PyTorch DDP", "plain", ("torch",), "a line every ten steps"),
    Framework("nanoGPT-like loop", "nanogpt", ("torch",), "a line a step"),
    Framework("transformers Trainer", "hf_trainer", ("transformers", "torch"), "tqdm, and a bar for each evaluation"),
    Framework("TRL SFTTrainer", "trl_sft", ("trl", "transformers"), "tqdm"),
    Framework("accelerate", "accelerate_loop", ("accelerate",), "tqdm"),
    Framework("Lightning", "lightning_fit", ("lightning",), "Rich's bar: nothing before the end", fault_step=UNREAD),
    Framework("Lightning, tqdm", "lightning_fit", ("lightning",), "tqdm", environ={"BAR": "tqdm"}),
    Framework("DeepSpeed", "deepspeed_loop", ("deepspeed",), "no steps: its logger is at WARNING", fault_step=UNREAD),
    Framework("pytorch-ignite", "ignite_run", ("pytorch-ignite",), "tqdm"),
    Framework("timm's parts", "timm_loop", ("timm",), "the lines of its train.py"),
    Framework("MMEngine", "mmengine_run", ("mmengine",), "a line every ten iterations"),
    Framework("Composer", "composer_fit", ("mosaicml",), "its bar"),
    Framework("JAX, orbax", "jax_orbax", ("jax", "orbax-checkpoint"), "a line a step", launcher="spawn"),
    Framework("Ray Train", "ray_train", ("ray",), "its tables", launcher="python", fault_step=UNREAD),
    Framework(
        "Keras",
        "keras_fit",
        ("keras", "jax"),
        "verbose=2: a line an epoch",
        ranks=1,
        launcher="python",
        fault_step=UNREAD,
    ),
    Framework("fastai", "fastai_fit", ("fastai",), "its bar", ranks=1, launcher="python", fault_step=UNREAD),
    Framework("stable-baselines3", "sb3_learn", ("stable_baselines3",), "its tables", ranks=1, launcher="python"),
)

SKIPPED: dict[str, str] = {
    "litgpt, torchtune, torchtitan, Megatron-Core": "their training commands want a GPU",
}
"""What was left out, and why."""


def fault_named(name: str) -> Fault:
    """Raises KeyError."""
    return {fault.name: fault for fault in FAULTS}[name]


def chosen(names: list[str]) -> list[Framework]:
    """Those whose name or script has one of `names` in it; without names all. Raises ValueError for a name
    that fits none."""
    for name in names:
        if not any(fits(name, each) for each in FRAMEWORKS):
            known = ", ".join(each.name for each in FRAMEWORKS)
            raise ValueError(f"{name!r} is no framework of the catalogue: {known}")
    return [each for each in FRAMEWORKS if not names or any(fits(name, each) for name in names)]


def fits(name: str, framework: Framework) -> bool:
    """Whether somebody who says `name` means this one."""
    words = name.lower()
    return words == framework.name.lower() or words in (
        framework.script,
        framework.name.lower().replace(",", " ").split()[0],
    )
