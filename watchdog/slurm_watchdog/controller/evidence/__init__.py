"""Evidence is requested from agents, collected, and kept with its incident."""
