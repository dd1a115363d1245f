"""Hints: each row is reached by a text that people see, is readable, and never claims to be the verdict."""

from __future__ import annotations

import re

import pytest

from slurm_watchdog.detect.registry import KINDS
from slurm_watchdog.diagnose.kernel_log.verdict import class_of
from slurm_watchdog.knowledge.kernel_signatures import SIGNATURES as KERNEL
from slurm_watchdog.knowledge.log_signatures import SIGNATURES
from slurm_watchdog.knowledge.remediation_hints import HINTS, MAX_HINTS, Hint, HintRow, hints_for
from slurm_watchdog.knowledge.stack_frames import CLASSES
from slurm_watchdog.knowledge.xids import XIDS
from slurm_watchdog.parse.kernel_log.line import parse_message

BY_NAME = {row.name: row for row in HINTS}

TEXTS = {
    "dataloader_at_evaluation": ("dataloader", "evaluate_and_print_results (megatron/training.py:1030)"),
    "nccl_2_14_blocking": ("collective_hang", "CUDA_LAUNCH_BLOCKING=1 NCCL version 2.14.3"),
    "infiniband_error_12": ("infiniband", "NCCL WARN NET/IB : Got completion from peer 10.2.0.5<33092> "
        "with error 12, opcode 0, len 0, vendor err 129 (Recv)"),
    "infiniband_local_error": ("infiniband", "NET/IB : Got completion from peer 10.2.0.5<33092> with "
        "status=10 opcode=129"),
    "memory_lock_limit": ("infiniband", "NCCL WARN Call to ibv_create_cq failed with error Cannot allocate memory"),
    "socket_interface": ("nccl_interface", "NCCL WARN Bootstrap : no socket interface found"),
    "async_errors_off": ("lingering_job", "NCCL_ASYNC_ERROR_HANDLING=0"),
    "flight_recorder": ("nccl_watchdog", "Stack trace of the failed collective not found, potentially "
        "because FlightRecorder is disabled."),
    "sequence_zero": ("nccl_watchdog", "WorkNCCL(SeqNum=1, OpType=ALLREDUCE) last completed NCCL work: -1."),
    "long_work_on_rank_0": ("nccl_watchdog", "WorkNCCL(SeqNum=77, OpType=BROADCAST, Timeout(ms)=1800000)"),
    "shared_memory_docker": ("bus_error", "This might be caused by insufficient shared memory (shm)."),
    "file_descriptors": ("too_many_files", "OSError: [Errno 24] Too many open files"),
    "worker_killed": ("dataloader_worker", "RuntimeError: DataLoader worker (pid 1234) is killed by signal: Killed."),
    "fragmentation": ("cuda_oom", "If reserved but unallocated memory is large try setting "
        "PYTORCH_CUDA_ALLOC_CONF to avoid fragmentation."),
    "another_process_holds_memory": ("cuda_oom", "Process 4242 has 31.20 GiB memory in use."),
    "index_out_of_range": ("device_assert", "RuntimeError: CUDA error: device-side assert triggered"),
    "peer_over_nvlink": ("cuda_error", "CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error"),
    "fabric_manager": ("cuda_unavailable", "Error 802: system not yet initialized"),
    "driver_mismatch": ("cuda_unavailable", "Failed to initialize NVML: Driver/library version mismatch"),
    "iommu": ("collective_hang", "AMD-Vi: Event logged [IO_PAGE_FAULT device=c1:00.0]"),
    "port_chosen_by_all": ("port_in_use", "(errno: 98 - Address already in use)"),
    "master_not_reached": ("rendezvous", "The client socket has failed to connect to [n1]:29500 (errno: "
        "113 - No route to host)."),
    "gloo_hostname": ("rendezvous", "Gloo connectFullMesh failed"),
    "async_checkpoint_full": ("disk_full", "No space left on device: '/scratch/ckpt/iter_10'"),
    "hub_offline": ("network", "429 Client Error: Too Many Requests for url: https://huggingface.co/api"),
    "wandb": ("network", "wandb: Network error (ConnectTimeout), entering retry loop."),
    "cuda_graph_or_arch": ("import_error", "ImportError: flash_attn.so: undefined symbol: _ZN3c10"),
    "fp16_overflow": ("loss_scale_minimum", "Current loss scale already at minimum - cannot decrease scale anymore."),
    "ray_memory": ("ray_actor_died", "1 Workers (tasks / actors) killed due to memory pressure (OOM)"),
    "lock_file": ("lock", "acquire (filelock/_api.py:331)"),
    "nvrx_timeout": ("heartbeat_lost", "[RankMonitorServer:34] Did not get subsequent heartbeat. Waited 171.92 seconds."),
    "jax_heartbeat": ("heartbeat_lost", "The following tasks are unhealthy (stopped sending heartbeats)"),
    "xla_memory": ("xla_error", "XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory allocating"),
    "xid_off_the_bus": ("gpu_fault", "Xid (PCI:0000:c1:00): 79, GPU has fallen off the bus."),
    "teardown_after_an_error": ("wedged_teardown", "rank 5 printed CUDA out of memory and stands in "
        "destroy_process_group"),
    "stale_kill_switch": ("crash_loop", "exiting: kill switch /scratch/m4/kill found"),
    "exit_137": ("task_exit", "srun: error: n1: task 0: Exited with exit code 137"),
    "exit_bus_error": ("launcher", "failed (exitcode: -7) local_rank: 0 (pid: 5275) of binary: /usr/bin/python"),
    "py_spy_not_allowed": ("undumpable", "Failed to suspend process; EPERM: Operation not permitted"),
    "core_file": ("segmentation_fault", "Segmentation fault (core dumped)"),
}  # fmt: skip
"""For each row with words: a class, and a text as it is printed."""


