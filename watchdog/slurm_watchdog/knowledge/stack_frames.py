"""Known frames: which function in which file means that a rank waits for its peers, for data, for storage: `data/stack_frames.conf`.

A row is (place, function pattern, file pattern); patterns are whole-match regular expressions, the first row
that fits wins. Sources: torch, DeepSpeed, Megatron-LM, accelerate, Lightning, JAX, Ray, Horovod and mpi4py as
their users' dumps show them, the interpreter's own library, and clients that upload a checkpoint. Native frames
(`py-spy --native`, gdb) have a table of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Final

from slurm_watchdog.knowledge import site_rows
from slurm_watchdog.knowledge.entries import Fields
from slurm_watchdog.knowledge.shipped import read_shipped
from slurm_watchdog.knowledge.site_rows import SiteRows


class Place(StrEnum):
    """Where a rank's main thread stands."""

    COLLECTIVE = "waits in a collective"
    P2P = "waits for a neighbour in the pipeline"
    RENDEZVOUS = "waits for the other ranks to join"
    DATALOADER = "waits for its data loader"
    CHECKPOINT = "writes or reads a checkpoint"
    TEARDOWN = "is shutting down"
    DEBUGGER = "sits at a debugger prompt"
    LOCK = "waits for a lock"
    QUEUE = "waits for a queue"
    BACKWARD = "is in the backward pass"
    """DistributedDataParallel reduces gradients in there: a rank that waits for its peers shows no collective."""
    DEVICE = "waits for its GPU"
    """Which may in turn wait for the other ranks: with NCCL collectives the wait shows up here."""
    NETWORK = "talks to a server over the network"
    FILESYSTEM = "is in a call to a file system"
    COMPILATION = "compiles"
    PREPARATION = "prepares its data set"
    TOKENIZER = "tokenizes"
    IMPORT = "imports modules"
    SUBPROCESS = "waits for a process it started"
    SLEEP = "sleeps"
    COLLECTING = "collects garbage"
    SIGNAL = "is in a signal handler"
    REMOTE = "waits for a Ray object"
    GIL = "waits for the interpreter's lock"
    CRASH = "is crashing"
    OTHER = "runs elsewhere"


CLASSES: Final[dict[Place, str]] = {
    Place.COLLECTIVE: "collective",
    Place.P2P: "pipeline",
    Place.RENDEZVOUS: "rendezvous",
    Place.DATALOADER: "dataloader",
    Place.CHECKPOINT: "checkpoint",
    Place.TEARDOWN: "teardown",
    Place.DEBUGGER: "debugger",
    Place.LOCK: "lock",
    Place.QUEUE: "queue",
    Place.BACKWARD: "backward",
    Place.DEVICE: "device_wait",
    Place.NETWORK: "network",
    Place.FILESYSTEM: "filesystem",
    Place.COMPILATION: "compilation",
    Place.PREPARATION: "data_preparation",
    Place.TOKENIZER: "tokenizer",
    Place.IMPORT: "import",
    Place.SUBPROCESS: "subprocess",
    Place.SLEEP: "sleep",
    Place.COLLECTING: "garbage_collection",
    Place.SIGNAL: "signal_handler",
    Place.REMOTE: "ray",
    Place.GIL: "gil",
    Place.CRASH: "crash",
    Place.OTHER: "working",
}
"""The word for a place in `group-stacks --json`."""

_PLACES: Final = {word: place for place, word in CLASSES.items()}


def frame_row(fields: Fields) -> tuple[Place, str, str]:
    """The row of a section [frame CLASS]: place, and whole-match expressions of function and file."""
    return _place(fields), fields.alternatives("function"), fields.alternatives("file")


def native_row(fields: Fields) -> tuple[Place, str]:
    """The row of a section [native CLASS]."""
    return _place(fields), fields.alternatives("function")


def _place(fields: Fields) -> Place:
    return _PLACES[fields.name_of(tuple(_PLACES)) or CLASSES[Place.OTHER]]


_SHIPPED = read_shipped("stack_frames.conf", {"frame": frame_row, "native": native_row})
FRAMES: Final[tuple[tuple[Place, str, str], ...]] = _SHIPPED["frame"]
NATIVE: Final[tuple[tuple[Place, str], ...]] = _SHIPPED["native"]
"""Native functions, innermost first; what they mean where the Python frames say nothing better."""


