"""What is missing for a node, a cluster or a job to be protected: facts are read at the edge, rules over them
are pure."""
