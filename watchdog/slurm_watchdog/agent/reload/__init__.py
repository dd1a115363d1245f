"""SIGHUP: a new configuration is validated, taken whole or rejected; state is handed to the next process."""
