"""What runs on a node under test: measurements in the standard library alone, sent to the node as source text."""
