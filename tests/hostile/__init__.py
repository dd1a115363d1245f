"""Text that is meant to harm, through everything that shows it."""
