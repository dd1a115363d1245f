"""The agent: sees what happens on one node, judges nothing, and can hang on nothing."""