@dataclass(frozen=True, eq=False)
class FrameTable:
    """The rows in force; the first that fits wins."""

    frames: tuple[tuple[Place, str, str], ...]
    native: tuple[tuple[Place, str], ...]


def frame_table() -> FrameTable:
    """The rows in force in this process."""
    return _table(site_rows.current())


@lru_cache(maxsize=2)
def _table(site: SiteRows) -> FrameTable:
    return FrameTable(
        site.before("frame", FRAMES, lambda row: row[0]), site.before("native", NATIVE, lambda row: row[0])
    )


CONTEXTS: Final[tuple[tuple[str, str, str], ...]] = (
    (
        "evaluation",
        r"(_*(run_)?(evaluate|validate|evaluation|validation|predict|inference)(_\w+)?|"
        r"_*(generate|log|sample|visuali[sz]e|render|draw|plot)_?(samples?|images?|completions?|texts?|examples?|outputs?|from_model|videos?)|generate|"
        r"_*eval_(loop|step|batch|epoch|model|one_epoch)\w*|"
        r"_*do_(eval|validation|test)|run_eval\w*|_run_(evaluation|validation|eval)\w*|\w*(evaluation|prediction|validation|eval|val)_(loop|step|epoch)|"
        r"(val|valid|test)_(epoch|one_epoch)|_?maybe_log_save_evaluate|_*estimate_loss)",
        r"(?!.*torch/_?(nn|utils|autograd|distributed)/).*",
    ),
    (
        "startup",
        r"(initialize_megatron|setup_model_and_optimizer|_*build_train_valid_test_\w+|build_pretraining_data_loader|from_pretrained|"
        r"_initialize_distributed|init_distributed\w*|deepspeed_init|_?init_process_group|setup_distributed|prepare_model|get_model|"
        r"_verify_param_shape_across_processes|_verify_params_across_processes|_sync_module_states|_ddp_init_helper|_setup_environment|"
        r"setup_training|_build_tokenizer|load_base_model|compile_dependencies|_?compile_dependencies)",
        r".*",
    ),
    ("startup", r"_find_and_load(_unlocked)?", r".*importlib.*"),
)  # fmt: skip
"""What a rank is about as a whole, whatever its innermost frame: (context, function pattern, file pattern)."""

NO_RANKS: Final[tuple[tuple[str, str, str], ...]] = (
    ("a data loader's worker", r"_worker_loop", r".*(_utils/worker|data/.*worker\w*)\.py"),
    ("a pool's worker", r"worker|_process_worker", r".*(multiprocessing/pool|concurrent/futures/process|(^|/)pool|loky/process_executor)\.py"),
    ("a compiler's worker", r".*", r".*torch/_inductor/compile_worker/(__main__|subproc_pool)\.py"),
    ("a resource tracker", r"main", r".*(resource_tracker|forkserver)\.py"),
    ("a launcher", r"_monitor_workers|_invoke_run|launch_agent|run_launcher|_run_with_retries", r".*"),
    ("a launcher", r"(simple|multi_gpu|deepspeed|tpu|multi_cpu)_launcher|launch_command|notebook_launcher", r".*accelerate/.*"),
    ("a launcher", r"main|launch\w*|_launch|run", r".*(deepspeed/launcher/(launch|runner)|torch/distributed/(run|launch)|horovod/runner/.*|deepspeed/launcher/multinode_runner)\.py"),
    ("a launcher", r"start_processes|spawn|join", r".*torch/multiprocessing/spawn\.py"),
    ("an experiment tracker's service", r".*", r".*(wandb/(sdk/(service|internal)/.*|cli/.*|sdk/lib/service/.*)|tensorboard/(main|program))\.py"),
    ("a service", r".*", r".*(ray/(dashboard|autoscaler)/.*|ray/_private/(log_monitor|runtime_env)/?.*|ipykernel_launcher|jupyter\w*/.*|slurm_watchdog/.*)\.py"),
)  # fmt: skip
"""Frames of processes of a job that hold no rank. A forked child keeps its parent's command line: its frames tell."""

