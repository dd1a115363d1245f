"""A recorded or written trace through the same detectors and the same policy, with nothing executed."""
