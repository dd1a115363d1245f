"""What a node, a cluster or a job lacks to be protected: facts are read at the edge, rules over them are pure."""
