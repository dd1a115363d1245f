"""What a rank and its GPU look like from outside, in whatever they may be doing.

The values are those of an A100 as the frozen-filesystem report shows them: 1410 MHz and some 380 W at work,
1410 MHz and 85 to 115 W while it spins in a collective at "100 %", 1155 MHz, 68 W and 28 C when it idles.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from slurm_watchdog.model.evidence import Frame, ThreadStack, WaitingThreads

Frames = tuple[str, ...]


@dataclass(frozen=True)
class Look:
    """One rank. `cpu` in cores, `io` in bytes a second; the GPU's values are means, noise is added where they
    are read."""

    state: str = "R"
    cpu: float = 1.0
    io: float = 2e4
    util: float = 0.98
    clock_mhz: float = 1410.0
    power_w: float = 380.0
    temp_c: float = 62.0
    frames: tuple[Frames, ...] = ()
    """One of them at each dump: a rank that works is seen in different places."""
    wchan: str | None = None
    syscall: str | None = None
    path: str | None = None
    mount: str | None = None
    call: str = "futex"
    """The system call of its main thread, as a dump has it."""
    others: tuple[WaitingThreads, ...] = ()
    """Threads that it has beside those that every rank has."""
    thread: Frames = ()
    """Python frames of one of them."""
    worker: Look | None = None
    """What its data loader's workers look like; None: as they usually do."""
    undumpable: str | None = None
    """Why no stack can be had of it."""
    throttle: tuple[str, ...] = ()


_LOOP = ("train (training.py)", "pretrain (training.py)", "<module> (pretrain_gpt.py)")
_TORCH = "torch/distributed/distributed_c10d.py"

WORK = Look(
    frames=(
        ("forward (megatron/model/transformer.py)", "forward_step (schedules.py)", *_LOOP),
        ("gelu (megatron/model/fused_bias_gelu.py)", "forward_step (schedules.py)", *_LOOP),
        ("_engine_run_backward (torch/autograd/graph.py)", "backward_step (schedules.py)", *_LOOP),
        ("step (megatron/optimizer/optimizer.py)", "train_step (training.py)", *_LOOP),
    )
)
EVALUATE = replace(
    WORK,
    power_w=320.0,
    frames=(
        ("forward (megatron/model/transformer.py)", "evaluate (training.py)", *_LOOP),
        ("layer_norm (megatron/model/norms.py)", "evaluate (training.py)", *_LOOP),
        ("item (metrics.py)", "evaluate (training.py)", *_LOOP),
    ),
)
SPIN = Look(
    cpu=1.0, util=1.0, power_w=90.0, temp_c=31.0,
    frames=((f"barrier ({_TORCH})", "wrapper (torch/distributed/c10d_logger.py)", "save_checkpoint_and_time (training.py)", *_LOOP),),
)  # fmt: skip
"""Waits in a NCCL collective: the GPU spins at 100 %, and so does the thread that polls it."""
SPIN_REDUCE = replace(
    SPIN,
    frames=((f"all_reduce ({_TORCH})", "wrapper (torch/distributed/c10d_logger.py)", "train_step (training.py)", *_LOOP),),
)  # fmt: skip
SPIN_EVALUATION = replace(
    SPIN,
    frames=((f"broadcast ({_TORCH})", "wrapper (torch/distributed/c10d_logger.py)", "evaluate (training.py)", *_LOOP),),
)  # fmt: skip
IDLE_GPU = Look(util=0.0, clock_mhz=1155.0, power_w=68.0, temp_c=28.0)
LOAD = replace(
    IDLE_GPU, cpu=1.0, io=8e7,
    frames=(
        ("_call_with_frames_removed (<frozen importlib._bootstrap>)", "<module> (pretrain_gpt.py)"),
        ("load_state_dict (torch/nn/modules/module.py)", "load_checkpoint (checkpointing.py)", "<module> (pretrain_gpt.py)"),
    ),
)  # fmt: skip
COMPILE = replace(
    IDLE_GPU, cpu=7.5, io=4e5,
    frames=(
        ("compile_fx (torch/_inductor/compile_fx.py)", "train_step (training.py)", *_LOOP),
        ("codegen (torch/_inductor/scheduler.py)", "train_step (training.py)", *_LOOP),
    ),
)  # fmt: skip
INDEX = replace(
    IDLE_GPU, cpu=1.0, io=3e7,
    frames=(
        ("_build_doc_idx (gpt_dataset.py)", "build_dataset (gpt_dataset.py)", "<module> (pretrain_gpt.py)"),
        ("_build_shuffle_idx (gpt_dataset.py)", "build_dataset (gpt_dataset.py)", "<module> (pretrain_gpt.py)"),
    ),
)  # fmt: skip
SAVE = replace(
    IDLE_GPU, cpu=0.7, io=6e8, clock_mhz=1410.0, power_w=86.0,
    frames=(
        ("_legacy_save (torch/serialization.py)", "save (torch/serialization.py)", "save_checkpoint (checkpointing.py)", *_LOOP),
        ("persistent_id (torch/serialization.py)", "save (torch/serialization.py)", "save_checkpoint (checkpointing.py)", *_LOOP),
    ),
)  # fmt: skip
"""Rank 0 while it writes a checkpoint."""
WRITE_BLOCKED = replace(
    IDLE_GPU, state="D", cpu=0.0, io=0.0, wchan="rpc_wait_bit_killable", syscall="write", undumpable="Operation not permitted (os error 1)",
    frames=(("write (io.py)", "print (utils.py)", "training_log (training.py)", *_LOOP),),
)  # fmt: skip
LOADER = replace(
    IDLE_GPU, state="S", cpu=0.004, io=0.0, clock_mhz=1410.0, power_w=84.0,
    frames=(
        (
            "wait (threading.py)", "get (queue.py)", "_try_get_data (torch/utils/data/dataloader.py)",
            "_next_data (torch/utils/data/dataloader.py)", "__next__ (torch/utils/data/dataloader.py)", "evaluate (training.py)", *_LOOP,
        ),
    ),
)  # fmt: skip
"""Waits for a DataLoader whose worker never answers."""
LOCKED = replace(
    IDLE_GPU, state="S", cpu=0.0, io=0.0,
    frames=(("acquire (threading.py)", "log_metrics (tracker.py)", "train_step (training.py)", *_LOOP),),
)  # fmt: skip
ELSEWHERE = replace(
    IDLE_GPU, state="S", cpu=0.0, io=0.0,
    frames=(("read (subprocess.py)", "query_gpu (memory_report.py)", "train_step (training.py)", *_LOOP),),
)  # fmt: skip
UNDUMPABLE = replace(LOCKED, undumpable="Operation not permitted (os error 1)")
STOPPED = replace(IDLE_GPU, state="T", cpu=0.0, io=0.0, undumpable="Failed to suspend process")
TEARDOWN = replace(
    IDLE_GPU, state="S", cpu=0.0, io=0.0,
    frames=((f"destroy_process_group ({_TORCH})", "main (pretrain_gpt.py)", "<module> (pretrain_gpt.py)"),),
)  # fmt: skip


