"""What the kernel shows: files of /proc, parsed, and its log. Reading one never blocks unless its docstring says so."""
