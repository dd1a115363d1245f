"""Actions under way: each is written down before it is done, verified after it, continued after a crash."""
