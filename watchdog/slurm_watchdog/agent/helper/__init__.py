"""The privileged helper: does for an agent without rights what needs some, from a short list of typed requests."""
