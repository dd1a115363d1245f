"""Lines of a job's log that look like an error. A row: name, what may be in the lower-cased line, and the proof.

Each matches something that programs print when they fail, never the bare word "error", which healthy logs are full of.
A row is tried only if one of its `needles` is in the line. The scanner (slurm_watchdog.parse.training_log.block_scan) looks for the letters of all
needles of all tables in whole blocks of a log: the fewer different ones there are, the faster it reads. A needle that
contains another one ("cuda error: " contains "error") costs it nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from slurm_watchdog.knowledge.xids import XIDS
from slurm_watchdog.model.observations import FaultSeverity


@dataclass(frozen=True)
class Signature:
    name: str
    needles: tuple[str, ...]
    """In lower case, without digits at their ends; one of them is in every line that matches."""
    regex: re.Pattern[str]
    consequence: bool = False
    """It follows from something else, which is to be looked for before it."""


def _row(name: str, needles: tuple[str, ...], regex: str, *, consequence: bool = False) -> Signature:
    return Signature(name, needles, re.compile(regex, re.IGNORECASE), consequence)


_MEMORY_XIDS = (48, 57, 58, 64, 94, 95, 140, 171, 172)
"""Of slurm_watchdog.knowledge.xids those that speak of the GPU's memory and end a program."""
_LOST_XIDS = tuple(
    row.number
    for row in XIDS.values()
    if row.blame == "hardware" and row.severity is FaultSeverity.CRITICAL and row.number not in _MEMORY_XIDS
)
"""The GPU no longer works before it is reset. What a program brings about itself (13, 31, 43, 45) is in neither."""


def _xid(numbers: tuple[int, ...]) -> str:
    return rf"NVRM: Xid \((?:PCI:)?[\w:.]+\): (?:{'|'.join(map(str, sorted(numbers)))})\b"


_NAMED_RANK = r"(?:(?:global |peer )?rank|worker rank)[ =:#]{0,2}(?P<peer>\d{1,6})\b"
LOST_A_RANK: Final = (
    rf"\b(?:lost|no|dropped|broken) (?:the )?(?:connection|contact|heartbeats?|response|reply|answer|communication) (?:to|from|with|of) {_NAMED_RANK}"
    rf"|\b(?:connection|link|socket|heartbeats?) (?:to|from|with|of) {_NAMED_RANK.replace('peer>', 'peer2>')} (?:was |is |has |been )*(?:lost|closed|reset|dropped|timed out|broken|missing|stopped)"
    rf"|\b(?:lost|unreachable:?|timed out waiting for|timeout waiting for|gave up waiting for|waited too long for) {_NAMED_RANK.replace('peer>', 'peer3>')}"
    rf"|\b{_NAMED_RANK.replace('peer>', 'peer4>')} (?:is |has |was |did |does )*(?:unreachable|not respond\w*|stopped responding|disconnected)\b"
)
"""A rank says in words of a program's own that it lost another one, which it names."""

