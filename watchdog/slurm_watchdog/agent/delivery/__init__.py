"""Reports on their way to the controller: sent, kept while it is away, answered."""
