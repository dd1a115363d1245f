"""Children of the agent that do what may hang, each as one user; the loop never waits for one beyond its deadline."""