NO_RANK_COMMANDS: Final[tuple[tuple[str, str], ...]] = (
    ("a resource tracker", r"multiprocessing\.(resource_tracker|forkserver)"),
    ("a launcher", r"(^|[/ ])(torchrun|accelerate|deepspeed|horovodrun|mpirun|mpiexec|srun|ds_ssh)( |$)|-m (torch\.distributed\.(run|launch)|accelerate\.commands\.launch|deepspeed\.launcher\.\w+)"),
    ("a compiler's worker", r"torch/_inductor/compile_worker"),
    ("an experiment tracker's service", r"wandb[-_](service|core|internal)|wandb/sdk/service|tensorboard( |\.main)|-m wandb|bin/wandb "),
    ("a service", r"ipykernel_launcher|jupyter|raylet|ray/dashboard|ray/_private/log_monitor|py-spy (dump|record)|nvitop|gpustat"),
)  # fmt: skip

THREADS: Final[tuple[tuple[str, str, str], ...]] = (
    ("pin memory", r".*pin_?memory.*", r"_pin_memory_loop|do_one_step"),
    ("queue feeder", r"QueueFeeder.*", r"_feed"),
    ("heartbeat", r".*(heart_?beat|keep_?alive|pulse).*", r"\w*heartbeat\w*"),
    ("watchdog", r".*(watchdog|ncclwatchdg|pt_nccl_watchdg).*", r"\w*watchdog\w*"),
    ("monitor", r".*(monitor|TMonitor|sampler|system_metrics).*", r"\w*monitor\w*"),
    ("autograd", r"pt_autograd.*|autograd.*", r"_engine_run_backward_thread"),
    ("compiler", r".*(compile|inductor|subproc|SubprocPool).*", r"_read_thread"),
    ("logger", r".*(wandb|tensorboard|mlflow|_EventLoggerThread|logger|NetStat|MsgRouter|IntMsgThr|ChkStop).*", r"message_loop"),
    ("executor", r"(ThreadPoolExecutor|asyncio|Executor|QueueManager).*", r"_worker"),
    ("ray", r"PythonGCThread|ray_\w+|PreemptionWatcher|train-resource-reservation|nccl-ras-poller", r"_print_logs"),
)  # fmt: skip
"""What a thread other than the main one is for: (role, pattern of its name, pattern of a function in it)."""

TRAINING_THREAD: Final = r"TrainingThread\(.*"
"""Name of the thread in which Ray Train runs the training function (`ray/train/v2/_internal/execution/worker_group/thread_runner.py`)."""

IDLE_LOOPS: Final[tuple[tuple[str, str], ...]] = (
    (r"main_loop", r".*ray/_private/worker\.py"),
    (r"run_forever|_run_once|run_until_complete", r".*asyncio/.*\.py"),
    (r"start|serve_forever", r".*(ipykernel|tornado|zmq|socketserver|grpc)\S*\.py"),
)
"""Where a main thread stands that lets another thread train (Ray, notebooks)."""

WAITING_ROOMS: Final = (
    r"(.*/lib/python3\.\d+t?/|.*/python3\.\d+t?/)?(threading|queue|selectors|socket|ssl|subprocess|popen_fork|popen_spawn_posix|"
    r"concurrent/.*|asyncio/.*|multiprocessing/.*|contextlib|_weakrefset|functools)\.py"
)
"""Frames of the interpreter's own waiting rooms: what matters is who called them. `connection.py` and
`queues.py` appear without their package when py-spy shortens the path."""

SHORTENED_WAITING_ROOMS: Final = r"(connection|queues|popen_fork|synchronize|resource_sharer)\.py"

MOMENTARY: Final[tuple[tuple[str, str], ...]] = (
    (r".*", r".*(logging/(__init__|handlers)|tensorboard\w*/.*|wandb/.*|tqdm/.*|rich/.*|mlflow/.*|torch/utils/tensorboard/.*)\.py"),
    (r"_?(write_|flush_|append_|do_)?(log|logs|print|report|metric|progress)\w*", r".*"),
)  # fmt: skip
"""Calls that one rank makes for a moment in every healthy job: one snapshot of them proves nothing."""
