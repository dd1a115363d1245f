"""The command line: one module a command. What only one command needs is imported inside that command."""