def test_each_row_with_words_has_a_text() -> None:
    assert set(TEXTS) == {row.name for row in HINTS if row.pattern is not None}


@pytest.mark.parametrize("name", TEXTS)
def test_a_row_is_found_by_its_words(name: str) -> None:
    class_name, text = TEXTS[name]
    assert BY_NAME[name].hint in hints_for(class_name, text)
    assert BY_NAME[name].hint not in hints_for(class_name, "")


@pytest.mark.parametrize("row", [row for row in HINTS if row.pattern is None], ids=lambda row: row.name)
def test_a_row_without_words_is_shown_for_each_of_its_classes(row: HintRow) -> None:
    for class_name in row.classes:
        assert row.hint in hints_for(class_name, "")


OF_A_VERDICT = frozenset({"undumpable", "missing_rank", "hang"})
"""Classes that no table has: group-stacks and scan-log say them of a whole file."""


@pytest.mark.parametrize("row", HINTS, ids=lambda row: row.name)
def test_a_row_names_only_classes_that_exist(row: HintRow) -> None:
    known = {each.name for each in SIGNATURES} | set(CLASSES.values()) | set(KINDS)
    known |= OF_A_VERDICT | {each.name for each in KERNEL} | {each.name for each in XIDS.values()}
    assert set(row.classes) <= known


@pytest.mark.parametrize("row", HINTS, ids=lambda row: row.name)
def test_a_hint_is_sentences(row: HintRow) -> None:
    hint = row.hint
    for text in (hint.usually, hint.try_next):
        assert text == text.strip()
        assert text.endswith((".", "?"))
        assert len(text) < 420
    assert not hint.documented.endswith(".")


def test_addresses_are_of_official_documentation_only() -> None:
    for row in HINTS:
        for address in re.findall(r"https?://\S+", f"{row.hint.usually} {row.hint.try_next} {row.hint.documented}"):
            assert address.startswith(("https://docs.nvidia.com/", "https://pytorch.org/docs/")), address


def test_names_are_used_once() -> None:
    assert len(BY_NAME) == len(HINTS)


UNADVISED = frozenset({
    "terminated", "cancelled", "interrupted", "python_exception", "traceback", "assertion", "shape_mismatch",
    "dtype_device", "floating_point_trap", "program_error", "fatal_log",
})  # fmt: skip
"""Of these the traceback, or the line itself, says more than any advice could."""


def test_every_class_of_a_log_has_a_hint_or_is_said_to_have_none() -> None:
    without = {
        row.name
        for row in SIGNATURES
        if not hints_for(row.name, "") and not any(row.name in hint.classes for hint in HINTS)
    }
    assert without <= UNADVISED


def test_there_are_never_more_than_a_few() -> None:
    text = "\n".join(text for _, text in TEXTS.values())
    for class_name in {name for row in HINTS for name in row.classes}:
        assert 0 < len(hints_for(class_name, text)) <= MAX_HINTS


def test_hint_by_words_comes_before_hint_by_class() -> None:
    first, *_ = hints_for("infiniband", TEXTS["infiniband_error_12"][1])
    assert first is BY_NAME["infiniband_error_12"].hint


@pytest.mark.parametrize("class_name", ["", "no such class", "healthy"])
def test_an_unknown_class_has_none(class_name: str) -> None:
    assert hints_for(class_name, "CUDA out of memory") == ()


def test_a_class_of_the_kernels_lines_has_them_too() -> None:
    fact = parse_message("NVRM: Xid (PCI:0000:c1:00): 79, pid=1, GPU has fallen off the bus.")
    assert fact is not None
    assert hints_for(class_of(fact), fact.message)


def test_a_text_of_megabytes_costs_no_time() -> None:
    assert isinstance(hints_for("cuda_oom", "Process " * 2_000_000)[0], Hint)
