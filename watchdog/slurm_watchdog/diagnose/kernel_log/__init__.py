"""What the kernel's log says about one node: cause before consequence. Pure."""