# The first that matches names the line: what says most stands first. Where a program repeats a peer's words, the words about the
# peer stand before those about the fault itself; what a hub or an object store answered stands before the socket's own words.
SIGNATURES: tuple[Signature, ...] = (
    # What the launcher, Slurm or a watchdog thread says about somebody else.
    _row("launcher", ("childfailederror",), r"ChildFailedError", consequence=True),
    _row("launcher", ("failed (exitcode",), r"failed \(exitcode: -?\d+\)", consequence=True),
    _row("launcher", ("killing subprocess", "exits with return code", "exited with code", "crashed with exit code", "bad termination", "terminated with signal", "terminated with code", "killed by signal: "), r"Killing subprocess \d+|exits with return code = -?\d+|\brank \d+ \(PID \d+\) exited with code -?\d+|\bRank \d+ crashed with exit code|BAD TERMINATION OF ONE OF YOUR|\bprocess (?:\d+|with PID \d+) terminated with (?:signal|code)|KILLED BY SIGNAL: \d+", consequence=True),
    _row("launcher", ("task launch for", "application launch failed"), r"srun: error: (?:Task launch for StepId=\S+ failed on node|Application launch failed)", consequence=True),
    _row("launcher", ("calledprocesserror", "non-zero exit"), r"CalledProcessError: Command .* (?:returned non-zero exit status|died with)", consequence=True),
    _row("launcher", ("processexitedexception", "processraisedexception"), r"Process(?:Exited|Raised)Exception", consequence=True),
    _row("launcher", ("mpirun", "mpiexec", "orterun", "prterun"), r"\b(?:mpirun|mpiexec|orterun|prterun)(?:\.real)? (?:noticed that|has exited due to|detected that)", consequence=True),
    _row("launcher", ("ssh exited with",), r"^pdsh@\S+: \S+: ssh exited with exit code \d+", consequence=True),
    # How a rank ended, in tables and boxes of several lines: slurm_watchdog.knowledge.launcher_exits reads who and how.
    _row("launcher", ("received by pid",), r"\bSignal \d+ \(SIG[A-Z0-9]+\) received by PID \d+", consequence=True),
    _row("launcher", ("process name: [",), r"^\s*Process name: \[\S+,\s?\d+\]", consequence=True),
    _row("launcher", ("exit code:",), r"^(?:=\s+|\s+)EXIT CODE:\s+\d+\s*$", consequence=True),
    _row("launcher", ("running at",), r"^=\s+(?:RANK \d+ )?PID \d+ RUNNING AT \S+", consequence=True),
    _row("launcher", ("exit string:",), r"^YOUR APPLICATION TERMINATED WITH THE EXIT STRING: ", consequence=True),
    _row("launcher", ("signal",), r"^signal \d{1,2} \([A-Z][A-Za-z ]+\)\.$", consequence=True),
    _row("launcher", ("died from signal", "exited with code"), r"^\s?(?:(?:\S+: )?rank \d+ )?(?:died from signal|exited with code) \d+", consequence=True),
    _row("mpi_abort", ("mpi_abort",), r"MPI_ABORT was invoked on rank|application called MPI_Abort\(", consequence=True),
    _row("launcher", ("bad command exit code", "pod failed"), r"Encountered a bad command exit code|\bLAUNCH INFO \S+ \S+ Pod failed", consequence=True),
    # Ray guesses in the same line what may have killed it: memory is one of the guesses.
    _row("ray_actor_died", ("died or was killed",), r"\bworker died or was killed (?:while executing a task )?by an unexpected system error", consequence=True),
    _row("collective_mismatch", ("mismatch between collectives",), r"Detected mismatch between collectives on ranks"),
    _row("collective_desync", ("caused the desync",), r"ranks that caused the desync are", consequence=True),
    _row("barrier_timeout", ("monitoredbarrier",), r"failed to pass monitoredBarrier|reached monitoredBarrier, but received errors|Timed out waiting.*monitoredBarrier", consequence=True),
    # A rank waited for a key that another one was to write.
    _row("collective_timeout", ("wait timeout after",), r"\bwait timeout after \d+ ?ms, keys: ", consequence=True),
    _row("collective_timeout", ("missing collectives status", "nrt_timeout"), r"\bmissing collectives status on Neuron Device\b|\bNRT_TIMEOUT\b", consequence=True),
    _row("nccl_watchdog", ("watchdog",), r"Watchdog caught collective operation timeout", consequence=True),
    _row("nccl_watchdog", ("watchdog",), r"watchdog thread terminated(?! with exception: (?:CUDA|HIP) error)|ProcessGroupNCCL's watchdog got stuck|detected by watchdog at work", consequence=True),
    _row("nccl_watchdog", ("no heartbeat of its watchdog",), r"detected no heartbeat of its watchdog", consequence=True),
    _row("nccl_watchdog", ("timeout at nccl work", "nccl operations have failed", "collective timeout", "data inconsistency"), r"Timeout at NCCL work|To avoid data inconsistency, we are taking the entire process down|Some NCCL operations have failed or timed out|due to (?:a )?collective timeout", consequence=True),
    _row("collective_timeout", ("timed out waiting", "deadline exceeded", "deadline_exceeded", "broadcasted by subset", "ranks joining collective"), r"Timed out waiting \d+ ?ms for (?:send|recv) operation|\bDEADLINE_EXCEEDED\b|tensors were submitted to be reduced, gathered or broadcasted by subset of ranks|\bNot all ranks joining collective", consequence=True),
    _row("heartbeat_lost", ("heartbeat", "unhealthy", "coordination", "service detected fatal"), r"heartbeat timeout|stopped sending heartbeats|missed (?:too many )?heartbeats|CoordinationServiceError|(?:coordination|distributed) service (?:detected fatal|is unavailable|agent .*error)|error from (?:the )?coordination service|[Hh]eartbeat monitor timed out", consequence=True),
    _row("abort", ("terminate called",), r"terminate called (?:after throwing an instance of|without an active exception)"),
    # The GPU
    _row("device_assert", ("device-side assert", "assertion `"), r"device-side assert triggered|\.cu:\d+:.* Assertion `.*` failed"),
    _row("cuda_oom", ("out of memory", "oom when allocating", "cudaerrormemoryallocation", "alloc_failed", "resource_exhausted", "resourceexhaustederror"), r"(?:CUDA|HIP|NPU|XPU|MPS(?: backend)?) out of memory|(?:CUDA|HIP)(?: driver)? error(?:\(\d+\))?[:,] out of memory|cudaErrorMemoryAllocation|torch\.(?:cuda\.)?OutOfMemoryError|[Cc]uda failure .*out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDA_ERROR_OUT_OF_MEMORY|OOM when allocating tensor|RESOURCE_EXHAUSTED: .*(?:memory|alloc)|ResourceExhaustedError: (?:Graph execution|.*(?:OOM|memory|alloc))|Out of memory (?:while trying to )?allocat|Allocator .* ran out of memory|tried to allocate .* out of memory"),
    _row("gpu_ecc", ("ecc error", "error_ecc", "nvrm: xid"), r"uncorrectable ECC error|CUDA_ERROR_ECC_UNCORRECTABLE|" + _xid(_MEMORY_XIDS)),
    _row("gpu_lost", ("fallen off the bus", "gpu is lost", "hw exception by gpu", "error_device_lost", "nvrm: xid"), r"fallen off the bus|\bGPU is lost\b|^HW Exception by GPU |_ERROR_DEVICE_LOST\b|" + _xid(_LOST_XIDS)),
    _row("cuda_unavailable", ("no cuda", "nvidia driver", "version is insufficient", "driver initialization failed", "driver/library version", "invalid device ordinal", "busy or unavailable", "system not yet initialized", "no nvidia gpu"), r"no CUDA-capable device|No CUDA GPUs are available|Found no NVIDIA driver|CUDA driver version is insufficient|CUDA driver initialization failed|Driver/library version mismatch|invalid device ordinal|devices? (?:is|are|\(s\) is/are) busy or unavailable|system not yet initialized|No NVIDIA GPU"),
    _row("cuda_error", ("cuda error: ", "cuda error(", "cudaerror", "cuda_error_", "cuda driver error", "cuda failure", "hip error: ", "cublas_status", "cudnn_status", "cusolver error", "cufft_", "illegal memory access", "access fault by gpu"), r"CUDA error: |CUDA error\(\d+\)|^Memory access fault by GPU |c10::CUDAError|CUDA_ERROR_[A-Z_]+|CUDA driver error|(?<!Unhandled)cudaError[A-Z]\w+|Cuda failure|HIP error: |CUBLAS_STATUS_(?!SUCCESS)[A-Z_]+|CUDNN_STATUS_(?!SUCCESS)[A-Z_]+|cusolver error|CUFFT_[A-Z_]+ERROR|an illegal memory access was encountered"),
    # NCCL and the network below it
    _row("duplicate_gpu", ("duplicate gpu",), r"Duplicate GPU detected"),
    _row("infiniband", ("got completion", "got async", "local catastrophic", "transport retry"), r"[Tt]ransport retry count(?:er)? exceeded|NET/IB ?: Got completion .*(?:with error|with status|status=)|NET/IB ?:.*Got async (?:fatal )?event ?: ?(?!.*(?:port active|client reregist|GID|P_?Key|SM change|LID change))|\bmlx\d+: .*got completion with error|local catastrophic error"),
    _row("infiniband", ("ibv_",), r"(?:Call to )?\bibv_\w+(?:\(\))? failed|\bibv_\w+ .*\berror\b"),
    _row("nccl_interface", ("no socket interface", "no interface found"), r"Bootstrap ?: [Nn]o (?:socket )?interface found|NET/Socket ?: [Nn]o (?:usable |socket )?interface found"),
    _row("shared_memory", ("shared memory", "/dev/shm", "</torch_"), r"creating shared memory segment|out of shared memory(?! \(shm\)\. Please)|insufficient shared memory|unable to (?:open|mmap|allocate|write to|resize) shared memory|unable to (?:write to|mmap \d+ bytes from) file </torch_|No space left on device.*/dev/shm|/dev/shm.*No space left on device"),
    _row("port_in_use", ("already in use",), r"Address already in use|EADDRINUSE"),
    _row("network", ("couldn't connect to", "max retries exceeded", "name resolution", "name or service not known", "certificate_verify", "http error", "client error", "server error", "hfhubhttperror", "localentrynotfound", "endpointconnection", "(slowdown)", "could not resolve host", "sslerror", "ssleof", "sslzero", "sslcert", "repositorynotfound", "gatedrepo", "clienterror", "commerror", "incompleteread", "readtimeout", "connecttimeout", "api_core.exceptions", "read timed out", "chunkedencoding", "connection aborted", "protocolerror", "offlinemodeisenabled", "clientconnector"), r"couldn't connect to '?https?:|Max retries exceeded with url|Temporary failure in name resolution|Name or service not known|CERTIFICATE_VERIFY_FAILED|\bSSL(?:Error|EOFError|ZeroReturnError|CertVerificationError)\b|\b[45]\d\d (?:Client|Server) Error\b|HfHubHTTPError|LocalEntryNotFoundError|EndpointConnectionError|\(SlowDown\)|Could not resolve host|RepositoryNotFoundError|GatedRepoError|\bClientError: An error occurred|wandb.*CommError|IncompleteRead|Read(?:Timeout(?:Error)?|TimeoutError)\b|Connect(?:Timeout|TimeoutError)\b|\bapi_core\.exceptions\.[A-Z]\w+: [45]\d\d |Read timed out|ChunkedEncodingError|Connection aborted|urllib\d?\.\w*\.?\w*HTTPError|HTTPError: |HTTP Error [45]\d\d|OfflineModeIsEnabled|ClientConnector\w*Error"),
    # What the system says of a file, and not of a peer: it has a path.
    _row("io_error", ("timed out: ", "host is down: ", "no route to host: ", "unreachable: "), r"\[Errno 1\d\d\] (?:Connection timed out|Host is down|No route to host|Network is unreachable): b?['\"]/"),
    _row("rendezvous", ("rendezvous", "waiting for clients", "store based barrier", "client socket has", "connectfullmesh", "failed to connect to", "failed to connect/validate"), r"Rendezvous(?:Timeout|Connection|Closed|State)?Error|rendezvous (?:failed|timed out|timeout)|Timed out after \d+ seconds waiting for clients|store based barrier on rank|client socket has (?:timed out|failed to connect)|[Cc]onnectFullMesh|client failed to connect/validate|failed to connect to (?:the )?(?:coordinator|master|rendezvous|TCPStore)", consequence=True),
    _row("peer_lost", ("lost communication with a remote daemon",), r"\b(?:ORTE|PRTE|PMIX) has lost communication with a remote daemon", consequence=True),
    _row("peer_lost", ("remoteerror", "remote process exited"), r"ncclRemoteError|NCCL error: remote process exited", consequence=True),
    _row("peer_lost", ("connection", "broken pipe", "socket closed", "socket timeout", "recvvalue", "recvvector", "sendbytes", "failed to recv", "pair closure", "distnetworkerror", "gloo/transport"), r"Connection closed by (?:remote )?peer|Connection reset by (?:remote )?peer|\bSocket (?:closed|Timeout)|\b(?:recvValue|recvVector|sendBytes) failed|\bBroken pipe\b|Failed to recv, got 0 bytes|timeout caused pair closure|ConnectionResetError|DistNetworkError|gloo/transport/\w+/\w+\.cc:\d+\]", consequence=True),
    _row("peer_lost", ("connection refused", "connection timed out", "no route to host"), r"\bConnection refused\b|\bConnection timed out\b|\bNo route to host\b", consequence=True),
    _row("peer_lost", ("connection", "contact with", "contact to", "heartbeat", "response from", "reply from", "answer from", "communication with", "link to rank", "lost rank", "unreachable", "waiting for rank", "respond", "disconnected"), LOST_A_RANK, consequence=True),
    _row("nccl_error", ("nccl error", "systemerror", "internalerror", "remoteerror", "cudaerror", "invalidusage", "communicator was aborted", "distbackenderror", "hccl"), r"NCCL error|HCCL function error|hccl api failed|\bEI0006\b|NCCL communicator was aborted|DistBackendError|ncclSystemError|ncclInternalError|ncclRemoteError|ncclUnhandledCudaError|ncclInvalidUsage", consequence=True),
    # The node
    _row("disk_full", ("no space left", "low on resource: ephemeral"), r"No space left on device|The node was low on resource: ephemeral-storage"),
    _row("checkpoint_write", ("pytorchstreamwriter", "unexpected pos ", "file write failed"), r"PytorchStreamWriter failed writing|inline_container\.cc\S*\] ?\. unexpected pos \d"),
    _row("quota", ("quota exceeded",), r"Disk quota exceeded"),
    _row("stale_file_handle", ("stale file handle", "stale nfs", "transport endpoint"), r"Stale (?:NFS )?file handle|Transport endpoint is not connected|Cannot send after transport endpoint shutdown"),
    _row("read_only", ("read-only file system",), r"Read-only file system"),
    _row("io_error", ("input/output error", "remote i/o error"), r"\bInput/output error\b|\bRemote I/O error\b"),
    _row("permission", ("permission denied", "permissionerror", "operation not permitted"), r"\bPermissionError: |\bPermission denied\b"),
    _row("too_many_files", ("too many open files", "of ancdata"), r"Too many open files|received \d+ items of ancdata"),
    # The launcher, Slurm or a person ended the job, and a loader's worker with it.
    _row("terminated", ("dataloader worker",), r"DataLoader worker \(pid\(?s?\)? [^)]*\) is killed by signal: (?:Terminated|Interrupt|Hangup|User defined signal|Quit|Continued)", consequence=True),
    _row("terminated", ("sigterm",), r"\bSIGTERMException\b|\b(?:received|caught|got|bypassing) (?:signal )?SIGTERM\b|\bSIGTERM (?:was )?(?:received|caught)\b", consequence=True),
    _row("dataloader_worker", ("dataloader worker", "pin memory thread"), r"Pin memory thread exited unexpectedly|DataLoader worker \(pid\(?s?\)? .*?(?:killed by signal|exited unexpectedly)"),
    _row("oom_kill", ("oom-kill", "oom_kill", "oom kill", "oomkilled", "oom handler", "out of memory", "memory cgroup"), r"oom[-_ ]kill|\bOOMKilled\b|Detected \d+ oom_kill event|srun: error: .*: tasks? [\d,-]+: Out Of Memory|[Oo]ut of memory: Killed process|memory cgroup out of memory"),
    _row("oom_kill", ("memory usage threshold", "running low on memory", "low on resource: memory", "memory limit", "outofmemoryerror", "memory pressure"), r"killed due to memory pressure|ray\.exceptions\.OutOfMemoryError|node was running low on memory|memory usage threshold|The node was low on resource: memory|exceeded (?:job|step)? ?memory limit .*being killed"),
    _row("host_oom", ("cannot allocate memory", "can't allocate memory", "bad_alloc", "memoryerror"), r"Cannot allocate memory|can't allocate memory|std::bad_alloc|\b(?:_Array)?MemoryError\b"),
    _row("node_failure", ("due to", "node failure", "node_fail"), r"CANCELLED AT .* DUE TO (?:\w+ )?NODE.?FAIL|srun: error: Node failure on|\bNODE_FAIL\b"),
    _row("time_limit", ("due to",), r"CANCELLED AT .* DUE TO TIME LIMIT", consequence=True),
    _row("preempted", ("due to",), r"CANCELLED AT .* DUE TO PREEMPTION", consequence=True),
    _row("requeued", ("due to",), r"CANCELLED AT .* DUE TO JOB REQUEUE", consequence=True),
    _row("cancelled", ("cancelled at", "step aborted", "force terminated"), r"\*\*\* (?:JOB|STEP) \S+ (?:ON \S+ )?CANCELLED AT |srun: Job step aborted|srun: .*\bForce Terminated\b", consequence=True),
    _row("terminated", ("signalexception", "death signal", "closing signal", "termination signal", "terminate signal"), r"SignalException: Process \d+ got signal: \d+|Received \d+ death signal, shutting down|(?:Sending process \d+ closing|Received (?:termination|terminate)) signal(?: SIG[A-Z]+)?", consequence=True),
    _row("interrupted", ("keyboardinterrupt",), r"^\s*KeyboardInterrupt\b", consequence=True),
    _row("segmentation_fault", ("segmentation fault", "segfault", "sigsegv"), r"Segmentation fault|\bsegfault at\b|\bSIGSEGV\b(?!.*\bhandler\b)"),
    _row("bus_error", ("bus error", "sigbus"), r"\bBus error\b|\bSIGBUS\b"),
    _row("illegal_instruction", ("illegal instruction", "sigill"), r"Illegal instruction|\bSIGILL\b"),
    _row("floating_point_trap", ("floating point exception", "sigfpe"), r"Floating point exception|\bSIGFPE\b"),
    _row("abort", ("fatal python error",), r"Fatal Python error: "),
    _row("glibc_abort", ("corruption", "double free", "malloc.c:", "invalid pointer", "free(): ", "stack smashing"), r"double free or corruption|\bmalloc\.c:\d+: \w+: Assertion |corrupted (?:size|double|unsorted)|malloc\(\): |free\(\): invalid|munmap_chunk\(\)|stack smashing detected|corrupted double-linked list"),
    _row("killed", ("killed", "sigkill", "command terminated"), r"^\s*Killed\s*$|\b[Cc]ommand terminated with exit code 137\b|: line \d+:\s+\d+ Killed\b|\bSignal 9 \(SIGKILL\) received", consequence=True),
    _row("task_exit", ("srun: error", "exited with exit code"), r"srun: error: .*(?:Exited with exit code|Segmentation fault|Killed|Aborted|Bus error|Terminated|Illegal instruction|Floating point exception)", consequence=True),
    # The numbers
    _row("loss_scale_minimum", ("loss scale already", "minimum loss scale", "loss scale is", "loss scale has"), r"loss scale already at minimum|Minimum loss scale reached|loss scale (?:is|has reached) (?:the )?minimum"),
    _row("loss_nan", ("loss is ", "loss was ", "loss became", "loss has become", "floatingpointerror", "found nan", "found inf", "encountered nan", "encountered inf", "detected nan", "detected inf", "nan in ", "inf in ", "non-finite", "nan loss", "result nan"), r"[Ll]oss (?:is|became|was|has become) (?:nan|inf)\b|(?:found|encountered|detected) (?:nan|inf)s?\b.*\b(?:loss|grad)|FloatingPointError: .*(?:nan|inf|invalid value|[Ll]oss)|(?:nan|inf|non-?finite) (?:in|loss|gradient).*(?:abort|stopping|exiting)|found NaN in local|Unexpected result nan|rerun.*result (?:nan|inf)"),
    # The program, its data and its surroundings
    _row("weights_only", ("weights only load failed", "weightsunpickler"), r"Weights only load failed|\bWeightsUnpickler error\b"),
    _row("checkpoint_corrupt", ("pytorchstreamreader", "safetensor", "unexpected eof", "ran out of input", "unpicklingerror", "corrupt", "invalid magic", "incomplete metadata", "headertoo"), r"PytorchStreamReader failed|SafetensorError|Header(?:TooLarge|TooSmall)|invalid header or archive is corrupted|unexpected EOF.*corrupted|EOFError: Ran out of input|UnpicklingError: |[Cc]heckpoint .*\bcorrupt|invalid magic number; corrupt|file might be corrupted"),
    _row("checkpoint_mismatch", ("loading state_dict", "size mismatch for", "state dict", "optimizer group"), r"Error\(s\) in loading state_dict|size mismatch for \S+: copying|loaded state dict (?:has|contains)|doesn't match the size of optimizer"),
    _row("import_error", ("modulenotfounderror", "importerror", "undefined symbol", "cannot open shared object", "version `glibc", "compiled with", "version mismatch", "has no kernel image", "no kernel image"), r"\bModuleNotFoundError: |\bImportError: |undefined symbol: |cannot open shared object file|version `GLIBC\w*' not found|was compiled (?:against|with) .*(?:but|while|than)|no kernel image is available"),
    _row("missing_file", ("no such file", "filenotfounderror"), r"\bFileNotFoundError: |execve\(\): .*No such file or directory|\bOSError: .*(?:No such file|does not exist|not found)|can't open file .*No such file"),
    _row("shape_mismatch", ("shapes cannot be", "size of tensor", "sizes of tensors", "mat1 and mat", "invalid for input of size", "must match the size", "shape mismatch", "incompatible shapes", "dimension", "dot_general", "expected input batch"), r"shapes cannot be (?:multiplied|broadcast)|The (?:expanded )?size of (?:the )?tensor|Sizes of tensors must match|mat1 and mat2|is invalid for input of size|must match the (?:existing )?size|shape mismatch: |[Ii]ncompatible shapes|dot_general requires|Expected input batch_size|dimension(?:s)? .*(?:mismatch|must match|out of range)|inconsistent tensor size"),
    _row("dtype_device", ("same device", "scalar type", "same dtype", "expected object of", "same data type"), r"Expected all tensors to be on the same device|expected scalar type \w+ but|(?:must have|have) the same dtype|mat1 and mat2 must have the same|Expected object of (?:scalar|device) type|should be the same type"),
    _row("config_error", ("configattributeerror", "configkeyerror", "configtypeerror", "configvalueerror", "configcompositionexc", "configcompositionerror", "missingmandatory", "validationerror", "validation error", "unrecognized arguments", "error: argument", "arguments are required", "missingconfig", "invalid config", "could not override", "is not in struct", "deepspeedconfigerror"), r"Config(?:Attribute|Key|Type|Value|Composition)Error|MissingMandatoryValue|MissingConfigException|pydantic\S*ValidationError|validation errors? for \w+|\berror: (?:unrecognized arguments|argument \S+|the following arguments are required)|\bInvalid config|Could not override '|Key '.*' is not in struct|DeepSpeedConfigError|ConfigCompositionException"),
    _row("dataset_error", ("datasetgeneration", "arrowinvalid", "unidentifiedimage", "can't load tokenizer", "datafilesnotfound", "datasetnotfound", "parquet magic"), r"DatasetGeneration(?:Cast)?Error|\bArrowInvalid: |UnidentifiedImageError|[Cc]an't load tokenizer|DataFilesNotFoundError|DatasetNotFoundError|Parquet magic bytes not found"),
    _row("assertion", ("assertionerror", "assertion"), r"^\s*AssertionError\b|: Assertion [`'].*' failed"),
    _row("ray_actor_died", ("actor died", "actor is dead", "actordied", "workercrashed", "actorunavailable", "owner has died", "ownerdied", "nodedied", "workergrouperror", "trainingfailederror"), r"ActorDiedError|WorkerGroupError: |TrainingFailedError: |[Aa]ctor died unexpectedly|actor is dead because|WorkerCrashedError|ActorUnavailableError|OwnerDiedError|NodeDiedError", consequence=True),
    _row("xla_error", ("xlaruntimeerror", "jaxruntimeerror"), r"(?:Xla|Jax)RuntimeError: (?:INTERNAL|INVALID_ARGUMENT|FAILED_PRECONDITION|UNIMPLEMENTED|NOT_FOUND|UNKNOWN|ABORTED|CANCELLED|UNAVAILABLE)"),
    _row("traceback", ("traceback (most recent",), r"Traceback \(most recent call last\)"),
    # The last line of a Python traceback: an exception's dotted name at the start, and what it says.
    _row("python_exception", ("error", "exception", "interrupt", "timeout"), r"^\s*(?:[a-z_][\w]*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Timeout)(?:: .+)?$"),
)  # fmt: skip

