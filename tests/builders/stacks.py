"""Places where ranks stand, as stacks show them, and texts of dumps made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slurm_watchdog.parse.stacks.headers import Dump
from slurm_watchdog.parse.stacks.text import parse_stacks

# fmt: off
C10D = "torch/distributed/distributed_c10d.py"
TAIL = ("train_step (megatron/training.py:540)", "train (megatron/training.py:732)", "<module> (pretrain.py:9)")
REDUCE = (f"all_reduce ({C10D}:2806)", "wrapper (torch/distributed/c10d_logger.py:83)", *TAIL)
BARRIER = (f"barrier ({C10D}:4000)", "wrapper (torch/distributed/c10d_logger.py:83)", *TAIL)
BROADCAST = (f"broadcast ({C10D}:1191)", *TAIL)
RECV = (f"recv ({C10D}:1002)", "recv_forward (megatron/p2p_communication.py:80)", *TAIL)
LOADER = ("wait (threading.py:306)", "get (queue.py:179)", "_try_get_data (torch/utils/data/dataloader.py:1011)", *TAIL)
FORWARD = ("forward (torch/nn/modules/linear.py:114)", "forward (model.py:20)", *TAIL)
SAVE = ("_save (torch/serialization.py:850)", "save (torch/serialization.py:619)", "save_checkpoint (megatron/checkpointing.py:300)", *TAIL)
STAT = ("stat (pathlib.py:1100)", "exists (pathlib.py:1200)", "find_shard (data.py:3)", *TAIL)
LOCK = ("wait (threading.py:320)", "wait_for_slot (pool.py:7)", *TAIL)
LOG = ("flush (logging/__init__.py:1084)", "emit (logging/__init__.py:1100)", "info (logging/__init__.py:1489)", *TAIL)
PDB = ("readline (codecs.py:322)", "cmdloop (cmd.py:126)", "interaction (pdb.py:445)", "user_line (pdb.py:340)", "trace_dispatch (bdb.py:90)", *TAIL)
DESTROY = (f"destroy_process_group ({C10D}:1600)", "main (pretrain.py:80)", "<module> (pretrain.py:9)")
COMPILE = ("compile_fx_inner (torch/_inductor/compile_fx.py:500)", "_call_user_compiler (torch/_dynamo/output_graph.py:1200)", *TAIL)
INIT = (f"_store_based_barrier ({C10D}:400)", f"init_process_group ({C10D}:900)", "main (pretrain.py:4)", "<module> (pretrain.py:9)")
IMPORT = ("get_data (<frozen importlib._bootstrap_external>:1073)", "_find_and_load (<frozen importlib._bootstrap>:1178)", "<module> (pretrain.py:2)")
UPLOAD = ("send (ssl.py:1200)", "send (http/client.py:1000)", "urlopen (urllib3/connectionpool.py:700)", "put_object (store.py:9)", *TAIL)
EVALUATE = ("forward (model.py:20)", "evaluate (megatron/training.py:890)", "train (megatron/training.py:732)", "<module> (pretrain.py:9)")
BACKWARD = ("_engine_run_backward (torch/autograd/graph.py:744)", "backward (torch/_tensor.py:522)", *TAIL)
DEVICE = ("synchronize (torch/cuda/__init__.py:892)", *TAIL)
# fmt: on


def text_of(rank: int, frames: Sequence[str], *, pid: int | None = None, host: str = "") -> str:
    pid = 40000 + rank if pid is None else pid
    name = f"=== rank {rank} {host}".rstrip() + " ===\n"
    return (
        f'{name}Process {pid}: python -u pretrain.py\nPython v3.10.12 (/x)\n\nThread {pid} (idle): "MainThread"\n'
        + "".join(f"    {frame}\n" for frame in frames)
    )


def dumps_of(places: Sequence[Sequence[str] | None], hosts: Mapping[int, str] | None = None) -> list[Dump]:
    """A dump for each place; None is a rank without one."""
    text = "".join(
        text_of(r, frames, host=(hosts or {}).get(r, "")) for r, frames in enumerate(places) if frames is not None
    )
    return parse_stacks(text)
