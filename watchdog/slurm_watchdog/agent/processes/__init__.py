"""Processes of jobs on this node: which there are, whose they are, what they wait for."""
