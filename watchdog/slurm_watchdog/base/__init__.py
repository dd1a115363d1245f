"""What every room may use and knows nothing of training jobs: time, the main loop, text for people, secrets masked."""
