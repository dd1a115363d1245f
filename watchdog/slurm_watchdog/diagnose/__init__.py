"""Who is to blame, and why, in one sentence: pure functions on stacks and on answers about filesystems."""
