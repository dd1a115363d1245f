"""What acts on jobs and nodes: each function carries out one operation. The ladder decides which, and when."""
