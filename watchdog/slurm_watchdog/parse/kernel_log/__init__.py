"""One line of the kernel's log, and files of them: time, level, message. Pure."""
