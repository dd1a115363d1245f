"""What a fault usually is and what to try next: shown under a verdict, never as the verdict.

A row is for classes: of log lines (slurm_watchdog.knowledge.log_signatures), of stacks
(slurm_watchdog.knowledge.stack_frames.CLASSES), of the kernel's lines
(slurm_watchdog.knowledge.kernel_signatures) and kinds of incidents (slurm_watchdog.model.incidents.IncidentKind);
some only where the text has certain words. Rows that need words say more and stand before those that don't.
What is documented is named by the name of the document or option; addresses only of official pages. Much of
it is what the people of BLOOM-176B and others wrote down.
"""

from __future__ import annotations

import re

import msgspec

from slurm_watchdog.base.late_regex import late_regex
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.knowledge.log_signatures import BOILERPLATE


class Hint(Struct):
    """One piece of advice. It may be wrong for this case: it says what it usually is."""

    usually: str
    try_next: str
    documented: str = ""  # Name of a document or an option, in words; empty if there is none.

    def as_json(self) -> dict[str, str]:
        """All three, for `--json`."""
        return {"usually": self.usually, "try_next": self.try_next, "documented": self.documented}


class HintRow(msgspec.Struct, frozen=True):
    """`classes` it is for; if `pattern` is given, only for a text in which it is found."""

    name: str
    classes: tuple[str, ...]
    hint: Hint
    pattern: re.Pattern[str] | None = None


MAX_HINTS = 3  # More no one reads under a verdict.
MAX_TEXT = 20_000  # Characters of the text that are searched.

NCCL_ENV = "NCCL user guide, Environment Variables: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
TORCH_NCCL_ENV = "PyTorch, ProcessGroupNCCL Environment Variables: https://pytorch.org/docs/stable/torch_nccl_environment_variables.html"
XIDS = "NVIDIA, XID Errors: https://docs.nvidia.com/deploy/xid-errors/"
NCCL_TROUBLE = "NCCL user guide, Troubleshooting"
DATALOADER = "PyTorch, torch.utils.data (num_workers, timeout, multiprocessing_context)"


def _row(name: str, classes: str, usually: str, try_next: str, documented: str = "", pattern: str = "") -> HintRow:  # fmt: skip
    hint = Hint(usually=usually, try_next=try_next, documented=documented)
    return HintRow(name, tuple(classes.split()), hint, late_regex(pattern, re.IGNORECASE) if pattern else None)


_COLLECTIVES = "nccl_watchdog collective_timeout collective_hang collective barrier_timeout collective_desync"

