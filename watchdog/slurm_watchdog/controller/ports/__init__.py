"""What the parts of the controller need of one another. None is given the whole controller, and it may come from
elsewhere: `replay` drives the same Decider with a journal in memory and an executor that only writes down."""
