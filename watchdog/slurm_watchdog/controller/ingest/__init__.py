"""Reports come in here: who sent them, how much is accepted, and which commands go back."""
