"""What failed first, and on which rank, from the lines of logs. Pure."""
