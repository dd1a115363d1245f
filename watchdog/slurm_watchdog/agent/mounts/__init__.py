"""Filesystems that jobs use: which there are, when each is probed, and what came of it."""
