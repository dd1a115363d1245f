"""Which rank keeps the others waiting, from the stacks of all of them. Pure."""