# fmt: off
_KILLED = (
    "SIGKILL (exit code 137 or -9) is sent by the kernel if memory is used up, by a container's or Slurm's memory limit, or by a person or program.",
    "The kernel's log of the node at that time (dmesg -T, slurm-watchdog diagnose FILE) names a process that it killed for memory; "
    "sacct -j JOB --format=JobID,State,MaxRSS,ExitCode.",
    "cgroup.conf, ConstrainRAMSpace",
)
_BUS_ERROR = (
    "SIGBUS (exit code 135 or -7): a page of a memory map was unavailable, most often because /dev/shm is full (data loaders and NCCL keep tensors there; a "
    "container has 64 MiB by default), or the disk behind a memory-mapped file.",
    "df -h /dev/shm inside the job or container; a larger --shm-size or --ipc=host; space and health of the filesystem of memory-mapped data.",
    "docker run --shm-size",
)
HINTS: tuple[HintRow, ...] = tuple(_row(*each) for each in (
    # ------------------------------------------------------------------ rows that need words: they say most
    ("dataloader_at_evaluation", "dataloader collective_hang",
         "At an evaluation new DataLoader workers are forked; one that copies a lock which is held at that moment never starts.",
         "num_workers=0 for the validation loader (the training loader may keep its workers), or persistent_workers=True so that workers are made once.",
         DATALOADER, r"\beval|valid"),
    ("nccl_2_14_blocking", _COLLECTIVES + " device_wait backward nccl_error",
         "NCCL 2.14.3, which came with PyTorch 1.13, hangs when CUDA_LAUNCH_BLOCKING=1 is set; it was repaired in NCCL 2.17.",
         "Unset CUDA_LAUNCH_BLOCKING, or use a PyTorch with NCCL 2.17 or newer (2.0 and later).",
         "CUDA_LAUNCH_BLOCKING, CUDA programming guide", r"CUDA_LAUNCH_BLOCKING\s*[=:]\s*['\"]?1"),
    ("infiniband_error_12", "infiniband nccl_error peer_lost",
         "Completion with error 12 (transport retries exceeded): the other end did not answer over InfiniBand or RoCE. Often the nodes have no common fabric "
         "(in a cloud: not allocated together), a port or cable is down, or the peer died before.",
         "Look whether the peer died first. Test the two nodes with ib_write_bw and all_reduce_perf. NCCL_IB_HCA to leave out wrong adapters, NCCL_IB_GID_INDEX for RoCE, "
         "NCCL_IB_TIMEOUT and NCCL_IB_RETRY_CNT to survive a short flap; NCCL_IB_DISABLE=1 only to prove that it is the fabric.",
         NCCL_ENV, r"(?:error|status)[ =]+12\b|vendor err 129"),
    ("infiniband_local_error", "infiniband nccl_error",
         "Completion with error 4, 10 or 11: memory was not registered or not reachable for the adapter, on this end (4) or the other (10, 11).",
         "ulimit -l must be unlimited in the job; nvidia-peermem loaded or NCCL_NET_GDR_LEVEL=LOC for a trial; PCIe access control (ACS) off.",
         NCCL_ENV, r"(?:Got completion|wc error).*(?:error|status)[ =]+(?:4|10|11)\b"),
    ("memory_lock_limit", "infiniband nccl_error",
         "The adapter could not register memory: the limit of locked memory is too small inside the job.",
         "ulimit -l unlimited for slurmd's jobs (PropagateResourceLimitsExcept=MEMLOCK in slurm.conf, LimitMEMLOCK=infinity in slurmd's unit).",
         "slurm.conf, PropagateResourceLimitsExcept", r"ibv_(?:reg_mr|create_qp|create_cq).*(?:failed|cannot allocate)|Cannot allocate memory.*ibv"),
    ("socket_interface", "nccl_interface rendezvous nccl_error peer_lost",
         "NCCL or gloo took a network interface that does not reach the other nodes (docker0, a virtual bridge, a management port), or none has the name that was given.",
         "NCCL_SOCKET_IFNAME (and GLOO_SOCKET_IFNAME) = the interface between the nodes; ^docker0,lo leaves those out. NCCL_DEBUG=INFO says which one was taken.",
         NCCL_ENV, r"no (?:usable )?(?:socket )?interface found|docker0|virbr|NCCL_SOCKET_IFNAME|connectFullMesh|127\.0\.\d\.1[:<]"),
    ("async_errors_off", _COLLECTIVES + " lingering_job nccl_error",
         "With asynchronous error handling off, a rank that died leaves its peers waiting indefinitely.",
         "TORCH_NCCL_ASYNC_ERROR_HANDLING=3 (NCCL_ASYNC_ERROR_HANDLING=1 before PyTorch 2.2), and a timeout for init_process_group.",
         TORCH_NCCL_ENV, r"NCCL_ASYNC_ERROR_HANDLING\s*[=:]\s*['\"]?0|NCCL_BLOCKING_WAIT"),
    ("flight_recorder", _COLLECTIVES,
         "Without the flight recorder PyTorch cannot name the rank that did not enter the collective.",
         "TORCH_NCCL_TRACE_BUFFER_SIZE=2000 and TORCH_NCCL_DUMP_ON_TIMEOUT=1, then analyse the dumps (torchfrtrace).",
         TORCH_NCCL_ENV, r"FlightRecorder is disabled"),
    ("sequence_zero", _COLLECTIVES,
         "It was the very first collective: the ranks never all came together (a rank failed before, a wrong network interface, a blocked port, two GPUs mixed up).",
         "Look for the rank with an earlier error; try a two-node all_reduce with NCCL_DEBUG=INFO; torch.cuda.set_device(local_rank) before the first collective.",
         NCCL_TROUBLE, r"SeqNum=[01]\b|last completed (?:NCCL )?work: -1"),
    ("long_work_on_rank_0", _COLLECTIVES,
         "Rank 0 did something long (preprocessing, saving, evaluating, downloading) while the others waited in a barrier, longer than the timeout.",
         "Give that one wait a longer timeout (init_process_group(timeout=…), a gloo group for the barrier), or let every rank do it.",
         "torch.distributed.init_process_group, timeout", r"OpType=(?:BROADCAST|BARRIER)|barrier"),
    ("shared_memory_docker", "shared_memory bus_error dataloader_worker nccl_error",
         "/dev/shm is too small: DataLoader workers and NCCL hand tensors over in it, and a container gives 64 MiB by default.",
         "--shm-size or --ipc=host for the container; a larger tmpfs on /dev/shm; fewer workers; torch.multiprocessing.set_sharing_strategy('file_system').",
         "docker run --shm-size; NCCL user guide, Troubleshooting (shared memory)", r"shm|shared memory|bus error"),
    ("file_descriptors", "too_many_files dataloader_worker",
         "DataLoader workers pass tensors as open files; the limit of open files of the job is too small.",
         "ulimit -n 65536 in the job script, or torch.multiprocessing.set_sharing_strategy('file_system').",
         "PyTorch, Multiprocessing package, Sharing strategies", r"too many open files|received 0 items of ancdata"),
    ("worker_killed", "dataloader_worker oom_kill host_oom",
         "The kernel killed a DataLoader worker, most often because the job's memory was used up: each worker holds its own copy of what the data set touches.",
         "Fewer workers or a smaller prefetch_factor; more memory (--mem); arrays instead of lists of Python objects in the data set.",
         DATALOADER, r"DataLoader worker.*(?:Killed|SIGKILL|signal: 9)|exited unexpectedly"),
    ("fragmentation", "cuda_oom",
         "Memory is reserved but split into pieces that are too small.",
         "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (PYTORCH_ALLOC_CONF in newer releases); the same sizes in every step.",
         "PyTorch, CUDA semantics, Memory management", r"reserved (?:by PyTorch )?but unallocated is large|to avoid fragmentation|max_split_size_mb"),
    ("another_process_holds_memory", "cuda_oom",
         "Other processes hold memory of this GPU: what is left of an earlier job, or several ranks on one GPU.",
         "nvidia-smi on the node: whose is it? Each rank needs its own GPU (torch.cuda.set_device(local_rank)).",
         "nvidia-smi --query-compute-apps", r"Process \d+ has [\d.]+ [GM]iB memory in use"),
    ("index_out_of_range", "device_assert cuda_error",
         "An index is out of range, most often a token id beyond the embedding or a label beyond the classes.",
         "CUDA_LAUNCH_BLOCKING=1 for a true traceback, or the same batch on the CPU; compare the vocabulary's size with the largest id.",
         "CUDA_LAUNCH_BLOCKING, CUDA programming guide", r"device-side assert|indexSelect|srcIndex|out of bounds"),
    ("peer_over_nvlink", "cuda_error gpu_lost",
         "Access to another GPU over NVLink failed: a link, the NVSwitch, or fabric manager on this node.",
         "The kernel's lines of the node (Xid 74, SXid): slurm-watchdog diagnose FILE; look whether nvidia-fabricmanager runs.",
         XIDS, r"nvlink|system not yet initialized|fabric"),
    ("nvlink_link", "nvlink_fault",
         "A link between GPUs of this node, or to its NVSwitch, failed: this end, the other end, or the wire.",
         "nvidia-smi nvlink -e on the node; reset its GPUs (nvidia-smi -r) while no job runs there; if it comes again, exchange the GPU or the switch.",
         XIDS),
    ("fabric_manager", "cuda_unavailable",
         "CUDA on machines with NVSwitch needs fabric manager of exactly the driver's version.",
         "systemctl status nvidia-fabricmanager on the node; the same version as the driver.",
         "NVIDIA Fabric Manager user guide", r"system not yet initialized|error 802"),
    ("driver_mismatch", "cuda_unavailable",
         "The driver's kernel module is older or newer than its library: it was updated without a reboot.",
         "Drain the node and reboot it, or unload and load the nvidia modules.",
         "nvidia-smi, NVML", r"driver/library version mismatch"),
    ("iommu", _COLLECTIVES + " cuda_error nccl_error device_wait iommu_fault",
         "With the IOMMU on (many AMD machines), transfers between GPUs over PCIe may hang or give wrong values.",
         "iommu=pt or IOMMU off in the BIOS, and PCIe access control (ACS) off; NCCL_P2P_DISABLE=1 for a trial.",
         "NCCL user guide, Troubleshooting (PCI Access Control Services)", r"IOMMU|AMD-Vi|IO_PAGE_FAULT|P2P/(?:direct|IPC)"),
    ("port_chosen_by_all", "port_in_use rendezvous",
         "MASTER_PORT is the same for two jobs on one node, or a rank of the last run still listens.",
         "A port of the job's own: MASTER_PORT=$((10000 + SLURM_JOB_ID % 50000)), or --rdzv-endpoint with port 0 on one node; ss -ltnp on the node says who has it.",
         "torchrun, --rdzv-endpoint and --master-port", r"in use|errno: 98|EADDRINUSE"),
    ("master_not_reached", "rendezvous peer_lost network",
         "The first node was not reached: MASTER_ADDR is a name that others cannot resolve, an interface they cannot reach, or a port behind a firewall.",
         "MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1); nc -zv HOST PORT from another node; the first node may also have failed at its start: read its lines first.",
         "torchrun (Elastic Launch), Deployment", r"No route to host|timed out|refused|failed to connect|name resolution|could not be resolved"),
    ("gloo_hostname", "rendezvous peer_lost",
         "gloo uses the address that the node's own name resolves to: in many containers and images that is 127.0.1.1.",
         "GLOO_SOCKET_IFNAME = the interface between the nodes, or a correct /etc/hosts.",
         "PyTorch, torch.distributed, Common environment variables", r"connectFullMesh|gloo"),
    ("async_checkpoint_full", "disk_full quota checkpoint checkpoint_overdue",
         "Checkpoints filled the filesystem: with optimizer states each is 12 to 16 bytes a parameter.",
         "Keep fewer (save_total_limit, --keep-last…), delete incomplete ones, look at df -i too; lfs quota or quota -s for the user's limit.",
         "", r"ckpt|checkpoint|\.pt\b|safetensors|global_step|inline_container"),
    ("hub_offline", "network dataset_error missing_file",
         "The compute nodes don't reach the Internet, or the hub limits the rate because every rank asks.",
         "Download on a login node, then HF_HUB_OFFLINE=1 (and TRANSFORMERS_OFFLINE=1); let one rank ask and the others wait.",
         "Hugging Face Hub, Environment variables", r"huggingface|hf_hub|\bhub\b|429 Client Error"),
    ("wandb", "network",
         "The tracker's server did not answer; training itself needs none.",
         "WANDB_MODE=offline, then wandb sync from a login node.", "Weights & Biases, Environment variables", r"wandb"),
    ("cuda_graph_or_arch", "import_error cuda_error",
         "The package was built for another GPU, CUDA or PyTorch than the node has.",
         "python -m torch.utils.collect_env on the node; rebuild the extension there (TORCH_CUDA_ARCH_LIST).",
         "PyTorch, torch.utils.cpp_extension", r"undefined symbol|no kernel image|compiled with|GLIBC"),
    ("fp16_overflow", "loss_scale_minimum loss_nan",
         "Gradients overflow in half precision at every scale: the run has diverged, or its numbers don't fit fp16.",
         "bf16 instead of fp16 where the GPU has it; a lower learning rate or a longer warm-up; restart before the spike and skip those batches.",
         "DeepSpeed configuration, fp16 and bf16", r"loss scale|overflow"),
    ("ray_memory", "ray_actor_died oom_kill",
         "Ray's memory monitor killed a worker because the node was nearly out of memory.",
         "More memory or fewer workers a node; RAY_memory_usage_threshold and RAY_memory_monitor_refresh_ms set the limit.",
         "Ray, Out-Of-Memory Prevention", r"memory pressure|memory usage threshold|running low on memory|\(OOM\)|\braylet\b"),
    ("lock_file", "lock filesystem",
         "Another process holds the lock file (of a cache of compiled kernels or of data), or one that was killed has left it behind.",
         "Who holds it: fuser -v FILE.lock, on each node that shares it; remove a file that no process holds; a cache for each node: TRITON_CACHE_DIR, TORCH_EXTENSIONS_DIR, HF_DATASETS_CACHE.",
         "PyTorch, torch.utils.cpp_extension; filelock", r"filelock|file_baton|portalocker|flock"),
    ("nvrx_timeout", "heartbeat_lost",
         "NVIDIA's ft_launcher ended a rank that had sent no heartbeat, or stayed in a section, for longer than its limit: it hung, or waited for one that did.",
         "All ranks that wait for the one that hangs say the same: stacks of all ranks (slurm-watchdog diagnose FILES) tell them apart; a longer limit for a step that is only slow.",
         "NVIDIA Resiliency Extension, Fault Tolerance", r"get (?:initial|subsequent) heartbeat|out of section for|has been open for"),
    ("jax_heartbeat", "heartbeat_lost xla_error",
         "A process of JAX died or was too busy to say that it lives (a long compilation, a stuck file system).",
         "Its own log says more than the others'; jax.distributed.initialize(heartbeat_timeout_seconds=…) for slow starts.",
         "JAX, jax.distributed.initialize", r"heartbeat timeout|heartbeats|missed heartbeat|coordination|unhealthy"),
    ("xla_memory", "cuda_oom xla_error",
         "XLA wants one piece of memory larger than is left after its share was reserved.",
         "XLA_PYTHON_CLIENT_MEM_FRACTION, a smaller batch a device, rematerialisation.",
         "JAX, GPU memory allocation", r"RESOURCE_EXHAUSTED|XlaRuntimeError"),
    ("xid_off_the_bus", "gpu_lost gpu_fault gpu_off_the_bus xid",
         "The GPU no longer answers over PCIe: power, heat, seating, or the board itself. It needs a reset or reboot.",
         "Keep jobs off the node; nvidia-bug-report.sh before the reboot; again on the same GPU: replace it.",
         XIDS, r"off the bus|GPU is lost|Xid.*\b79\b"),
    ("core_file", "segmentation_fault abort glibc_abort illegal_instruction",
         "A native library crashed; Python cannot locate it.",
         "ulimit -c unlimited, then: gdb PYTHON CORE, `thread apply all bt`, in the same environment; PYTHONFAULTHANDLER=1 gives at least the Python frames.",
         "Python, faulthandler; gdb", r"core dumped|Segmentation fault|SIGSEGV|Aborted|double free|malloc"),
    ("teardown_after_an_error", "teardown wedged_teardown",
         "A rank failed inside a collective and then destroys its process group: that waits for the broken communicator indefinitely, and as nothing exits, srun's "
         "--kill-on-bad-exit never acts.",
         "On the error path print the traceback and os._exit(1) instead of destroy_process_group(); a deadline around the whole job script until then.",
         "PyTorch, torch.distributed, Shutdown", r"out of memory|Error|Traceback|exception"),
    ("stale_kill_switch", "crash_loop",
         "The job ends at each start: a kill-switch file of the last run is still there.",
         "Remove the file that the trainer looks for (--kill-switch-path, --exit-signal and the like) before the next start.", "", r"kill.?switch"),
    ("exit_137", "task_exit launcher lingering_job dead_rank", _KILLED[0], _KILLED[1], _KILLED[2],
         r"\bexit(?: ?code|ed with code|s with return code =)?:? (?:137|-9)\b|signal 9|SIGKILL"),
    ("exit_bus_error", "task_exit launcher", _BUS_ERROR[0], _BUS_ERROR[1], _BUS_ERROR[2],
         r"\bexit(?: ?code|ed with code|s with return code =)?:? (?:135|-7)\b|Bus error|SIGBUS"),
    ("py_spy_not_allowed", "undumpable",
         "The stack could not be read: the user may not trace the process (yama, a container without SYS_PTRACE), or the process is in a system call that does not return.",
         "If others on the same node could be read, it is the process: /proc/PID/status, wchan, stack and open files show what it waits for. If none could: root, or --cap-add=SYS_PTRACE.",
         "py-spy, When do you need to run as sudo", r"EPERM|not permitted|suspend"),
    # ------------------------------------------------------------------ rows for a class, whatever the words
    ("dataloader_waits", "dataloader",
         "A worker process died, inherited a locked lock at fork, or waits for storage.",
         "Check whether its workers (children of the rank) are alive, and their stacks. num_workers=0 for a trial, a timeout= for the loader, multiprocessing_context='spawn' or 'forkserver'.",
         DATALOADER),
    ("collective_hang", "collective_hang collective",
         "The others wait for a rank that did not come to the collective, or came to another one.",
         "That rank's own stack and first error (slurm-watchdog show, diagnose); TORCH_NCCL_TRACE_BUFFER_SIZE=2000 for next time.",
         TORCH_NCCL_ENV),
    ("collective_timeout", "nccl_watchdog collective_timeout barrier_timeout collective_desync",
         "The ranks that report the timeout are the ones that waited: the cause is with a rank that did not come, or came to another collective.",
         "Find the rank that is missing or behind, and its first error; stacks of all ranks before the job is ended (slurm-watchdog diagnose FILES); TORCH_NCCL_TRACE_BUFFER_SIZE=2000 for next time.",
         TORCH_NCCL_ENV),
    ("collective_mismatch", "collective_mismatch",
         "A collective is behind an `if` that is true on some ranks only, or ranks see different numbers of batches.",
         "TORCH_DISTRIBUTED_DEBUG=DETAIL shows both calls; pad or drop uneven batches (Join, drop_last).",
         "PyTorch, torch.distributed, Debugging applications"),
    ("message_size", "message_size",
         "Nodes run different versions of NCCL or of its plugins, or ranks call collectives of other sizes.",
         "NCCL_DEBUG=VERSION on every node; the same container and LD_LIBRARY_PATH everywhere; TORCH_DISTRIBUTED_DEBUG=DETAIL compares the calls.",
         NCCL_ENV),
    ("infiniband", "infiniband rdma_error link_down",
         "A link, adapter or the peer below NCCL failed.",
         "ibstat and the kernel's lines on both nodes; perfquery for errors; NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=NET; NCCL_IB_HCA to leave the adapter out for a trial.",
         NCCL_ENV),
    ("peer_lost", "peer_lost nccl_error ending_process",
         "Another rank or its node went away: this line is a consequence.",
         "The rank that ended first, and why: its lines, and srun's or Slurm's word on its node.",
         NCCL_TROUBLE),
    ("lingering_job", "lingering_job dead_rank task_exit",
         "A rank is dead and the others wait indefinitely, because nothing ends the step when one task fails.",
         "srun --kill-on-bad-exit=1 --wait=60 (or KillOnBadExit=1 in slurm.conf), and TORCH_NCCL_ASYNC_ERROR_HANDLING=3 (NCCL_ASYNC_ERROR_HANDLING=1 before PyTorch 2.2).",
         "srun --kill-on-bad-exit, --wait; " + TORCH_NCCL_ENV),
    ("out_of_gpu_memory", "cuda_oom",
         "The model, its activations or one unusually long batch does not fit.",
         "A smaller micro batch, activation checkpointing, sharding; if it came late in a run: the longest batch, or what is kept from step to step.",
         "PyTorch, Understanding CUDA Memory Usage"),
    ("killed", "killed", _KILLED[0], _KILLED[1], _KILLED[2]),
    ("bus_error", "bus_error", _BUS_ERROR[0], _BUS_ERROR[1], _BUS_ERROR[2]),
    ("watchdog_stuck", "watchdog_stuck",
         "The thread of that rank that watches its collectives could not proceed: another thread holds the interpreter's lock (GIL) inside a call of CUDA, or a call of "
         "the driver does not return. It is not a collective's timeout.",
         "Stacks of all threads of that rank (py-spy dump --native, slurm-watchdog diagnose JOB); the kernel's lines of its node (Xid); "
         "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC if it is only slow.",
         TORCH_NCCL_ENV),
    ("out_of_host_memory", "oom_kill host_oom memory_kill",
         "The job used more memory than its cgroup or the node has: DataLoader workers, loading a checkpoint on every rank at once, a leak.",
         "seff or sacct --format=MaxRSS; fewer workers; load with mmap=True or one rank at a time; --mem.",
         "cgroup.conf, ConstrainRAMSpace"),
    ("port_in_use", "port_in_use",
         "Another program has the port of the rendezvous.",
         "Another MASTER_PORT; ss -ltnp on the first node; processes that are left of an earlier job.",
         "torchrun, --master-port"),
    ("rendezvous", "rendezvous",
         "Not all nodes came to the meeting point in time: one did not start, or could not reach it.",
         "Count which nodes printed anything; the same --nnodes and --rdzv-id everywhere; one torchrun a node (--ntasks-per-node=1).",
         "torchrun (Elastic Launch), Rendezvous"),
    ("device_assert", "device_assert", "An index is out of range in a GPU kernel.",
         "CUDA_LAUNCH_BLOCKING=1, or the same batch on the CPU: then the traceback is true.", "CUDA_LAUNCH_BLOCKING, CUDA programming guide"),
    ("cuda_error", "cuda_error",
         "The line that raises is rarely the one that failed: kernels run later than they are started. Often the program, sometimes the GPU.",
         "The kernel's lines of the node (Xid 13, 31: the program; 48, 74, 79, 94, 95: the hardware): slurm-watchdog diagnose FILE; then CUDA_LAUNCH_BLOCKING=1 or compute-sanitizer.",
         XIDS),
    ("gpu_ecc", "gpu_ecc ecc_double_bit uncontained_ecc row_remap_failed",
         "A cell of the GPU's memory is broken.", "nvidia-smi -q -d ECC,ROW_REMAPPER; reset the GPU so that the row is replaced; again, or remapping failed: replace it.", "NVIDIA, GPU Memory Error Management"),
    ("gpu_lost", "gpu_lost gpu_off_the_bus gpu_init_failed",
         "The driver lost the GPU.", "Keep jobs off the node, nvidia-bug-report.sh, reboot; look at power and temperature before it happened.", XIDS),
    ("gpu_fault", "gpu_fault gsp_rpc_timeout gsp_error nvlink_error", "A fault that the driver reports (Xid).",
         "slurm-watchdog diagnose FILE on the node's log says what it means and which component it points to; dcgmi diag -r 3 on the drained node.", XIDS),
    ("gpu_clock_low", "gpu_clock_low slow_node cpu_throttled",
         "Heat, power capping, a power brake signal, or a manual nvidia-smi -lgc.",
         "nvidia-smi -q -d PERFORMANCE,CLOCK,POWER on this node and a healthy one, and compare; cooling; a burn-in of the node alone.",
         "nvidia-smi, clocks event reasons"),
    ("filesystem", "filesystem filesystem_stall filesystem_outage io_error stale_file_handle nfs_server_silent lustre_connection_lost hung_task",
         "The storage does not answer, or forgot an open file. Neither the job nor its node is to blame.",
         "Is it one node or all (df on others)? Ask the storage's people with mount, server and time; restart only when the mount answers; local disk for logs.",
         ""),
    ("read_only", "read_only filesystem_read_only filesystem_error",
         "The kernel made the filesystem read-only after an error of its disk, or it was mounted so.",
         "The kernel's lines of that node; drain it if the disk is its own.", ""),
    ("checkpoint", "checkpoint checkpoint_overdue",
         "Saving takes long or waits for the storage; the others wait in a barrier meanwhile.",
         "Compare with how long earlier ones took; every rank its own file or an asynchronous save; a longer timeout for that barrier.",
         "torch.distributed.checkpoint, async_save"),
    ("weights_only", "weights_only",
         "Since PyTorch 2.6 torch.load reads only tensors and a few plain types; the file is whole, and holds other objects as well (optimizer settings, numpy scalars, the framework's own classes).",
         "Update the framework that wrote it, allow its classes with torch.serialization.add_safe_globals, or load with weights_only=False a file that you wrote yourself.",
         "PyTorch, torch.load (weights_only)"),
    ("checkpoint_corrupt", "checkpoint_corrupt",
         "The file was cut off: the job ended or the disk was full while it was written.",
         "Resume from the one before; write to a temporary name and rename; df and quota at that time.", ""),
    ("checkpoint_mismatch", "checkpoint_mismatch",
         "Model, parallel layout or vocabulary is not the one that was saved.",
         "Compare the options of both runs; convert the checkpoint (universal, distributed) when the number of ranks changes.",
         "DeepSpeed Universal Checkpointing; torch.distributed.checkpoint"),
    ("disk_full", "disk_full quota no_space",
         "No space or no inodes are left, often for checkpoints, core files or caches in a home directory.",
         "df -h and df -i on the path in the message, quota -s or lfs quota; move TMPDIR, HF_HOME, TRITON_CACHE_DIR, TORCHINDUCTOR_CACHE_DIR.",
         ""),
    ("teardown", "teardown wedged_teardown",
         "Training is over; a thread, a destructor or the destruction of NCCL's communicators does not end.",
         "All is saved, so it may be cancelled. destroy_process_group() before the end of main; a daemon or a tracker that is still uploading.",
         "PyTorch, torch.distributed, Shutdown"),
    ("debugger", "debugger", "A breakpoint was left in: the rank waits for a terminal that is not there.",
         "Remove breakpoint() or set_trace(), or PYTHONBREAKPOINT=0.", "Python, PYTHONBREAKPOINT"),
    ("lock", "lock gil", "Two threads wait for each other, or a lock was copied by fork().",
         "All threads of that rank (py-spy dump shows who holds the interpreter's lock); start worker processes before threads, or spawn them.",
         "Python, multiprocessing, Contexts and start methods"),
    ("compilation", "compilation", "Kernels are compiled: minutes at the first step, and again when shapes change.",
         "Wait; fixed shapes or mark_dynamic; TORCH_LOGS=recompiles says why; caches on a local disk.", "torch.compile, Troubleshooting"),
    ("network_wait", "network", "A rank waits for a server outside the cluster: a hub, a tracker, an object store.",
         "A deadline and retries for that call; do it in the background or on rank 0 only, not inside a collective's reach.", ""),
    ("subprocess", "subprocess", "The rank waits for a program that it started.", "What that program does: ps --forest, and its own stack.", ""),
    ("worker_says_nothing", "launcher task_exit mpi_abort terminated",
         "The launcher saw a worker fail, and the worker's own words are elsewhere or were mixed with those of others.",
         "torchrun --role $(hostname -s): --tee 3 (or srun --label) puts host and rank before each line; --log-dir keeps a file a rank; @record on main keeps the traceback.",
         "torchrun (Elastic Launch), --tee, --log-dir; torch.distributed.elastic.multiprocessing.errors.record"),
    ("undumpable", "undumpable missing_rank",
         "A rank without a stack is often the one to look for: it is dead, stopped, or in a system call that does not return.",
         "On its node: is the process there, in which state, on which file (ps -o pid,stat,wchan, ls -l /proc/PID/fd)? Is the node itself well?",
         "proc(5), stat and wchan"),
    ("crash", "crash", "The process is ending after an error of a native library or an uncaught C++ exception.",
         "Its last lines in the log, and the core file: gdb PYTHON CORE, `thread apply all bt`.", "gdb"),
    ("queue", "queue", "The rank waits for a queue that another thread or process of the program fills.",
         "The thread or process on the other side: its stack, and whether it lives.", "Python, multiprocessing, Queues"),
    ("import_hangs", "import", "Importing reads thousands of small files: slow on a shared filesystem when many ranks start at once.",
         "The environment on a local disk or in one image (container, squashfs); a first start alone fills the cache.", ""),
    ("data_preparation", "data_preparation", "An index or cache of the data set is built, often by one rank while the others wait.",
         "Build it once before the job; a longer timeout for the first collective.", "Megatron-LM, --data-cache-path; datasets, cache"),
    ("stalled", "stalled_progress hang collective_hang", "The log says nothing of a step any more; heartbeat lines and progress bars do not count.",
         "Stacks of all ranks now, before anything is ended (slurm-watchdog diagnose JOB); which rank is not in the collective?", ""),
    ("rank_stopped", "rank_stopped", "A process was stopped (SIGSTOP, a debugger, a tool that died while it held it).",
         "kill -CONT PID on the node, after a look at who traces it (TracerPid in /proc/PID/status).", "signal(7), ptrace(2)"),
    ("slurm_unreachable", "slurm_unreachable partition_or_outage", "Slurm's controller or the network is down; jobs continue without it.",
         "scontrol ping; do nothing to the jobs until it answers.", "slurmctld"),
    ("pipeline", "pipeline", "Its neighbour in the pipeline does not send: the cause is a stage further on.",
         "Follow the stages to the one that waits for no other.", ""),
    ("device_wait", "device_wait backward gpu_idle_rank",
         "The rank waits for its GPU, which may itself wait in a collective for the other ranks.",
         "Which ranks are not in it? GPU use and clocks of that rank against the others; the kernel's lines of its node.", ""),
    ("loss_nan", "loss_nan", "The run diverged, a batch is damaged, or a GPU computes wrongly.",
         "Restart from before and skip those batches; if it does not happen again on other nodes, test that GPU; anomaly detection for one step.",
         "torch.autograd.set_detect_anomaly"),
    ("loss_spike", "loss_spike", "Often it recovers within some tens of steps.",
         "Wait; if not: restart from before and skip the batches, lower the learning rate.", ""),
    ("slow_job", "slow_job", "One GPU, link or node is slower than the rest, and the rest waits for it; or the storage is.",
         "Compare clocks and link widths of all nodes: slurm-watchdog test-nodes on those that are idle. A watchdog of the cluster searches for the node with each restart.", ""),
    ("node_failure", "node_failure node_down agent_silent", "Slurm's controller lost the node: it crashed, rebooted, or its network is down.",
         "sinfo -R and scontrol show node; the console's or BMC's log; the kernel's lines before it.", "slurm.conf, SlurmdTimeout"),
    ("time_limit", "time_limit", "A normal end.", "--signal=B:USR1@300 to save in time; a chain with --dependency=afterany or requeue.", "sbatch --signal, --time"),
    ("preempted", "preempted requeued", "A normal end: a job of higher priority took the nodes, or it was requeued.",
         "--requeue and a checkpoint at the signal (GraceTime).", "slurm.conf, PreemptMode, GraceTime"),
    ("checkpoint_write", "checkpoint_write", "torch.save could not write all of its file: the disk is full, a quota is used up, or the storage failed.",
         "df -h, df -i and the quota of that path, from the node itself; delete the half-written checkpoint before the next start.", ""),
    ("import_error", "import_error missing_file", "A module or file is not on this node or not in this environment.",
         "The same on all nodes? which python, and the path in the message, by srun on each node; the environment's activation in the batch script.", ""),
    ("permission", "permission", "The user may not read or write that path, on this node or at all.",
         "ls -ld of each directory of the path, from the node itself; an expired ticket (Kerberos, AFS).", ""),
    ("cuda_unavailable", "cuda_unavailable", "The job has no GPU, or the node's driver is ill.",
         "nvidia-smi by srun on that node; --gres or --gpus in the job; CUDA_VISIBLE_DEVICES.", ""),
    ("process_limit", "process_limit",
         "The limit of processes or threads of the user or of the job's cgroup was reached; each rank's libraries start as many threads as the node has cores.",
         "OMP_NUM_THREADS and OPENBLAS_NUM_THREADS in the job script; fewer workers; ulimit -u and TasksMax= of slurmd on that node.",
         "getrlimit(2), RLIMIT_NPROC; systemd.resource-control, TasksMax="),
    ("not_started", "not_started",
         "The step asks for what its allocation does not have, or its container could not be brought to the node.",
         "srun's own line, and the lines of enroot below it; compare srun's options with those of sbatch; does the image start on that node alone?",
         "srun, NOTES; pyxis, Usage"),
    ("duplicate_gpu", "duplicate_gpu", "Two ranks chose the same GPU.",
         "torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before the process group; one GPU a task with --gpus-per-task needs device 0.", NCCL_TROUBLE),
    ("segmentation_fault", "segmentation_fault abort glibc_abort segfault", "A native library crashed.",
         "ulimit -c unlimited for a core file and gdb's `thread apply all bt`; PYTHONFAULTHANDLER=1; the newest change of a native package first.", "Python, faulthandler"),
    ("dataset_error", "dataset_error", "A file of the data set is damaged or not what the reader expects.",
         "Read that file alone; clear the cache of the data set; compare its size with the source.", ""),
    ("program", "python_exception traceback assertion shape_mismatch dtype_device program_error", "The program failed; its node is not the cause.",
         "The last frame in your own code, in the traceback of the rank that failed first; the same data and step on one rank alone.", ""),
    ("loader_worker", "dataloader_worker", "A worker of the data loader died: no memory or /dev/shm was left, or the data set's code failed.",
         "num_workers=0 shows its own error; df -h /dev/shm and the kernel's lines for a kill.", DATALOADER),
    ("shared_memory", "shared_memory", "Loaders and NCCL share memory between processes in /dev/shm, which is small in a container.",
         "df -h /dev/shm on the node; --shm-size or --ipc=host for the container; fewer workers.", ""),
    ("open_files", "too_many_files", "Each tensor that processes share holds a file open.",
         "ulimit -n; torch.multiprocessing.set_sharing_strategy('file_system').", "PyTorch, torch.multiprocessing, Sharing strategies"),
    ("no_interface", "nccl_interface", "The interface that NCCL is configured to use does not exist on this node.",
         "ip -br address on each node; NCCL_SOCKET_IFNAME and NCCL_IB_HCA.", NCCL_ENV),
    ("fell_silent", "heartbeat_lost ray_actor_died xla_error", "The process that stopped answering died, or was too busy to answer.",
         "Its own log first; sacct and the kernel's lines of its node, which a kill for memory is in.", ""),
    ("other_processor", "illegal_instruction", "A library was built for another processor than this node has.",
         "lscpu of this node beside one where it runs; rebuild for the older of them, or --constraint.", ""),
    ("division", "floating_point_trap", "Native code divided by zero, or traps were switched on.", "PYTHONFAULTHANDLER=1 for the place; the newest change of a native package first.", "Python, faulthandler"),
    ("ended_by_someone", "cancelled interrupted", "A user, a script or Slurm ended it.", "sacct --format=JobID,State,ExitCode,Reason; a line CANCELLED … by UID has the user.", "sacct"),
    ("config_error", "config_error", "An option is misspelt, missing, or of another version.", "The first line of the message names it.", ""),
))
# fmt: on


def hints_for(class_name: str, text: str) -> tuple[Hint, ...]:
    """What a fault of this class usually is, at most `MAX_HINTS`: first what the words of `text` say, then
    what the class does.

    `class_name` is a class of a log line, a stack or a line of the kernel, or a kind of incident; for an
    unknown one there is nothing. `text` is the line, the stack or the summary that the class was found in,
    and may be empty.
    """
    searched = BOILERPLATE.sub("", text[:MAX_TEXT])
    rows = [row for row in HINTS if class_name in row.classes]
    telling = [row.hint for row in rows if row.pattern is not None and row.pattern.search(searched)]
    general = [row.hint for row in rows if row.pattern is None]
    return tuple((*telling, *general)[:MAX_HINTS])
