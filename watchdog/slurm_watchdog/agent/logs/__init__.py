"""Follows log files of jobs from where the last read ended."""
