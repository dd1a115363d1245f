"""Known frames: which function in which file means that a rank waits for its peers, for data, for storage.

A row is (place, function pattern, file pattern); patterns are whole-match regular expressions, the first row
that fits wins. Sources: torch, DeepSpeed, Megatron-LM, accelerate, Lightning, JAX, Ray, Horovod and mpi4py as
their users' dumps show them, the interpreter's own library, and clients that upload a checkpoint. Native frames
(`py-spy --native`, gdb) have a table of their own.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final


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

_COLLECTIVES = (
    r"barrier|monitored_barrier|all_reduce|allreduce|all_reduce_coalesced|all_gather|all_gather_into_tensor|"
    r"all_gather_object|all_gather_coalesced|_all_gather_base|allgather|reduce_scatter|reduce_scatter_tensor|"
    r"_reduce_scatter_base|broadcast|broadcast_object_list|bcast|scatter_object_list|gather_object|all_to_all|"
    r"all_to_all_single|alltoall|wait_for_everyone|allgather_object|broadcast_object|allreduce_async_|grouped_allreduce|"
    r"clip_grad_norm_distributed|sync_global_devices|process_allgather|broadcast_one_to_all|wait_at_barrier|"
    r"reduce_scatter_fn|allgather_fn|broadcast_coalesced|_allgather_params|_broadcast_coalesced|_sync_module_states|"
    r"Barrier|Allreduce|Allgather|Allgatherv|Bcast|Alltoall|Reduce_scatter|broadcast_data|barrier_all_processes|"
    r"dist_barrier|sync_barrier|torch_distributed_barrier|synchronize_barrier|all_reduce_grads|allreduce_gradients"
)
"""Names that mean a collective in whatever file they stand. `send`, `recv`, `reduce`, `gather` and `wait` mean
other things elsewhere (an upload, functools) and count only in the files of the distributed libraries."""

_NEIGHBOURS = (
    r"recv_forward|send_forward|recv_backward|send_backward|send_forward_recv_backward|send_backward_recv_forward|"
    r"send_forward_recv_forward|send_backward_recv_backward|_communicate|_p2p_ops|_batched_p2p_ops|"
    r"_exec_recv_activations|_exec_send_activations|_exec_recv_grads|_exec_send_grads|batch_isend_irecv|"
    r"send_object_list|recv_object_list|send_forward_backward_recv_forward_backward"
)

FRAMES: Final[tuple[tuple[Place, str, str], ...]] = (
    (
        Place.DEBUGGER,
        r"interaction|set_trace|breakpoint|cmdloop|_cmdloop|post_mortem",
        r".*\b(pdb|bdb|cmd|ipdb|pdbpp|pudb|rpdb|remote_pdb|debugger|core)\b.*",
    ),
    (Place.DEBUGGER, r"do_wait_suspend|_do_wait_suspend|wait_for_client|wait_for_attach", r".*(pydev|debugpy|ptvsd).*"),
    (Place.DEBUGGER, r"prompt_for_code|embed|mainloop|interact", r".*(IPython/terminal/.*|(^|/)code\.py)"),
    (
        Place.TEARDOWN,
        r"destroy_process_group|_exit_function|_shutdown|_python_exit|_?shutdown_workers|_run_exitfuncs|destroy_model_parallel|"
        r"_shutdown_backend|_shutdown_all_pgs|_abort_process_group|finish_and_exit|_cleanup_at_exit|"
        r"cleanup_distributed|cleanup_ddp|ddp_cleanup|shutdown_distributed|dist_cleanup",
        r".*",
    ),
    (Place.TEARDOWN, r"__del__", r".*\b(torch|deepspeed|megatron|accelerate|lightning|horovod|multiprocessing)/.*"),
    (Place.SIGNAL, r"(_*(sig|signal)\w*_?handler\w*|_*handle_(sig|signal)\w*|_*on_sig(term|usr1|usr2|int))", r".*"),
    (
        Place.RENDEZVOUS,
        r"init_process_group|_new_process_group_helper|_store_based_barrier|new_group|_new_group_with_tag|new_subgroups|"
        r"rendezvous|_create_c10d_store|_env_rendezvous_handler|_tcp_rendezvous_handler|_rendezvous_helper|"
        r"init_device_mesh|_init_process_groups|next_rendezvous|_initialize_distributed|init_distributed|"
        r"init_distributed_mode|initialize_model_parallel",
        r".*",
    ),
    (Place.RENDEZVOUS, r"initialize|State\.initialize|connect", r".*jax/_src/distributed\.py"),
    (Place.RENDEZVOUS, r"init|_init", r".*horovod/common/basics\.py"),
    (Place.DATALOADER, r".*", r".*torch/utils/data/(dataloader|_utils/.*|datapipes/.*)\.py"),
    (Place.DATALOADER, r"_try_get_data|_next_data|_get_data", r".*"),
    (
        Place.DATALOADER,
        r"__next__|__iter__|next|_next|get|_get|next_batch|_next_batch|get_batch|_get_batch|fetch|_fetch|prefetch|"
        r"_prefetch|_fetch_next|get_next_batch|load_batch|_load_batch|_schedule_outputs|__getitem__",
        r".*(data_?loaders?|data_iter\w*|fairseq/data/iterators|prefetch\w*(/\w+)?|webdataset/.*|nvidia/dali/.*|torchdata/.*|"
        r"streaming/base/.*|lightning/.*/fetchers|mosaic\w*/.*/dataloader|ffcv/.*|tensorflow/python/data/.*|grain/.*)"
        r"(\.py)?",
    ),
    (Place.DATALOADER, r"_?get_(micro_?)?batch(_pipe|_on_this_tp_rank)?|_?(get_)?next_(micro_?)?batch|_?fetch_(next_)?batch|_?load_next_batch", r".*"),
    (
        Place.P2P,
        r".*",
        r".*(pipe/p2p\.py|p2p_communication\.py|pipelining/(schedules|stage|_\w+)\.py)",
    ),
    (Place.P2P, _NEIGHBOURS, r".*"),
    (Place.P2P, r"send|recv|isend|irecv|_send|_recv|batch_isend_irecv", r".*torch/distributed/distributed_c10d\.py"),
    (
        Place.COLLECTIVE,
        r".*",
        r".*torch/distributed/(distributed_c10d|c10d_logger|_functional_collectives\w*|nn/functional)\.py",
    ),
    (Place.COLLECTIVE, r".*", r".*(deepspeed/comm/.*|horovod/.*|mpi4py/.*)"),
    # Our own slurm_watchdog_hooks: a rank waits here for one that does not come to the same step.
    (Place.COLLECTIVE, r"_wait_for_all_ranks", r".*slurm_watchdog_hooks/agreement\.py"),
    (Place.COLLECTIVE, _COLLECTIVES, r".*"),
    # Libraries that wrap collectives of their own: the waits as their sources name them.
    (
        Place.COLLECTIVE,
        r"wait_for_unshard|_wait_all_gather_streams_on_event|foreach_all_gather\w*|foreach_reduce\w*|wait_tensor|_wait_for_computation_stream",
        r".*torch/distributed/(fsdp/.*|_composable/fsdp/.*|_tensor/.*|tensor/.*)\.py",
    ),
    (Place.COLLECTIVE, r"(low_latency_|internode_|intranode_)?(dispatch|combine)|current_stream_wait|get_dispatch_layout", r".*deep_ep/(buffer|utils)\.py"),
    (Place.COLLECTIVE, r".*", r".*transformer_engine/(pytorch|jax)/(distributed|cpp_extensions/(comm|fused_comm)\w*)\.py"),
    (Place.COLLECTIVE, r"initialize_ub", r".*transformer_engine/.*\.py"),
    (Place.COLLECTIVE, r"wait_quorum|start_quorum|should_commit|_wait_replicate|allreduce_quantized|wait", r".*torchft/(manager|process_group|collectives|futures)\.py"),
    (
        Place.COLLECTIVE,
        r"fetch_sub_module|__all_gather_params\w*|_?partition_grads|__reduce_and_partition_ipg_grads|reduce_independent_p_g_buckets_and_remove_grads|"
        r"allreduce_and_\w+|overlapping_partition_gradients_reduce_epilogue|_all_gather_\w+|all_gather_dp_groups",
        r".*deepspeed/runtime/(zero/.*|bf16_optimizer|utils)\.py",
    ),
    (Place.COLLECTIVE, r".*", r".*colossalai/(communication|legacy/communication)/(?!p2p).*\.py"),
    (Place.P2P, r".*", r".*colossalai/(pipeline/p2p|(legacy/)?communication/p2p\w*)\.py"),
    (Place.COLLECTIVE, r"acquire_read|dequeue|wait_until_ready", r".*vllm/distributed/device_communicators/shm_broadcast\.py"),
    (Place.COLLECTIVE, r".*", r".*(vllm/distributed/(parallel_state|communication_op|device_communicators/\w+)|ray/util/collective/.*|ray/experimental/channel/.*)\.py"),
    # Compilers before checkpoints: `load` and `save` stand in both.
    (
        Place.COMPILATION,
        r".*",
        r".*(torch/_inductor/(compile_fx\w*|codecache|async_compile|graph|scheduler|codegen/.*|lowering|ir|cpp_builder|select_algorithm|"
        r"kernel/.*|pattern_matcher|fx_passes/.*|autotune_process|compile_worker/.*)|torch/_functorch/_aot_autograd/(traced_function_transforms|"
        r"collect_metadata\w*|dispatch_and_compile_graph|jit_compile_runtime_wrappers|graph_compile)|"
        r"torch/_dynamo/(convert_frame|symbolic_convert|output_graph|bytecode_transformation|variables/.*|guards|repro/.*|backends/.*)|"
        r"torch/utils/cpp_extension|triton/compiler/.*|triton/backends/\w+/compiler|triton/runtime/build|deepspeed/ops/op_builder/.*|"
        r"jax/_src/(compiler|compilation_cache)|jax/_src/interpreters/mlir|torch/_export/.*|tilelang/jit/.*|numba/core/.*|flashinfer/jit/.*|deep_gemm/jit.*)"
        r"(\.py)?",
    ),
    (
        Place.COMPILATION,
        r"_compile|_compile_inner|compile_inner|compile_and_call|backend_compile|backend_compile_and_load|compile_or_get_cached|"
        r"jit_load|_jit_compile|_run_ninja_build|_write_ninja_file_and_build_library|"
        r"compile_fx|compile_helpers|load_fused_kernels|_compile_dependencies|compile_dependencies|fused_kernels_load|"
        r"make_cubin|make_ptx|make_llir|autotune|_bench|warmup_triton",
        r".*(torch|triton|jax|megatron|deepspeed|fused_kernels|apex|xla|transformer_engine|nemo|vllm|initialize).*",
    ),
    (Place.COMPILATION, r"(_?jit)?_?(compile|build)_\w*(kernel|op|ops|extension|cuda|helper)\w*|nvcc\w*", r".*"),
    (
        Place.CHECKPOINT,
        r"save_checkpoint|load_checkpoint|_save_checkpoint|_load_checkpoint|save_state_dict|load_state_dict|"
        r"async_save|dist_cp_save|save_model|_save_zero_checkpoint|save_pretrained|save_state|_save_to_state_dict|"
        r"save_checkpoint_and_time|dump_checkpoint|write_checkpoint|checkpoint_save|maybe_finalize_async_save|"
        r"save_to_checkpoint|consolidate_\w*|save_16bit_model|_zero3_consolidated_16bit_state_dict|full_state_dict\w*",
        r".*",
    ),
    # In people's own code: save_ckpt, write_checkpoint_shard, upload_model, maybe_save_state.
    (
        Place.CHECKPOINT,
        r"_*(maybe_)?(save|write|dump|store|export|upload|push|restore|load)_\w*(checkpoint|ckpt|model|state|weights)\w*",
        r".*",
    ),
    (Place.CHECKPOINT, r"save_?ckpt|ckpt_?save|checkpoint_callback|on_save|_save_last_checkpoint", r".*"),
    (Place.CHECKPOINT, r"save|_save|_legacy_save|load|_load|_legacy_load|persistent_load|load_tensor", r".*torch/serialization\.py"),
    (
        Place.CHECKPOINT,
        r".*",
        r".*(torch/distributed/checkpoint/.*|torch/distributed/fsdp/_(optim|state_dict)_utils|safetensors/.*|orbax/.*|flax/training/checkpoints|"
        r"dist_checkpointing/.*|checkpoint_engine/.*|checkpointing|torchsnapshot/.*)\.py",
    ),
    # torch 2.x: both files for gloo and NCCL, see tests/captures/stacks.
    (Place.BACKWARD, r"_engine_run_backward", r".*torch/autograd/graph\.py"),
    (Place.BACKWARD, r"backward", r".*torch/(autograd/__init__|_tensor)\.py"),
    (Place.DEVICE, r"synchronize|current_stream_synchronize|elapsed_time|wait_stream", r".*torch/(cuda|accelerator|npu|xpu|hpu)/.*\.py"),
    (Place.DEVICE, r"block_until_ready|_wait|_value|__array__|_single_device_array_to_np_array_did_copy|__float__", r".*jax/.*\.py"),
    (Place.DEVICE, r"mark_step|wait_device_ops", r".*torch_xla/.*\.py"),
    (Place.DEVICE, r"(_?to_)?item|tolist|_local_scalar_dense|cuda_synchronize|device_synchronize|synchronize_device", r".*"),
    (Place.REMOTE, r"get|wait|get_objects|_get|fetch_and_deserialize", r".*ray/_private/(worker|client_mode_hook|auto_init_hook)\.py"),
    (Place.TOKENIZER, r"\w*_?(de)?tokeni[sz]e\w*|batch_encode_plus|encode_batch|encode_plus", r".*"),
    (Place.TOKENIZER, r".*", r".*(transformers/tokenization_\w+|tokenizers/.*|sentencepiece/.*|tiktoken/.*)\.py"),
    (
        Place.PREPARATION,
        r"_?build_(index|sample|shuffle|doc|document|train|data|blending|samples?)\w*|_?build_\w*(dataset|index|indices|mapping|idx)\w*|"
        r"_?build_\w*_datasets?|make_builder|_prepare_(split\w*|single|dataset\w*)|download_and_prepare|prepare_data\w*|map|_map_single|"
        r"_build_sample_idx|_build_doc_idx|_build_shuffle_idx|get_samples_mapping",
        r".*(data|index|blend|helpers|gpt|bert|t5|arrow|builder|train|pretrain).*\.py",
    ),
    (Place.PREPARATION, r".*", r".*(/|^)datasets/(arrow_dataset|builder|load|iterable_dataset|fingerprint|download/.*|utils/file_utils)\.py"),
    (
        Place.NETWORK,
        r".*",
        r".*\b(requests|urllib3|urllib|http|httpx|httpcore|aiohttp|botocore|boto3|s3transfer|s3fs|gcsfs|fsspec|huggingface_hub|"
        r"paramiko|wandb|mlflow|neptune|comet_ml|clearml|grpc|google/cloud|azure|minio|adlfs|swanlab|s3torchconnector|hf_transfer|pymongo|redis|sqlalchemy)/.*\.py",
    ),
    (Place.NETWORK, r"create_connection|getaddrinfo|do_handshake|recv_into|sendall", r".*\b(socket|ssl)\.py"),
    (Place.LOCK, r"acquire|createLock", r".*logging/__init__\.py"),
    (
        Place.FILESYSTEM,
        r"emit|flush|_open|doRollover|shouldRollover",
        r".*logging/(__init__|handlers)\.py",
    ),
    (
        Place.FILESYSTEM,
        r"exists|isfile|isdir|getsize|getmtime|lexists|islink|samefile|realpath|_joinrealpath",
        r".*(genericpath|posixpath)\.py",
    ),
    (
        Place.FILESYSTEM,
        r"open|stat|lstat|exists|is_file|is_dir|is_symlink|resolve|iterdir|glob|rglob|mkdir|touch|unlink|rename|replace|"
        r"read_text|write_text|read_bytes|write_bytes|rmdir|symlink_to|hardlink_to|chmod",
        r".*pathlib(/\w+)?\.py",
    ),
    (Place.FILESYSTEM, r"makedirs|walk|_walk|removedirs|renames|scandir|fsync|listdir|statvfs|replace", r".*(^|/|\b)(os|posix)\.py"),
    (
        Place.FILESYSTEM,
        r"copyfile|copyfileobj|_copyfileobj\w*|_fastcopy\w*|copytree|_copytree|copy|copy2|copystat|rmtree|_rmtree\w*|move|disk_usage|"
        r"make_archive",
        r".*shutil\.py",
    ),
    (Place.FILESYSTEM, r".*", r".*(^|/)(glob|tempfile|tarfile|zipfile(/__init__)?|gzip|lzma|bz2|fcntl|mmap|fileinput|linecache)\.py"),
    (
        Place.FILESYSTEM,
        r"_?(append|write|flush|fsync|read|open|stat|touch|lock)(_to)?_?\w*(logs?|file|files|disk|metrics|shard|shards|csv|jsonl?|lines?|records?|bytes)"
        r"|log_to_file|fsync\w*|_?flush_\w*|_?stat_\w*|write_log\w*",
        r".*",
    ),
    (Place.FILESYSTEM, r"memmap|__new__|open_memmap|fromfile|load|save|savez|_savez|read_array|write_array", r".*numpy/(core/memmap|_core/memmap|lib/(npyio|format|_npyio_impl|_format_impl))\.py"),
    (Place.FILESYSTEM, r".*", r".*(PIL/(Image|ImageFile|JpegImagePlugin)|h5py/.*|pyarrow/(parquet|dataset|fs|feather)\S*|zarr/.*|lmdb/.*|tifffile/.*|netCDF4/.*|pandas/io/.*|soundfile|tensorboard/summary/writer/.*|tensorboard/compat/.*|filelock/.*)(\.py)?"),
    (
        Place.FILESYSTEM,
        r"read|write|writelines|readlines?|readinto|fsync|flush|pread|pwrite|open|truncate",
        r"(?!.*(socket|ssl|pipe|connection|queue|stream|zmq|asyncio|tornado|selectors|subprocess|serial)).*",
    ),
    (Place.COLLECTING, r"(_?gc_collect|collect_garbage|_?run_gc|gc_step|maybe_gc|_?gc_\w+|garbage_collect\w*)", r".*"),
    (
        Place.SUBPROCESS,
        r"wait|_wait|communicate|_communicate|call|run|check_call|check_output|_try_wait|getoutput|getstatusoutput|_execute_child",
        r".*\bsubprocess\.py",
    ),
    (Place.SUBPROCESS, r"poll|wait|join", r".*(multiprocessing/popen_fork|popen_fork|multiprocessing/process)\.py"),
    (
        Place.IMPORT,
        r"_find_and_load|_find_and_load_unlocked|_load_unlocked|exec_module|_call_with_frames_removed|_handle_fromlist|"
        r"_gcd_import|import_module|get_code|get_data|path_stats|_path_stat|find_spec|_path_importer_cache|create_module|_get_spec|_fill_cache",
        r".*importlib.*",
    ),
    (Place.SLEEP, r"_?(time_)?sleep\w*|nap|back_?off\w*|_?retry_sleep|sleep_for_retry", r".*"),
    (Place.QUEUE, r"get|put|join|_?recv(_bytes)?|_?poll|wait|select", r".*(^|/)(queue|queues|connection|selectors)\.py"),
    (Place.LOCK, r"acquire|__enter__|wait|_wait_for_tstate_lock|join|_acquire_restore|wait_for", r".*threading\.py"),
    (Place.LOCK, r"acquire|lock|_acquire|wait_for_lock|acquire_lock|__enter__", r".*(file_?lock|portalocker(/\w+)?|fasteners(/\w+)?|multiprocessing/synchronize|synchronize|lock\w*)\.py"),
    (Place.LOCK, r"_?(acquire|take|grab|wait_for)_?\w*(lock|mutex)\w*", r".*"),
)  # fmt: skip

NATIVE: Final[tuple[tuple[Place, str], ...]] = (
    (Place.CRASH, r"(__GI_)?(raise|abort)|__pthread_kill\w*|std::(terminate|rethrow_exception)|__assert_fail\w*|faulthandler_fatal_error|<signal handler called>"),
    (Place.COLLECTIVE, r"(pnccl|nccl|rccl|hccl|msccl|nvshmem|rocshmem)[A-Z_]\w*|mscclpp::.*|c10d::.*|gloo::.*|ucc_\w+|(uct|ucs)_\w*(progress|wait)\w*|ccl::.*|deep_ep::.*|hvd::.*|P?MPI_\w+|ompi_\w+|opal_progress|mca_\w+|MPIDI?_\w+|ucp_\w+|horovod::.*"),
    (Place.TEARDOWN, r"Py_FinalizeEx|Py_Finalize|finalize_modules|_?_run_exit_handlers|__cxa_finalize|wait_for_thread_shutdown|ncclCommDestroy|ncclCommAbort"),
    (
        Place.DEVICE,
        r"cu(da)?(Stream|Event|Device|Ctx|Memcpy|Memset|Mem|Launch|Module|Free|Malloc|HostAlloc)\w*|hip(Stream|Event|Device|Memcpy|Free|Malloc)\w*|"
        r".*_local_scalar_dense.*|at::native::(item|copy_|_to_copy).*|c10::cuda::.*|.*CUDAStream.*synchronize.*",
    ),
    (Place.COLLECTING, r"gc_collect\w*|_?PyGC_\w+|gc_main|deduce_unreachable|collect_generations|subtract_refs|visit_decref"),
    (Place.GIL, r"take_gil|PyEval_RestoreThread|PyEval_AcquireThread|PyGILState_Ensure"),
    (Place.SUBPROCESS, r"(__|_|__GI___|__GI_)?(wait4|waitpid|waitid)(\.part\.\d+)?|os_waitpid\w*"),
    (
        Place.FILESYSTEM,
        r"(__|_|__GI___|__GI_|__libc_|_IO_new_file_|__xstat|__fxstat)?"
        r"(p?read(v|64)?|p?write(v|64)?|open(at)?(64)?|f?stat(at|x|fs|vfs)?(64)?|lstat(64)?|newfstatat|fsync|fdatasync|rename(at)?2?|unlink(at)?|getdents(64)?|readdir(64)?|close|"
        r"flock|fcntl(64)?|mkdir(at)?|access|faccessat2?|ftruncate(64)?|msync|sync_file_range|syncfs|lseek(64)?|fallocate)(_nocancel)?"
        r"|_io_\w+_(write|read|flush|readinto|open)\w*|_?Py_(read|write|open|fstat|stat)\w*|os_(stat|open|read|write|fsync|listdir|scandir|mkdir|rename)\w*",
    ),
    (Place.SLEEP, r"(__|_|__GI___|__GI_)?(clock_)?nanosleep(_time64)?|usleep|sleep|pysleep|time_sleep"),
    (Place.NETWORK, r"(__|_|__GI___|__GI_|__libc_)?(connect|recv(from|msg)?|send(to|msg)?|accept4?|getaddrinfo|res_\w+)|SSL_\w+|sock_\w+"),
    (
        Place.LOCK,
        r".*(futex|pthread_cond_(timed)?wait|pthread_mutex_lock|lll_lock_wait|sem_(timed|clock)?wait|PyThread_acquire_lock\w*|pthread_rwlock\w*|std::condition_variable::wait|_PyMutex_Lock\w*|lock_PyThread_acquire_lock\w*).*",
    ),
)  # fmt: skip
"""Native functions, innermost first; what they mean where the Python frames say nothing better."""

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
