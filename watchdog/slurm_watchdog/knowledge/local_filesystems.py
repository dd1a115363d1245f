"""Types of filesystems that one kernel has for itself, as mountinfo names them: no one else can lose them, or
answer for them."""

from __future__ import annotations

LOCAL_TYPES = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "vfat", "tmpfs", "overlay"})
