"""The kernel's message buffer: reading it, and repeated messages put together."""
