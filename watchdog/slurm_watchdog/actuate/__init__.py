"""Levers. They execute and never think: what to pull, and when, is decided by the ladder."""
