"""A recording through the real controller, on the recording's own clock, with nothing executed."""