def waiting(call: str, threads: int = 1, name: str = "python", state: str = "S") -> WaitingThreads:
    """Threads that are in this system call."""
    return WaitingThreads(name=name, state=state, call=call, threads=threads)


USUAL = (waiting("futex", 24), waiting("epoll_wait", 2), waiting("futex", 2, "pt_nccl_watchdg"))
"""Threads of every rank: pools of compiled code, NCCL's own, a client of the store."""
OF_RANK_0 = (waiting("epoll_wait", 1, "pt_tcpstore_uv"),)


def others_of(rank: int, look: Look) -> tuple[WaitingThreads, ...]:
    """All threads of a rank but its main one."""
    return USUAL + (OF_RANK_0 if rank == 0 else ()) + look.others


def threads_of(look: Look, frames: Frames, pid: int) -> tuple[ThreadStack, ...]:
    """The main thread as py-spy would print it, and the one that it may have beside it."""
    main = ThreadStack(thread_id=pid, name="MainThread", active=True, frames=_frames(frames))
    if not look.thread:
        return (main,)
    return main, ThreadStack(thread_id=pid + 1, name="Thread-7", active=False, frames=_frames(look.thread))


def _frames(frames: Frames) -> tuple[Frame, ...]:
    split = (text.rpartition(" (") for text in frames)
    return tuple(Frame(function=name, file=file.rstrip(")"), line=100) for name, _, file in split)


_FETCH = ("fetch (torch/utils/data/_utils/fetch.py)", "_worker_loop (torch/utils/data/_utils/worker.py)")
_RUN = ("run (multiprocessing/process.py)", "_bootstrap (multiprocessing/process.py)")
WORKER_WAITS = Look(
    state="S", cpu=0.001, io=10.0, call="poll",
    frames=(("select (selectors.py)", "wait (connection.py)", "get (queues.py)", _FETCH[1], *_RUN),),
)  # fmt: skip
"""A data loader's worker with nothing to do."""
WORKER_WORKS = Look(
    state="R", cpu=0.4, io=2e6, call="read", frames=(("decode (corpus.py)", "__getitem__ (corpus.py)", *_FETCH, *_RUN),)
)
WORKER_READS = replace(WORKER_WAITS, state="D", call="read", frames=(("__getitem__ (corpus.py)", *_FETCH, *_RUN),))
"""In one read of a storage that is slow."""
WORKER_SLEEPS = replace(WORKER_READS, state="S", call="clock_nanosleep")
"""Between two attempts."""
WORKER_LOCKED = replace(WORKER_READS, state="S", call="futex")
"""In a lock that its parent held when it was forked."""
WORKER_FETCHES = replace(WORKER_LOCKED, others=(waiting("recvfrom"),))
"""Waits for a thread of compiled code, which waits for a server."""
STARVED = replace(
    IDLE_GPU, state="S", cpu=0.002, io=10.0, clock_mhz=1410.0, power_w=84.0,
    frames=(
        (
            "wait (threading.py)", "get (queue.py)", "_try_get_data (torch/utils/data/dataloader.py)",
            "_next_data (torch/utils/data/dataloader.py)", "__next__ (torch/utils/data/dataloader.py)", "train_step (training.py)", *_LOOP,
        ),
    ),
)  # fmt: skip
"""Waits for its data loader in a step."""
DEADLOCKED = replace(
    IDLE_GPU, state="S", cpu=0.001, io=10.0, frames=(("take_turn (state.py)", "train_step (training.py)", *_LOOP),)
)
"""Waits for a lock of its own that nobody gives back: `with lock:` has no frame."""
DEADLOCKED_IN_EVALUATION = replace(DEADLOCKED, frames=(("take_turn (state.py)", "evaluate (training.py)", *_LOOP),))
