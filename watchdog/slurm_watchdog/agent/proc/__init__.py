"""Files of /proc, parsed: status, system calls, mappings. Reading one never blocks unless its docstring says so."""
