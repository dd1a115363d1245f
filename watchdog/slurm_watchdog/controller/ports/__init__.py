"""What the parts of the controller need of one another: a narrow Protocol for each need.

Nobody holds the whole controller. `Decider`, `Actions`, `Collector`, the local socket and the page are given
what they use, and it may come from elsewhere: `replay` drives the same Decider with a journal in memory and
an executor that only writes down.
"""
