"""NVIDIA's numbered faults (Xid): what each means, whom to blame, and whether it alone may keep jobs off a node.

Sources: NVIDIA's Xid catalogue for Ampere and newer (docs.nvidia.com/deploy/xid-errors, "Analyzing Xid Errors with the Xid
Catalog": name, meaning, immediate resolution), the older "Xid Errors" listing for what that leaves out, and the driver's own
header nverror.h (open-gpu-kernel-modules 590) for the newest numbers. The words are ours.

`may_exclude_node` is true only where the number alone says that a piece of hardware is broken or will not work again before it
is reset. What is usually the hardware, but may also come from a neighbour, a driver or somebody's reset, says no: a wrong yes
costs a healthy node, a wrong no costs a second look. The kernel's line often says more than the number (see
slurm_watchdog.parse.kernel_log.line).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slurm_watchdog.model.observations import FaultSeverity

Blame = Literal["application", "hardware", "driver", "either"]

INFO, WARNING, ERROR, CRITICAL = (
    FaultSeverity.INFO, FaultSeverity.WARNING, FaultSeverity.ERROR, FaultSeverity.CRITICAL,
)  # fmt: skip


@dataclass(frozen=True)
class XidRow:
    """One fault. `blame` is who usually causes it; `either` where the number alone does not tell."""

    number: int
    name: str
    text: str
    blame: Blame
    severity: FaultSeverity
    may_exclude_node: bool = False
    consequence: bool = False
    """It follows from something else, which is to be looked for before it."""


def _same(numbers: str, name: str, text: str, blame: Blame, severity: FaultSeverity) -> list[XidRow]:
    """A row for each of `numbers`; `{}` in name and text becomes the ordinal that follows the number: `70:3 71:4`."""
    pairs = [each.split(":") for each in numbers.split()]
    return [
        XidRow(int(number), name.format(unit), text.format(unit), blame, severity) for number, unit in pairs
    ]


# fmt: off
_ROWS: tuple[XidRow, ...] = (
    XidRow(8, "fifo_idle_timeout", "The GPU stopped processing a channel", "either", ERROR),
    XidRow(11, "push_buffer_invalid", "The GPU was given an invalid or corrupted stream of commands", "application", WARNING),
    XidRow(13, "graphics_engine_exception", "A kernel of the application failed: most often an index out of bounds", "application", WARNING),
    XidRow(14, "driver_test", "A test of the driver, no fault", "driver", INFO),
    XidRow(16, "display_timeout", "The display engine timed out", "driver", WARNING),
    XidRow(18, "bus_master_timeout", "A transfer over PCIe timed out", "either", ERROR),
    XidRow(25, "push_buffer_illegal", "The GPU was given an illegal stream of commands", "application", WARNING),
    XidRow(31, "mmu_fault", "A kernel of the application touched memory that is not its own", "application", WARNING),
    XidRow(32, "pbdma_error", "The stream of commands was corrupted on its way: program, driver or PCIe", "either", WARNING),
    XidRow(37, "firmware_method", "The driver's firmware met a command it does not know", "driver", WARNING),
    XidRow(38, "firmware_watchdog", "The driver's firmware timed out", "driver", ERROR),
    XidRow(42, "video_engine", "The video engine failed", "either", WARNING),
    XidRow(43, "channel_reset", "The application's work was stopped after a fault of its own; the GPU is well", "application", WARNING, consequence=True),
    XidRow(44, "context_switch_fault", "The GPU failed while it changed from one program to another", "either", ERROR),
    XidRow(45, "preemptive_cleanup", "Work was removed because its process ended or another fault came before: a consequence", "application", WARNING, consequence=True),
    XidRow(46, "gpu_timeout", "The GPU stopped answering and needs a reset", "either", ERROR),
    XidRow(47, "nvenc0", "The video encoder 0 failed", "either", WARNING),
    XidRow(48, "ecc_double_bit", "GPU memory held an error that could not be corrected", "hardware", CRITICAL, True),
    XidRow(54, "auxiliary_power", "The GPU's auxiliary power is not connected", "hardware", CRITICAL, True),
    XidRow(56, "display_engine", "The display engine failed", "either", WARNING),
    XidRow(57, "memory_link_training", "The link to GPU memory, or its memory itself, could not be trained", "hardware", CRITICAL),
    XidRow(58, "memory_error", "GPU memory reported an error", "hardware", CRITICAL),
    XidRow(59, "pmu_error", "The GPU's power controller failed", "driver", ERROR),
    XidRow(60, "video_processor", "The video processor failed", "either", WARNING),
    XidRow(61, "pmu_breakpoint", "The GPU's power controller stopped at a breakpoint", "either", ERROR),
    XidRow(62, "pmu_halt", "The GPU's power controller halted: it needs a reset", "hardware", CRITICAL),
    XidRow(63, "row_remap_recorded", "A bad row of GPU memory was recorded; it is replaced at the next reset", "hardware", WARNING),
    XidRow(64, "row_remap_failed", "A bad row of GPU memory could not be recorded or replaced", "hardware", CRITICAL, True),
    XidRow(65, "nvenc1", "The video encoder 1 failed", "either", WARNING),
    XidRow(66, "illegal_register_access", "The driver did something illegal", "driver", WARNING),
    XidRow(67, "illegal_driver_access", "The driver did something illegal", "driver", WARNING),
    XidRow(68, "nvdec0", "The video decoder 0 failed", "either", WARNING),
    XidRow(69, "graphics_class_error", "The GPU was given a command that its class does not know", "application", WARNING),
    XidRow(73, "nvenc2", "The video encoder 2 failed", "either", WARNING),
    XidRow(74, "nvlink_error", "A link to another GPU or to the switch failed: this end, the other end, or the wire", "hardware", ERROR),
    XidRow(78, "vgpu_start", "A virtual GPU could not be started", "driver", ERROR),
    XidRow(79, "gpu_off_the_bus", "The GPU has fallen off the bus: it does not answer over PCIe", "hardware", CRITICAL, True),
    XidRow(80, "push_buffer_crc", "The GPU was sent data that was corrupted on its way", "either", ERROR),
    XidRow(81, "vga_subsystem", "The VGA part failed", "hardware", WARNING),
    XidRow(82, "nvjpg0", "The JPEG engine 0 failed", "either", WARNING),
    XidRow(83, "nvdec1", "The video decoder 1 failed", "either", WARNING),
    XidRow(84, "nvdec2", "The video decoder 2 failed", "either", WARNING),
    XidRow(86, "ofa0", "The optical-flow engine 0 failed", "either", WARNING),
    XidRow(87, "telemetry_report", "A report of the driver, no fault", "driver", INFO),
    XidRow(90, "l2_cache_error", "The GPU's L2 cache reported an error", "hardware", ERROR),
    XidRow(92, "single_bit_rate", "GPU memory has many errors, all corrected so far", "hardware", WARNING),
    XidRow(93, "inforom_wear", "The GPU's InfoROM is written too often; nothing is broken", "driver", INFO),
    XidRow(94, "contained_ecc", "A memory error was contained: its program dies, the GPU and the others continue", "application", WARNING),
    XidRow(95, "uncontained_ecc", "A memory error was not contained: all programs on this GPU die, it needs a reset", "hardware", CRITICAL, True),
    XidRow(106, "smbpbi_test", "A test message, no fault", "driver", INFO),
    XidRow(107, "smbpbi_test_silent", "A test message, no fault", "driver", INFO),
    XidRow(108, "nvlink_remote_translation", "A remote GPU's address could not be translated", "either", WARNING),
    XidRow(109, "context_switch_timeout", "A program would not make room for another on the GPU", "either", ERROR),
    XidRow(110, "security_fault", "The GPU met a security fault and needs a reset", "either", ERROR),
    XidRow(119, "gsp_rpc_timeout", "The GPU's system processor (GSP) does not answer the driver: it needs a reset", "hardware", CRITICAL, True),
    XidRow(120, "gsp_error", "The GPU's system processor (GSP) crashed: it needs a reset", "hardware", CRITICAL, True),
    XidRow(121, "c2c_error", "The link between GPU and CPU had errors, corrected so far", "hardware", WARNING),
    XidRow(122, "spi_read_failed", "The GPU's flash memory could not be read", "hardware", WARNING),
    XidRow(123, "spi_write_failed", "The GPU's flash memory could not be written", "hardware", WARNING),
    XidRow(124, "spi_erase_failed", "The GPU's flash memory could not be erased", "hardware", WARNING),
    XidRow(125, "inforom_damaged", "The GPU's InfoROM is damaged", "hardware", WARNING),
    XidRow(136, "link_training_failed", "A link to another GPU could not be trained", "hardware", ERROR),
    XidRow(137, "nvlink_privilege", "Another GPU refused an access over NVLink: most often that GPU's program failed", "application", WARNING, consequence=True),
    XidRow(138, "dla", "The DLA engine failed", "either", WARNING),
    XidRow(139, "ofa1", "The optical-flow engine 1 failed", "either", WARNING),
    XidRow(140, "ecc_unrecovered", "An ECC error could not be recovered from: the GPU needs a reset", "hardware", CRITICAL, True),
    XidRow(141, "fast_path", "CUDA's fast path failed for a program", "either", WARNING),
    XidRow(142, "nvenc3", "The video encoder 3 failed", "either", WARNING),
    XidRow(143, "gpu_init_failed", "The GPU could not be initialised", "hardware", CRITICAL, True),
    XidRow(144, "nvlink_saw", "NVLink reported an event (SAW); the line says whether it is fatal", "either", WARNING),
    XidRow(145, "nvlink_rlw", "NVLink reported an event (RLW); the line says whether it is fatal", "either", WARNING),
    XidRow(146, "nvlink_tlw", "NVLink reported an event (TLW); the line says whether it is fatal", "either", WARNING),
    XidRow(147, "nvlink_trex", "NVLink reported an event (TREX); the line says whether it is fatal", "either", WARNING),
    XidRow(148, "nvlink_control", "NVLink reported an event (NVLPW_CTRL); the line says whether it is fatal", "either", WARNING),
    XidRow(149, "nvlink_netir", "NVLink reported an event (NETIR); the line says whether it is fatal", "either", WARNING),
    XidRow(150, "nvlink_mse", "NVLink reported an event (MSE); the line says whether it is fatal", "either", WARNING),
    XidRow(151, "key_rotation", "A key of confidential computing could not be changed", "driver", WARNING),
    XidRow(152, "dla_smmu", "The DLA engine touched memory that is not its own", "either", WARNING),
    XidRow(153, "dla_timeout", "The DLA engine timed out", "either", WARNING),
    XidRow(154, "recovery_action", "What the driver now asks for: nothing, drain, reset, reboot; the line says which", "either", WARNING, consequence=True),
    XidRow(155, "nvlink_software", "NVLink was taken down by software", "either", WARNING, consequence=True),
    XidRow(156, "resource_retired", "A part of the GPU was retired; it works on with less after a reset", "hardware", WARNING),
    XidRow(157, "resource_retirement_failed", "A bad part of the GPU could not be retired", "hardware", ERROR),
    XidRow(158, "gpu_fatal_timeout", "The GPU met a timeout that it can't recover from: it needs a reset", "hardware", CRITICAL, True),
    XidRow(159, "chi_error", "An access between CPU and GPU failed", "either", WARNING),
    XidRow(160, "channel_retired", "A channel of GPU memory was retired", "hardware", WARNING),
    XidRow(161, "channel_retirement_failed", "A bad channel of GPU memory could not be retired", "hardware", ERROR),
    XidRow(162, "power_smoothing_on", "Power smoothing works again", "hardware", INFO),
    XidRow(163, "power_smoothing_off", "Power smoothing is off", "hardware", INFO),
    XidRow(164, "power_smoothing_low", "Power smoothing is nearly worn out", "hardware", INFO),
    XidRow(165, "power_smoothing_gone", "Power smoothing is worn out", "hardware", WARNING),
    XidRow(166, "nvlink_encryption", "Traffic came over NVLink before its encryption was set up", "driver", WARNING),
    XidRow(167, "pcie_fatal_timeout", "A transfer over PCIe timed out for good", "hardware", CRITICAL, True),
    XidRow(168, "less_memory", "The GPU has less memory than it should: errors in its protected region", "hardware", ERROR),
    XidRow(169, "sec2_halt", "The GPU's security controller halted", "hardware", ERROR),
    XidRow(170, "nvlink_secure", "NVLink raised an interrupt in confidential mode", "driver", WARNING),
    XidRow(171, "dram_uncorrectable", "GPU memory held an error that could not be corrected (with Xid 48)", "hardware", CRITICAL, True),
    XidRow(172, "sram_uncorrectable", "A cache or register of the GPU held an error that could not be corrected (with Xid 48)", "hardware", CRITICAL, True),
    XidRow(173, "c2c_link_down", "The link between GPU and CPU is down for good", "hardware", CRITICAL, True),
    XidRow(174, "process_killed", "A program was removed from the GPU after a fault", "application", WARNING, consequence=True),
    XidRow(175, "memory_subsystem", "The GPU's memory subsystem reported an error", "hardware", ERROR),
    XidRow(176, "pcie_correctable", "PCIe had many errors, all corrected so far", "hardware", WARNING),
    *_same("39:0 40:1 41:2 70:3 71:4 72:5 75:6 76:7 77:8 85:9 126:10 127:11 128:12 129:13 130:14 131:15 132:16 133:17 134:18 135:19",
           "copy_engine_{}", "The copy engine {} failed: program, peer or hardware", "either", WARNING),
    *_same("88:3 89:4 96:5 97:6 98:7", "nvdec{}", "The video decoder {} failed", "either", WARNING),
    *_same("99:1 100:2 101:3 102:4 103:5 104:6 105:7", "nvjpg{}", "The JPEG engine {} failed", "either", WARNING),
    *_same("27: 28:_2 29:_bsp 33:_sec 34:_msvld 35:_mspdec 36:_msppp", "video_unit{}", "A video or security unit failed", "either", WARNING),
    *_same("111:bundle 112:supervisor 113:dp_training 114:underflow 115:core 116:window 117:cursor 118:head",
           "display_{}", "The display engine failed ({})", "driver", WARNING),
)
# fmt: on

XIDS: dict[int, XidRow] = {row.number: row for row in _ROWS}
"""Every number that is known to be used. Numbers that NVIDIA's lists call unused are absent."""


def describe_xid(number: int) -> XidRow:
    """The row of `number`; for one that is not in the table a careful one that blames nobody and excludes nothing."""
    row = XIDS.get(number)
    if row is not None:
        return row
    return XidRow(number, "unknown", f"Xid {number}: not in our table", "either", FaultSeverity.WARNING)
