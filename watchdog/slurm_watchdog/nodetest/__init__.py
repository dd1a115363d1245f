"""Tests of nodes: bounded jobs that measure nodes and pairs of nodes, and a pure judgement of what they measured."""
