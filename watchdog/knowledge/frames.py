"""Known frames: which function in which file means that a rank waits for its peers, for data, for storage.

A row is (place, function pattern, file pattern); patterns are whole-match regular expressions, the first row
that fits wins. Sources: torch/distributed, DeepSpeed, Megatron-LM, accelerate and mpi4py as their users'
dumps show them, the interpreter's own library, and clients that upload a checkpoint.
"""

from __future__ import annotations

from enum import StrEnum


class Place(StrEnum):
    """Where a rank's main thread stands."""

    COLLECTIVE = "waits in a collective"
    DATALOADER = "waits for its data loader"
    CHECKPOINT = "writes or reads a checkpoint"
    TEARDOWN = "tears its process group down"
    DEBUGGER = "sits at a debugger prompt"
    LOCK = "waits for a lock"
    BACKWARD = "is in the backward pass"
    """DistributedDataParallel reduces gradients in there: a rank that waits for its peers shows no collective."""
    DEVICE = "waits for its GPU"
    """Which may in turn wait for the other ranks: with NCCL collectives the wait shows up here."""
    NETWORK = "talks to a server over the network"
    OTHER = "runs elsewhere"


_COLLECTIVES = (
    r"barrier|monitored_barrier|all_reduce|allreduce|all_reduce_coalesced|all_gather|all_gather_into_tensor|"
    r"all_gather_object|all_gather_coalesced|_all_gather_base|allgather|reduce_scatter|reduce_scatter_tensor|"
    r"_reduce_scatter_base|broadcast|broadcast_object_list|bcast|scatter_object_list|gather_object|all_to_all|"
    r"all_to_all_single|alltoall|batch_isend_irecv|send_object_list|recv_object_list|wait_for_everyone"
)
"""Names that mean a collective in whatever file they stand. `send`, `recv`, `reduce`, `gather` and `wait` mean
other things elsewhere (an upload, functools) and count only in the files of the distributed libraries."""

FRAMES: tuple[tuple[Place, str, str], ...] = (
    (
        Place.DEBUGGER,
        r"interaction|set_trace|breakpoint|cmdloop|_cmdloop",
        r".*\b(pdb|bdb|cmd|ipdb|debugger)\b.*",
    ),
    (Place.TEARDOWN, r"destroy_process_group|_exit_function|_shutdown|_python_exit|shutdown_workers", r".*"),
    (Place.DATALOADER, r".*", r".*torch/utils/data/(dataloader|_utils/.*)\.py"),
    (Place.DATALOADER, r"_try_get_data|_next_data|_get_data", r".*"),
    (
        Place.COLLECTIVE,
        r".*",
        r".*torch/distributed/(distributed_c10d|c10d_logger|_functional_collectives)\.py",
    ),
    (
        Place.COLLECTIVE,
        r".*",
        r".*(deepspeed/comm/.*|horovod/.*|mpi4py/.*|pipe/p2p\.py|p2p_communication\.py)",
    ),
    (Place.COLLECTIVE, _COLLECTIVES, r".*"),
    (
        Place.CHECKPOINT,
        r"save_checkpoint|load_checkpoint|_save_checkpoint|_load_checkpoint|save_state_dict|load_state_dict|"
        r"async_save|dist_cp_save|save_model|_save_zero_checkpoint|save_pretrained|save_state",
        r".*",
    ),
    # In people's own code: save_ckpt, write_checkpoint_shard, upload_model, maybe_save_state.
    (
        Place.CHECKPOINT,
        r"_*(maybe_)?(save|write|dump|store|export|upload|push|restore|load)_\w*(checkpoint|ckpt|model|state|weights)\w*",
        r".*",
    ),
    (Place.CHECKPOINT, r"save|_save|_legacy_save|load|_load|_legacy_load", r".*torch/serialization\.py"),
    (Place.CHECKPOINT, r".*", r".*(torch/distributed/checkpoint/.*|safetensors/.*)\.py"),
    # torch 2.x: both files for gloo and NCCL, see tests/unit/stack_captures.
    (Place.BACKWARD, r"_engine_run_backward", r".*torch/autograd/graph\.py"),
    (Place.BACKWARD, r"backward", r".*torch/(autograd/__init__|_tensor)\.py"),
    (Place.DEVICE, r"synchronize|current_stream_synchronize", r".*torch/(cuda|accelerator)/.*\.py"),
    (
        Place.NETWORK,
        r".*",
        r".*\b(requests|urllib3|urllib|http|httpx|aiohttp|botocore|boto3|s3transfer|s3fs|gcsfs|fsspec|huggingface_hub|"
        r"paramiko)/.*\.py",
    ),
    (Place.LOCK, r"acquire|__enter__|wait|_wait_for_tstate_lock|join", r".*threading\.py"),
)

STANDARD_LIBRARY = (
    r"(.*/lib/python3\.\d+/)?(threading|queue|selectors|socket|ssl|subprocess|concurrent/.*|asyncio/.*|"
    r"multiprocessing/.*)\.py"
)
"""Frames of the interpreter's own waiting rooms: what matters is who called them. `connection.py` and
`queues.py` appear without their package when py-spy shortens the path."""

SHORTENED_STANDARD_LIBRARY = r"(connection|queues|popen_fork|synchronize|resource_sharer)\.py"
