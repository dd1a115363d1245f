"""The configuration: its schema, its loading, and the file that shows all of it."""