# Harmless although a row matches: what says that it goes on by itself, or only talks about an error.
HARMLESS = re.compile(
    r"\bwill (?:be )?(?:retr|reconnect)|(?<!non-)(?<!not )\bretr[iy]able (?:error|exception|failure)|\bretrying\b|\bretry \d|\bignor(?:ed|ing)\b|\bnon-?fatal\b|(?<!un)\bhandled\b|\brecover(?:ed|ing)\b|(?<!\] )\bno error|\b0 errors\b"
    r"|\bfall(?:s|ing)? ?back\b|\bskipp(?:ed|ing)\b|\b(?!Non)[A-Z]\w*Warning\b|\bcontinuing\b|\bthis is (?:expected|harmless|normal)\b|\bsuppress|\bharmless\b|\bNCCL INFO\b"
    # What a tracker of experiments says in its own log: it tries again by itself, and the training goes on without it.
    r"|(?:^|[\s\]])(?:wandb|swanlab): |\bCOMET (?:ERROR|WARNING|INFO|DEBUG):|\[neptune\]|(?:^|\b(?:ERROR|WARNING|INFO) )mlflow\.(?!exceptions)[\w.]+: |\bclearml\.\w+ - ",
    re.IGNORECASE,
)
HARMLESS_NEEDLES = (
    "retr", "reconnect", "ignor", "non-fatal", "nonfatal", "handled", "recover", "no error", "0 errors", "fall", "skipp", "warning", "continuing",
    "this is ", "suppress", "harmless", "nccl info", "wandb: ", "swanlab: ", "comet ", "[neptune]", "mlflow.", "clearml.",
)  # fmt: skip
"""One of them is in each lower-cased line that HARMLESS matches: to search for these is much quicker."""

