"""What nodes have done before, and how suspicious that makes them: computed from events, never stored. Pure."""
