"""Bodies that no agent would send, through the controller's door and everything behind it."""