GUESSES = re.compile(
    r"\b(?:potential|possible|common|likely|typical|probable|usual) (?:root )?(?:causes?|reasons?)\b|^\s*(?:\(\d\)|\d\)) ",
    re.IGNORECASE,
)
"""What stands behind it is a list of what may have happened, and says nothing about what did (Ray: "Some common causes include: (1) the
process was killed by the OOM killer, …")."""
GUESS_NEEDLES = ("cause", "reason", "1) ", "2) ", "3) ", "4) ", "5) ")
"""One of them is in each lower-cased line that GUESSES matches."""

SOURCE_LINE = re.compile(
    r"\s*(?:raise|assert|return|yield|await|del|except)[ (](?!.{0,40}(?:failed|error)$)|\s*File \"|\s{4,}(?:[\w.]+ = |if |elif |with |for |while |self\.)"
)
"""A line of a program that Python prints in a traceback, above what the exception itself says."""

CONSEQUENCES: frozenset[str] = frozenset(row.name for row in SIGNATURES if row.consequence)
"""Names of the rows that never are a cause."""
FROM_OUTSIDE: frozenset[str] = frozenset({"time_limit", "preempted", "requeued", "cancelled", "interrupted"})
"""Somebody ends the run: whatever comes after such a line follows from it."""
NORMAL_ENDS: frozenset[str] = frozenset({"time_limit", "preempted", "requeued"})
"""Of these, the ones that say why."""
FELT: frozenset[str] = CONSEQUENCES - FROM_OUTSIDE - {"launcher", "task_exit", "killed"}
"""Consequences that a rank itself says of what another did to it."""
HEADERS: frozenset[str] = frozenset({"traceback", "abort"})
"""They announce an error; what it is stands in the lines after them."""
STORAGE_FULL: frozenset[str] = frozenset({"disk_full", "quota"})
GPU_ERRORS: frozenset[str] = frozenset({"gpu_ecc", "cuda_error"})
AFTER_SIGTERM: frozenset[str] = frozenset(
    {
        "python_exception",
        "dataloader_worker",
        "abort",
        "segmentation_fault",
        "import_error",
        "traceback",
        "glibc_abort",
        "assertion",
    }
)
"""What processes say that are ended while they work."""
NODE_CAN_CAUSE: frozenset[str] = frozenset(
    {
        "gpu_ecc", "gpu_lost", "cuda_error", "cuda_unavailable", "nccl_error", "nccl_interface", "infiniband", "disk_full",
        "stale_file_handle", "read_only", "io_error", "shared_memory", "bus_error", "segmentation_fault", "illegal_instruction",
        "oom_kill", "host_oom", "killed", "node_failure", "too_many_files",
    }
)  # fmt: skip
"""What a node may be the reason of: its hardware, its filesystems, its memory. An exception of Python is the program's."""

