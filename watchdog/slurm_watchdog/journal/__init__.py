"""The controller's memory on disk: incidents, decisions, actions, messages to send."""
