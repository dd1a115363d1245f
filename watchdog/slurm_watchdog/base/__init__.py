"""What every room may use and which knows nothing of training jobs: time, the main loop, text for people,
secrets masked."""
