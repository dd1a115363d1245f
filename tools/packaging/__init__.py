"""Packages: a virtual environment that may be moved, and what is made of it: an archive, a `.deb`, a `.rpm`."""
