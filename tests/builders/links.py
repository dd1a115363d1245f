"""Links of a node as sysfs has them: a directory tree like /sys/class."""

from __future__ import annotations

from pathlib import Path

PORT = {
    "state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": "400 Gb/sec (4X NDR)", "link_layer": "InfiniBand",
    "counters/link_downed": "3", "counters/symbol_error": "7", "counters/port_rcv_errors": "1",
    "hw_counters/packet_seq_err": "2", "counters/port_xmit_data": "1000", "counters/port_rcv_data": "500",
    "counters/port_xmit_wait": "9", "hw_counters/local_ack_timeout_err": "0", "hw_counters/out_of_sequence": "4",
}  # fmt: skip
ROCE = PORT | {
    "link_layer": "Ethernet", "hw_counters/np_ecn_marked_roce_packets": "70", "hw_counters/rp_cnp_handled": "30",
}  # fmt: skip
INTERFACE = {
    "operstate": "up", "speed": "100000", "carrier_down_count": "2", "device/vendor": "0x15b3",
    "statistics/rx_crc_errors": "5", "statistics/tx_bytes": "4000", "statistics/rx_bytes": "6000",
}  # fmt: skip


def tree(root: Path, places: dict[str, dict[str, str]]) -> str:
    for place, files in places.items():
        for name, text in files.items():
            path = root / place / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
    return str(root)
