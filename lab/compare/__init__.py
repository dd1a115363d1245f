"""What others do about the same faults, on the same machine: launchers that restart, and a script that looks at a log."""
