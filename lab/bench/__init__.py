"""`make bench`: what the agent costs, measured beside its peers on the same machine at the same time."""
