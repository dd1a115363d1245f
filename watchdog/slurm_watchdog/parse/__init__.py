"""Text to facts, without judgement: lines of training logs, of the kernel's log, and stack dumps. Pure."""
