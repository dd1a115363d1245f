"""What people and programs ask the controller: the local socket, the page, JSON."""
