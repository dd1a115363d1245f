"""What is fetched only when the controller asks for it."""
