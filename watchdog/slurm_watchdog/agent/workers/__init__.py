"""Disposable child processes that do what may hang; the agent's loop never waits for one beyond its deadline."""
