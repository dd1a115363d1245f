"""A *recording* (docs/recordings.md): what came in to a controller; `--record` writes it, `replay` feeds it."""
