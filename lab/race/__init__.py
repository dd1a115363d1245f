"""Names that change while they are used: links, renames and mounts against the children that touch users' files."""
