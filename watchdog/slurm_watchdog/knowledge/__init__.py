"""What is known from elsewhere, as data: a new framework, error or system call is a line here and a line in a test."""
