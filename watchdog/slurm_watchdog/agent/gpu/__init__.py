"""NVML: readings, events, health, and which process has which GPU open."""
