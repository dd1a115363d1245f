"""What makes files of this repository: documentation from the code, packages."""
