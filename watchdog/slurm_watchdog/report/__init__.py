"""A job's story and an incident's, from the controller's documents and from journals; and their words for people."""