WORDS: dict[str, str] = {
    "cuda_oom": "a GPU ran out of memory",
    "gpu_ecc": "a GPU's memory had an error that could not be corrected",
    "gpu_lost": "the driver lost a GPU",
    "cuda_unavailable": "no usable GPU, or a driver that does not fit",
    "device_assert": "an assertion in a GPU kernel failed (often an index out of range)",
    "cuda_error": "an error of CUDA",
    "nccl_watchdog": "a collective timed out",
    "collective_timeout": "waiting for another rank timed out",
    "collective_mismatch": "ranks ran different collectives",
    "collective_desync": "ranks were not in the same collective",
    "barrier_timeout": "ranks did not reach a barrier",
    "heartbeat_lost": "a process stopped sending heartbeats",
    "nccl_error": "an error of NCCL",
    "nccl_interface": "NCCL found no network interface",
    "duplicate_gpu": "two ranks use the same GPU",
    "infiniband": "a transfer over InfiniBand failed",
    "rendezvous": "the ranks did not find each other (rendezvous)",
    "network": "a server on the network did not answer, or refused",
    "port_in_use": "the port of the rendezvous is in use",
    "shared_memory": "shared memory (/dev/shm) is too small or full",
    "disk_full": "no space was left",
    "checkpoint_write": "a file could not be written (most often the disk is full or a quota is used up)",
    "quota": "the quota is used up",
    "stale_file_handle": "a file's server lost it (stale handle)",
    "read_only": "the filesystem is read-only",
    "io_error": "an input/output error",
    "permission": "permission was denied",
    "too_many_files": "too many files are open",
    "dataloader_worker": "a DataLoader worker died",
    "segmentation_fault": "a segmentation fault",
    "bus_error": "a bus error (often shared memory is full)",
    "illegal_instruction": "an illegal instruction (built for another processor)",
    "floating_point_trap": "a floating point exception",
    "abort": "an uncaught C++ exception",
    "glibc_abort": "the heap of the process was corrupted",
    "oom_kill": "the kernel killed it: out of memory",
    "host_oom": "the node ran out of memory",
    "killed": "it was killed (SIGKILL)",
    "time_limit": "the time limit",
    "preempted": "preemption",
    "requeued": "a requeue",
    "node_failure": "Slurm lost a node",
    "cancelled": "Slurm ended it",
    "terminated": "it was terminated",
    "interrupted": "it was interrupted",
    "task_exit": "a task ended",
    "mpi_abort": "MPI ended all ranks",
    "ray_actor_died": "an actor of Ray died",
    "launcher": "the launcher saw a worker fail",
    "peer_lost": "the connection to another rank was lost",
    "loss_nan": "the loss is NaN or infinite",
    "loss_scale_minimum": "the loss scale reached its minimum: the gradients overflow at any scale",
    "checkpoint_corrupt": "a checkpoint or another file is damaged",
    "weights_only": "torch.load refused a file that holds more than weights (weights_only=True)",
    "checkpoint_mismatch": "a checkpoint does not fit the model",
    "import_error": "a module or library is missing or does not fit",
    "missing_file": "a file is missing",
    "shape_mismatch": "shapes do not fit",
    "dtype_device": "tensors are of different types or on different devices",
    "config_error": "the configuration or an option is wrong",
    "dataset_error": "the data set or the tokenizer could not be read",
    "assertion": "an assertion of the program failed",
    "xla_error": "an error of XLA",
    "traceback": "a Python exception",
    "python_exception": "a Python exception",
}
"""What each row means, half a sentence."""
