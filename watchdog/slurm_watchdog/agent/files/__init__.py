"""Files of other users: opened safely, and written as their owner."""
